"""Oxford-IIIT Pet's trimaps as class numbers from 0, for `--data.preprocess configs/oxford_pets.py:trimap`."""


def trimap(example):
    """Pet 1, background 2 and border 3 become 0, 1 and 2."""
    return {**example, "mask": example["mask"] - 1}

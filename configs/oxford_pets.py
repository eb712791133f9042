"""Converts Oxford-IIIT Pet's trimaps to class numbers from 0, for `--data.preprocess configs/oxford_pets.py:trimap`."""


def trimap(example):
    """Maps pet 1, background 2 and border 3 to 0, 1 and 2."""
    return {**example, "mask": example["mask"] - 1}

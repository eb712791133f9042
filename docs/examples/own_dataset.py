"""Your own Hugging Face data set: custom column names, classes as words, and pixels that need a function.

- `make_dataset` writes a typical data set: scans as PNG files, black ink on white paper, in a column `scan`, and the
  name of each digit as text.
- `--data.columns` says which column is the image and which is the label.
- `ink` runs on each stored example: it converts the scan to the model's input, and the word to a class number (without
  a function, words become classes in alphabetical order).
- The trainer checks the result: `careless` returns int64, which is an error before the first step.

The same from the command line, once the folder exists:

    python scripts/train.py --data.name hf:FOLDER --data.columns image scan label digit --data.num_classes 10 \\
        --data.preprocess docs/examples/own_dataset.py:ink
"""

import dataclasses
import pathlib
import tempfile
from typing import NamedTuple

import datasets
import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

import mpjax


WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def make_dataset(folder: str | pathlib.Path) -> None:
    """Writes the digits of scikit-learn, 1,437 to train on and 360 to test, with `save_to_disk`."""
    digits = load_digits()
    pixels = 255 - np.rint(digits.images * (255 / 16)).astype(np.uint8)  # [1797, 8, 8]
    order = np.random.default_rng(0).permutation(len(pixels))
    kinds = datasets.Features({"scan": datasets.Image(), "digit": datasets.Value("string")})

    def split(chosen: np.ndarray) -> datasets.Dataset:
        scans = [Image.fromarray(pixels[i]).convert("RGB") for i in chosen]
        return datasets.Dataset.from_dict({"scan": scans, "digit": [WORDS[digits.target[i]] for i in chosen]}, kinds)

    parts = {"train": split(order[:1437]), "test": split(order[1437:])}
    datasets.DatasetDict(parts).save_to_disk(folder)


def ink(example: dict) -> dict:
    """Converts uint8 [8, 8, 3], black on white, to float32 [8, 8, 1]: 1 is ink, 0 is paper."""
    gray = example["image"].mean(axis=-1, keepdims=True)  # float64
    return {"image": (1 - gray / 255).astype(np.float32), "label": WORDS.index(example["label"])}


def careless(example: dict) -> dict:
    """Returns the image as int64, by mistake; the trainer cannot know how to scale it."""
    return {"image": 255 - example["image"].astype(int), "label": WORDS.index(example["label"])}


def config_for(folder: str | pathlib.Path, function: str, steps: int, output_dir: str | pathlib.Path) -> mpjax.Config:
    """Returns settings to train on the data set in `folder` with a function of this file."""
    base = mpjax.Config(steps=mpjax.Duration(steps), output_dir=str(output_dir))
    data = dataclasses.replace(
        base.data,
        name=f"hf:{folder}",
        columns={"image": "scan", "label": "digit"},
        num_classes=10,
        preprocess=f"{__file__}:{function}",
    )
    model = dataclasses.replace(base.model, name="mlp", width=64)
    precision = dataclasses.replace(base.precision, policy="mixed_float16")
    return dataclasses.replace(base, data=data, model=model, precision=precision)


class Told(NamedTuple):
    """The results.

    Attributes:
      refusal: the error of the trainer for `careless`.
      summary: the summary of the run with `ink`, from `mpjax.run`.
    """

    refusal: str
    summary: dict


def main(steps: int = 400) -> Told:
    """Writes the data set, shows the error for `careless`, and trains with `ink`."""
    with tempfile.TemporaryDirectory() as root:
        folder = pathlib.Path(root) / "scans"
        make_dataset(folder)
        refusal = "nothing was refused"
        try:
            mpjax.run(config_for(folder, "careless", steps, f"{root}/refused"))
        except mpjax.UsageError as error:
            refusal = str(error)
        print("\n  ".join(refusal.split("; ")) + "\n")
        summary = mpjax.run(config_for(folder, "ink", steps, f"{root}/run"))
    return Told(refusal, summary)


if __name__ == "__main__":
    main()

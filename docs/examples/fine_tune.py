"""Fine-tune pretrained weights in half precision, with a new head.

- A small ResNet learns the digits 0 to 4, and `mpjax.commands.export.export_run` writes its weights as safetensors
  (`python scripts/export.py --run FOLDER --output zero_to_four.safetensors`).
- `mpjax.load_pretrained` loads all weights except the head into a model with ten classes, and reports each of them.
- `--model.pretrained` and `--model.pretrained_skip` do the same for a run. It learns all ten digits in float16 and is
  compared with a run of as many steps from scratch.

With a network, a checkpoint of the Hugging Face hub, or a folder with one, can replace the first run:

    python scripts/train.py --model.name resnet50 --model.stem imagenet --data.image_size 224 \\
        --data.name hf:OWNER/NAME --model.pretrained microsoft/resnet-50 --model.pretrained_skip "head/*"
"""

import dataclasses
import pathlib
import tempfile
from typing import NamedTuple

from flax import nnx
from PIL import Image
from sklearn.datasets import load_digits

import mpjax
from mpjax.commands.export import export_run
from mpjax.config.commands import Export
from mpjax.models.pretrained import PretrainedReport
from mpjax.models.resnet import BasicBlock, ResNet, SmallStem


POLICY = "mixed_float16"
SKIP = ("head/*",)


def small_resnet(fields, *, rngs: nnx.Rngs) -> ResNet:
    """Returns a ResNet with two residual blocks, small enough that all three runs of this file take seconds."""
    channels, num_classes = fields["image"].shape[2], fields["label"].num_classes
    return ResNet((1, 1), BasicBlock, SmallStem, channels=channels, width=16, num_classes=num_classes, rngs=rngs)


def write_first_digits(folder: pathlib.Path) -> None:
    """Writes the digits 0 to 4 as images, in one folder per class, for `folder:PATH`."""
    digits = load_digits()
    for index, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        if label < 5:
            place = folder / str(label)
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray((image * (255 / 16)).astype("uint8")).save(place / f"{index}.png")


def settings(steps: int, output_dir: pathlib.Path, *, seed: int = 0, pretrained: str = "", **data) -> mpjax.Config:
    """Returns the settings of a short float16 run, from scratch or from weights for another number of classes."""
    base = mpjax.Config(seed=seed, steps=mpjax.Duration(steps), output_dir=str(output_dir))
    model = dataclasses.replace(base.model, name=f"{__file__}:small_resnet")
    if pretrained:
        model = dataclasses.replace(model, pretrained=pretrained, pretrained_skip=SKIP)
    return dataclasses.replace(
        base,
        data=dataclasses.replace(base.data, **data),
        model=model,
        precision=dataclasses.replace(base.precision, policy=POLICY),
        optimizer=dataclasses.replace(base.optimizer, warmup=mpjax.Duration(5)),
    )


def pretrain(root: pathlib.Path, steps: int, seed: int = 0) -> str:
    """Trains on the first five digits; returns the path of the weights."""
    write_first_digits(root / "digits")
    parts = {"train_split": "train[:90%]", "test_split": "train[90%:]"}
    mpjax.run(settings(steps, root / "pretraining", seed=seed, name=f"folder:{root / 'digits'}", **parts))
    weights = str(root / "zero_to_four.safetensors")
    # The run names a model in this file, which we trust.
    export_run(Export(run=str(root / "pretraining"), output=weights, checkpoint="latest", trust_code=True))
    return weights


def load(weights: str) -> PretrainedReport:
    """Loads the same weights through the library, into a model that has no initial values."""
    fields = {"image": mpjax.data.Image((8, 8, 1)), "label": mpjax.data.Label(10)}
    model = nnx.eval_shape(lambda: small_resnet(fields, rngs=nnx.Rngs(0)))
    return mpjax.load_pretrained(model, weights, policy=POLICY, skip=SKIP)


class Told(NamedTuple):
    """The results.

    Attributes:
      report: of the weights: what each variable was in the file and is in the model.
      scratch: summary of the run from initial values.
      tuned: summary of the run from the weights.
    """

    report: PretrainedReport
    scratch: dict
    tuned: dict


def main(steps: int = 60, seed: int = 0, pretraining_steps: int = 100) -> Told:
    """Pretrains, loads the weights, and trains on all ten digits with and without them."""
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        weights = pretrain(root, pretraining_steps, seed)
        report = load(weights)
        print(f"\n{report}\n")
        scratch = mpjax.run(settings(steps, root / "scratch", seed=seed))
        tuned = mpjax.run(settings(steps, root / "tuned", seed=seed, pretrained=weights))
    print(f"\ntest accuracy after {steps} steps of {POLICY}: ", end="")
    print(f"{scratch['test/accuracy']:.3f} from scratch, {tuned['test/accuracy']:.3f} from the weights")
    return Told(report, scratch, tuned)


if __name__ == "__main__":
    main()

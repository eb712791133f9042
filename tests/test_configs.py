"""Every shipped configuration loads, says what it is for, round-trips, and trains two steps on generated data."""

import pathlib

import jax
import pytest
from flax import nnx

from mpjax.commands.train import run
from mpjax.config import Config, from_toml, load_config, to_toml
from mpjax.data import labelled_images
from mpjax.models.build import build_model
from mpjax.plan.shapes import planned_fields


CONFIGS = pathlib.Path(__file__).parent.parent / "configs"
FILES = sorted(CONFIGS.rglob("*.toml"))
SMALL = ["--data.batch_size", "4", "--data.eval_batch_size", "4", "--data.crop_padding", "1", "--steps", "2"]
QUIET = ["--report.no_tensorboard", "--report.no_plot"]


def name_of(file):
    return str(file.relative_to(CONFIGS))


def test_the_shipped_files_are_these():
    tasks = [
        "cifar100_resnet50",
        "cifar10_airbench",
        "cifar10_resnet18",
        "cifar10_wrn28_10",
        "digits",
        "digits_unet",
        "digits_vit",
    ]
    tasks += ["docstrings_bert", "imagenet_resnet50", "imagenet_resnext50", "imagenet_vit_b16", "imagenet_vit_s16"]
    tasks = [
        f"{task}.toml"
        for task in [*tasks, "gpt2_small", "imagenet_xception", "oxford_pets_unet", "sst2_bert", "tiny_gpt2"]
    ]
    policies = ["bfloat16", "float16", "float32", "mixed_bfloat16", "mixed_float16", "mixed_float8"]
    assert sorted(map(name_of, FILES)) == sorted(tasks + [f"precision/{policy}.toml" for policy in policies])


def test_the_digits_file_says_what_the_defaults_are():
    assert from_toml(CONFIGS / "digits.toml") == Config()


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_a_file_loads_and_round_trips(file, tmp_path):
    config = from_toml(file)
    (tmp_path / "again.toml").write_text(to_toml(config))
    assert from_toml(tmp_path / "again.toml") == config


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_a_header_says_what_how_long_and_how(file):
    header = [line for line in file.read_text().splitlines() if line.startswith("#")]
    text = "\n".join(header)
    for word in ("Time:", "Result:", "Command:  python scripts/train.py --config configs/"):
        assert word in text
    assert f"--config configs/{name_of(file)}" in text


def train_two_steps(folder, *arguments):
    summary = run(load_config([*arguments, *SMALL, *QUIET, "--output_dir", str(folder)]))
    assert (summary["attempts"], (folder / "checkpoints" / "2").is_dir()) == (2, True)
    return summary


@pytest.mark.slow
@pytest.mark.parametrize("file", [file for file in FILES if file.parent.name == "precision"], ids=name_of)
def test_a_precision_file_trains_two_steps(file, tmp_path):
    flags = ["--model.name", "mlp", "--model.width", "64", "--model.depth", "4", "--data.name", "synthetic:8x8x1:10"]
    files = ["--config", str(CONFIGS / "digits.toml"), "--config", str(file)]
    summary = train_two_steps(tmp_path / "run", *files, *flags)
    dtype = file.stem.removeprefix("mixed_")
    assert f"products={dtype}" in summary["policy"] or f"compute={dtype}," in summary["policy"]


IMAGES = {
    # File: side and classes of its images (ImageNet's smaller), parameters, and flags for a small model of its family.
    "digits.toml": (8, 10, 701_178, "--model.width 4"),
    "cifar10_resnet18.toml": (32, 10, 11_173_962, "--model.width 4"),
    "cifar100_resnet50.toml": (32, 100, 23_705_252, "--model.name resnet18 --model.width 4"),
    "cifar10_wrn28_10.toml": (32, 10, 36_479_194, "--model.name wrn16_4 --model.width 2"),
    "imagenet_resnet50.toml": (64, 1000, 25_557_032, "--model.name resnet18 --model.width 4"),
    "imagenet_resnext50.toml": (64, 1000, 25_028_904, "--model.name resnet18 --model.width 4"),
    "imagenet_xception.toml": (64, 1000, 22_855_952, "--model.width 4 --model.depth 1"),
    "imagenet_vit_b16.toml": (64, 1000, 86_427_880, "--model.width 12 --model.depth 2"),
    "imagenet_vit_s16.toml": (64, 1000, 21_980_776, "--model.width 12 --model.depth 2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", IMAGES)
def test_a_task_file_names_a_model_of_that_size(name):
    side, classes, parameters, _ = IMAGES[name]
    fields, settings = labelled_images(classes, (side, side, 1 if side == 8 else 3)), from_toml(CONFIGS / name).model
    model = nnx.eval_shape(lambda: build_model(settings, fields=fields, rngs=nnx.Rngs(0)))
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))) == parameters


def test_gpt2_small_is_planned_without_its_data_and_has_124_million_parameters(tmp_path):
    config = from_toml(CONFIGS / "gpt2_small.toml")
    fields = planned_fields(config.task, config.data, tmp_path)
    model = nnx.eval_shape(lambda: build_model(config.model, fields=fields, rngs=nnx.Rngs(0)))
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))) == 124_439_808


@pytest.mark.slow
@pytest.mark.parametrize("name", IMAGES)
def test_a_task_file_trains_two_steps(name, tmp_path):
    side, classes, _, smaller = IMAGES[name]
    data = ["--data.name", f"synthetic:{side}x{side}x{1 if side == 8 else 3}:{classes}", "--data.image_size", str(side)]
    train_two_steps(tmp_path / "run", "--config", str(CONFIGS / name), *data, *smaller.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "flags", "parameters"),
    [
        ("digits_vit.toml", [], 202_058),
        ("digits_unet.toml", [], 29_571),
        ("docstrings_bert.toml", [], 632_394),
        ("tiny_gpt2.toml", [], 124_864),
    ],
)
def test_a_task_file_trains_two_steps_on_the_data_that_it_names(name, flags, parameters, tmp_path):
    summary = train_two_steps(tmp_path / "run", "--config", str(CONFIGS / name), *flags)
    assert summary["parameters"] == parameters

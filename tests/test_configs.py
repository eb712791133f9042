"""Every shipped configuration loads, says what it is for and round-trips, and its step can be run."""

import pathlib

import jax
import pytest
from flax import nnx

from mpjax.commands import fields_of, planned_step, run
from mpjax.config import Config, from_toml, load_config, to_toml
from mpjax.data import labelled_images
from mpjax.models import build_model
from mpjax.plan import planned_fields
from mpjax.training import make_mesh


CONFIGS = pathlib.Path(__file__).parent.parent / "configs"
FILES = sorted(CONFIGS.rglob("*.toml"))
CHATS = ["nanochat_d12", "nanochat_d12_chat"]
SMALL = ["--data.batch_size", "4", "--data.eval_batch_size", "4", "--data.crop_padding", "1", "--steps", "2"]
QUIET = ["--report.no_tensorboard", "--report.no_plot"]


def name_of(file):
    return str(file.relative_to(CONFIGS))


def test_the_shipped_files_are_these():
    tasks = [
        "cifar100_resnet50",
        "cifar10_resnet18",
        "cifar10_wrn28_10",
        "digits",
        "digits_dit",
        "digits_unet",
        "digits_vit",
    ]
    tasks += ["docstrings_bert", "imagenet_resnet50", "imagenet_resnext50", "imagenet_vit_b16", "imagenet_vit_s16"]
    tasks = [
        f"{task}.toml"
        for task in [*tasks, "gpt2_small", "imagenet_xception", *CHATS, "oxford_pets_unet", "sst2_bert", "tiny_gpt2"]
    ]
    policies = ["bfloat16", "float16", "float32", "mixed_bfloat16", "mixed_float16", "mixed_float8"]
    assert sorted(map(name_of, FILES)) == sorted(tasks + [f"precision/{policy}.toml" for policy in policies])


def test_the_digits_file_says_what_the_defaults_are():
    assert from_toml(CONFIGS / "digits.toml") == Config()


QUICK = ("digits_vit.toml", "gpt2_small.toml", "precision/mixed_float8.toml")


@pytest.mark.parametrize(
    "file",
    [pytest.param(file, id=name_of(file), marks=[] if name_of(file) in QUICK else pytest.mark.slow) for file in FILES],
)
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
    # File: side and classes of its images, parameters.
    "digits.toml": (8, 10, 701_178),
    "cifar10_resnet18.toml": (32, 10, 11_173_962),
    "cifar100_resnet50.toml": (32, 100, 23_705_252),
    "cifar10_wrn28_10.toml": (32, 10, 36_479_194),
    "imagenet_resnet50.toml": (224, 1000, 25_557_032),
    "imagenet_resnext50.toml": (224, 1000, 25_028_904),
    "imagenet_xception.toml": (299, 1000, 22_855_952),
    "imagenet_vit_b16.toml": (224, 1000, 86_566_120),
    "imagenet_vit_s16.toml": (224, 1000, 22_049_896),
}


def check_step(config, fields, parameters):
    """A training step at full size whose state comes out as it went in, and a model of so many parameters."""
    step = planned_step(config, fields)
    assert sum(leaf.size for leaf in jax.tree.leaves(step.state.params)) == parameters
    train_step, arguments = step.on(make_mesh(jax.devices()[:1]))
    before, (after, _) = arguments[0], jax.eval_shape(train_step, *arguments)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), before)


@pytest.mark.slow
@pytest.mark.parametrize("name", IMAGES)
def test_a_task_file_has_a_step_on_images_of_its_set(name):
    side, classes, parameters = IMAGES[name]
    config = from_toml(CONFIGS / name)
    assert config.data.image_size in (0, side)
    check_step(config, labelled_images(classes, (side, side, 1 if side == 8 else 3)), parameters)


@pytest.mark.slow
def test_gpt2_small_is_planned_without_its_data_and_has_124_million_parameters(tmp_path):
    config = from_toml(CONFIGS / "gpt2_small.toml")
    fields = planned_fields(config.task, config.data, tmp_path)
    model = nnx.eval_shape(lambda: build_model(config.model, fields=fields, rngs=nnx.Rngs(0)))
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))) == 124_439_808


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parameters"),
    [("digits_vit.toml", 202_058), ("docstrings_bert.toml", 632_394), ("tiny_gpt2.toml", 124_864)],
)
def test_a_task_file_has_a_step_on_the_data_that_it_names(name, parameters):
    config = from_toml(CONFIGS / name)
    check_step(config, fields_of(config), parameters)


@pytest.mark.slow
def test_a_task_file_trains_two_steps_on_the_data_that_it_names(tmp_path):
    summary = train_two_steps(tmp_path / "run", "--config", str(CONFIGS / "digits_unet.toml"))
    assert summary["parameters"] == 29_571

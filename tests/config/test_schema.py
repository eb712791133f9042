"""The defaults are the default task, and every field says what it means."""

import ast
import dataclasses
import inspect
import itertools

import pytest

from mpjax.config import (
    Config,
    Data,
    Diagnosis,
    Distributed,
    Duration,
    Loop,
    Mesh,
    Model,
    Optimizer,
    Precision,
    Report,
    Training,
    with_settings,
)


SECTIONS = (
    *(Data, Model, Precision, Optimizer),
    *(Training, Mesh, Distributed, Loop, Report, Diagnosis),
)


def test_the_default_task_is_the_digits_in_mixed_float16():
    config = Config()
    assert (config.data.name, config.model.name, config.precision.policy) == ("digits", "resnet18", "mixed_float16")


def test_the_sections_are_all_there():
    settings = [field.type for field in dataclasses.fields(Config)]
    assert tuple(kind for kind in settings if dataclasses.is_dataclass(kind)) == SECTIONS


@pytest.mark.parametrize("section", [Config, *SECTIONS])
def test_every_field_is_frozen_and_documented(section):
    assert section.__dataclass_params__.frozen
    body = ast.parse(inspect.getsource(section)).body[0].body
    for node, following in itertools.pairwise([*body, None]):
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) not in [s.__name__ for s in SECTIONS]:
            assert isinstance(following, ast.Expr), f"{section.__name__}.{node.target.id} has no docstring"
            assert following.value.value.endswith(".")


def test_settings_are_replaced_by_name():
    config = with_settings(Config(), {"task": "segmentation", "data.mask_values": (0, 9), "data.image_size": 4})
    assert (config.task, config.data.mask_values, config.data.image_size) == ("segmentation", (0, 9), 4)
    assert config.data.name == "digits"


def test_from_python_durations_are_also_numbers_of_steps_or_text():
    config = Config(steps=100, optimizer=Optimizer(warmup="2 epochs"), loop=Loop(log_every="1e3 examples"))
    assert config.steps == Duration(100)
    assert config.optimizer.warmup == Duration(2, "epochs")
    assert config.loop.log_every == Duration(1000, "examples")
    with pytest.raises(ValueError, match="bad duration 'soon'"):
        Config(steps="soon")


@pytest.mark.parametrize(
    ("pretrained", "weights"), [("", "folder"), ("other.safetensors", "other.safetensors"), ("none", "")]
)
def test_initial_weights_are_those_of_the_folder_unless_another_file_or_none_is_named(pretrained, weights):
    assert Model(name="hf:folder", pretrained=pretrained).weights == weights


@pytest.mark.parametrize(
    ("task", "name", "data", "size"),
    [
        ("classification", "resnet18", Data(), 360),
        ("instructions", "hf:a", Data(batch_size=8), 8),
        ("instructions", "hf:a", Data(batch_size=8, eval_batch_size=360), 360),
        ("embedding", "hf:a", Data(batch_size=8), 360),
    ],
)
def test_a_network_of_a_folder_is_evaluated_in_batches_of_the_training_size(task, name, data, size):
    """It fits into memory. What is compared with the others of a batch keeps as many others."""
    assert Config(task=task, model=Model(name=name), data=data).data.eval_batch_size == size

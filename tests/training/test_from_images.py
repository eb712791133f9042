"""Initial values from training images: computed once, kept in the checkpoint, and never changed by a step."""

import dataclasses
import types
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.commands import build_run, fresh_state, run, with_parts
from mpjax.config import Data, Duration, load_config
from mpjax.data import Source, labelled_images, reader
from mpjax.data.sources import synthetic_source
from mpjax.errors import UsageError
from mpjax.loop import read_checkpoint
from mpjax.training import arrays_from_images


SETTINGS = "--data.name synthetic:12x12x3:5 --data.batch_size 8 --data.eval_batch_size 8 --data.mean 0.5 "
SETTINGS += "--precision.policy float32 --report.no_tensorboard --report.no_plot --output_dir "


class Centred(nnx.Module):
    """Classifies an image by the distance of its mean colour from that of the training images."""

    def __init__(self, fields, *, rngs):
        channels = fields["image"].shape[2]
        self.centre = nnx.BatchStat(jnp.zeros(channels))
        self.head = nnx.Linear(channels, fields["label"].num_classes, rngs=rngs)

    def __call__(self, x):
        return self.head(jnp.mean(x, axis=(1, 2)) - self.centre[...][None])

    def from_images(self, images):
        return {"centre": images.mean((0, 1, 2))}


def settings(folder, *arguments):
    return load_config([*f"{SETTINGS}{folder}".split(), *arguments])


def start_of(config):
    built = build_run(with_parts(config, model=Centred))
    return built.source.train, np.asarray(fresh_state(built).stats["centre"])


def test_a_new_run_has_the_value_that_a_module_computes_from_its_images(tmp_path):
    images, centre = start_of(settings(tmp_path / "run"))
    expected = np.mean([example["image"] / 255 - 0.5 for example in images.__getitems__(range(len(images)))], (0, 1, 2))
    np.testing.assert_allclose(centre, expected, atol=1e-5)
    assert np.all(np.abs(centre) > 1e-4)


class Squares(list):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def test_images_of_several_sizes_are_cropped_as_in_evaluation():
    seen = []

    class Seeing(nnx.Module):
        def from_images(self, images):
            seen.append(images)
            return {}

    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    squares = Squares({"image": pixels[:side, :side], "label": 0} for side in (16, 32))
    source, config = Source("squares", labelled_images(2, (None, None, 3)), squares, squares), Data(image_size=8)
    task: Any = types.SimpleNamespace(
        abstract=Seeing(), objective=types.SimpleNamespace(prepare=lambda batch, _: batch)
    )
    arrays_from_images(task, source, config)
    read = reader(source, config, training=False)
    np.testing.assert_array_equal(seen[0], [read(square)["image"] for square in squares])


def test_a_training_image_that_cannot_be_read_is_named_as_one():
    broken = Squares([{"image": b"no image", "label": 0}])
    source = Source("squares", labelled_images(2, (None, None, 3)), broken, broken)
    task: Any = types.SimpleNamespace(abstract=Wrong())
    with pytest.raises(UsageError, match="split 'train' of 'squares'"):
        arrays_from_images(task, source, Data(image_size=8))


@pytest.mark.slow
def test_a_step_leaves_it_and_a_resumed_run_takes_it_from_the_checkpoint(tmp_path, monkeypatch):
    config = settings(tmp_path / "run", "--steps", "1")
    run(config, model=Centred)
    _, expected = start_of(config)

    def unread(*_):
        raise AssertionError("images were read")

    monkeypatch.setattr("mpjax.training.from_images._images", unread)
    run(dataclasses.replace(config, steps=Duration(2), resume=True), model=Centred)
    position, arrays, _ = read_checkpoint(tmp_path / "run" / "checkpoints")
    kept = [value for name, value in arrays.items() if name.endswith("centre")]
    assert (position, [np.array_equal(value, expected) for value in kept]) == (2, [True])


class Wrong(nnx.Module):
    """Returns what it does not have."""

    def from_images(self, images):
        return {"kernle": np.zeros(3, np.float32)}


def test_a_variable_that_the_module_does_not_have_is_an_error(monkeypatch):
    monkeypatch.setattr("mpjax.training.from_images._images", lambda *_: np.zeros((2, 4, 4, 1), np.float32))
    source = synthetic_source(image_shape=(4, 4, 1), num_classes=2, size=4)
    task: Any = types.SimpleNamespace(abstract=Wrong())
    with pytest.raises(UsageError, match=r"Wrong.from_images returns 'kernle' \(3,\); wanted a variable of the module"):
        arrays_from_images(task, source, Data())

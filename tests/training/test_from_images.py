"""Initial values from training images: computed once, kept in the checkpoint, and never changed by a step."""

import types
from typing import Any

import numpy as np
import pytest
from flax import nnx

from mpjax.commands.build import build_run, fresh_state
from mpjax.commands.train import run
from mpjax.config import load_config
from mpjax.config.schema import Data
from mpjax.data import synthetic_source
from mpjax.errors import UsageError
from mpjax.loop.stored import read_checkpoint
from mpjax.training.from_images import arrays_from_images


SETTINGS = "--model.name airbench --model.width 4 --data.name synthetic:12x12x3:5 --data.batch_size 8 "
SETTINGS += "--data.eval_batch_size 8 --data.mean 0.5 --report.no_tensorboard --report.no_plot --output_dir "
KERNEL = "whitening/kernel"


def settings(folder, *arguments):
    return load_config([*f"{SETTINGS}{folder}".split(), *arguments])


def test_the_kernel_of_a_new_run_whitens_its_images(tmp_path):
    config = settings(tmp_path / "run")
    built = build_run(config)
    kernel = np.asarray(fresh_state(built).stats[KERNEL]).reshape(12, 24)[:, :12]
    x = np.stack([example["image"] for example in built.source.train.__getitems__(range(16))]) / 255 - 0.5
    patches = np.concatenate([x[:, i : i + 2, j : j + 2].reshape(16, 12) for i in range(11) for j in range(11)])
    variances = np.linalg.eigvalsh(patches.T @ patches / len(patches))
    whitened = (patches @ kernel).T @ (patches @ kernel) / len(patches)
    np.testing.assert_allclose(whitened, np.diag(variances / (variances + 5e-4)), atol=1e-4)


@pytest.mark.slow
def test_a_step_leaves_it_and_a_resumed_run_takes_it_from_the_checkpoint(tmp_path, monkeypatch):
    config = settings(tmp_path / "run", "--steps", "1")
    run(config)
    expected = np.asarray(fresh_state(build_run(config)).stats[KERNEL])

    def unread(*_):
        raise AssertionError("images were read")

    monkeypatch.setattr("mpjax.training.from_images._images", unread)
    run(settings(tmp_path / "run", "--steps", "2", "--resume"))
    position, arrays, _ = read_checkpoint(tmp_path / "run" / "checkpoints")
    kept = [value for name, value in arrays.items() if name.endswith(KERNEL)]
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

"""Which changes of settings change what a metric of the test set means, and what a checkpoint computes."""

import pytest

from mpjax.config import Config, changes_of_meaning, changes_of_outputs, to_toml, with_settings


def names(function, before, now):
    return [name for name, _, _ in function(*(to_toml(with_settings(Config(), each)) for each in (before, now)))]


@pytest.mark.parametrize(
    ("before", "now", "changed"),
    [
        ({}, {"data.mean": (0.9,), "data.std": (0.5,)}, ["data.mean", "data.std"]),
        ({"task": "diffusion"}, {"task": "diffusion", "training.prediction": "eps"}, ["training.prediction"]),
        ({}, {"training.objective": "mine.py:f"}, ["training.objective"]),
        ({}, {"loop.best": "loss"}, ["loop.best"]),
        ({}, {"loop.best": "accuracy", "loop.best_is": "max"}, []),  # as it is for the task
        ({}, {"loop.best_is": "min"}, ["loop.best_is"]),
        ({"task": "regression"}, {"task": "regression", "training.loss": "mae"}, []),  # the score is rmse
        (
            {"task": "regression", "loop.best": "loss"},
            {"task": "regression", "loop.best": "loss", "training.loss": "mae"},
            ["training.loss"],
        ),
        ({}, {"data.eval_batch_size": 9}, []),
        ({"task": "embedding"}, {"task": "embedding", "data.eval_batch_size": 9}, ["data.eval_batch_size"]),
        ({}, {"training.metrics": ("mine.py:dice",)}, []),
        (
            {"loop.best": "dice", "loop.best_is": "max"},
            {"loop.best": "dice", "loop.best_is": "max", "training.metrics": ("mine.py:dice",)},
            ["training.metrics"],
        ),
        (
            {},
            {
                "optimizer.learning_rate": 1.0,
                "precision.policy": "float32",
                "data.batch_size": 8,
                "data.flip": True,
                "mesh.fsdp": 2,
                "loop.log_every": 3,
                "loop.stop_after": 3,
                "training.label_smoothing": 0.0,
                "model.dropout": 0.5,
                "model.scan_blocks": True,
                "seed": 3,
                "data.name": "folder:moved",
            },
            [],
        ),
    ],
)
def test_the_metric_of_the_best_changes_its_meaning(before, now, changed):
    assert names(changes_of_meaning, before, now) == changed


def test_a_checkpoint_is_read_as_what_it_is_not():
    assert names(changes_of_outputs, {}, {"data.std": (2.0,), "loop.best": "loss", "model.pool": "cls"}) == ["data.std"]

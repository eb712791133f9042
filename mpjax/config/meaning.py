"""Which settings decide what a metric of the test set means, and what a network computes from an example."""

import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from mpjax.config.choices import BEST
from mpjax.config.save import OF_ONE_COMMAND, changes, flat, to_toml
from mpjax.config.schema import Config
from mpjax.config.tasks import COMPARED, TASKS


_OF_OUTPUTS = (
    "task",
    "data.mean",
    "data.std",
    "data.range",
    "training.prediction",
    "training.noise_schedule",
    "training.lora_alpha",
    "training.lora_variant",
)
"""Prefixes of settings that the outputs of a network depend on, beside its arrays."""

_OF_MODEL = ("model.", "data.documents")
_OF_ARRAYS_ALONE = ("model.dropout", "model.scan_blocks", "model.norm_kernel", "model.pretrained")
"""Prefixes of settings of the model that do not change what it computes in an evaluation."""

_OF_METRICS = ("training.objective", "data.ignore_index", "data.preprocess")
_OF_LOSS = (
    "training.loss",
    "training.huber_delta",
    "training.beta",
    "training.temperature",
    "training.symmetric",
)
"""Prefixes of settings that change the loss of the test set, and no other of its metrics."""


def changes_of_outputs(before: str, now: str) -> list[tuple[str, str, str]]:
    """Lists name, old and new value of the settings that the outputs of a checkpoint depend on.

    `before` are the settings of the checkpoint and `now` those to read it with, both texts of `to_toml`. Settings that
    decide which examples are read, and not how, are not among them.
    """
    return [change for change in changes(before, now) if change[0].startswith(_OF_OUTPUTS)]


def changes_of_meaning(before: str, now: str) -> Iterator[tuple[str, str, str]]:
    """Yields name, old and new value of the settings in whose change the metric of the best checkpoint changes meaning.

    That metric of two checkpoints, `--loop.best` or that of the task, is then not comparable. The data sets themselves
    are not looked at, because they may be moved (`mpjax.data.fingerprint` compares them).

    Args:
      before: the old settings, a text of `to_toml`.
      now: the new settings.
    """
    old, new = map(_settings, (before, now))
    (_, metric), other_score = _score(new), _score(old) != _score(new)
    deciding = (*_OF_OUTPUTS, *_OF_MODEL, *_OF_METRICS)
    deciding += _OF_LOSS if metric == "loss" else ()
    deciding += () if metric in BEST else ("training.metrics",)
    deciding += ("data.eval_batch_size",) if new["task"] in COMPARED else ()
    deciding += ("loop.best",) if other_score else ()
    for change in changes(before, now, apart_from=OF_ONE_COMMAND):
        if change[0].startswith(deciding) and not change[0].startswith(_OF_ARRAYS_ALONE):
            yield change


def _settings(text: str) -> dict[str, Any]:
    return dict(flat(tomllib.loads(to_toml(Config())))) | dict(flat(tomllib.loads(text)))


def _score(settings: Mapping[str, Any]) -> tuple[Any, str]:
    """What is the best value, and of which metric; as `score_of`, of settings by name that were stored."""
    best, is_best = settings["loop.best"], settings["loop.best_is"]
    metric = best or ("loss" if settings["training.objective"] else TASKS[settings["task"]].score)
    return {"min": min, "max": max}.get(is_best, BEST.get(metric)), metric


def of_reading(name: str) -> bool:
    """True if a setting of `changes_of_meaning` also changes the outputs for an example, not only their metrics."""
    return not name.startswith(("loop.", "training.metrics", "data.eval_batch_size", *_OF_LOSS))

"""Adds a user's own code (`mpjax/extend.py`) to a run: arguments of `mpjax.run`, callbacks and the chosen metric."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mpjax.config.schema import Config, with_settings
from mpjax.config.score import score_of
from mpjax.config.user_code import PythonObject, described
from mpjax.errors import CallbackError, UsageError
from mpjax.loop.callbacks import Callbacks, EarlyStopping, load_callbacks


PARTS = {
    "model": "model.name",
    "source": "data.name",
    "preprocess": "data.preprocess",
    "augment": "data.augment",
    "objective": "training.objective",
    "metrics": "training.metrics",
    "optimizer": "optimizer.name",
    "schedule": "optimizer.schedule",
    "callbacks": "loop.callbacks",
}
"""The setting that each argument of `mpjax.run` replaces."""


def with_parts(config: Config, **parts: Any) -> Config:
    """Replaces settings by objects that were passed to `mpjax.run`; returns the new settings.

    An argument of None changes nothing. Each object is wrapped in a `PythonObject`. Metrics and callbacks, lists of
    objects, are added after those that the settings name.

    Args:
      config: the settings.
      **parts: the objects, by their names in `PARTS`.

    Raises:
      UsageError: `metrics` or `callbacks` cannot be iterated, or another object than a source or a callback is not
        callable.
    """
    for name, part in parts.items():
        if part is None:
            continue
        section, _, field = PARTS[name].partition(".")
        before = getattr(getattr(config, section), field)
        several = isinstance(before, tuple)
        values = require_several(name, part) if several else (part,)
        _require_callable(name, values)
        value = (*before, *map(_wrapped, values)) if several else _wrapped(part)
        config = with_settings(config, {PARTS[name]: value})
    return config


def _wrapped(part: Any) -> PythonObject:
    return part if isinstance(part, PythonObject) else PythonObject(part)


def _require_callable(name: str, parts: Sequence[Any]) -> None:
    if name in ("source", "callbacks"):  # these may be values and objects
        return
    for part in parts:
        if not (callable(part) or isinstance(part, PythonObject)):
            raise UsageError(f"{name} of mpjax.run is not callable: {described(part)}")


def require_several(name: str, parts: Any) -> tuple:
    """Converts the argument `name` of `mpjax.run`, an iterable of objects, to a tuple.

    Raises:
      UsageError: it cannot be iterated, such as a single function.
    """
    if not isinstance(parts, Iterable):
        raise UsageError(f"{name} is {parts!r}: wanted a list of them, [...], also of one")
    return tuple(parts)


def callbacks_of(
    config: Config, gather: Callable[[Any], list], failures: list[CallbackError] | None = None
) -> Callbacks:
    """Loads the callbacks that `loop.callbacks` names, and adds early stopping if `loop.stop_after` is set.

    Args:
      config: the settings of the run.
      gather: a function from a value of this process to the list of the values of all processes.
      failures: the list to which the user's writers add their failures; None if no process has such writers.

    Raises:
      UsageError: the code that a setting names cannot be used, or `loop.stop_after` is set and the best value of the
        metric is unknown.
    """
    callbacks = load_callbacks(config.loop.callbacks)
    if config.loop.stop_after:
        score = score_of(config)
        improves = functools.partial(score.improves, delta=config.loop.stop_delta)
        callbacks.append(EarlyStopping(improves, f"test/{score.metric}", config.loop.stop_after))
    return Callbacks(callbacks, gather, failures)


def require_metric(metric: str, names: Sequence[str]) -> None:
    """Raises UsageError if `metric`, the value of `--loop.best`, is not among `names`, the metrics of the test set."""
    if metric not in names:
        raise UsageError(f"--loop.best {metric}: the test set has the metrics {', '.join(names)}")

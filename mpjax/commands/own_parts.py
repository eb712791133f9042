"""The user's own parts of a run: passed in Python, or named by the settings; see `mpjax/extend.py`."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mpjax.config import Config
from mpjax.config.score import score_of
from mpjax.config.user_calls import arguments_of, named_failure, require_call
from mpjax.config.user_code import Code, PythonObject, described, load_function
from mpjax.errors import UsageError
from mpjax.extend import RunInfo
from mpjax.loop.callbacks import Callbacks, EarlyStopping, load_callbacks
from mpjax.report.writer import Writer


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
    """Adds parts that were passed in Python to the settings, by their names in `PARTS`; None means no part.

    Metrics and callbacks, of which there may be several, come after those that the settings name.
    """
    for name, part in parts.items():
        if part is None:
            continue
        section, _, field = PARTS[name].partition(".")
        before = getattr(getattr(config, section), field)
        several = isinstance(before, tuple)
        those = require_several(name, part) if several else (part,)
        _require_callable(name, those)
        value = (*before, *map(_wrapped, those)) if several else _wrapped(part)
        changed = dataclasses.replace(getattr(config, section), **{field: value})
        config = dataclasses.replace(config, **{section: changed})
    return config


def _wrapped(part: Any) -> PythonObject:
    return part if isinstance(part, PythonObject) else PythonObject(part)


def _require_callable(name: str, parts: Sequence[Any]) -> None:
    if name in ("source", "callbacks"):  # these may be values and objects
        return
    for one in parts:
        if not (callable(one) or isinstance(one, PythonObject)):
            raise UsageError(f"{name} of mpjax.run is not callable: {described(one)}")


def require_several(name: str, parts: Any) -> tuple:
    """Converts an argument of `mpjax.run` with several parts to a tuple.

    Raises:
      UsageError: it is a single part.
    """
    if not isinstance(parts, Iterable):
        raise UsageError(f"{name} is {parts!r}: wanted a list of them, [...], also of one")
    return tuple(parts)


def require_writers(writers: Any) -> tuple[Writer, ...]:
    """Checks the writers that were passed to `mpjax.run`.

    Raises:
      UsageError: the argument is a single writer, or one of them is no writer.
    """
    found = require_several("writers", writers)
    for writer in found:
        require_writer(writer, "writers has")
    return found


def callbacks_of(config: Config, gather: Callable[[Any], list], *others: Any) -> Callbacks:
    """Loads the callbacks of a run, with early stopping if the settings say so, and `others` last.

    Raises:
      UsageError: the code that a setting names cannot be used.
    """
    callbacks = load_callbacks(config.loop.callbacks)
    if config.loop.stop_after:
        score = score_of(config)
        improves = functools.partial(score.improves, delta=config.loop.stop_delta)
        callbacks.append(EarlyStopping(improves, f"test/{score.metric}", config.loop.stop_after))
    return Callbacks([*callbacks, *others], gather)


def require_metric(metric: str, names: Sequence[str]) -> None:
    """Raises UsageError if the metric that chooses the best checkpoint is not a metric of the test set."""
    if metric not in names:
        raise UsageError(f"--loop.best {metric}: the test set has the metrics {', '.join(names)}")


def open_writers(specs: Sequence[Code], run: RunInfo) -> list[Writer]:
    """Opens the writers that `--report.writers` names.

    Raises:
      UsageError: there is no such code, or its result is no writer. Open writers are then closed.
    """
    with contextlib.ExitStack() as opened:
        writers: list[Writer] = []
        for spec in specs:
            opener = load_function(_logger(spec), flag="--report.writers")
            with named_failure(f"--report.writers {spec} failed", opener):
                writer = opener(run)
            require_writer(writer, f"--report.writers {spec} returned")
            opened.callback(writer.close)
            writers.append(writer)
        opened.pop_all()
    return writers


def require_writer(writer: Any, said: str) -> None:
    """Raises UsageError if an object is no writer.

    Args:
      writer: the object.
      said: its source, as the beginning of the message; a description of the object follows.
    """
    wanted = "wanted an object with the methods of mpjax.report.Writer"
    if isinstance(writer, type):
        raise UsageError(f"{said} the class {writer.__name__}; {wanted}: write {writer.__name__}(...)")
    if isinstance(writer, str):
        raise UsageError(f"{said} the text {writer!r}; {wanted}; names of loggers are for --report.writers")
    missing = [name for name in _METHODS if not callable(getattr(writer, name, None))]
    if missing:
        raise UsageError(f"{said} {type(writer).__name__}, which has no {', '.join(missing)}; {wanted}")
    for name in _METHODS:
        named = f"{said} {type(writer).__name__}, whose {name}"
        require_call(getattr(writer, name), arguments_of(getattr(Writer, name)), named)


LOGGERS = {
    "wandb": "mpjax.report.loggers.weights_and_biases:open_wandb",
    "mlflow": "mpjax.report.loggers.mlflow:open_mlflow",
    "comet": "mpjax.report.loggers.comet:open_comet",
}
"""The writers that need additional packages."""


def _logger(spec: Code) -> Code:
    """The import path of a named logger; any other spec is unchanged."""
    if isinstance(spec, PythonObject) or ":" in spec:
        return spec
    if spec not in LOGGERS:
        raise UsageError(
            f"--report.writers {spec}: wanted {', '.join(LOGGERS)}, or FILE.py:NAME or package.module:NAME for your own"
        )
    return LOGGERS[spec]


_METHODS = tuple(name for name in vars(Writer) if not name.startswith("_"))

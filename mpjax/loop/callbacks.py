"""Calls the user's callbacks at each event of a run, and collects their requests to stop or to save."""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mpjax.config.user_calls import arguments_of, require_call
from mpjax.config.user_code import Code, load_function
from mpjax.errors import CallbackError, UsageError, failure
from mpjax.extend import EVENTS, Ask, Callback


_ASKS = ("stop", "save")

_HOOK = re.compile(r"(on|before|after)_|.*_(begin|start|end)$")
"""Names of methods that other frameworks call, such as `on_train_batch_end`."""


class Callbacks:
    """The callbacks of a run. It is false if there is nothing to call or to check, as `Callbacks()`.

    Attributes:
      reason: text that says why a callback requested a stop, to append to "stopped at step N of M"; empty before.

    Args:
      callbacks: objects with some of the methods of `mpjax.extend.Callback`.
      gather: `(value) -> values` of all processes, in their order; by default of this process alone.
      failures: a list to which the user's writers add their failures. Each `call` removes the first and raises it. None
        if no process of the run has such writers.

    Raises:
      UsageError: an object has none of these methods, a method with other arguments, or a method that resembles one of
        these or a hook of another framework.
    """

    def __init__(
        self,
        callbacks: Iterable[Any] = (),
        gather: Callable[[Any], list] = lambda value: [value],
        failures: list[CallbackError] | None = None,
    ):
        self.reason = ""
        self._callbacks = tuple(callbacks)
        self._gather, self._failures = gather, failures
        for callback in self._callbacks:
            _require_events(callback)

    def __bool__(self) -> bool:
        return bool(self._callbacks) or self._failures is not None

    def call(self, event: str, *arguments: Any) -> set[str]:
        """Calls the method named `event` of each callback that has one; returns the requests, "stop" and "save".

        All processes call it together, and all get the requests of process 0. A request to stop sets `reason`. If there
        are no callbacks and no writers to check, it returns an empty set at once.

        Raises:
          CallbackError: a callback of any process raised an exception, called `sys.exit`, or returned a value other
            than "stop", "save" or None, and later callbacks were not called; or a writer of any process has failed.
        """
        if not self:
            return set()
        asks: set[str] = set()
        failed: CallbackError | None = None
        try:
            for callback in self._callbacks:
                if (method := getattr(callback, event, None)) is not None:
                    requests = _asked(callback, event, method, arguments)
                    asks |= requests
                    if "stop" in requests:
                        is_early_stopping = isinstance(callback, EarlyStopping)
                        self.reason = callback.reason if is_early_stopping else ", as a callback asked"
            if self._failures:
                raise self._failures.pop(0)
        except CallbackError as error:
            failed = error
        outcomes = self._gather({"asks": sorted(asks), "error": failed and str(failed)})
        if failed:
            raise failed
        for process, other in enumerate(outcomes):
            if other["error"]:
                raise CallbackError(f"process {process}: {other['error']}")
        return set(outcomes[0]["asks"])


def load_callbacks(specs: Sequence[Code]) -> list[Any]:
    """Makes the callbacks of `--loop.callbacks`, in order: calls each class or function without arguments.

    An object passed from Python that cannot be called, or that has methods of `mpjax.extend.Callback`, is a callback
    itself and is not called.

    Raises:
      UsageError: the code does not exist, needs arguments, raises an exception, or calls `sys.exit`.
    """
    callbacks = []
    for spec in specs:
        make = load_function(spec, flag="--loop.callbacks")
        if not callable(make) or (_events(make) and not isinstance(make, type)):
            callbacks.append(make)  # an object passed from Python
            continue
        try:
            callbacks.append(make())
        except TypeError as error:
            raise UsageError(
                f"--loop.callbacks {spec}: {error}; wanted a class or function without arguments"
            ) from error
        except (Exception, SystemExit) as error:
            raise UsageError(f"--loop.callbacks {spec}: {failure(error)}") from error
    return callbacks


def _events(callback: Any) -> list[str]:
    """Lists the events of `mpjax.extend.Callback` for which an object has a method."""
    return [event for event in EVENTS if callable(getattr(callback, event, None))]


def _require_events(callback: Any) -> None:
    """Raises UsageError for an object that `Callbacks` refuses."""
    kind = type(callback).__name__
    methods = [name for name in dir(callback) if not name.startswith("_") and callable(getattr(callback, name))]
    for name in methods:
        near = difflib.get_close_matches(name, EVENTS, n=1, cutoff=0.75)
        if name not in EVENTS and near:
            raise UsageError(f"callback {kind}: {name} is not an event; did you mean {near[0]}?")
    if not _events(callback):
        raise UsageError(f"callback {kind} has none of the methods {', '.join(EVENTS)}")
    for name in methods:
        if name not in EVENTS and _HOOK.match(name):
            raise UsageError(
                f"callback {kind}: {name} is not an event, and would never be called; the events are "
                f"{', '.join(EVENTS)}; if you call it yourself, name it _{name}"
            )
    for event in _events(callback):
        require_call(getattr(callback, event), arguments_of(getattr(Callback, event)), f"callback {kind}.{event}")


def _asked(callback: Any, event: str, method: Callable, arguments: Sequence[Any]) -> set[str]:
    """Calls the method of a callback for an event; returns its request in a set, which is empty if it returns None.

    Raises:
      CallbackError: the method raises an exception, calls `sys.exit`, or returns another value.
    """
    source = f"callback {type(callback).__name__}.{event}"
    try:
        ask: Ask = method(*arguments)
    except (Exception, SystemExit) as error:
        stop = '; to end a run, return "stop"' if isinstance(error, SystemExit) else ""
        raise CallbackError(f"{source}{at_step(arguments)}: {failure(error)}{stop}") from error
    if ask is not None and ask not in _ASKS:
        raise CallbackError(f'{source} returned {ask!r}: wanted "stop", "save" or None')
    return {ask} if ask else set()


def at_step(arguments: Sequence[Any]) -> str:
    """Formats the first argument of an event as " at step N" for a message; empty if it is absent or no integer."""
    return f" at step {arguments[0]}" if arguments and isinstance(arguments[0], int) else ""


class EarlyStopping:
    """A callback that requests a stop when a metric no longer improves. NaN is never an improvement.

    Attributes:
      reason: text that says why, to append to "stopped at step N of M".

    Args:
      improves: `(value, best) -> bool`: True if a value is better than the best so far.
      metric: the metric, such as `test/loss`.
      patience: the number of consecutive evaluations without a better value after which the run stops.
    """

    def __init__(self, improves: Callable[[float, float], bool], metric: str, patience: int):
        self._improves, self._metric, self._patience = improves, metric, patience
        times = "an evaluation" if patience == 1 else f"{patience} evaluations in a row"
        self.reason = f": {metric} did not improve in {times} (--loop.stop_after {patience})"
        self._best: float | None = None
        self._without = 0

    def started(self, run: Any) -> Ask:
        """Counts the evaluations of a resumed run after `run.best_since` up to its start. Requests nothing."""
        for record in run.records:
            if self._metric in record and run.best_since < record["step"] <= run.start:
                self._count(record[self._metric])

    def evaluated(self, step: int, metrics: Mapping[str, float], model: Callable) -> Ask:
        """Counts an evaluation. Returns "stop" if none of the last `patience` values was better, else None."""
        del step, model
        self._count(metrics[self._metric])
        return "stop" if self._without >= self._patience else None

    def _count(self, value: float) -> None:
        better = value == value and (self._best is None or self._improves(value, self._best))  # NaN is never better
        self._best, self._without = (value, 0) if better else (self._best, self._without + 1)

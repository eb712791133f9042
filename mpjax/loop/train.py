"""The training loop: steps, metrics, evaluation, checkpoints, and the test for divergence."""

import contextlib
import dataclasses
import math
import operator
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from mpjax.config.score import ACCURACY, Score
from mpjax.errors import CallbackError, Diverged, Interrupted
from mpjax.extend import Writer
from mpjax.loop.callbacks import Callbacks
from mpjax.loop.signals import Stop
from mpjax.loop.when import When


class Clock:
    """Counts seconds from its creation, except while paused."""

    def __init__(self):
        self._start = time.perf_counter()
        self._paused = 0.0

    def seconds(self) -> float:
        """The seconds since the start, without pauses."""
        return time.perf_counter() - self._start - self._paused

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Context whose duration `seconds` leaves out, once it has ended."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - start


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits beyond which a run has diverged.

    Attributes:
      floor: the smallest loss scale. None without loss scaling, where no step is skipped and NaN spreads at once.
      patience: the number of consecutive skipped steps that ends training, if the last was at the floor.
    """

    floor: float | None
    patience: int

    def exceeded_by(self, metrics: Mapping[str, float]) -> str | None:
        """The reason why the step with these metrics ends training; None if training goes on.

        Without loss scaling, the loss or the norm of the gradient is not finite. With it, too many steps in a row were
        skipped, the last at the smallest loss scale.
        """
        if self.floor is None:
            # Checks the gradient too: a NaN gradient in the last step makes the parameters NaN, but not the loss.
            bad = [name for name in ("loss", "grad_norm") if not math.isfinite(metrics[name])]
            return f"{bad[0]} is {metrics[bad[0]]}" if bad else None
        if metrics["loss_scale"] > self.floor or metrics["consecutive_skips"] < self.patience:
            return None
        skips = int(metrics["consecutive_skips"])
        return f"gradients were not finite {skips} steps in a row, the last at the smallest loss scale {self.floor:g}"


class Explain(NamedTuple):
    """Functions that explain why a run has diverged.

    Attributes:
      step: `(step number) -> text`, for a step that failed.
      evaluation: `(position, state) -> text`, for a state whose test loss is not finite.
    """

    step: Callable[[int], str]
    evaluation: Callable[[int, Any], str]


NO_CALLBACKS = Callbacks()

STEPS_AHEAD = 8
"""The number of steps that the host may start before the device has ended the first of them; at least 2 calls."""

Metrics = Mapping[str, float]


def train_loop(
    state,
    train_call: Callable,
    feed: Iterator[Any],
    *,
    start: int,
    when: When,
    batch_size: int,
    limits: Limits,
    writer: Writer,
    evaluate: Callable[[Any], Metrics],
    save: Callable[[int, Any, float | None], None],
    explain: Callable[[], Explain],
    stop: Stop,
    score: Score = ACCURACY,
    probe: Callable | None = None,
    draw: Callable[[Any], Mapping[str, Any]] | None = None,
    callbacks: Callbacks = NO_CALLBACKS,
    model_of: Callable[[Any], Callable] = lambda state: lambda: state,
):
    """Runs steps `start + 1` to `when.steps`, or fewer if a callback requests a stop, and returns the final state.

    The state is evaluated and saved at the intervals of `when`, after the last step, and before it stops for a
    callback. The host reads metrics one call after their interval ends, while the device runs the next call.

    Args:
      state: the training state; donated.
      train_call: `(state, fed, count) -> (state, metrics)` runs `count` steps. Metrics have shape [count], or [] for 1.
      feed: the device inputs of the calls, which have `when.call_counts(start)` steps.
      start: the number of steps attempted before.
      when: the intervals of logging, evaluation, checkpoints and layer statistics.
      batch_size: examples per step, for the throughput.
      limits: the limits of divergence.
      writer: receives `train/…` metrics (means over the interval, last values of counters) and the metrics of
        `evaluate`.
      evaluate: `(state) -> metrics`, including `test/loss`.
      save: writes a checkpoint of (position, state, score). A higher score is better; it is None without an evaluation.
      explain: makes the functions that explain a divergence; called only after one.
      stop: a request to stop after the current call, with a checkpoint but without an evaluation.
      score: the metric of the test set that decides which checkpoint is best. `evaluate` returns it.
      probe: `(state, fed, count) -> Layers`, the layer statistics of the next step; called when they are due. None:
        no statistics.
      draw: `(state) -> pictures` by name; called after each evaluation. None: no pictures.
      callbacks: receive the events of the run, and may request a checkpoint or a stop.
      model_of: `(state) -> model`, the `model` argument of the callbacks' `evaluated`.

    Raises:
      CallbackError: a callback failed, and a checkpoint was saved.
      Exception: that of `evaluate`; a checkpoint was saved, unless there are several processes.
      Diverged: `limits` were exceeded, or the last test loss is not finite. The message includes the explanation.
      Interrupted: `stop` was due before the last step, and a checkpoint was saved.
    """
    clock = Clock()
    ahead = max(2, STEPS_AHEAD // when.per_call)
    unwritten: list = []
    looked: list = []
    interval_start = 0.0
    requests: set[str] = set()  # requests of callbacks

    def write_layers() -> None:
        while looked:
            position, layers = looked.pop()
            writer.layers(position, layers.by_layer())

    def diverged(text: str, number: int, reason: str, explained: Callable[[], str]) -> Diverged:
        failed = ""
        try:
            callbacks.call("diverged", number, reason)
        except CallbackError as error:
            failed = f"\n{error}"
        return Diverged(f"{text}: {reason}\n{explained()}{failed}")

    def write_interval(position: int, interval: list) -> None:
        nonlocal interval_start, requests
        if not interval:
            return
        steps = [step for metrics, count in jax.device_get(interval) for step in _each(metrics, count)]
        seconds = clock.seconds() - interval_start
        interval_start = clock.seconds()
        rate = {"examples_per_second": len(steps) * batch_size / seconds}
        metrics = _summary(steps) | rate
        metrics = {f"train/{name}": value for name, value in metrics.items()}
        writer.write(position, metrics)
        numbered = list(enumerate(steps, start=position - len(steps) + 1))
        for number, step in numbered:
            if reason := limits.exceeded_by(step):
                text = f"training diverged at step {number}"
                raise diverged(text, number, reason, lambda number=number: explain().step(number))
        for number, step in numbered:
            if not step["finite"]:
                requests |= callbacks.call("skipped", number, {name: float(value) for name, value in step.items()})
        requests |= callbacks.call("logged", position, metrics)

    unread: tuple[int, list] | None = None  # the interval that ended with the previous call
    position = saved = start

    def evaluate_and_save(position: int, *, evaluating: bool, saving: bool) -> None:
        nonlocal saved, requests
        tested: Metrics = {}
        if evaluating:
            try:
                tested = evaluate(state)
            except Exception:  # such as one that does not fit into memory
                if jax.process_count() == 1:  # others may be elsewhere, and a save is of all
                    save(position, state, None)
                    writer.message(f"the evaluation failed; the checkpoint of step {position} is saved")
                raise
            writer.write(position, tested)
            if draw:
                writer.images(position, draw(state))
            requests |= callbacks.call("evaluated", position, tested, model_of(state))
        if saving or requests:
            save(position, state, score.higher_is_better(tested.get(f"test/{score.metric}")))
            saved = position
            requests.discard("save")
            requests |= callbacks.call("saved", position)
        ends = position == when.steps or (evaluating and "stop" in requests)
        if ends and not math.isfinite(tested["test/loss"]):
            reason = f"the test loss is {tested['test/loss']} at the end"
            raise diverged("training diverged", position, reason, lambda: explain().evaluation(position, state))

    try:
        for count in when.call_counts(start):
            fed = next(feed)
            layers = [(position + 1, probe(state, fed, count))] if probe and when.layers_due(position + 1) else []
            state, metrics = train_call(state, fed, count)
            before, position = position, position + count
            unwritten.append((metrics, count))
            write_layers()
            looked += layers
            if unread is not None:
                write_interval(*unread)
                unread = None
            if len(unwritten) >= ahead:  # limits the number of batches in device memory
                jax.block_until_ready(unwritten[-ahead][0])

            stopping = stop.due(position) and position < when.steps
            due_evaluate = (when.due(when.evaluate, position) or "stop" in requests) and not stopping
            due_save = when.due(when.save, position) or stopping or bool(requests)
            if due_evaluate or due_save:
                write_layers()
                interval, unwritten = unwritten, []
                write_interval(position, interval)
                with clock.pause():
                    evaluate_and_save(position, evaluating=due_evaluate, saving=due_save)
                if stopping:
                    raise Interrupted(f"stopped at step {position}; the checkpoint is saved", stop.signal_number)
                if due_evaluate and saved == position and "stop" in requests:
                    break
            elif any(when.due(when.log, passed) for passed in range(before + 1, position + 1)):
                unread, unwritten = (position, unwritten), []
    except CallbackError as error:
        callbacks = NO_CALLBACKS
        write_interval(position, unwritten)  # raises if the run has diverged
        if saved != position:
            save(position, state, None)
        raise CallbackError(f"{error}; the checkpoint of step {position} is saved") from error.__cause__
    return state


def _each(metrics: Metrics, count: int) -> list[Metrics]:
    """Splits the metrics of one call into a dict for each step. They have shape [count], or [] if `count` is 1."""
    return [metrics] if count == 1 else [jax.tree.map(operator.itemgetter(index), metrics) for index in range(count)]


_COUNTERS = ("learning_rate", "loss_scale", "skipped", "consecutive_skips")


def _summary(steps: list[Metrics]) -> dict[str, float]:
    """Averages each metric over the steps of an interval that were not skipped, or over all if all were skipped.

    `_COUNTERS` keep the value of the last step, and `finite` is left out.
    """
    good = [step for step in steps if step["finite"]] or steps
    means = {
        name: math.fsum(float(step[name]) for step in good) / len(good)
        for name in steps[0]
        if name not in (*_COUNTERS, "finite")
    }
    return means | {name: float(steps[-1][name]) for name in _COUNTERS if name in steps[-1]}

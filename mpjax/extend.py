"""What a run can be given of your own: the one page to read before writing a part.

Each part is named by a setting, as `FILE.py:NAME` or `package.module:NAME`, or passed to `mpjax.run` in Python. A class
or a function is called as its protocol here says. docs/extending.md has an example of each.

| part | setting | argument of `mpjax.run` |
| --- | --- | --- |
| model: `(fields, *, rngs)` to an `nnx.Module` | `--model.name` | `model` |
| `Objective` | `--training.objective` | `objective` |
| `Metric` | `--training.metrics` | `metrics` |
| `Source` | `--data.name`, `--data.mix` | `source` |
| function of a stored example | `--data.preprocess` | `preprocess` |
| `Augmentation` | `--data.augment` | `augment` |
| `Optimizer` | `--optimizer.name` | `optimizer` |
| `Schedule` | `--optimizer.schedule` | `schedule` |
| `Callback` | `--loop.callbacks` | `callbacks` |
| `OpenWriter` | `--report.writers` | `writers`, open ones |
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol


if TYPE_CHECKING:
    import jax
    import optax
    from flax import nnx
    from jaxtyping import Array, Key

    from mpjax.config import Config
    from mpjax.report.writer import Writer
    from mpjax.training.objective import Mean


class Objective(Protocol):
    """The loss and the metrics of a batch, one value per example. mpjax adds them up: over a batch, its micro-batches
    and devices, and over the test set, whose last batch is padded.
    """

    def __call__(
        self, model: nnx.Module, batch: Mapping[str, jax.Array], key: Key[Array, ""] | None
    ) -> Mapping[str, jax.Array | Mean]:
        """Returns `loss` and metrics by name.

        A value is [B], of which the mean is reported. It is a `Mean` of totals [B] and weights [B] where examples have
        several terms each, such as tokens. `loss` is differentiated. `outputs`, if there is one, may be any pytree with
        leading axes [B]; metrics (below) are computed from it.

        Args:
          model: the model under the policy of the run, in training or evaluation mode. It may hold several networks.
          batch: the fields of the examples, [B, ...]; images are float32, scaled and augmented. In training with mixup
            or cutmix, `target`, float32 [B, classes], has the mixed labels. In evaluation, `weight`, float32 [B], is 0
            for examples that are padding, which mpjax leaves out itself.
          key: random numbers of this step and device; None in evaluation. A function without a third parameter is
            called without it.
        """
        ...


class Metric(Protocol):
    """A metric of the test set."""

    def __call__(self, outputs: Any, batch: Mapping[str, jax.Array]) -> Any:
        """Returns values per example, as of an `Objective`: one, or several by name.

        It may also return a metric of `clu` or `metrax` (an object with `merge` and `compute`), whose arrays are sums.
        It is then made of each example alone, with a batch axis of 1, and added up.

        Args:
          outputs: what the model returned, such as logits [B, classes]; of an own objective, its `outputs`.
          batch: the fields of the examples, [B, ...].
        """
        ...


Split = Any
"""Examples to train on or to evaluate on: a dict of arrays [N, ...]; anything with a length and integer indices whose
elements are dicts of fields (a `grain.MapDataset`, a torch `Dataset`, a list); or an iterable that can be read again
(a `grain.DataLoader`, a function that returns a generator), whose examples are read into memory."""


class Source(Protocol):
    """A data set."""

    def __call__(self) -> tuple[Split, Split]:
        """Returns the training and the test examples. The columns of an example are chosen as for other data sets."""
        ...


class Augmentation(Protocol):
    """An augmentation of training batches on the device, inside the compiled step, after those of `--data`."""

    def __call__(self, batch: dict[str, jax.Array], key: Key[Array, ""]) -> dict[str, jax.Array]:
        """Returns the batch with the same fields; images are float32, scaled to `--data.mean` and `--data.std`."""
        ...


class Optimizer(Protocol):
    """An update rule."""

    def __call__(self, learning_rate: optax.Schedule) -> optax.GradientTransformation:
        """Returns the transformation. mpjax clips before it, and adds loss scaling and master weights around it.

        Args:
          learning_rate: the learning rate of each applied step. Further parameters come from `--optimizer.arguments`.
        """
        ...


class Schedule(Protocol):
    """A learning rate as a function of applied steps. Parameters that it does not name are not passed."""

    def __call__(self, *, peak: float, steps: int, warmup: int) -> optax.Schedule:
        """Returns a function from the number of applied steps to the learning rate, a scalar that is not negative."""
        ...


@dataclasses.dataclass(frozen=True)
class RunInfo:
    """A run, for callbacks and writers.

    Attributes:
      folder: the folder of the run.
      config: its settings.
      start: the number of steps attempted before: 0, unless it was resumed.
      steps: the number of attempted steps at which it ends.
      first: True in the process that prints and writes, of several.
      records: the metrics logged so far, dicts with `step`, of a run that was resumed.
    """

    folder: pathlib.Path
    config: Config
    start: int
    steps: int
    first: bool
    records: Sequence[Mapping[str, Any]]


Ask = Literal["stop", "save"] | None
"""What a callback may ask for: to save a checkpoint after this step; or to stop after it, evaluated and saved."""


class Callback:
    """Hears of what happens in a run. Override what you need; every method may return an `Ask`, or None.

    Callbacks get numbers, never the state, which the next step overwrites. With several processes each has its own;
    what that of process 0 asks for holds for all.
    """

    def started(self, run: RunInfo) -> Ask:
        """Called before the first step."""

    def logged(self, step: int, metrics: Mapping[str, float]) -> Ask:
        """Called with `train/…`, means over the interval that ended at `step`, while the device runs later steps."""

    def skipped(self, step: int, metrics: Mapping[str, float]) -> Ask:
        """Called for each skipped step, with that step's metrics, such as `loss_scale`."""

    def evaluated(self, step: int, metrics: Mapping[str, float], model: Callable[[], nnx.Module]) -> Ask:
        """Called with `test/…` (and `ema/…`); `model()` returns a copy of the model in evaluation mode."""

    def saved(self, step: int) -> Ask:
        """Called when the checkpoint of a step is being written, to `checkpoints/<step>` of the run's folder."""

    def diverged(self, step: int, reason: str) -> None:
        """Called before a run that cannot continue ends, and before its diagnosis."""

    def ended(self, summary: Mapping[str, Any]) -> None:
        """Called after the last step, with the contents of summary.json; not after an error or a signal."""


EVENTS = tuple(name for name in vars(Callback) if not name.startswith("_"))
"""The names of a callback's methods. A class of yours needs only those that it is called for."""


class OpenWriter(Protocol):
    """Opens a destination of metrics, such as a logger."""

    def __call__(self, run: RunInfo) -> Writer:
        """Returns a writer; it is opened in the first of several processes, and closed at the end."""
        ...

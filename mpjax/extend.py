"""The extension points of a run: the one page to read before you write a part of your own.

Name a part in its setting, as `FILE.py:NAME` or `package.module:NAME`, or pass it to `mpjax.run` in Python. mpjax calls
a class or function as its protocol below documents. docs/extending.md has an example of each.

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

A module of your model may be `FromImages`.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable


if TYPE_CHECKING:
    import jax
    import numpy as np
    import optax
    from flax import nnx
    from jaxtyping import Array, Key

    from mpjax.config.schema import Config
    from mpjax.diagnosis.layers import Layer
    from mpjax.training.objective import Mean


@runtime_checkable
class FromImages(Protocol):
    """A module with initial values that depend on the training images, such as a kernel that whitens patches."""

    def from_images(self, images: np.ndarray) -> Mapping[str, np.ndarray]:
        """Computes initial values from training images, and returns them by the name of the variable's attribute.

        mpjax calls it on an abstract module (shapes in place of arrays) before the first step of a new run, casts each
        value to the dtype of its variable, and puts it into the first state. The method must not change the module. A
        name that is no variable, or a value of another shape, is a UsageError.

        Args:
          images: up to 5,000 training images (fewer if they are large), normalised and not augmented, float32
            [N, H, W, C].
        """
        ...


class Objective(Protocol):
    """The loss and the metrics of a batch, one value per example. mpjax/training/objectives.py has those of the tasks.

    mpjax sums the values over the micro-batches and devices of a batch, and over the test set, whose last batch is
    padded.
    """

    def __call__(
        self, model: nnx.Module, batch: Mapping[str, jax.Array], key: Key[Array, ""] | None
    ) -> Mapping[str, jax.Array | Mean]:
        """Computes `loss` and metrics, by name.

        Each value is either [B], which is averaged, or a `Mean` of totals [B] and weights [B] if an example has several
        terms, such as tokens. `loss` is differentiated. The optional value `outputs` may be any pytree with leading
        axes [B]; metrics (below) are computed from it.

        Args:
          model: the model under the policy of the run, in training or evaluation mode. It may hold several networks.
          batch: the fields of the examples, [B, ...]; images are float32, scaled and augmented. In training with mixup
            or cutmix, `target`, float32 [B, classes], has the mixed labels. In evaluation, `weight`, float32 [B], is 0
            for padding examples. mpjax itself leaves their values out of its sums.
          key: the random key of this step and device; None in evaluation. A function without a third parameter is
            called without it.
        """
        ...


class Metric(Protocol):
    """A metric of the test set."""

    def __call__(self, outputs: Any, batch: Mapping[str, jax.Array]) -> Any:
        """Computes one value per example, [B] or a `Mean` as in an `Objective`, or a dict of several by name.

        It may also return a metric of `clu` or `metrax` (an object with `merge` and `compute`) whose arrays are sums.
        mpjax then calls it for each example alone, with a batch axis of 1, and adds up the results.

        Args:
          outputs: the model's result, such as logits [B, classes]; with your own objective, its `outputs`.
          batch: the fields of the examples, [B, ...].
        """
        ...


Split = Any
"""Examples to train or to evaluate on, in one of three forms.

- A dict of arrays [N, ...].
- An object with a length and integer indices whose elements are dicts of fields, such as a `grain.MapDataset`, a torch
  `Dataset` or a list.
- An iterable that can be iterated again, such as a `grain.DataLoader` or a function that returns a generator. Its
  examples are read into memory.
"""


class Source(Protocol):
    """A function that opens a data set."""

    def __call__(self) -> tuple[Split, Split]:
        """Opens the data set and returns the training examples and the test examples.

        mpjax finds the fields of the task among their columns as in other data sets: by name, or by `--data.columns`.
        """
        ...


class Augmentation(Protocol):
    """An augmentation of training batches on the device, in the compiled step, after the augmentations of `--data`."""

    def __call__(self, batch: dict[str, jax.Array], key: Key[Array, ""]) -> dict[str, jax.Array]:
        """Augments a training batch and returns it with the same fields; it is traced, so it must use JAX operations.

        Args:
          batch: the fields of the examples, [B, ...]; images are float32, normalised by `--data.mean` and `--data.std`.
          key: the random key of this step.
        """
        ...


class Optimizer(Protocol):
    """An update rule."""

    def __call__(self, learning_rate: optax.Schedule) -> optax.GradientTransformation:
        """Builds the transformation. Further parameters of your function get their values from `--optimizer.arguments`.

        mpjax clips gradients before the transformation, and adds loss scaling and master weights around it.

        Args:
          learning_rate: a schedule from the number of applied steps to the learning rate.
        """
        ...


class Schedule(Protocol):
    """A learning rate as a function of applied steps. mpjax passes only the arguments that your function names."""

    def __call__(self, *, peak: float, steps: int, warmup: int) -> optax.Schedule:
        """Builds a function from the number of applied steps to the learning rate, a non-negative scalar.

        Args:
          peak: `--optimizer.learning_rate`.
          steps: the number of steps of training; without the warm-up if your function has no parameter `warmup`.
          warmup: the number of steps of the warm-up, at most a fifth of training. If your function has no such
            parameter, mpjax puts a linear warm-up before its schedule.
        """
        ...


@dataclasses.dataclass(frozen=True)
class RunInfo:
    """The facts about a run that callbacks and writers receive before its first step.

    Attributes:
      folder: the folder of the run.
      config: the settings of the run.
      start: the number of steps attempted before: 0 unless the run is resumed.
      steps: the number of attempted steps at which the run ends.
      first: True in the one process that prints and writes.
      records: the metrics that a resumed run logged so far, as dicts with `step`; empty for a new run. They may be of
        steps after `start` if the run was killed after its last checkpoint.
      best_since: the step up to which metrics of the test set are not comparable with those to come, because the test
        set, or a setting that decides what they mean, has changed since; 0 if all are.
    """

    folder: pathlib.Path
    config: Config
    start: int
    steps: int
    first: bool
    records: Sequence[Mapping[str, Any]]
    best_since: int = 0


Ask = Literal["stop", "save"] | None
"""A request of a callback: "save" writes a checkpoint after the current step, and "stop" ends the run after it, with an
evaluation and a checkpoint. None requests nothing."""


class Callback:
    """Receives the events of a run. Override the methods you need; each may return an `Ask`, or None.

    Callbacks get numbers, never the state, because the next step overwrites it. With several processes, each has its
    own callbacks, and the requests of process 0 hold for all. An exception in a method, or another result, ends the run
    with a CallbackError; once training has begun, a checkpoint is saved before.
    """

    def started(self, run: RunInfo) -> Ask:
        """Called before the first step, also of a resumed run; "stop" ends it with UsageError, "save" does nothing."""

    def logged(self, step: int, metrics: Mapping[str, float]) -> Ask:
        """Called with the `train/…` metrics of the interval that ends at `step`, while the device may run later steps.

        Each is the mean over the applied steps of the interval; `train/learning_rate`, `train/loss_scale`,
        `train/skipped` and `train/consecutive_skips` have their last value.
        """

    def skipped(self, step: int, metrics: Mapping[str, float]) -> Ask:
        """Called for each skipped step, with its metrics, such as `loss_scale` (without `train/`).

        The call comes at the end of the interval with that step, before `logged`.
        """

    def evaluated(self, step: int, metrics: Mapping[str, float], model: Callable[[], nnx.Module]) -> Ask:
        """Called with `test/…` (and `ema/…`); `model()` returns a copy of the model in evaluation mode.

        Call `model()` in this method; after the next step, it raises UsageError.
        """

    def saved(self, step: int) -> Ask:
        """Called while the checkpoint of a step is being written to `checkpoints/<step>` of the run's folder."""

    def diverged(self, step: int, reason: str) -> None:
        """Called before a diverged run is diagnosed and ends, with the first bad step and the reason in words.

        If it fails, its error is added to the message of `Diverged`.
        """

    def ended(self, summary: Mapping[str, Any]) -> None:
        """Called after the last step, or after a requested stop, with the contents of summary.json.

        It is not called after an error or a signal. Its result is ignored.
        """


EVENTS = tuple(name for name in vars(Callback) if not name.startswith("_"))
"""The names of a callback's methods. Your class needs only the methods for its events."""


class Writer:
    """Receives the metrics and messages of a run. Override the methods for what you write; the others do nothing.

    A step is a number of attempted training steps, skipped steps included.
    """

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes metrics by name, such as `train/loss`, `train/skipped` (total so far) or `test/accuracy`."""

    def layers(self, step: int, layers: Sequence[Layer]) -> None:
        """Writes the statistics of one step: a `Layer` for each module or parameter and each direction."""

    def images(self, step: int, images: Mapping[str, np.ndarray]) -> None:
        """Writes images of an evaluation, uint8 [H, W, 3] by name, such as `masks/37` for example 37 of the test split.

        A run draws images only if a writer overrides this method.
        """

    def saved(self, step: int) -> None:
        """Called when the write of the checkpoint of `step` has started; it ends in the background, before `close`."""

    def message(self, text: str) -> None:
        """Shows a message to the user."""

    def close(self) -> None:
        """Closes files and releases the terminal. Nothing is written afterwards. Closing twice is allowed."""

    @property
    def takes_images(self) -> bool:
        """True if the writer overrides `images`."""
        return getattr(self.images, "__func__", None) is not Writer.images


class OpenWriter(Protocol):
    """Opens a destination of metrics, such as a logger."""

    def __call__(self, run: RunInfo) -> Any:
        """Opens a `Writer`, or an object with its methods. Only the first process calls it, and closes the writer."""
        ...

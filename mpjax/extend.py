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

    from mpjax.config import Config
    from mpjax.diagnosis.layers import Layer
    from mpjax.training.objective import Mean


@runtime_checkable
class FromImages(Protocol):
    """A module with initial values that depend on the training images, such as a kernel that whitens patches."""

    def from_images(self, images: np.ndarray) -> Mapping[str, np.ndarray]:
        """Computes variables of the module, by attribute, before the first step. The module does not change.

        Args:
          images: up to 5,000 training images, normalised and not augmented, float32 [N, H, W, C].
        """
        ...


class Objective(Protocol):
    """The loss and the metrics of a batch, one value per example. The tasks' own are in mpjax/training/objectives.py.

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
        """Computes values per example, as an `Objective` does: one value, or several by name.

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
    """A data set."""

    def __call__(self) -> tuple[Split, Split]:
        """Opens the training and the test examples. Their columns are chosen as for other data sets."""
        ...


class Augmentation(Protocol):
    """An augmentation of training batches on the device, in the compiled step, after the augmentations of `--data`."""

    def __call__(self, batch: dict[str, jax.Array], key: Key[Array, ""]) -> dict[str, jax.Array]:
        """Augments a batch and keeps its fields; images are float32, scaled to `--data.mean` and `--data.std`."""
        ...


class Optimizer(Protocol):
    """An update rule."""

    def __call__(self, learning_rate: optax.Schedule) -> optax.GradientTransformation:
        """Builds the transformation. mpjax clips before it, and adds loss scaling and master weights around it.

        Args:
          learning_rate: the learning rate of each applied step. Further parameters come from `--optimizer.arguments`.
        """
        ...


class Schedule(Protocol):
    """A learning rate as a function of applied steps. mpjax passes only the arguments that your function names."""

    def __call__(self, *, peak: float, steps: int, warmup: int) -> optax.Schedule:
        """Builds a function from the number of applied steps to the learning rate, a non-negative scalar."""
        ...


@dataclasses.dataclass(frozen=True)
class RunInfo:
    """A run, for callbacks and writers.

    Attributes:
      folder: the folder of the run.
      config: the settings of the run.
      start: the number of steps attempted before: 0 unless the run is resumed.
      steps: the number of attempted steps at which the run ends.
      first: True in the one process that prints and writes.
      records: the metrics that a resumed run logged so far, as dicts with `step`.
    """

    folder: pathlib.Path
    config: Config
    start: int
    steps: int
    first: bool
    records: Sequence[Mapping[str, Any]]


Ask = Literal["stop", "save"] | None
"""The requests of a callback: save a checkpoint after this step, or stop after it with an evaluation and a
checkpoint."""


class Callback:
    """Receives the events of a run. Override the methods you need; each may return an `Ask`, or None.

    Callbacks get numbers, never the state, because the next step overwrites it. With several processes, each has its
    own callbacks, and the requests of process 0 hold for all.
    """

    def started(self, run: RunInfo) -> Ask:
        """Called before the first step. Here "stop" ends the run with a UsageError, and "save" does nothing."""

    def logged(self, step: int, metrics: Mapping[str, float]) -> Ask:
        """Called with `train/…`, means over the interval that ends at `step`, while the device runs later steps."""

    def skipped(self, step: int, metrics: Mapping[str, float]) -> Ask:
        """Called for each skipped step, with the metrics of that step, such as `loss_scale`."""

    def evaluated(self, step: int, metrics: Mapping[str, float], model: Callable[[], nnx.Module]) -> Ask:
        """Called with `test/…` (and `ema/…`); `model()` returns a copy of the model in evaluation mode.

        Call `model()` in this method; after the next step, it raises UsageError.
        """

    def saved(self, step: int) -> Ask:
        """Called while the checkpoint of a step is being written to `checkpoints/<step>` of the run's folder."""

    def diverged(self, step: int, reason: str) -> None:
        """Called before a diverged run ends, and before its diagnosis."""

    def ended(self, summary: Mapping[str, Any]) -> None:
        """Called after the last step, with the contents of summary.json; not after an error or a signal."""


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
        """Called when the write of a checkpoint of `step` has started. It is complete by `close` at the latest."""

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
        """Opens a `Writer`, or an object with its methods. The first process calls this, and closes it at the end."""
        ...

"""The interface between the training loop and its outputs: a `Writer`, and `Writers` that forwards to several."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeGuard


if TYPE_CHECKING:
    import numpy as np

    from mpjax.diagnosis.layers import Layer


class Writer(Protocol):
    """Receives the metrics and messages of a run. The training loop does not know the destination."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the metrics of one report.

        Args:
          step: the number of attempted training steps so far, skipped steps included.
          metrics: the values by name, such as `train/loss`, `train/skipped` (total so far) or `test/accuracy`.
        """
        ...

    def layers(self, step: int, layers: "Sequence[Layer]") -> None:
        """Writes the statistics of the layers in one step.

        Args:
          step: the number of the attempted step.
          layers: the statistics of each module or parameter in each direction.
        """
        ...

    def saved(self, step: int) -> None:
        """Receives the step of a checkpoint that is being written. It is complete at the latest when `close` is called.

        Args:
          step: the number of attempted training steps, which is the name of the checkpoint's folder.
        """
        ...

    def message(self, text: str) -> None:
        """Shows a message to the user at the console."""
        ...

    def close(self) -> None:
        """Closes files and releases the terminal. Nothing may be written afterwards. Closing twice is allowed."""
        ...


class TakesImages(Protocol):
    """An optional extension of a `Writer`. A run draws images only if a writer takes them."""

    def images(self, step: int, images: "Mapping[str, np.ndarray]") -> None:
        """Writes images of an evaluation.

        Args:
          step: the number of attempted training steps so far.
          images: uint8 [H, W, 3] by name, such as `masks/37` for example 37 of the test split.
        """
        ...


class Writers:
    """Forwards to several writers, in order. `Writers()` writes nothing, for processes without output."""

    def __init__(self, writers: Iterable[Writer] = ()):
        self._writers = tuple(writers)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Forwards the metrics to every writer."""
        for writer in self._writers:
            writer.write(step, metrics)

    def layers(self, step: int, layers: "Sequence[Layer]") -> None:
        """Forwards the statistics to every writer."""
        for writer in self._writers:
            writer.layers(step, layers)

    @property
    def takes_images(self) -> bool:
        """True if a writer has a method `images`."""
        return any(getattr(writer, "takes_images", _takes_images(writer)) for writer in self._writers)

    def images(self, step: int, images: "Mapping[str, np.ndarray]") -> None:
        """Forwards images to every writer that has a method `images`."""
        for writer in self._writers:
            if _takes_images(writer):
                writer.images(step, images)

    def saved(self, step: int) -> None:
        """Forwards the step to every writer."""
        for writer in self._writers:
            writer.saved(step)

    def message(self, text: str) -> None:
        """Forwards the text to every writer."""
        for writer in self._writers:
            writer.message(text)

    def close(self) -> None:
        """Closes every writer, the last opened first, even if one fails. Raises the first failure afterwards."""
        failures = []
        for writer in reversed(self._writers):
            try:
                writer.close()
            except Exception as error:  # the terminal must be restored even if the disk is full
                failures.append(error)
        if failures:
            raise failures[0]


def _takes_images(writer: Writer) -> TypeGuard[TakesImages]:
    return callable(getattr(writer, "images", None))

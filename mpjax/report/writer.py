"""What the loop talks to: a `Writer` takes metrics and messages; `Writers` passes them on to several."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol


if TYPE_CHECKING:
    from mpjax.diagnosis.layers import Layer


class Writer(Protocol):
    """Takes what a run has to say. The loop is handed one and never learns where things go."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of one moment.

        Args:
          step: attempted training steps so far, skipped ones included.
          metrics: values by name, such as `train/loss`, `train/skipped` (total so far) or `test/accuracy`.
        """
        ...

    def layers(self, step: int, layers: "Sequence[Layer]") -> None:
        """Takes the statistics of the layers in one step.

        Args:
          step: number of the attempted step.
          layers: one for each module or parameter in each direction.
        """
        ...

    def message(self, text: str) -> None:
        """Takes a notice to the person at the console."""
        ...

    def close(self) -> None:
        """Lets go of files and terminal; nothing is written afterwards. Closing twice is harmless."""
        ...


class Writers:
    """Several writers as one, in order. `Writers()` writes nothing: for processes that keep quiet."""

    def __init__(self, writers: Iterable[Writer] = ()):
        self._writers = tuple(writers)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Passes the metrics to every writer."""
        for writer in self._writers:
            writer.write(step, metrics)

    def layers(self, step: int, layers: "Sequence[Layer]") -> None:
        """Passes the statistics to every writer."""
        for writer in self._writers:
            writer.layers(step, layers)

    def message(self, text: str) -> None:
        """Passes the text to every writer."""
        for writer in self._writers:
            writer.message(text)

    def close(self) -> None:
        """Closes every writer, last opened first, also when one of them fails; then raises what failed first."""
        failures = []
        for writer in reversed(self._writers):
            try:
                writer.close()
            except Exception as error:  # the terminal must come back even if the disk is full
                failures.append(error)
        if failures:
            raise failures[0]

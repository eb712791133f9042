"""Writes and reads metrics.jsonl: one strict JSON object per line. A resumed run repeats no step."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpjax import strict_json
from mpjax.errors import UsageError
from mpjax.extend import Writer
from mpjax.files import AppendFile, naming, write_atomically


if TYPE_CHECKING:
    from mpjax.diagnosis.layers import Layer


Records = Sequence[Mapping[str, Any]]
"""The lines of a metrics.jsonl: `step`, `time`, and metrics by name."""


class JsonlWriter(Writer):
    """Appends one line `{"step": ..., "time": ..., metrics...}` to a metrics file for each call of `write`.

    `time` is the time in seconds since the run began, without pauses before a resumption.

    Args:
      path: the file; its folder is created.
      resume_step: the step of the checkpoint that the run resumes from. None: a new run. Lines of later steps, which a
        killed run wrote after its checkpoint, and an incomplete last line are removed from the file. `time` continues
        from the last kept line.
      clock: the function that returns the time in seconds, from an arbitrary start.

    Raises:
      UsageError: the file of a new run already exists, or a line of a resumed run is damaged.
      OSError: the file cannot be written, here or in `write`; the message names the file.
    """

    def __init__(self, path: Path, resume_step: int | None = None, *, clock: Callable[[], float] = time.monotonic):
        if resume_step is None and path.exists():
            raise UsageError(f"{path} belongs to an earlier run: resume that run, or choose another output_dir")
        elapsed = 0.0 if resume_step is None else _rewind(path, resume_step)
        self._file = AppendFile(path, new=resume_step is None)
        self._started, self._clock = clock() - elapsed, clock

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        seconds = round(self._clock() - self._started, 3)
        line = strict_json.encode({"step": step, "time": seconds, **metrics})
        self._file.append(line.encode() + b"\n")

    def layers(self, step: int, layers: "Sequence[Layer]") -> None:
        by_direction: dict[str, dict[str, dict]] = {}
        for layer in layers:
            counts = {str(exponent): count for exponent, count in layer.counts.items()}
            fields = layer._asdict() | {"dtype": str(layer.dtype), "histogram": counts}
            by_direction.setdefault(fields.pop("direction"), {})[fields.pop("path")] = fields
        self.write(step, {"layers": by_direction})

    def close(self) -> None:
        self._file.close()


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Reads the lines of a metrics.jsonl as dicts, in order.

    NaN and infinities are floats; an incomplete or damaged last line is ignored.

    Raises:
      UsageError: a line before the last is damaged; the message names the line.
      OSError: the file cannot be read; the message names it.
    """
    return [record for _, record in _lines(Path(path))]


def written_lines(path: Path) -> int:
    """The number of complete lines in a metrics.jsonl; 0 if there is no file."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def missing_steps(records: Records, step: int, written: int = 0) -> tuple[int, int] | None:
    """Finds the first and the last step whose metrics are lost before a checkpoint; None if no line is lost.

    Before it writes a checkpoint, a run writes the metrics of all steps up to it. So the steps after the last line of
    training metrics are lost. If there are none, but lines are fewer than `written`, it is not known which are lost,
    and the range is from 1 to `step`.

    Args:
      records: the lines that are left, of which those after `step` are ignored.
      step: the step of the checkpoint.
      written: the number of lines that the run had written by the checkpoint; 0: unknown.

    >>> missing_steps([{"step": 10, "train/loss": 0.5}], 20)
    (11, 20)
    >>> missing_steps([{"step": 20, "train/loss": 0.5}], 20, written=2)
    (1, 20)
    """
    kept = [record for record in records if record["step"] <= step]
    trained = [record["step"] for record in kept if any(name.startswith("train/") for name in record)]
    last = max(trained, default=0)
    if last < step:
        return last + 1, step
    return (1, step) if len(kept) < written else None


def _rewind(path: Path, step: int) -> float:
    """Removes the lines after `step`, and an incomplete last line, from the file.

    Returns the `time` of the last line that is left, in seconds; 0 if none is left or there is no file.
    """
    if not path.exists():
        return 0.0
    kept = [(line, record) for line, record in _lines(path) if record["step"] <= step]
    content = b"".join(line for line, _ in kept)
    if len(content) != path.stat().st_size:
        write_atomically(path, content)
    return kept[-1][1].get("time", 0.0) if kept else 0.0


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yields each line of the file, as bytes with its newline, and its decoded record.

    Ignores a damaged last line, and raises UsageError for any other damaged line.
    """
    with naming(path):
        lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            if not line.endswith(b"\n"):
                raise ValueError("no newline")
            record = strict_json.decode(line.decode())
            for name, kind in (("step", int), ("time", int | float)):
                value = record.get(name, 0.0 if name == "time" else None)
                if not isinstance(value, kind) or isinstance(value, bool):
                    raise ValueError(f"{name} is {value!r}, not a number")
            for name, value in record.items():
                if "/" in name and not isinstance(value, int | float):
                    raise ValueError(f"{name} is {value!r}, not a number")
                if isinstance(value, int):
                    float(value)  # OverflowError if the integer is too large
        except (ValueError, OverflowError, RecursionError) as error:
            if number == len(lines):  # incomplete, because the run was killed while writing
                return
            raise UsageError(f"{path}, line {number} is damaged ({error}): repair or delete that line") from error
        yield line, record

"""metrics.jsonl: one strict-JSON object per line, for programs to read; a resumed run leaves no trace in it."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpjax import strict_json
from mpjax.errors import UsageError
from mpjax.report.files import AppendFile, naming, write_atomically
from mpjax.report.writer import Writer


if TYPE_CHECKING:
    from mpjax.diagnosis.layers import Layer


def jsonl_writer(
    path: str | os.PathLike[str], resume_step: int | None = None, *, clock: Callable[[], float] = time.monotonic
) -> Writer:
    """Opens the file that takes one line `{"step": ..., "time": ..., metrics...}` per call of `write`.

    Args:
      path: the file; its folder is made.
      resume_step: the step of the checkpoint a run goes on from. Lines of later steps, which a killed run wrote after
        its checkpoint, and a torn last line are dropped, and `time` goes on from the last line kept.
        None: a new run.
      clock: seconds, from any start.

    Raises:
      UsageError: the file of a new run exists already, or a line of a resumed run is damaged.
      OSError: the file cannot be written; here and in `write` it names the file.
    """
    path = Path(path)
    if resume_step is None:
        if path.exists():
            raise UsageError(f"{path} belongs to an earlier run: resume that run, or choose another output_dir")
        return _JsonlWriter(AppendFile(path, new=True), started=clock(), clock=clock)
    elapsed = _rewind(path, resume_step)
    return _JsonlWriter(AppendFile(path, new=False), started=clock() - elapsed, clock=clock)


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, NaN and infinities as floats again; a torn last line is left out.

    Raises:
      UsageError: a line before the last is damaged; the message names it.
    """
    return [record for _, record in _lines(Path(path))]


class _JsonlWriter:
    def __init__(self, file: AppendFile, *, started: float, clock: Callable[[], float]):
        self._file, self._started, self._clock = file, started, clock

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

    def message(self, text: str) -> None:
        pass  # for the person, not for programs

    def close(self) -> None:
        self._file.close()


def _rewind(path: Path, step: int) -> float:
    """Drops what was written after `step`; the time of the last line kept."""
    if not path.exists():
        return 0.0
    kept = [(line, record) for line, record in _lines(path) if record["step"] <= step]
    content = b"".join(line for line, _ in kept)
    if len(content) != path.stat().st_size:
        write_atomically(path, content)
    return kept[-1][1].get("time", 0.0) if kept else 0.0


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each whole line, newline included, and what it says."""
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
                    float(value)  # an OverflowError at hundreds of digits
        except (ValueError, OverflowError, RecursionError) as error:
            if number == len(lines):  # torn: the run was killed while it wrote
                return
            raise UsageError(f"{path}, line {number} is damaged ({error}): mend or delete that line") from error
        yield line, record

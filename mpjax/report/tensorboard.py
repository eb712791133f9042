"""TensorBoard events of a run, through tensorboardX: no TensorFlow, and no background thread that hides a full disk."""

import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mpjax.report.files import AppendFile
from mpjax.report.writer import Writer


if TYPE_CHECKING:
    from mpjax.diagnosis.layers import Layer


def tensorboard_writer(directory: str | os.PathLike[str], resume_step: int | None = None) -> Writer:
    """Opens a new event file in `directory`; every metric becomes a scalar under its own name.

    Args:
      directory: TensorBoard's log directory of the run; it is made.
      resume_step: the step of the checkpoint a run goes on from: TensorBoard forgets later steps of earlier files.
        None: a new run.

    Raises:
      OSError: the file cannot be written; here and in `write` it names the file.
    """
    # TensorBoard reads a directory's files in the order of their names; nanoseconds keep two of one second apart.
    name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}"
    file = AppendFile(Path(directory) / name, new=True)
    file.append(_record(file_version="brain.Event:2"))
    if resume_step is not None:
        # Purges steps from this one on; the checkpoint's own step stays.
        file.append(_record(step=resume_step + 1, session_log={"status": "START"}))
    return _TensorBoardWriter(file)


class _TensorBoardWriter:
    def __init__(self, file: AppendFile):
        self._file = file

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [{"tag": name, "simple_value": value} for name, value in metrics.items()]
        self._file.append(_record(step=step, summary={"value": values}))

    def layers(self, step: int, layers: "Sequence[Layer]") -> None:
        values = []
        for layer in layers:
            tag = f"{layer.direction}/{layer.path}"
            values += [{"tag": f"{tag}/{name}", "simple_value": getattr(layer, name)} for name in _STATISTICS]
            values.append({"tag": f"{tag}/log2", "histo": _histogram(layer)})
        self._file.append(_record(step=step, summary={"value": values}))

    def message(self, text: str) -> None:
        pass  # for the person, not for curves

    def close(self) -> None:
        self._file.close()


_STATISTICS = ("largest", "mean", "non_finite", "overflow", "underflow", "subnormal")


def _histogram(layer: "Layer") -> dict:
    """Of the logarithms to base 2 of the magnitudes, each taken for the middle of its bin."""
    counts = layer.counts
    # Bins between those that hold something are there too: a viewer takes each to begin where the one before ends.
    exponents = range(min(counts), max(counts) + 1) if counts else range(0)
    return {
        "min": float(exponents.start),
        "max": float(exponents.stop),
        "num": float(sum(counts.values())),
        "sum": sum((exponent + 0.5) * count for exponent, count in counts.items()),
        "sum_squares": sum((exponent + 0.5) ** 2 * count for exponent, count in counts.items()),
        "bucket_limit": [float(exponent + 1) for exponent in exponents],
        "bucket": [float(counts.get(exponent, 0)) for exponent in exponents],
    }


def _record(**fields) -> bytes:
    """An event of now as a TFRecord: its length and itself, each followed by a masked CRC-32C.

    tensorboardX's own writer is not used: it waits for ever on its thread when that met a full disk.
    """
    from tensorboardX.proto import event_pb2
    from tensorboardX.record_writer import masked_crc32c

    event = event_pb2.Event(wall_time=time.time(), **fields)  # pyright: ignore[reportAttributeAccessIssue]
    data = event.SerializeToString()
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))

"""Writes TensorBoard events, without TensorFlow, and without a background thread that would hide a full disk."""

import io
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mpjax.extend import Writer
from mpjax.files import AppendFile


if TYPE_CHECKING:
    import numpy as np

    from mpjax.diagnosis.layers import Layer


class TensorBoardWriter(Writer):
    """Writes a new event file. Every metric becomes a scalar under its own name.

    Statistics of a layer become scalars and a histogram under DIRECTION/PATH/.

    Args:
      directory: the TensorBoard log directory of the run; it is created.
      resume_step: the step of the checkpoint that the run resumes from. None: a new run. TensorBoard then hides later
        steps of earlier files.

    Raises:
      OSError: the file cannot be written, here or in `write`; the message names the file.
    """

    def __init__(self, directory: Path, resume_step: int | None = None):
        # TensorBoard reads files in the order of their names. Nanoseconds order files of the same second.
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}"
        self._file = AppendFile(directory / name, new=True)
        self._file.append(_record(file_version="brain.Event:2"))
        if resume_step is not None:
            # Purges steps from this one on, so the checkpoint's own step stays.
            self._file.append(_record(step=resume_step + 1, session_log={"status": "START"}))

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

    def images(self, step: int, images: "Mapping[str, np.ndarray]") -> None:
        values = [{"tag": name, "image": _image(pixels)} for name, pixels in images.items()]
        self._file.append(_record(step=step, summary={"value": values}))

    def close(self) -> None:
        self._file.close()


_STATISTICS = ("largest", "mean", "non_finite", "overflow", "underflow", "subnormal")


def _histogram(layer: "Layer") -> dict:
    """Builds a TensorBoard histogram of log2 of a layer's magnitudes, with each value at the centre of its bin."""
    counts = layer.counts
    # Empty bins in between are included, because a viewer assumes that each bin starts where the previous one ends.
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


def _image(pixels: "np.ndarray") -> dict:
    """Encodes an image, uint8 [H, W, 3], as PNG in the fields of a TensorBoard image."""
    from PIL import Image  # imported here, because few runs have images

    encoded = io.BytesIO()
    Image.fromarray(pixels).save(encoded, "PNG")
    height, width, channels = pixels.shape
    return {"height": height, "width": width, "colorspace": channels, "encoded_image_string": encoded.getvalue()}


def _record(**fields) -> bytes:
    """Encodes an event with the current time as a TFRecord: length and data, each followed by a masked CRC-32C.

    The writer of tensorboardX is not used, because it waits forever for its thread after a full disk.
    """
    from tensorboardX.proto import event_pb2
    from tensorboardX.record_writer import masked_crc32c

    event = event_pb2.Event(wall_time=time.time(), **fields)  # pyright: ignore[reportAttributeAccessIssue]
    data = event.SerializeToString()
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))

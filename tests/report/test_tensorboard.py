"""TensorBoard event files, read back record by record."""

import io
import math
import struct

import numpy as np
import pytest
from PIL import Image
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import masked_crc32c

from mpjax.report import TensorBoardWriter


def read_events(path):
    data, events = path.read_bytes(), []
    while data:
        length, length_check = struct.unpack("<QI", data[:12])
        body, (body_check,) = data[12 : 12 + length], struct.unpack("<I", data[12 + length : 16 + length])
        assert length_check == masked_crc32c(data[:8])
        assert body_check == masked_crc32c(body)
        events.append(Event.FromString(body))
        data = data[16 + length :]
    return events


def test_metrics_read_back_as_scalars_at_once(tmp_path):
    writer = TensorBoardWriter(tmp_path / "tensorboard")
    writer.write(20, {"train/loss": 0.5, "train/loss_scale": 32768.0})
    writer.write(40, {"train/loss": math.nan})
    (path,) = (tmp_path / "tensorboard").iterdir()
    first, second, third = read_events(path)  # before close: a killed run keeps them
    assert "tfevents" in path.name
    assert first.file_version == "brain.Event:2"
    assert second.step == 20
    assert [(v.tag, v.simple_value) for v in second.summary.value] == [("train/loss", 0.5), ("train/loss_scale", 2**15)]
    assert third.step == 40
    assert math.isnan(third.summary.value[0].simple_value)
    writer.close()


def test_layers_are_scalars_and_a_histogram_of_logarithms(tmp_path, layer):
    writer = TensorBoardWriter(tmp_path)
    writer.layers(100, [layer, layer._replace(path="head", histogram=(0,) * 88)])
    writer.close()
    (path,) = tmp_path.iterdir()
    event = read_events(path)[1]
    values = {value.tag: value for value in event.summary.value}
    assert event.step == 100
    assert values["forward/stem/conv/largest"].simple_value == 3.0
    assert values["forward/stem/conv/underflow"].simple_value == 0.25
    histogram = values["forward/stem/conv/log2"].histo
    assert (histogram.min, histogram.max, histogram.num) == (-3, 2, 12)
    assert histogram.sum == -2.5 * 5 + 1.5 * 7
    filled = dict(zip(histogram.bucket_limit, histogram.bucket, strict=True))
    assert {limit: count for limit, count in filled.items() if count} == {-2: 5, 2: 7}
    assert values["forward/head/log2"].histo.num == 0


def test_pictures_are_stored_as_png(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    pixels = np.arange(18, dtype=np.uint8).reshape(2, 3, 3)
    writer.images(7, {"masks/3": pixels})
    writer.close()
    (path,) = tmp_path.iterdir()
    event = read_events(path)[1]
    (value,) = event.summary.value
    assert (event.step, value.tag) == (7, "masks/3")
    assert (value.image.height, value.image.width, value.image.colorspace) == (2, 3, 3)
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(value.image.encoded_image_string))), pixels)


def test_a_resumed_run_purges_the_steps_after_its_checkpoint(tmp_path):
    TensorBoardWriter(tmp_path).close()
    TensorBoardWriter(tmp_path, resume_step=40).close()
    earlier, later = sorted(tmp_path.iterdir())
    assert [event.step for event in read_events(earlier)] == [0]
    purge = read_events(later)[1]
    assert purge.step == 41
    assert purge.session_log.status == SessionLog.START


def test_a_metric_beyond_float32_is_infinite_not_an_error(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    writer.write(1, {"train/grad_norm": 1e300})
    writer.close()
    (path,) = tmp_path.iterdir()
    assert read_events(path)[1].summary.value[0].simple_value == math.inf


def test_a_failed_write_names_the_file(tmp_path):
    writer = TensorBoardWriter(tmp_path)

    whole = writer._file._file

    class FullDisk:
        fileno, close, truncate = whole.fileno, whole.close, whole.truncate

        def write(self, record):
            raise OSError(28, "No space left on device")

    writer._file._file = FullDisk()
    with pytest.raises(OSError, match=r"No space left.*tfevents"):
        writer.write(1, {"train/loss": 1.0})
    whole.close()

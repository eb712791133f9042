import io
import re
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from mpjax.config import Data
from mpjax.data.images import FileBytes, decoded_mask, unknown_classes
from mpjax.errors import UsageError


def png(picture):
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def test_gray_values_are_classes():
    pixels = np.array([[0, 1, 2], [3, 254, 255]], np.uint8)
    decoded = decoded_mask(png(Image.fromarray(pixels)))
    assert (decoded.dtype, decoded.shape) == (np.uint8, (2, 3, 1))
    assert decoded[..., 0].tolist() == pixels.tolist()


def test_the_colours_of_a_palette_do_not_matter():
    picture = Image.fromarray(np.array([[0, 1], [20, 255]], np.uint8), "L").copy()
    picture.putpalette([(7 * index) % 256 for index in range(768)])
    assert picture.mode == "P"
    assert decoded_mask(png(picture))[..., 0].tolist() == [[0, 1], [20, 255]]


def test_one_bit_is_two_classes():
    decoded = decoded_mask(png(Image.new("1", (2, 1), 1)))
    assert (decoded.dtype, decoded.ravel().tolist()) == (np.uint8, [1, 1])


def packed(bits, numbers):
    """A grey PNG of one row of 2 or 4 bits per pixel, whole bytes of them."""

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    row = int("".join(f"{number:0{bits}b}" for number in numbers), 2).to_bytes(len(numbers) * bits // 8)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", len(numbers), 1, bits, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" + row)) + chunk(b"IEND", b"")


SCALED = {
    "2 bits": (packed(2, [0, 1, 2, 3]), [0, 1, 2, 3]),
    "4 bits": (packed(4, [0, 7, 11, 15]), [0, 7, 11, 15]),
    "pgm": (b"P5 4 1 20\n" + bytes([0, 1, 19, 20]), [0, 1, 19, 20]),
    "plain pgm": (b"P2 4 1 254\n0 1 127 254\n", [0, 1, 127, 254]),
    "pgm of 2 bytes": (b"P2 4 1 1000\n0 1 999 1000\n", [0, 1, 999, 1000]),
}


@pytest.mark.parametrize(("content", "wanted"), SCALED.values(), ids=SCALED)
def test_numbers_that_pillow_scales_are_those_of_the_file(content, wanted):
    assert decoded_mask(content).ravel().tolist() == wanted


def test_arrays_are_left_alone():
    mask = np.zeros((2, 2), np.int64)
    assert decoded_mask(mask) is mask


def test_colours_are_refused():
    with pytest.raises(UsageError, match=r"mask: a colour image \(Pillow's mode RGB\); wanted one channel"):
        decoded_mask(png(Image.new("RGB", (2, 2))))


def test_a_file_that_is_no_image_is_named(tmp_path):
    (tmp_path / "m.png").write_text("no")
    with pytest.raises(UsageError, match="m.png: cannot be decoded"):
        decoded_mask(FileBytes.read(str(tmp_path / "m.png")))


@pytest.mark.parametrize(
    ("values", "says", "repair"),
    [
        ([0, 255], "in 2 of 2 masks of 'cells' are 0, 255; write --data.mask_values 0 255,", {"mask_values": (0, 255)}),
        ([0, 1, 2, 7], "are 0, 1, 2; write --data.num_classes 3$", {"num_classes": 3}),
        ([5], "are 5; write --data.num_classes N$", {}),
        (range(0, 256, 3), "are 0, 3, .* and 78 more; write --data.num_classes N .*JPEG .*: store them as PNG", {}),
    ],
)
def test_who_does_not_say_how_many_classes_masks_have_is_told_their_values(values, says, repair):
    masks = [{"mask": np.asarray(values, np.uint8)[None, :, None]}] * 2
    error = unknown_classes(masks, Data(ignore_index=(7,)), "cells", "")
    assert isinstance(error, UsageError)
    assert re.search(says, str(error))
    assert error.repair == {f"data.{name}": value for name, value in repair.items()}

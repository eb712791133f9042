import contextlib
import io
import os
import struct
import warnings
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mpjax.data.images import FileBytes, decode
from mpjax.errors import DataWarning, UsageError


def encoded(picture, form="PNG"):
    buffer = io.BytesIO()
    picture.save(buffer, form)
    return buffer.getvalue()


@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
def test_jpegs_of_any_mode_become_rgb(mode):
    assert decode(encoded(Image.new(mode, (7, 5)), "JPEG"), 3).shape == (5, 7, 3)


def test_palettes_become_their_colours():
    picture = Image.new("RGB", (2, 2), (255, 0, 0)).convert("P")
    assert decode(encoded(picture), 3).tolist() == [[[255, 0, 0]] * 2] * 2


def test_grayscale_keeps_one_channel_where_one_is_wanted():
    assert decode(encoded(Image.new("L", (3, 2), 9)), 1).tolist() == [[[9]] * 3] * 2


def test_arrays_are_taken_as_they_are():
    image = np.zeros((2, 2, 5), np.float32)
    assert decode(image, 5) is image


def transparent(mode):
    picture = Image.new("RGBA", (2, 2), (90, 90, 90, 128)).convert(mode)
    if mode == "P":
        picture.info["transparency"] = 0
    return picture


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
@pytest.mark.parametrize("channels", [1, 3])
def test_transparent_pixels_are_told_of(mode, channels):
    with pytest.warns(DataWarning, match="transparent pixels, which keep the colours stored under them"):
        assert decode(encoded(transparent(mode)), channels).shape == (2, 2, channels)


def test_a_colour_of_lab_is_no_transparency():
    assert decode(saved(Image.new("LAB", (3, 2), (100, 20, 30)), "TIFF"), 3).shape == (2, 3, 3)


@pytest.mark.parametrize("picture", [Image.new("RGBA", (2, 2), (255, 0, 0, 255)), Image.new("RGB", (2, 2))])
def test_what_is_opaque_everywhere_loses_nothing(picture):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decode(encoded(picture), 3)
        decode(encoded(transparent("RGBA")), 4)


def saved(picture, form, **options):
    buffer = io.BytesIO()
    picture.save(buffer, form, **options)
    return buffer.getvalue()


TURNED = Image.Exif()
TURNED[0x112] = 6  # the orientation


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_a_rotation_in_exif_data_is_told_of_and_not_applied(form):
    with pytest.warns(DataWarning, match="EXIF tag that says how to turn them, and are read as they are stored"):
        assert decode(saved(Image.new("RGB", (3, 2)), form, exif=TURNED), 3).shape == (2, 3, 3)


def test_tiff_is_turned_and_other_exif_data_says_nothing():
    assert decode(saved(Image.new("RGB", (3, 2)), "TIFF", exif=TURNED), 3).shape == (3, 2, 3)
    upright = Image.Exif()
    upright[0x112] = 1
    decode(saved(Image.new("RGB", (3, 2)), "JPEG", exif=upright), 3)
    decode(saved(Image.new("RGB", (3, 2)), "JPEG", exif=b"Exif\0\0damaged"), 3)


@pytest.mark.parametrize("form", ["TIFF", "GIF", "WEBP", "PNG"])
def test_frames_and_pages_beyond_the_first_are_told_of(form):
    first, second = Image.new("RGB", (3, 2), (255, 255, 255)), Image.new("RGB", (3, 2))
    content = saved(first, form, save_all=True, append_images=[second])
    with pytest.warns(DataWarning, match="several frames or pages, of which only the first is read"):
        assert decode(content, 3).tolist() == [[[255] * 3] * 3] * 2
    decode(saved(first, form), 3)


def png(width, height):
    """A PNG whose header says so, with no pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", len(header)) + b"IHDR" + header + struct.pack(">I", zlib.crc32(b"IHDR" + header))
    return b"\x89PNG\r\n\x1a\n" + chunk


WHOLE = encoded(Image.new("RGB", (5, 7), (1, 2, 3)))
DAMAGED = {
    "a bomb": png(60_000, 60_000),
    "no pixels": png(5, 7),
    "a short header": WHOLE[:8] + struct.pack(">I", 4) + b"IHDR" + b"\0\0\0\5",
    "a broken chunk": WHOLE[:50] + b"\xff" * 8 + WHOLE[58:],
    "cut short": WHOLE[:-30],
    "empty": b"",
    "text": b"not an image",
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_image_is_named(content, tmp_path):
    (tmp_path / "a.png").write_bytes(content)
    with pytest.raises(UsageError, match="a.png: cannot be decoded: .*; repair or remove the file"):
        decode(FileBytes.read(str(tmp_path / "a.png")), 3)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.png")
    with pytest.raises(UsageError, match="a.png: not a regular file; wanted an image; remove it"):
        FileBytes.read(str(tmp_path / "a.png"))


@settings(max_examples=150)
@given(st.sampled_from(["PNG", "JPEG", "GIF", "BMP", "WEBP"]), st.data())
def test_whatever_the_bytes_of_an_image_it_is_decoded_or_refused(form, data):
    content = bytearray(encoded(Image.new("RGB", (5, 7), (1, 2, 3)), form))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content = bytes(content[: data.draw(st.integers(0, len(content)))])
    with warnings.catch_warnings(), contextlib.suppress(UsageError):
        warnings.simplefilter("ignore")
        assert decode(content, 3).shape[2:] == (3,)


def test_an_image_in_a_format_that_starts_another_program_is_refused():
    stored = io.BytesIO()
    Image.new("RGB", (4, 4)).save(stored, "EPS")
    with pytest.raises(UsageError, match="image: cannot be decoded"):
        decode(stored.getvalue(), 3)


def test_bytes_of_no_image_are_told_as_such():
    with pytest.raises(UsageError, match=r"image: cannot be decoded: not an image in one of the formats PNG, JPEG, "):
        decode(b"no image", 3)


@pytest.mark.parametrize("bits", [16, 64])
def test_floats_that_pillow_does_not_read_are_named(bits):
    single = saved(Image.new("F", (3, 2)), "TIFF")
    with pytest.raises(UsageError, match=r"TIFF of 16- or 64-bit floats \(store 32-bit floats\)"):
        decode(single.replace(struct.pack("<HHII", 258, 3, 1, 32), struct.pack("<HHII", 258, 3, 1, bits)), 1)

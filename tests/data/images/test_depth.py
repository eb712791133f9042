"""Every mode that Pillow opens a stored image in, against the numbers that were stored."""

import io
import struct
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image

from mpjax.data.images import EIGHT, Depth, decode, depth_of
from mpjax.errors import DataWarning, UsageError


def stored(picture, form, **options):
    buffer = io.BytesIO()
    picture.save(buffer, form, **options)
    return buffer.getvalue()


def depth(content):
    return depth_of(Image.open(io.BytesIO(content)))


def grey(value, dtype):
    return Image.fromarray(np.full((2, 3), value, dtype))


def signed_bytes(value):
    return stored(grey(value % 256, np.uint8), "TIFF", tiffinfo={339: 2})


WHITE = {262: 0}  # the tag of a TIFF that says what 0 is

DEEP = {
    # name: what is stored, its depth, the value in a batch
    "I;16 png": (stored(grey(300, np.uint16), "PNG"), "16-bit grayscale", 300 / 65535),
    "I;16 tiff": (stored(grey(300, np.uint16), "TIFF"), "16-bit grayscale", 300 / 65535),
    "I;16B tiff": (stored(Image.frombytes("I;16B", (3, 2), b"\x01\x2c" * 6), "TIFF"), "16-bit grayscale", 300 / 65535),
    "I pgm": (stored(grey(300, np.uint16), "PPM"), "16-bit grayscale", 300 / 65535),
    "I pgm of 12 bits": (b"P5 3 2 4095\n" + np.full(6, 4095, ">u2").tobytes(), "12-bit grayscale", 1.0),
    "I pgm up to 1000": (b"P2 3 2 1000\n" + b"250 " * 6, "grayscale up to 1000", 0.25),
    "F tiff": (stored(grey(0.5, np.float32), "TIFF"), "floating-point grayscale", 0.5),
    "F tiff beyond 1": (stored(grey(-1000.25, np.float32), "TIFF"), "floating-point grayscale", -1000.25),
    "F pfm": (stored(grey(0.5, np.float32), "PPM"), "floating-point grayscale", 0.5),
    "white I;16 tiff": (
        stored(grey(300, np.uint16), "TIFF", tiffinfo=WHITE),
        "16-bit grayscale with 0 for white",
        1 - 300 / 65535,
    ),
}


@pytest.mark.parametrize(("content", "name", "wanted"), DEEP.values(), ids=DEEP)
def test_what_8_bits_cannot_hold_is_read_as_a_fraction_of_its_range(content, name, wanted):
    found = depth(content)
    assert found.name == name
    pixels = decode(content, 1, found)
    assert (pixels.dtype, pixels.shape) == (np.float32, (2, 3, 1))
    np.testing.assert_allclose(pixels, wanted, rtol=1e-6)


RANGED = {
    "I;16 png": (stored(grey(300, np.uint16), "PNG"), (200, 400), 0.5),
    "I pgm of 12 bits": (b"P5 3 2 4095\n" + np.full(6, 1000, ">u2").tobytes(), (0, 2000), 0.5),
    "I pgm up to 1000": (b"P2 3 2 1000\n" + b"250 " * 6, (0, 1), 250),
    "signed 8 bits": (signed_bytes(-18), (-20, 0), 0.1),
    "signed 16 bits": (stored(grey(-1, np.int16).convert("I"), "TIFF"), (-2, 2), 0.25),
    "signed 32 bits": (stored(grey(-300, np.int32), "TIFF"), (-400, 0), 0.25),
    "F tiff": (stored(grey(3.0, np.float32), "TIFF"), (1, 5), 0.5),
    "outside": (stored(grey(7.0, np.float32), "TIFF"), (1, 5), 1.5),
}


@pytest.mark.parametrize(("content", "bounds", "wanted"), RANGED.values(), ids=RANGED)
def test_a_given_range_becomes_0_to_1_and_what_is_outside_lies_in_the_same_line(content, bounds, wanted):
    np.testing.assert_allclose(decode(content, 1, Depth(depth(content).name, bounds)), wanted, rtol=1e-6)


def test_8_bits_with_a_sign_need_a_range_as_16_do():
    assert depth(signed_bytes(-18)) == Depth("signed 8-bit grayscale", None)


def test_32_bits_without_a_sign_do_not_turn_negative():
    signed = bytes.fromhex("5301 0300 0100 0000 02")  # the tag SampleFormat
    content = stored(grey(-2, np.int32), "TIFF").replace(signed, signed[:-1] + b"\x01")
    assert depth(content) == Depth("unsigned 32-bit grayscale", None)
    np.testing.assert_allclose(decode(content, 1, Depth("unsigned 32-bit grayscale", (0, 2**32 - 2))), 1.0)


SHALLOW = {
    # mode: format, what a pixel is as RGB and, of modes without colours, as grey
    "1": (Image.new("1", (3, 2), 1), "PNG", [255, 255, 255], 255),
    "L": (Image.new("L", (3, 2), 9), "PNG", [9, 9, 9], 9),
    "LA": (Image.new("LA", (3, 2), (9, 255)), "PNG", [9, 9, 9], 9),
    "P": (Image.new("RGB", (3, 2), (255, 0, 0)).convert("P"), "PNG", [255, 0, 0], None),
    "P of greys": (Image.new("RGB", (3, 2), (51, 51, 51)).convert("P"), "PNG", [51, 51, 51], 51),
    "PA": (Image.new("RGBA", (3, 2), (255, 0, 0, 255)).convert("PA"), "TIFF", [255, 0, 0], None),
    "RGB": (Image.new("RGB", (3, 2), (1, 2, 3)), "PNG", [1, 2, 3], None),
    "RGB of greys": (Image.new("RGB", (3, 2), (7, 7, 7)), "PNG", [7, 7, 7], 7),
    "RGBA": (Image.new("RGBA", (3, 2), (1, 2, 3, 255)), "PNG", [1, 2, 3], None),
    "CMYK": (Image.new("CMYK", (3, 2), (0, 255, 255, 0)), "TIFF", [255, 0, 0], None),
}


@pytest.mark.parametrize(("picture", "form", "colours", "grey"), SHALLOW.values(), ids=SHALLOW)
def test_8_bits_are_read_as_they_are_and_colours_never_become_grey(picture, form, colours, grey):
    content = stored(picture, form)
    assert depth(content) == EIGHT
    assert decode(content, 3)[0, 0].tolist() == colours
    if grey is None:
        with pytest.raises(UsageError, match="image: a colour image .*the set is grayscale, 1 channel"):
            decode(content, 1)
    else:
        assert decode(content, 1)[0, 0].tolist() == [grey]


KINDS = {**{name: content for name, (content, *_) in DEEP.items()}, "L": stored(SHALLOW["L"][0], "PNG")}


@pytest.mark.parametrize("of_set", ["L", "I;16 png", "F tiff", "white I;16 tiff"])
@pytest.mark.parametrize("of_file", KINDS)
def test_numbers_of_another_kind_than_the_sets_are_refused(of_set, of_file):
    wanted, found = depth(KINDS[of_set]), depth(KINDS[of_file])
    if wanted.name == found.name:
        decode(KINDS[of_file], 1, wanted)
    else:
        with pytest.raises(UsageError, match=f"image: {found.name} .*, but the set has {wanted.name} images"):
            decode(KINDS[of_file], 1, wanted)


def rgb16(form):
    values = np.full((2, 3, 3), 65535, ">u2")
    if form == "PPM":
        return b"P6 3 2 65535\n" + values.tobytes()

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    rows = b"".join(b"\0" + row.tobytes() for row in values)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 3, 2, 16, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("form", ["PNG", "PPM"])
def test_16_bits_per_colour_of_which_pillow_reads_8_are_told_of(form):
    with pytest.warns(DataWarning, match="16 bits per channel, of which Pillow reads the upper 8"):
        assert (decode(rgb16(form), 3) == 255).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decode(stored(Image.new("RGB", (3, 2)), "TIFF"), 3)

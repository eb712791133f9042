import io
import re
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mpjax.data.images import (
    averaged,
    decode,
    draws,
    interpolation,
    linear,
    random_part,
    read_header,
    read_plain_header,
    require_packages,
)
from mpjax.errors import UsageError


def extra(test):
    """Marks a test that needs the packages of the extra `images`."""
    for name in ("cv2", "simplejpeg"):
        try:
            __import__(name)
        except ImportError:
            test = pytest.mark.skip(reason=f"pip install 'mpjax[images]': {name}")(test)
    return pytest.mark.extra(test)


def photo(width, height, seed=0):
    """An image with shapes of several sizes, edges and grain."""
    generator = np.random.default_rng(seed)
    coarse = Image.fromarray(generator.integers(256, size=(4, 6, 3), dtype=np.uint8))
    fine = Image.fromarray(generator.integers(256, size=(24, 32, 3), dtype=np.uint8))
    parts = [np.asarray(part.resize((width, height), Image.Resampling.BICUBIC), np.int32) for part in (coarse, fine)]
    parts[0][: height // 3, width // 2 :] += 90
    grain = generator.integers(-6, 7, (height, width, 1))
    return (0.6 * parts[0] + 0.4 * parts[1] + grain).clip(0, 255).astype(np.uint8)


def resized(resize, picture, size, box):
    out = np.empty((size, size, picture.channels), np.uint8)
    resize(picture, box, out)
    return out


def encoded(pixels, form="JPEG", mode="RGB", **options):
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(buffer, form, **options)
    return buffer.getvalue()


def interpolated(pixels, size):
    """The definition of linear interpolation, in float64."""
    rows, columns = ((np.arange(size) + 0.5) * length / size - 0.5 for length in pixels.shape[:2])
    rows, columns = rows.clip(0, pixels.shape[0] - 1), columns.clip(0, pixels.shape[1] - 1)
    top, left = rows.astype(int), columns.astype(int)
    bottom, right = (top + 1).clip(max=pixels.shape[0] - 1), (left + 1).clip(max=pixels.shape[1] - 1)
    down, across = (rows - top)[:, None, None], (columns - left)[None, :, None]
    pixels = pixels.astype(np.float64)
    upper = pixels[top][:, left] * (1 - across) + pixels[top][:, right] * across
    lower = pixels[bottom][:, left] * (1 - across) + pixels[bottom][:, right] * across
    return upper * (1 - down) + lower * down


@extra
@settings(max_examples=60)
@given(
    side=st.integers(8, 40),
    besides=st.integers(0, 20),
    fraction=st.sampled_from([1, 2, 4, 8]),
    mode=st.sampled_from([("RGB", 3), ("L", 3), ("L", 1), ("CMYK", 3), ("RGB", 4)]),
    options=st.fixed_dictionaries(
        {"quality": st.integers(1, 100), "subsampling": st.integers(0, 2), "progressive": st.booleans()}
    ),
)
def test_a_jpeg_has_pillows_pixels_to_the_last_bit(side, besides, fraction, mode, options):
    stored = encoded(photo((side + besides) * fraction, side * fraction), "JPEG", mode[0], **options)
    # Decoded at the fraction, the crop has the wanted size, so there is nothing to interpolate.
    box = (0.0, 0.0, float(side * fraction), float(side * fraction))
    found, pillows = (resized(resize, read_header(stored, mode[1]), side, box) for resize in (linear, averaged))
    np.testing.assert_array_equal(found, pillows)


@extra
@pytest.mark.parametrize(("width", "height", "size"), [(61, 47, 90), (90, 70, 64), (64, 64, 33), (33, 1, 8)])
def test_pixels_are_linear_interpolations_but_for_rounding(width, height, size):
    image = photo(width, height)
    found = resized(linear, read_header(image, 3), size, (0.0, 0.0, float(width), float(height)))
    np.testing.assert_allclose(found, interpolated(image, size), atol=1.0)


CROPS = (
    (3, 0, 138, 154),
    (12, 9, 193, 152),
    (40, 0, 192, 119),
    (3, 6, 106, 114),
    (29, 5, 183, 147),
    (31, 5, 187, 147),
    (61, 25, 146, 100),
    (54, 14, 197, 129),
    (42, 4, 172, 148),
    (16, 31, 147, 136),
    (98, 22, 175, 85),
    (46, 26, 145, 148),
)
"""Drawn at random from images of 201x155."""


@extra
@pytest.mark.parametrize("subsampling", [0, 2], ids=["444", "420"])
@pytest.mark.parametrize(
    ("size", "largest", "mean"), [(320, 12, 0.3), (96, 16, 0.9), (48, 30, 3.0)], ids=["larger", "similar", "smaller"]
)
def test_random_crops_are_near_the_antialiased_ones(subsampling, size, largest, mean):
    stored = encoded(photo(201, 155), subsampling=subsampling, quality=90)
    differences = []
    for box in CROPS:
        found, wanted = (resized(resize, read_header(stored, 3), size, box) for resize in (linear, averaged))
        differences.append(np.abs(found.astype(int) - wanted))
    assert np.max(differences) <= largest
    assert np.mean(differences) <= mean


@extra
def test_a_jpeg_is_averaged_down_to_twice_the_size_and_a_png_is_not():
    stripes = np.zeros((512, 512, 3), np.uint8)
    stripes[::2] = 200
    jpeg, png = (
        resized(linear, read_header(encoded(stripes, form, **options), 3), 64, (0.0, 0.0, 512.0, 512.0))
        for form, options in (("JPEG", {"quality": 100}), ("PNG", {}))
    )
    np.testing.assert_allclose(jpeg, 100, atol=3)
    assert png.min() == 100


def square(picture):
    """The largest square at the top left; damage may change the size of an image."""
    return (0.0, 0.0, float(min(picture.size)), float(min(picture.size)))


def refused(resize, stored):
    try:
        picture = read_header(stored, 3)
        resized(resize, picture, 16, square(picture))
    except UsageError as error:
        return re.sub("0x[0-9a-f]+", "", str(error))
    return ""


@extra
@pytest.mark.parametrize("progressive", [False, True])
def test_a_jpeg_cut_short_anywhere_is_refused_as_by_pillow(progressive):
    stored = encoded(photo(40, 24), progressive=progressive)
    for length in range(0, len(stored), 7):
        says = refused(linear, stored[:length])
        assert says.startswith("image: cannot be decoded: ")
        assert says == refused(averaged, stored[:length])
    assert refused(linear, stored[:-1]) == refused(averaged, stored[:-1])


@extra
@settings(max_examples=200)
@given(st.data())
def test_a_damaged_jpeg_is_refused_or_decoded_as_by_pillow(data):
    content = bytearray(encoded(photo(24, 24), subsampling=data.draw(st.integers(0, 2))))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    stored = bytes(content)
    assert refused(linear, stored) == refused(averaged, stored)
    if not refused(averaged, stored):
        picture = read_header(stored, 3)
        side = min(picture.size)
        box = (0.0, 0.0, float(side), float(side))
        if side < 200:
            found, pillows = (resized(resize, read_header(stored, 3), side, box) for resize in (linear, averaged))
            np.testing.assert_array_equal(found, pillows)


SMALL_JPEGS = st.builds(
    lambda width, height, mode, seed, options: encoded(photo(width, height, seed), "JPEG", mode, **options),
    st.integers(1, 150),
    st.integers(1, 150),
    st.sampled_from(["RGB", "L"]),
    st.integers(0, 9),
    st.fixed_dictionaries(
        {
            "quality": st.integers(1, 100),
            "subsampling": st.integers(0, 2),
            "progressive": st.booleans(),
            "restart_marker_rows": st.integers(0, 1),
        }
    ),
)


def either(read, stored, channels, size, seed):
    """Returns the pixels of a random crop, or what the error says."""
    try:
        picture = read(stored, channels)
        (drawn,) = draws(np.random.default_rng(seed), 1)
        return resized(linear, picture, size, random_part(*picture.stored_size, drawn))
    except UsageError as error:
        return re.sub("0x[0-9a-f]+", "", str(error))


@extra
@settings(max_examples=150)
@given(SMALL_JPEGS, st.sampled_from([1, 3]), st.sampled_from([4, 9, 24, 60]), st.integers(0, 9))
def test_rows_down_to_the_end_of_the_crop_have_the_pixels_of_the_whole(stored, channels, size, seed):
    found, whole_image = (either(read, stored, channels, size, seed) for read in (read_plain_header, read_header))
    if isinstance(found, str):
        assert (channels, found) == (1, whole_image)
        assert "a colour image" in found
    else:
        np.testing.assert_array_equal(found, whole_image)


@extra
@settings(max_examples=300)
@given(SMALL_JPEGS, st.data())
def test_a_damaged_jpeg_is_refused_or_decoded_in_part_as_the_whole_is(stored, data):
    content = bytearray(stored)
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] = data.draw(st.sampled_from([0, 0xC0, 0xD0, 0xD8, 0xD9, 0xFF]) | st.integers(0, 255))
    length = data.draw(st.just(len(content)) | st.integers(0, len(content)))
    damaged = bytes(content[:length])
    try:
        width, height = read_header(damaged, 3).stored_size
    except UsageError:
        width, height = 1, 1
    if width * height < 10**6:
        found, whole_image = (either(read, damaged, 3, 16, 0) for read in (read_plain_header, read_header))
        assert type(found) is type(whole_image)
        np.testing.assert_array_equal(found, whole_image)


TOP = (0.0, 0.0, 160.0, 64.0)


@extra
@pytest.mark.parametrize(("size", "rows"), [(224, 66), (64, 66), (32, 68), (16, 72), (8, 80)])
def test_only_the_rows_down_to_the_end_of_the_crop_are_decoded(monkeypatch, size, rows):
    import simplejpeg

    heights, decode_jpeg = [], simplejpeg.decode_jpeg

    def watched(stored, *arguments, **options):
        heights.append(simplejpeg.decode_jpeg_header(stored)[0])
        return decode_jpeg(stored, *arguments, **options)

    monkeypatch.setattr(simplejpeg, "decode_jpeg", watched)
    resized(linear, read_plain_header(encoded(photo(160, 200)), 3), size, TOP)
    assert heights == [rows]


@extra
def test_damage_below_the_crop_is_found_as_in_the_whole():
    stored = encoded(photo(160, 200))
    unknown = stored[:-200] + b"\xff\xc8" + stored[-198:]
    for damaged in (stored[:-2], stored[: len(stored) * 3 // 4], unknown):
        says = []
        for read in (read_plain_header, read_header):
            with pytest.raises(UsageError, match="^image: cannot be decoded: ") as caught:
                resized(linear, read(damaged, 3), 64, TOP)
            says.append(re.sub("0x[0-9a-f]+", "", str(caught.value)))
        assert says[0] == says[1]


@extra
def test_an_image_keeps_its_pixels_when_the_thread_decodes_the_next():
    first = resized(linear, read_plain_header(encoded(photo(64, 64)), 3), 64, (0.0, 0.0, 64.0, 64.0))
    before = first.copy()
    resized(linear, read_plain_header(encoded(photo(64, 64, seed=1)), 3), 64, (0.0, 0.0, 64.0, 64.0))
    np.testing.assert_array_equal(first, before)


@extra
def test_a_thread_does_not_keep_the_memory_of_a_huge_image(monkeypatch):
    monkeypatch.setattr(interpolation, "_KEPT", 1000)
    monkeypatch.setattr(interpolation, "_threads", threading.local())
    small, large = interpolation._memory(1000), interpolation._memory(1001)
    assert len(large) == 1001
    assert interpolation._memory(1000) is small


@extra
@pytest.mark.parametrize(
    ("form", "mode"), [("PNG", "P"), ("PNG", "L"), ("WEBP", "RGB"), ("GIF", "P"), ("JPEG", "CMYK")]
)
def test_other_formats_are_decoded_by_pillow(form, mode):
    stored = encoded(photo(30, 20), form, mode)
    found = resized(linear, read_header(stored, 3), 20, (5.0, 0.0, 25.0, 20.0))
    np.testing.assert_array_equal(found, decode(stored, 3)[:, 5:25])


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    with pytest.raises(UsageError, match=r"--data.no_antialias needs .*write: pip install 'mpjax\[images\]'"):
        require_packages()

import io

import numpy as np
import pytest
from PIL import Image

from mpjax.data.images import Plain, first_rows, plain_header


def jpeg(mode="RGB", width=50, height=40, **options):
    buffer = io.BytesIO()
    pixels = np.random.default_rng(0).integers(256, size=(height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(buffer, "JPEG", **options)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("mode", "options", "channels"),
    [
        ("RGB", {"subsampling": 0}, 3),
        ("RGB", {"subsampling": 1}, 3),
        ("RGB", {"subsampling": 2}, 3),
        ("RGB", {"comment": b"made by hand"}, 3),
        ("L", {}, 1),
    ],
)
def test_the_header_of_a_plain_jpeg(mode, options, channels):
    found = plain_header(jpeg(mode, **options))
    assert found is not None
    assert (found.width, found.height, found.channels) == (50, 40, channels)


@pytest.mark.parametrize(
    "stored",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\x89PNG\r\n\x1a\n" + bytes(100), id="png"),
        pytest.param(jpeg()[:100], id="cut short"),
        pytest.param(jpeg("CMYK"), id="cmyk"),
        pytest.param(jpeg(progressive=True), id="progressive"),
        pytest.param(jpeg(restart_marker_rows=1), id="restart markers"),
        pytest.param(jpeg(keep_rgb=True), id="stored as RGB"),
        pytest.param(jpeg(exif=Image.Exif().tobytes() + bytes(8)), id="exif"),
        pytest.param(jpeg(icc_profile=bytes(200)), id="colour profile"),
        pytest.param(jpeg().replace(b"JFIF\0", b"JFXX\0"), id="not jfif"),
        pytest.param(jpeg().replace(b"\xff\xc0\x00\x11\x08", b"\xff\xc0\x00\x11\x0c"), id="12 bits"),
        pytest.param(jpeg().replace(b"\x01\x22\x00", b"\x01\x41\x00"), id="unusual sampling"),
    ],
)
def test_what_is_not_plain(stored):
    assert plain_header(stored) is None


def test_fewer_rows_are_the_same_file_with_another_height():
    stored = jpeg()
    header = plain_header(stored)
    assert header is not None
    cut = first_rows(17, stored, header)
    assert plain_header(cut) == Plain(50, 17, 3, header.height_at)
    differing = np.flatnonzero(np.frombuffer(cut, np.uint8) != np.frombuffer(stored, np.uint8))
    assert differing.tolist() == [header.height_at + 1]

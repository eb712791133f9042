import io
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mpjax.data.images import SAMPLE, Depth, stored_image
from mpjax.errors import UsageError


def encoded(width, height, mode="RGB", kind="PNG"):
    buffer = io.BytesIO()
    Image.new(mode, (width, height)).save(buffer, kind)
    return buffer.getvalue()


def shape_of(*images):
    return stored_image(len(images), images.__getitem__, "column 'img'").shape


def test_one_size():
    assert shape_of(encoded(5, 3), encoded(5, 3)) == (3, 5, 3)


def test_several_sizes():
    assert shape_of(encoded(5, 3), encoded(3, 5)) == (None, None, 3)


def test_channels_are_one_only_where_all_are_gray():
    assert shape_of(encoded(5, 3, "L"), encoded(5, 3, "1")) == (3, 5, 1)
    assert shape_of(encoded(5, 3, "L"), encoded(5, 3, "RGB")) == (3, 5, 3)
    assert shape_of(encoded(5, 3, "P"), encoded(5, 3, "RGBA")) == (3, 5, 3)


def test_files_are_named_and_only_their_headers_read(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(encoded(5, 3)[:45])  # no pixels
    assert shape_of(str(path)) == (3, 5, 3)
    path.write_text("no image")
    with pytest.raises(UsageError, match=r"a.png: cannot be decoded"):
        shape_of(str(path))


def test_bytes_are_named_after_their_column():
    with pytest.raises(UsageError, match="^column 'img': cannot be decoded"):
        shape_of(b"no image")


def test_the_numbers_are_those_of_all_sampled_images():
    images = [encoded(5, 3, "I;16")] * 2
    deep = stored_image(2, images.__getitem__, "image")
    assert (deep.shape, deep.depth) == ((3, 5, 1), Depth("16-bit grayscale", (0, 65535)))
    with pytest.raises(UsageError, match="column 'img': 16-bit grayscale, but others are 8-bit"):
        shape_of(encoded(5, 3, "L"), encoded(5, 3, "I;16"))


def test_a_sample_of_large_sets_from_first_to_last():
    asked = []
    image = encoded(5, 3)
    assert stored_image(10**6, lambda index: asked.append(index) or image, "image").shape == (3, 5, 3)
    assert (len(asked), asked[0], asked[-1]) == (SAMPLE, 0, 10**6 - 1)
    assert np.diff(asked).max() < 1010


@settings(max_examples=200)
@given(
    st.sampled_from(["PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF", "PPM"]),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 255)), max_size=4),
    st.none() | st.integers(0, 60),
)
def test_whatever_a_header_says_it_is_a_shape_or_the_set_is_named(kind, written, kept):
    content = bytearray(encoded(5, 3, kind=kind))
    for at, byte in written:
        content[at % len(content)] = byte
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's
            found = shape_of(bytes(content[:kept]))
    except UsageError as error:
        found = str(error)
    if isinstance(found, str):
        assert found.startswith("column 'img': ")
    else:
        height, width, channels = found
        assert height > 0
        assert width > 0
        assert channels in (1, 3)

import io

import numpy as np
import pytest
from PIL import Image

from mpjax.data.images import averaged, centre, draws, random_part, read_header, shrinks, shrunk, whole_pixels
from mpjax.errors import DataWarning, UsageError


def rng(seed=0):
    return np.random.default_rng(seed)


def drawn(seed=0):
    return draws(rng(seed), 1)[0]


def centre_of(stored, channels, size):
    """The centre of an image, resized."""
    picture = read_header(stored, channels)
    return resized(picture, size, centre()(*picture.size, drawn()))


def resized(picture, size, box):
    out = np.empty((size, size, picture.channels), np.uint8)
    averaged(picture, box, out)
    return out


def encoded(picture, form="PNG"):
    buffer = io.BytesIO()
    picture.save(buffer, form)
    return buffer.getvalue()


def test_centre_is_the_middle_square():
    assert centre()(30, 20, drawn()) == (5.0, 0.0, 25.0, 20.0)
    assert centre(224 / 256)(256, 512, drawn()) == (16.0, 144.0, 240.0, 368.0)


def test_random_parts_are_inside_with_8_to_100_percent_and_ratio_up_to_4_to_3():
    boxes = np.array([random_part(40, 30, one) for one in draws(rng(), 500)])
    across, down = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    assert (boxes >= 0).all()
    assert (boxes <= [40, 30, 40, 30]).all()
    share, ratio = across * down / 1200, across / down
    assert 0.08 <= share.min() < 0.12
    assert 0.85 < share.max() <= 1
    assert 0.749 < ratio.min() < 0.8
    assert 1.25 < ratio.max() < 1.334


def test_a_strip_that_no_part_fits_gives_its_middle():
    assert random_part(1000, 10, drawn()) == (495.0, 0.0, 505.0, 10.0)


@pytest.mark.parametrize("channels", [1, 3])
def test_resize_to_the_size_of_the_box_copies_it(channels):
    image = rng().integers(256, size=(4, 8, channels), dtype=np.uint8)
    np.testing.assert_array_equal(centre_of(image, channels, 4), image[:, 2:6])


def test_resize_averages():
    image = np.zeros((64, 64, 1), np.uint8)
    image[::2] = 200
    np.testing.assert_allclose(centre_of(image, 1, 8), 100, atol=5)  # without averaging: 0 or 200


def test_a_jpeg_decoded_at_a_fraction_shows_the_same_part():
    # Decoded at 1/4, 72 x 24; the square in the middle spans the middle third of the gray levels.
    ramp = np.broadcast_to(np.linspace(0, 255, 288).astype(np.uint8)[None, :, None], (96, 288, 3))
    stored = encoded(Image.fromarray(ramp), "JPEG")
    cut = centre_of(stored, 3, 24)
    np.testing.assert_allclose(cut[:, 0].mean(), 85, atol=3)
    np.testing.assert_allclose(cut[:, -1].mean(), 170, atol=3)


@pytest.mark.parametrize(
    ("stored", "channels", "says"),
    [
        (b"no image", 3, "image: cannot be decoded"),
        (encoded(Image.new("RGB", (64, 64)), "JPEG")[:400], 3, "image: cannot be decoded"),
        (np.zeros((4, 4, 3), np.float32), 3, r"image: float32 \(4, 4, 3\); only uint8"),
        (np.zeros((4, 4, 2), np.uint8), 2, "image: 2 channels; only 1, 3 or 4 can be resized"),
    ],
)
def test_what_cannot_be_resized(stored, channels, says):
    with pytest.raises(UsageError, match=says):
        centre_of(stored, channels, 2)


def test_the_crops_of_a_seed_stay_the_same():
    crops = [random_part(500, 375, drawn(7)), random_part(40, 30, drawn(7))]
    wanted = [(83.07891066116876, 14.047410940443642, 475.9750776190669, 326.67191155682946)]
    wanted += [(6.646312852893501, 1.1237928752354907, 38.07800620952535, 26.13375292454636)]
    np.testing.assert_allclose(crops, wanted, rtol=1e-12)


def test_a_crop_is_resized_as_pillow_does_to_the_last_bit():
    photo = rng().integers(256, size=(150, 200, 3), dtype=np.uint8)
    stored, box = encoded(Image.fromarray(photo), "JPEG"), random_part(200, 150, drawn(3))
    wanted = Image.open(io.BytesIO(stored)).resize((64, 64), Image.Resampling.BILINEAR, box=box)
    np.testing.assert_array_equal(resized(read_header(stored, 3), 64, box), np.asarray(wanted))


@pytest.mark.parametrize(
    ("box", "rounded"),
    [
        ((0.6, 0.4, 9.5, 6.51), (1, 0, 10, 7)),
        ((4.6, 4.7, 5.4, 5.3), (5, 5, 6, 6)),  # less than a pixel
        ((9.6, 6.6, 10.0, 7.0), (9, 6, 10, 7)),
    ],
)
def test_whole_pixels_are_inside_and_at_least_one(box, rounded):
    assert whole_pixels(lambda *_: box)(10, 7, drawn()) == rounded


@pytest.mark.parametrize(
    ("width", "height", "size", "divisor"),
    [(64, 64, 8, 8), (64, 64, 9, 4), (64, 40, 9, 4), (65, 67, 17, 2), (64, 64, 33, 1), (64, 64, 80, 1)],
)
def test_the_divisor_of_a_jpeg_is_the_one_that_pillow_chooses(width, height, size, divisor):
    picture = read_header(encoded(Image.new("RGB", (width, height)), "JPEG"), 3)
    box = (0.0, 0.0, float(width), float(width))
    assert shrinks(width, height, size, box) == divisor
    shrunk(picture, size, box)
    assert picture.size == (-(-width // divisor), -(-height // divisor))


def test_the_fourth_channel_of_an_array_is_no_transparency():
    image = np.full((4, 4, 4), 200, np.uint8)
    image[..., 3] = 0
    np.testing.assert_array_equal(centre_of(image, 4, 2), image[:2, :2])


def test_transparent_pixels_of_a_file_keep_their_colours_without_its_fourth_channel():
    with pytest.warns(DataWarning, match="transparent pixels"):
        assert (centre_of(encoded(Image.new("RGBA", (4, 4), (200, 200, 200, 0))), 3, 2) == 200).all()

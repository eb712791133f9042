"""An image, its mask and the predicted mask, in fixed colours."""

import numpy as np

from mpjax.report.mask_pictures import coloured, side_by_side


def test_image_mask_and_prediction_stand_side_by_side_and_ignored_pixels_are_white():
    image = np.array([[[10], [20]], [[30], [40]]], np.uint8)
    picture = side_by_side(image, np.array([[0, 1], [2, 255]]), np.array([[0, 1], [3, 3]], np.uint8))
    grey, black, red, green, olive, white = (128,) * 3, (0, 0, 0), (128, 0, 0), (0, 128, 0), (128, 128, 0), (255,) * 3
    assert (picture.shape, picture.dtype) == ((2, 10, 3), np.uint8)
    assert [[tuple(pixel) for pixel in row] for row in picture.tolist()] == [
        [(10,) * 3, (20,) * 3, grey, grey, black, red, grey, grey, black, red],
        [(30,) * 3, (40,) * 3, grey, grey, green, white, grey, grey, olive, olive],
    ]


def test_no_two_classes_have_one_colour_and_none_that_of_ignored_pixels():
    colours = coloured(np.arange(256)[None])[0]
    assert len({tuple(colour) for colour in colours.tolist()}) == 256
    assert colours[255].tolist() == [255, 255, 255]


def test_images_of_any_kind_are_visible():
    mask = np.zeros((1, 3), np.int32)

    def pixels(image):
        return side_by_side(image, mask, mask)[0, :3].tolist()

    assert pixels(np.array([[[-1.0], [0.0], [3.0]]], np.float32)) == [[0] * 3, [64] * 3, [255] * 3]
    assert pixels(np.full((1, 3, 1), 0.5, np.float32)) == [[0] * 3] * 3
    rgb = np.arange(9, dtype=np.uint8).reshape(1, 3, 3)
    assert pixels(rgb) == rgb[0].tolist()
    assert pixels(np.concatenate([rgb, rgb], axis=-1)) == rgb[0].tolist()
    assert pixels(rgb[..., :2]) == [[0] * 3, [3] * 3, [6] * 3]

import numpy as np
import pytest

from mpjax.data import joined, squares_of


@pytest.mark.parametrize("size", [(4, 4), (4, 5), (9, 4), (4, 12), (1, 7), (30, 13)])
def test_squares_cover_an_image_from_edge_to_edge(size):
    width, height = size
    seen = np.zeros((height, width), int)
    squares = squares_of(width, height)
    for left, top, right, bottom in squares:
        assert right - left == bottom - top == min(size)
        seen[top:bottom, left:right] += 1
    assert seen.min() == 1
    assert len(squares) == -(-max(size) // min(size))


@pytest.mark.parametrize("size", [(4, 4), (4, 5), (9, 4), (4, 12), (1, 7), (30, 13)])
@pytest.mark.parametrize("times", [1, 2])
def test_parts_of_a_mask_join_to_that_mask(size, times):
    """Also those of another size, as models return them."""
    width, height = size
    mask = np.random.default_rng(0).integers(255, size=(height, width), dtype=np.uint8)
    parts = [mask[top:bottom, left:right] for left, top, right, bottom in squares_of(width, height)]
    parts = [part.repeat(times, axis=0).repeat(times, axis=1) for part in parts]
    np.testing.assert_array_equal(joined(parts, width, height), mask)


def test_a_pixel_in_two_squares_takes_the_nearer_one():
    one, two = np.full((4, 4), 1, np.uint8), np.full((4, 4), 2, np.uint8)
    assert joined([one, two], 6, 4)[0].tolist() == [1, 1, 1, 2, 2, 2]
    assert joined([one, two], 4, 6)[:, 0].tolist() == [1, 1, 1, 2, 2, 2]

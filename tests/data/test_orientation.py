"""Alternating flips: every image is seen in both orientations in each two consecutive epochs, however it is read."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpjax.config import Data
from mpjax.data import Alternating, Tokens, labelled_images, orientation_of
from mpjax.errors import UsageError


FLIPS = Data(flip=True, alternate_flips=True)
IMAGES = labelled_images(10, (4, 4, 1))


@given(seed=st.integers(0, 2**32 - 1), epoch=st.integers(0, 10**6), rows=st.lists(st.integers(0, 2**40), min_size=1))
def test_an_image_is_mirrored_in_one_of_two_consecutive_epochs(seed, epoch, rows):
    chosen = np.array(rows)
    once, then = (Alternating(seed).of(chosen, number)["mirrored"] for number in (epoch, epoch + 1))
    assert once.dtype == bool
    assert once.shape == chosen.shape
    assert (once ^ then).all()


def test_half_of_the_images_begin_mirrored_and_each_seed_chooses_others():
    rows = np.arange(50_000)
    zero, one, far = (Alternating(seed).of(rows, 0)["mirrored"] for seed in (0, 1, 2**32 - 1))
    for first in (zero, one, far):
        assert 0.49 < first.mean() < 0.51  # 4.5 standard deviations
        assert 0.49 < (first[1:] ^ first[:-1]).mean() < 0.51  # neighbours are independent
    assert 0.49 < (zero ^ one).mean() < 0.51
    assert 0.49 < (zero[1:] ^ one[:-1]).mean() < 0.51  # the next seed is not this one, shifted


def test_an_image_begins_as_it_does_alone_and_in_every_order():
    rows = np.array([7, 3, 12_345])
    assert Alternating(5).of(rows, 0)["mirrored"].tolist() == [
        bool(Alternating(5).of(np.array([row]), 0)["mirrored"][0]) for row in (7, 3, 12_345)
    ]


def test_the_first_orientations_are_those_of_every_version_of_mpjax():
    mirrored = Alternating(0).of(np.arange(16), 0)["mirrored"]
    assert "".join(str(int(flip)) for flip in mirrored) == "1101110111110110"


def test_alternating_flips_begin_by_the_seed_of_the_run():
    assert orientation_of(FLIPS, IMAGES, 9) == Alternating(9)


def test_data_without_images_is_rejected():
    with pytest.raises(UsageError, match="--data.alternate_flips: 'digits' has no images to flip, only tokens"):
        orientation_of(FLIPS, {"tokens": Tokens(8, 256)}, 0)

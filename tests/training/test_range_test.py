"""The range test: rates that grow by equal factors, and a suggestion only where the loss falls."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from mpjax.training import Point, Watch, growing_rates, suggest


RATES: list[float] = np.geomspace(1e-6, 10, 141).tolist()  # 20 in each factor of ten


def points(loss_at: Callable[[float], float], noise=0.0) -> list[Point]:
    random = np.random.default_rng(0)
    return [Point(float(rate), loss_at(rate) + noise * float(random.normal())) for rate in RATES]


def falling(rate: float) -> float:
    """A loss that falls from 2 to 1 around a rate of 0.01, and explodes from 1 on."""
    return 2 - 1 / (1 + (0.01 / rate) ** 2) + 5 * max(0.0, math.log10(rate))


def test_rates_grow_by_equal_factors_and_stay_at_the_highest():
    rates = growing_rates(1e-4, 1.0, 5)
    assert [float(rates(count)) for count in range(6)] == pytest.approx([1e-4, 1e-3, 1e-2, 0.1, 1, 1], rel=1e-5)


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_the_suggestion_is_where_the_loss_falls_fastest(noise):
    found = suggest(points(falling, noise))
    assert found.rate == pytest.approx(0.01, rel=0.3)
    assert 0.03 < found.lowest < 2
    assert len(found.smoothed) == 141


def test_a_fall_behind_an_explosion_does_not_count():
    def wild(rate):
        return falling(rate) if rate < 0.3 else (6.0 if rate < 1.5 else -3.0)

    assert suggest(points(wild)).rate == pytest.approx(0.01, rel=0.3)


@pytest.mark.parametrize("loss_at", [lambda rate: 2.0, lambda rate: 2 + rate], ids=["flat", "rising"])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_a_loss_that_never_falls_gives_no_suggestion(loss_at, noise):
    found = suggest(points(loss_at, noise))
    assert found.rate is None
    assert found.reason.startswith("the loss never falls: from ")


@pytest.mark.parametrize("count", [20, 100, 301])
def test_the_rounding_of_averages_is_no_fall(count):
    """The average of equal losses differs from them by 4e-16."""
    assert suggest([Point(float(rate), 2.0) for rate in np.geomspace(1e-5, 1, count)]).rate is None


@pytest.mark.parametrize("count", [0, 1, 2])
def test_too_few_points_give_no_suggestion(count):
    found = suggest(points(falling)[:count])
    assert (found.rate, found.reason) == (None, f"only {count} updates have a finite loss")


def test_a_search_stops_where_the_average_loss_is_a_multiple_of_its_smallest():
    watch = Watch(2.0)
    assert [watch.explodes(loss) for loss in (1.0, 1.0, 1.9, 3.0, 9.0)] == [False, False, False, False, True]
    assert Watch(2.0).explodes(float("nan"))


@pytest.mark.parametrize("updates", [20, 30, 50, 100])
def test_noise_alone_is_seldom_taken_for_a_fall(updates):
    """In at most 3 of 100 series; above two standard deviations of the losses it would be in 29, for 30 updates."""
    random = np.random.default_rng(0)
    rates = np.geomspace(1e-6, 10, updates)
    series = [2.3 + 0.02 * random.standard_normal(updates) for _ in range(300)]
    found = [suggest([Point(*point) for point in zip(rates, losses, strict=True)]).rate for losses in series]
    assert sum(rate is not None for rate in found) <= 9

"""What is tolerated, and what ends training."""

import math

import pytest

from mpjax.loop import Limits


def metrics(loss=1.0, grad_norm=1.0, loss_scale=1.0, consecutive_skips=0):
    return {"loss": loss, "grad_norm": grad_norm, "loss_scale": loss_scale, "consecutive_skips": consecutive_skips}


@pytest.mark.parametrize(
    ("of_step", "reason"),
    [
        (metrics(), None),
        (metrics(loss=math.nan), "loss is nan"),
        (metrics(loss=math.inf, grad_norm=math.nan), "loss is inf"),
        (metrics(grad_norm=math.inf), "grad_norm is inf"),
    ],
)
def test_without_scaling_the_first_bad_value_ends_training(of_step, reason):
    assert Limits(None, 10).exceeded_by(of_step) == reason


@pytest.mark.parametrize(
    ("of_step", "ends"),
    [
        (metrics(loss=math.nan, grad_norm=math.nan, loss_scale=2.0, consecutive_skips=99), False),
        (metrics(loss=math.nan, loss_scale=1.0, consecutive_skips=9), False),
        (metrics(loss=math.nan, loss_scale=1.0, consecutive_skips=10), True),
        (metrics(loss=1.0, loss_scale=1.0, consecutive_skips=11), True),
    ],
)
def test_with_scaling_ten_skips_in_a_row_at_the_smallest_scale_do(of_step, ends):
    reason = Limits(1.0, 10).exceeded_by(of_step)
    assert (reason is not None) == ends
    if ends:
        skips = of_step["consecutive_skips"]
        assert reason == f"gradients were not finite {skips} steps in a row, the last at the smallest loss scale 1"

"""Segmentation: both losses, and the intersection over union of a whole set."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.data import IGNORED
from mpjax.errors import UsageError
from mpjax.precision import get_policy
from mpjax.training import Mean, RunObjective, cross_entropy_over, dice_loss, require_pixels, segmentation


def objective_under(policy):
    return RunObjective(segmentation(get_policy(policy)), complete=require_pixels)


class Fixed:
    """A model whose logits are 10 for the class that each pixel names."""

    def __call__(self, images):
        self.seen = images
        return 10 * jax.nn.one_hot(images[..., 0].astype(jnp.int32), 3, dtype=images.dtype)


#                       right, 1 for 0; 1 for 2, ignored
BATCH = {"image": jnp.array([[[0, 1], [1, 2]]], jnp.float32)[..., None], "mask": jnp.array([[[0, 0], [2, IGNORED]]])}


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "dtype"), [("float32", "float32"), ("mixed_float16", "float16")])
def test_images_reach_the_model_in_the_compute_dtype(policy, dtype):
    model = Fixed()
    loss, _ = objective_under(policy).loss(model, BATCH, jax.random.key(0))
    assert (model.seen.dtype, loss.value.dtype) == (dtype, "float32")


def test_the_loss_is_cross_entropy_plus_dice_without_ignored_pixels():
    objective = objective_under("float32")
    loss, metrics = jax.jit(lambda batch, key: objective.loss(Fixed(), batch, key))(BATCH, jax.random.key(0))
    # Two of three pixels are wrong by 10; classes 0 and 1 and 2 have IoU 1/2, 0 and 0.
    cross = 2 / 3 * 10
    dice = jax.jit(lambda batch: dice_loss(Fixed()(batch["image"]), batch["mask"], ignore=IGNORED)[0])(BATCH)
    assert float(loss.value) == pytest.approx(cross + float(dice), abs=1e-3)
    assert float(metrics["iou"].value) == pytest.approx(1 / 6)
    assert float(metrics["accuracy"].value) == pytest.approx(1 / 3)


def test_iou_is_of_the_whole_set_and_not_the_mean_over_images():
    # Class 1 is half found in one image and wholly in another, ten times as large.
    sums = {
        "loss": np.float64(3.0),
        "count": np.float64(2.0),
        "accuracy": Mean(np.float64(90.0), np.float64(100.0)),
        "iou": Mean(np.array([45.0, 21.0, 0.0]), np.array([50.0, 22.0, 0.0])),
    }
    found = objective_under("float32").conclude(sums)
    assert found == {"loss": 1.5, "accuracy": 0.9, "iou": pytest.approx((0.9 + 21 / 22) / 2)}


def test_measures_sum_to_the_metrics():
    values = objective_under("float32").measure(Fixed(), BATCH)
    assert values["loss"].shape == (1,)
    assert (values["iou"].total.tolist(), values["iou"].weight.tolist()) == ([[1, 0, 0]], [[2, 2, 1]])
    assert (values["accuracy"].total.tolist(), values["accuracy"].weight.tolist()) == ([1], [3])
    logits = Fixed()(BATCH["image"])
    both = cross_entropy_over(logits, BATCH["mask"], ignore=IGNORED) + dice_loss(logits, BATCH["mask"], ignore=IGNORED)
    np.testing.assert_allclose(values["loss"], both)


def test_a_set_of_which_no_pixel_counts_is_refused():
    none = np.float64(0)
    nothing = {"loss": none, "count": none, "accuracy": Mean(none, none), "iou": Mean(none, none)}
    with pytest.raises(UsageError, match="mask: every pixel of the set is 255, the ignored label"):
        objective_under("float32").conclude(nothing)

"""Weights of classes and ignored labels: the losses of torch, whatever is summed where."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.data.fields import IGNORED, IGNORED_LABEL
from mpjax.errors import UsageError
from mpjax.precision import get_policy
from mpjax.training.class_weights import by_class, pixels_by_class, weighted_cross_entropy
from mpjax.training.losses import cross_entropy_over, dice_loss
from mpjax.training.objectives import equally, segmentation


RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(6, 3)).astype(np.float32) * 3
LABELS = np.array([0, 2, IGNORED_LABEL, 1, 2, IGNORED_LABEL])
WEIGHTS = (0.2, 0.0, 5.0)


def torch_loss(logits, labels, **options):
    """Returns the loss and its gradient."""
    torch = pytest.importorskip("torch")
    options["weight"] = torch.tensor(options["weight"])
    logits = torch.tensor(logits, requires_grad=True)
    loss = torch.nn.CrossEntropyLoss(**options)(logits, torch.tensor(labels))
    loss.backward()
    return loss.item(), logits.grad.numpy()


def loss_of(weights, smoothing, *, ignores=True, **batch):
    return jax.jit(by_class(weights, smoothing, ignores=ignores).in_training)(LOGITS, batch)


@pytest.mark.extra
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weights", [WEIGHTS, (1.0, 1.0, 1.0)])
def test_the_loss_and_its_gradient_are_those_of_torch(weights, smoothing):
    wanted, slope = torch_loss(LOGITS, LABELS, weight=weights, label_smoothing=smoothing, ignore_index=IGNORED_LABEL)

    def loss(logits):
        return by_class(weights, smoothing, ignores=True).in_training(logits, {"label": jnp.asarray(LABELS)})[0].value

    value, gradient = jax.value_and_grad(loss)(jnp.asarray(LOGITS))
    assert float(value) == pytest.approx(wanted, rel=1e-6)
    np.testing.assert_allclose(gradient, slope, rtol=1e-5, atol=1e-7)


def test_the_loss_by_hand():
    # Logits 0 and log 3: probabilities 1/4 and 3/4. Weighted: 1 log 4 + 3 log(4/3), divided by 1 + 3.
    logits = np.log(np.array([[1.0, 3.0], [1.0, 3.0]], np.float32))
    loss, metrics = jax.jit(by_class((1.0, 3.0), 0.0, ignores=False).in_training)(logits, {"label": np.array([0, 1])})
    assert float(loss.value) == pytest.approx((np.log(4) + 3 * np.log(4 / 3)) / 4, rel=1e-6)
    assert float(metrics["accuracy"].value) == 0.5  # and not 3/4


def test_the_parts_of_a_batch_add_up_to_the_whole():
    whole, _ = loss_of(WEIGHTS, 0.1, label=jnp.asarray(LABELS))
    parts = [
        jax.jit(by_class(WEIGHTS, 0.1, ignores=True).in_training)(LOGITS[part], {"label": LABELS[part]})[0]
        for part in (slice(0, 1), slice(1, 6))
    ]
    assert float(jax.tree.map(jnp.add, *parts).value) == pytest.approx(float(whole.value), rel=1e-6)


def test_a_target_of_one_class_is_its_label_and_an_even_mixture_has_the_mean_weight():
    labels = jnp.asarray(np.maximum(LABELS, 0))
    target = jax.nn.one_hot(labels, 3)
    one, _ = loss_of(WEIGHTS, 0.1, label=labels)
    two, _ = loss_of(WEIGHTS, 0.1, label=labels, target=target)
    assert float(one.value) == float(two.value)
    _, weights = weighted_cross_entropy(jnp.zeros((1, 3)), jnp.array([[0.5, 0.0, 0.5]]), jnp.array(WEIGHTS))
    assert weights.tolist() == [pytest.approx(2.6)]


def test_equal_weights_change_nothing():
    labels = jnp.asarray(np.maximum(LABELS, 0))
    wanted, _ = equally(0.1).in_training(jnp.asarray(LOGITS), {"label": labels})
    found, _ = loss_of((2.0, 2.0, 2.0), 0.1, label=labels)
    assert float(found.value) == pytest.approx(float(wanted.value), rel=1e-6)


@pytest.mark.slow
def test_ignored_examples_count_in_no_metric():
    logits, labels = jnp.eye(3)[jnp.array([0, 1, 1])] * 9, jnp.array([0, 2, IGNORED_LABEL])
    compared = by_class((), 0.0, ignores=True)
    _, metrics = compared.in_training(logits, {"label": labels})
    assert float(metrics["accuracy"].value) == 0.5
    values = compared.in_evaluation(logits, {"label": labels})
    sums = {name: np.asarray(x.sum()) for name, x in values.items()} | {"count": np.asarray(3.0)}
    found = compared.conclude(sums)
    assert found == {"loss": pytest.approx((0.000247 + 9.000247) / 2, abs=1e-5), "accuracy": 0.5}
    with pytest.raises(UsageError, match="every example of the set is ignored by --data.ignore_index"):
        compared.conclude({**sums, "counted": np.asarray(0.0)})


def test_a_batch_of_ignored_examples_has_loss_and_gradient_zero():
    def loss(logits):
        found = by_class((), 0.1, ignores=True).in_training(logits, {"label": jnp.full(6, IGNORED_LABEL)})
        return found[0].value

    value, slope = jax.value_and_grad(loss)(jnp.asarray(LOGITS))
    assert float(value) == 0.0
    assert not slope.any()


@pytest.mark.parametrize(("ignores", "label"), [(False, -1), (True, -2), (True, 3)])
def test_any_other_label_is_nan(ignores, label):
    loss, _ = loss_of(WEIGHTS, 0.0, ignores=ignores, label=jnp.full(6, label))
    assert np.isnan(loss.total)


PIXELS = RNG.normal(size=(1, 2, 3, 3)).astype(np.float32)
MASK = np.array([[[0, 2, IGNORED], [1, 2, 0]]])


@pytest.mark.extra
def test_the_loss_of_an_image_is_that_of_torch():
    wanted, slope = torch_loss(np.moveaxis(PIXELS, -1, 1), MASK, weight=WEIGHTS, ignore_index=IGNORED)

    def loss(logits):
        return pixels_by_class(WEIGHTS, logits, jnp.asarray(MASK), ignore=IGNORED)[0]

    value, gradient = jax.value_and_grad(loss)(jnp.asarray(PIXELS))
    assert float(value) == pytest.approx(wanted, rel=1e-6)
    np.testing.assert_allclose(np.moveaxis(gradient, -1, 1), slope, rtol=1e-5, atol=1e-7)


def test_an_image_of_ignored_pixels_costs_nothing():
    mask = jnp.full((1, 2, 3), IGNORED)
    assert pixels_by_class(WEIGHTS, jnp.asarray(PIXELS), mask, ignore=IGNORED).tolist() == [0.0]


@pytest.mark.slow
def test_segmentation_is_weighted_in_training_and_not_in_evaluation():
    def weighted(logits, mask, *, ignore):
        return pixels_by_class(WEIGHTS, logits, mask, ignore=ignore)

    def prepare(batch, key):
        return batch

    objective = segmentation(prepare, get_policy("float32"), pixel_loss=weighted)
    batch, model = {"image": jnp.asarray(PIXELS), "mask": jnp.asarray(MASK)}, nnx.Sequential()
    loss, _ = objective.loss(model, batch, jax.random.key(0))
    measured = objective.measure(model, batch)["loss"]
    dice = dice_loss(batch["image"], batch["mask"], ignore=IGNORED)
    assert float(loss.value) == pytest.approx(float((weighted(*batch.values(), ignore=IGNORED) + dice)[0]), rel=1e-6)
    assert float(measured[0]) == pytest.approx(float((cross_entropy_over(*batch.values(), ignore=IGNORED) + dice)[0]))

"""Weights of classes and ignored labels: the losses of torch, whatever is summed where."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.data import IGNORED, IGNORED_LABEL
from mpjax.errors import UsageError
from mpjax.precision import get_policy
from mpjax.training import (
    RunObjective,
    by_class,
    cross_entropy_over,
    dice_loss,
    equally,
    pixels_by_class,
    require_counted,
    segmentation,
    weighted_cross_entropy,
    weighted_sums,
)


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


KEY = jax.random.key(0)


def objective_of(compare, **options):
    """Of a model whose outputs are the field `logits`."""
    return RunObjective(lambda model, batch, key: compare(batch["logits"], batch, key), **options)


def loss_of(weights, smoothing, *, ignores=True, logits=LOGITS, **batch):
    """The mean loss of a training batch, and its accuracy."""
    objective = objective_of(by_class(weights, smoothing, ignores=ignores))
    loss, metrics = jax.jit(lambda batch: objective.loss(None, batch, KEY))({"logits": logits, **batch})
    return loss, metrics["accuracy"]


@pytest.mark.extra
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weights", [WEIGHTS, (1.0, 1.0, 1.0)])
def test_the_loss_and_its_gradient_are_those_of_torch(weights, smoothing):
    wanted, slope = torch_loss(LOGITS, LABELS, weight=weights, label_smoothing=smoothing, ignore_index=IGNORED_LABEL)

    def loss(logits):
        return loss_of(weights, smoothing, logits=logits, label=jnp.asarray(LABELS))[0].value

    value, gradient = jax.value_and_grad(loss)(jnp.asarray(LOGITS))
    assert float(value) == pytest.approx(wanted, rel=1e-6)
    np.testing.assert_allclose(gradient, slope, rtol=1e-5, atol=1e-7)


def test_the_loss_by_hand():
    # Logits 0 and log 3: probabilities 1/4 and 3/4. Weighted: 1 log 4 + 3 log(4/3), divided by 1 + 3.
    logits = np.log(np.array([[1.0, 3.0], [1.0, 3.0]], np.float32))
    loss, accuracy = loss_of((1.0, 3.0), 0.0, ignores=False, logits=logits, label=np.array([0, 1]))
    assert float(loss.value) == pytest.approx((np.log(4) + 3 * np.log(4 / 3)) / 4, rel=1e-6)
    assert float(accuracy.value) == 0.5  # and not 3/4


def test_the_parts_of_a_batch_add_up_to_the_whole():
    whole, _ = loss_of(WEIGHTS, 0.1, label=jnp.asarray(LABELS))
    parts = [loss_of(WEIGHTS, 0.1, logits=LOGITS[part], label=LABELS[part])[0] for part in (slice(0, 1), slice(1, 6))]
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
    wanted, _ = objective_of(equally(0.1)).loss(None, {"logits": jnp.asarray(LOGITS), "label": labels}, KEY)
    found, _ = loss_of((2.0, 2.0, 2.0), 0.1, label=labels)
    assert float(found.value) == pytest.approx(float(wanted.value), rel=1e-6)


@pytest.mark.slow
def test_ignored_examples_count_in_no_metric():
    logits, labels = jnp.eye(3)[jnp.array([0, 1, 1])] * 9, jnp.array([0, 2, IGNORED_LABEL])
    _, accuracy = loss_of((), 0.0, logits=logits, label=labels)
    assert float(accuracy.value) == 0.5
    objective = objective_of(by_class((), 0.0, ignores=True), complete=require_counted)

    def metrics(labels):
        return objective.conclude(
            weighted_sums(objective.measure(None, batch := {"logits": logits, "label": labels}), batch)
        )

    assert metrics(labels) == {"loss": pytest.approx((0.000247 + 9.000247) / 2, abs=1e-5), "accuracy": 0.5}
    with pytest.raises(UsageError, match="every example of the set is ignored by --data.ignore_index"):
        metrics(jnp.full(3, IGNORED_LABEL))


def test_a_batch_of_ignored_examples_has_loss_and_gradient_zero():
    def loss(logits):
        return loss_of((), 0.1, logits=logits, label=jnp.full(6, IGNORED_LABEL))[0].value

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

    objective = RunObjective(segmentation(get_policy("float32"), pixel_loss=weighted))
    batch, model = {"image": jnp.asarray(PIXELS), "mask": jnp.asarray(MASK)}, nnx.Sequential()
    loss, _ = objective.loss(model, batch, KEY)
    measured = objective.measure(model, batch)["loss"]
    dice = dice_loss(batch["image"], batch["mask"], ignore=IGNORED)
    assert float(loss.value) == pytest.approx(float((weighted(*batch.values(), ignore=IGNORED) + dice)[0]), rel=1e-6)
    assert float(measured[0]) == pytest.approx(float((cross_entropy_over(*batch.values(), ignore=IGNORED) + dice)[0]))

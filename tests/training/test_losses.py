"""Losses in float32, whatever the logits' dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.training.losses import correct, cross_entropy


LOGITS = [[2.0, 0.0, -1.0], [0.5, 0.5, 0.5]]
LABELS = [0, 2]


def test_cross_entropy_by_hand():
    losses = cross_entropy(jnp.array(LOGITS), jnp.array(LABELS))
    np.testing.assert_allclose(losses, [0.16984602, 1.0986123], rtol=1e-6)


def test_label_smoothing_by_hand():
    """A tenth of the target is spread over all three classes: 0.9 * nll + 0.1 * mean of the negative log softmax."""
    losses = cross_entropy(jnp.array(LOGITS), jnp.array(LABELS), label_smoothing=0.1)
    log_softmax = np.array(LOGITS) - np.log(np.exp(LOGITS).sum(-1, keepdims=True))
    expected = [-0.9 * row[label] - 0.1 * row.mean() for row, label in zip(log_softmax, LABELS, strict=True)]
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_the_loss_is_float32_and_computed_there(dtype, label_smoothing):
    """Logits of 60000 apart: their difference is beyond float16, where the loss would be inf."""
    logits = jnp.array([[30000.0, -32768.0]], dtype)
    loss = cross_entropy(logits, jnp.array([1]), label_smoothing=label_smoothing)
    exact = float(logits[0, 0].astype(jnp.float32)) + 32768
    assert loss.dtype == jnp.float32
    assert float(loss[0]) == pytest.approx(exact * (1 - label_smoothing / 2), rel=1e-6)


def test_a23_a_sum_over_4096_examples_is_finite():
    logits = jnp.tile(jnp.array([20.0, 0.0], jnp.float16), (4096, 1))
    total = jnp.sum(cross_entropy(logits, jnp.ones(4096, jnp.int32)))
    assert float(total) == pytest.approx(4096 * 20, rel=1e-4)


def test_gradients_reach_half_precision_logits():
    grads = jax.grad(lambda x: jnp.mean(cross_entropy(x, jnp.array(LABELS))))(jnp.array(LOGITS, jnp.float16))
    assert grads.dtype == jnp.float16
    np.testing.assert_allclose(grads[1].astype(jnp.float32), [1 / 6, 1 / 6, -1 / 3], rtol=1e-3)


def test_correct_is_one_where_the_largest_logit_is_the_labels():
    scores = correct(jnp.array([[1.0, 2.0], [2.0, 1.0], [1.0, 2.0]], jnp.float16), jnp.array([1, 1, 0]))
    assert scores.dtype == jnp.float32
    assert scores.tolist() == [1, 0, 0]

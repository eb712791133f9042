"""The cross entropy with labels: exact, with a derivative of its own."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mpjax.training import cross_entropy, predicted, with_labels


LOGITS = [[2.0, 0.0, -1.0], [0.5, 0.5, 0.5]]
LABELS = [0, 2]


@pytest.mark.parametrize("smoothing", [pytest.param(0.0, marks=pytest.mark.slow), 0.1])
def test_loss_and_gradient_are_those_of_automatic_differentiation(smoothing):
    logits = 5 * jax.random.normal(jax.random.key(0), (4, 7))
    labels = jnp.array([0, 6, 3, 3], jnp.uint8)

    def plain(x):
        target = optax.smooth_labels(jax.nn.one_hot(labels, 7, dtype=x.dtype), smoothing)
        return jnp.sum(optax.softmax_cross_entropy(x, target))

    def own(x):
        return jnp.sum(cross_entropy(x, labels, label_smoothing=smoothing))

    for derivative in (lambda f: f, jax.grad, jax.hessian):
        found, wanted = jax.jit(derivative(own))(logits), jax.jit(derivative(plain))(logits)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_the_predicted_class_is_the_first_of_the_largest_and_none_without_a_finite_one():
    logits = jnp.array([*LOGITS, [-2, 7, 7], [-3, jnp.nan, 7], [jnp.inf, 0, 0], [-jnp.inf, -5, -jnp.inf]], jnp.bfloat16)
    assert predicted(logits).tolist() == [0, 0, 1, 3, 3, 1]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_one_pass_reads_the_logits_for_loss_accuracy_and_gradient(smoothing):
    """A gather or a scatter would write all logits of a vocabulary once more."""

    def loss(x):
        losses, hits = with_labels(smoothing, x, jnp.array(LABELS))
        return jnp.sum(losses), hits

    program = jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(jnp.array(LOGITS, jnp.bfloat16)).as_text()
    assert len(re.findall(r"stablehlo.reduce\b.*\btensor<2x3x", program)) == 1
    assert "gather" not in program
    assert "scatter" not in program


def test_logits_that_are_far_apart_or_infinite():
    rows = [[-1e30, 1e30, 0], [88, 89, 90], [-jnp.inf, 0, -jnp.inf], [jnp.inf, 0, 0], [-jnp.inf] * 3, [jnp.nan, 0, 0]]
    losses, hits = with_labels(0.0, jnp.array(rows), jnp.array([1, 2, 1, 1, 0, 1]))
    np.testing.assert_allclose(losses, [0, 0.4076059, 0, jnp.inf, jnp.nan, jnp.nan], rtol=1e-6)
    assert hits.tolist() == [True, True, True, False, False, False]


@pytest.mark.parametrize("label", [-1, 3, 255])
def test_a_label_that_is_no_class_makes_loss_and_gradient_nan(label):
    labels = jnp.array([0, label])
    losses, grads = jax.vmap(jax.value_and_grad(cross_entropy))(jnp.array(LOGITS), labels)
    assert np.isnan(losses).tolist() == [False, True]
    assert np.isnan(grads).tolist() == [[False] * 3, [True] * 3]

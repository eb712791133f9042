"""The cross entropy with labels: exact, with a derivative of its own, and chunk by chunk."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mpjax.precision.casting.walk import equations
from mpjax.training.cross_entropy import in_chunks, predicted, with_labels
from mpjax.training.losses import cross_entropy


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


# Chunks

FEATURES, VOCABULARY = 4, 9


def of_tokens(chunk, dtype=jnp.float32):
    """The loss of 2 x 5 tokens as a function of features and a table, and its arguments."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (2, 5, FEATURES), dtype)
    table = jax.random.normal(keys[1], (FEATURES, VOCABULARY), jnp.float32)
    labels = jax.random.randint(keys[2], (2, 5), 0, VOCABULARY)

    def loss(x, table):
        def of_logits(x, labels):
            return (cross_entropy(x @ table.astype(x.dtype), labels, label_smoothing=0.1),)

        (losses,) = in_chunks(of_logits, chunk, x, labels) if chunk else of_logits(x, labels)
        assert losses.shape == (2, 5)
        return jnp.mean(losses)

    return jax.value_and_grad(loss, argnums=(0, 1)), (x, table)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 3, 5, 10, 64])
def test_loss_and_gradients_in_chunks_are_those_of_all_tokens(chunk):
    whole, inputs = of_tokens(0)
    parts, _ = of_tokens(chunk)
    for one, other in zip(jax.tree.leaves(whole(*inputs)), jax.tree.leaves(parts(*inputs)), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-7)


def test_logits_of_all_tokens_never_exist():
    def largest(chunk):
        program, inputs = of_tokens(chunk)
        jaxpr = jax.make_jaxpr(program)(*inputs)
        shapes = [x.aval.shape for _, eqn in equations(jaxpr) for x in eqn.outvars]
        return max(int(np.prod(shape[:-1])) for shape in shapes if shape[-1:] == (VOCABULARY,))

    assert largest(0) == 10
    assert largest(2) == 4  # the table's gradient, of which there are FEATURES rows


def test_gradients_of_the_table_are_added_in_its_own_dtype():
    grads = of_tokens(2, jnp.bfloat16)
    assert [g.dtype for g in grads[0](*grads[1])[1]] == [jnp.bfloat16, jnp.float32]

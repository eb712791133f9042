"""A loss in chunks of tokens: its sums, its gradients and its steps are those with the logits of all tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from mpjax.diagnosis import diagnose
from mpjax.precision import apply_policy, static_loss_scaling
from mpjax.precision.casting import autocast, equations
from mpjax.training import (
    Layout,
    RunObjective,
    create_state,
    in_chunks,
    language_modeling,
    make_mesh,
    make_train_step,
    sums_in_chunks,
    take_apart,
    uncast,
    with_labels,
)


FEATURES, VOCABULARY = 4, 9


def of_tokens(chunk, dtype=jnp.float32, *, unit=0.1, cotangent=0.1):
    """The scaled loss of 2 x 5 tokens as a function of features and a table, with the hits, and its arguments."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (2, 5, FEATURES)).astype(dtype)
    table = jax.random.normal(keys[1], (FEATURES, VOCABULARY))
    labels = jax.random.randint(keys[2], (2, 5), 0, VOCABULARY)

    def loss(x, table):
        def of_logits(x, labels):
            losses, hits = with_labels(0.1, x @ table.astype(x.dtype), labels)
            return losses, hits.astype(jnp.float32)

        if chunk:
            total, hits = sums_in_chunks(of_logits, chunk, x, labels, unit=jnp.float32(unit))
        else:
            total, hits = map(jnp.sum, of_logits(x, labels))
        return cotangent * total, hits

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True), (x, table)


@pytest.mark.parametrize("cotangent", [0.1, -3.0, 0.0])
@pytest.mark.parametrize("chunk", [1, 3, 5, 10, 64])
def test_sums_and_gradients_in_chunks_are_those_of_all_tokens(chunk, cotangent):
    whole, inputs = of_tokens(0, cotangent=cotangent)
    chunked, _ = of_tokens(chunk, cotangent=cotangent)
    for one, other in zip(jax.tree.leaves(whole(*inputs)), jax.tree.leaves(chunked(*inputs)), strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-6 * float(jnp.max(jnp.abs(one))))


@pytest.mark.parametrize("scale", [2.0**15, 1e-5])
def test_float16_gradients_in_chunks_are_rounded_like_those_of_all_tokens(scale):
    """A scale of 1e-5 loses most bits: they are lost in chunks too, and so neither is an overflow hidden."""
    whole, inputs = of_tokens(0, jnp.float16, cotangent=scale / 10)
    chunked, _ = of_tokens(10, jnp.float16, cotangent=scale / 10, unit=scale / 10)
    for one, other in zip(jax.tree.leaves(whole(*inputs)), jax.tree.leaves(chunked(*inputs)), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(other, one)


def test_gradients_of_a_table_in_half_precision_add_up_in_float32():
    """2,000 times 1 in bfloat16 is 256."""

    def loss(table):
        def of_chunk(x, labels):
            return (x @ table).astype(jnp.float32)[:, 0], jnp.zeros(1)

        ones, labels = jnp.ones((1, 2000, 1), jnp.bfloat16), jnp.zeros((1, 2000), jnp.int32)
        return sums_in_chunks(of_chunk, 1, ones, labels, unit=jnp.float32(1))[0]

    assert jax.grad(loss)(jnp.ones((1, 1), jnp.bfloat16)).item() == 2000


def test_results_of_each_token_in_chunks():
    (results,) = in_chunks(lambda x, y: (x[:, 0] * y,), 4, jnp.arange(10.0).reshape(2, 5, 1), jnp.full((2, 5), 2.0))
    assert results.tolist() == [[0, 2, 4, 6, 8], [10, 12, 14, 16, 18]]


def test_logits_of_all_tokens_never_exist():
    def largest(chunk):
        program, inputs = of_tokens(chunk)
        jaxpr = jax.make_jaxpr(program)(*inputs)
        shapes = [x.aval.shape for _, eqn in equations(jaxpr) for x in eqn.outvars]
        return max(int(np.prod(shape[:-1])) for shape in shapes if shape[-1:] == (VOCABULARY,))

    assert largest(0) == 10
    assert largest(2) == 4  # the table's gradient, of which there are FEATURES rows


def test_gradients_have_the_dtypes_of_features_and_table():
    grads = of_tokens(2, jnp.bfloat16)
    assert [g.dtype for g in grads[0](*grads[1])[1]] == [jnp.bfloat16, jnp.float32]


# Steps


class Bigrams(nnx.Module):
    """Predicts each next token of 11 from the token before it."""

    def __init__(self, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(11, 6, rngs=rngs)
        self.mix = nnx.Linear(6, 6, rngs=rngs)
        self.head = nnx.Linear(6, 11, rngs=rngs)

    def __call__(self, tokens):
        return self.logits(self.features(tokens))

    def features(self, tokens):
        return self.mix(self.tokens(tokens))

    def logits(self, features):
        return self.head(features)


def after_a_step(chunk, policy, scale, accumulate=1, devices=1, cast=uncast):
    """The metrics of a step of gradient descent at rate 1, and the parameters after it."""
    model = Bigrams(nnx.Rngs(0))
    apply_policy(model, policy if cast is uncast else "float32")
    structure, params, stats = take_apart(model)
    tx = static_loss_scaling(optax.sgd(1.0), scale)
    state = create_state(params, stats, tx)
    layout = None
    if devices > 1:
        layout = Layout(make_mesh(jax.devices()[:devices]))
        state = jax.device_put(state, layout.state(state))
    loss = RunObjective(language_modeling(label_smoothing=0.1, chunk=chunk)).loss
    step = make_train_step(structure, tx, loss, accumulate=accumulate, layout=layout, cast=cast)
    tokens = jax.random.randint(jax.random.key(1), (4, 6), 0, 11)
    state, metrics = jax.device_get(step(state, {"tokens": tokens}))
    return {name: metrics[name] for name in ("loss", "accuracy", "grad_norm", "finite")}, state.params


@pytest.mark.parametrize(
    ("policy", "scale", "more", "tolerance"),
    [
        ("float32", 1.0, {}, 1e-6),
        ("float32", 1.0, {"accumulate": 2}, 1e-6),
        ("float32", 1.0, {"devices": 2}, 1e-6),
        ("mixed_bfloat16", 1.0, {}, 2e-3),
        ("mixed_float16", 2.0**15, {}, 3e-4),
        ("mixed_float16", 2.0**15, {"devices": 2}, 3e-4),
        ("mixed_float16", 2.0**15, {"cast": functools.partial(autocast, policy="mixed_float16")}, 3e-4),
    ],
)
def test_a_step_in_chunks_is_the_step_with_all_logits(policy, scale, more, tolerance):
    """Chunks of 7 tokens of 20: the last has 6, and zeros fill it up."""
    (values, params), (of_chunks, after) = (after_a_step(chunk, policy, scale, **more) for chunk in (0, 7))
    for name in values:
        np.testing.assert_allclose(of_chunks[name], values[name], rtol=max(tolerance, 1e-6), err_msg=name)
    for name in params:
        np.testing.assert_allclose(after[name], params[name], rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("scale", [2.0**15, 2.0**24])
def test_a_scale_overflows_in_chunks_where_it_overflows_for_all_logits(scale):
    """Chunks that had gradients without the scale would find 2^24 finite, and never lower it."""
    finite = {after_a_step(chunk, "mixed_float16", scale)[0]["finite"].item() for chunk in (0, 7)}
    assert finite == {float(scale == 2.0**15)}


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [0, 7])
def test_a_diagnosis_differentiates_chunks_with_the_loss_scale(chunk):
    loss = RunObjective(language_modeling(chunk=chunk)).loss
    tokens = jax.random.randint(jax.random.key(1), (4, 6), 0, 11)
    found = diagnose(
        Bigrams(nnx.Rngs(0)),
        lambda model, batch: loss(model, batch, jax.random.key(0))[0].value,
        {"tokens": tokens},
        policy="mixed_float16",
        loss_scale=2.0**24,
    )
    assert (found.verdict, found.verified) == ("loss_scale", True)

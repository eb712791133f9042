"""A language model that is called with parts of texts computes what it does with whole ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mpjax.errors import UsageError
from mpjax.models import PartsOfTexts, WholeTexts, attend
from mpjax.precision.casting import equations
from mpjax.training import Mean, instructions, language_modeling, make_mesh


PARTS = PartsOfTexts("context", 2)
HALVES = P(None, "context")


def on_two(function, in_specs, out_specs=HALVES):
    mesh = make_mesh(jax.devices()[:2], data=1, context=2)
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))


def heads(key_heads: int, dtype: str, length: int = 6):
    query, key, value = (
        jax.random.normal(jax.random.key(seed), (2, length, count, 8), dtype)
        for seed, count in ((0, 4), (1, key_heads), (2, key_heads))
    )
    return query, key, value


SEGMENTS = jnp.asarray([[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1]], jnp.int32)


@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("options", [{"is_causal": True}, {"is_causal": True, "window": 3, "cap": 5.0}, {}])
def test_attention_and_its_gradients_are_those_of_whole_texts(key_heads, options):
    def whole(query, key, value):
        return attend(query, key, value, segments=SEGMENTS, implementation="xla", **options)

    def parts(query, key, value):
        within = PARTS.attend(functools.partial(attend, segments=SEGMENTS))
        return within(query, key, value, implementation="xla", **options)

    inputs, weights = heads(key_heads, "float32"), jax.random.normal(jax.random.key(9), (2, 6, 4, 8))
    parted = on_two(parts, (HALVES,) * 3)
    np.testing.assert_allclose(parted(*inputs), whole(*inputs), rtol=1e-6, atol=1e-6)

    def gradients(function):
        return jax.grad(lambda *inputs: jnp.sum(weights * function(*inputs)), (0, 1, 2))(*inputs)

    for one, other in zip(gradients(parted), gradients(whole), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_the_gradient_of_a_key_head_that_several_devices_read_is_added_in_float32():
    """In bfloat16, 1 + 2 ** -8 is 1."""
    repeated = functools.partial(PartsOfTexts("context", 4)._repeated, heads=4)
    cotangent = jnp.asarray([1, 2**-8, 2**-8, 2**-8], jnp.bfloat16).reshape(1, 1, 4, 1)
    backward = jax.vjp(repeated, jnp.ones((1, 1, 1, 1), jnp.bfloat16))[1]
    sums = [eqn for _, eqn in equations(jax.make_jaxpr(backward)(cotangent).jaxpr) if "sum" in eqn.primitive.name]
    assert [str(eqn.invars[0].aval.dtype) for eqn in sums] == ["float32"]
    assert float(backward(cotangent)[0][0, 0, 0, 0]) == 1.015625


def test_places_rows_and_own_positions_are_those_in_the_whole_text():
    table = jnp.arange(12.0).reshape(6, 2)
    tokens = jnp.arange(12, dtype=jnp.int32).reshape(2, 6)

    def found(own):
        whole = PARTS.whole(own)
        return PARTS.places(3)[None], PARTS.rows(table, 3), PARTS.own(whole), jnp.max(jnp.abs(whole - tokens))[None]

    places, rows, own, difference = on_two(found, (HALVES,), (HALVES, P("context"), HALVES, P("context")))(tokens)
    assert places.tolist() == [[0, 1, 2, 3, 4, 5]]
    assert np.array_equal(rows, table)
    assert np.array_equal(own, tokens)
    assert difference.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("heads", "key_heads", "advice"),
    [(6, 6, 3), (6, 2, 2), (5, 1, 1)],
)
def test_heads_that_do_not_divide_are_named_with_a_size_that_does(heads, key_heads, advice):
    parts = PartsOfTexts("context", 4)
    key = jax.ShapeDtypeStruct((1, 2, key_heads, 8), jnp.float32)
    with pytest.raises(
        UsageError,
        match=f"--mesh.context 4 does not divide the {heads} heads of .* --mesh.data -1 --mesh.context {advice}$",
    ):
        parts._repeated(key, heads)


class Bigrams:
    """A language model that predicts each token from the one before it."""

    def __init__(self, context):
        self.context = context

    def __call__(self, tokens):
        return self.logits(self.features(tokens))

    def features(self, tokens):
        return jax.nn.one_hot(tokens, 8)

    def logits(self, features):
        return features @ jax.random.normal(jax.random.key(3), (8, 8))


@pytest.mark.parametrize("objective", [language_modeling(), language_modeling(chunk=2), instructions(chunk=2)])
def test_parts_of_a_loss_add_up_to_the_loss_of_whole_texts(objective):
    """The answers are all in the second half."""

    def sums(context, tokens, answers):
        found = objective(Bigrams(context), {"tokens": tokens, "answers": answers}, None)["loss"]
        found = found if isinstance(found, Mean) else Mean(found, jnp.ones_like(found))
        return jax.tree.map(jnp.sum, found)

    def added(tokens, answers):
        return jax.tree.map(lambda x: jax.lax.psum(x, "context")[None], sums(PARTS, tokens, answers))

    tokens = jax.random.randint(jax.random.key(4), (2, 7), 0, 8)
    answers = jnp.asarray([[0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 1, 0]], bool)
    parts, whole = on_two(added, (P(), P()), P())(tokens, answers), sums(WholeTexts(), tokens, answers)
    np.testing.assert_allclose(parts.total[0], whole.total, rtol=1e-6)
    assert float(parts.weight[0]) == float(whole.weight) > 3

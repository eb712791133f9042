"""Gradients that are sums over a batch, in float32 whatever the layer computes in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mpjax import apply_policy


NORMAL = jax.nn.initializers.normal(1.0)


def layer(kind, rngs=None):
    rngs = nnx.Rngs(0) if rngs is None else rngs
    return {
        "linear": lambda: nnx.Linear(4, 8, rngs=rngs),
        "general": lambda: nnx.LinearGeneral(4, (2, 4), rngs=rngs),
        "batched": lambda: nnx.LinearGeneral(4, 8, batch_axis={0: 2}, rngs=rngs),
        "conv": lambda: nnx.Conv(4, 8, (3, 3), rngs=rngs),
        "grouped": lambda: nnx.Conv(4, 8, (3, 3), feature_group_count=2, rngs=rngs),
        "transposed": lambda: nnx.ConvTranspose(4, 8, (2, 2), strides=2, rngs=rngs),
    }[kind]()


def inputs(kind):
    shape = {"linear": (2, 3, 4), "general": (2, 3, 4), "batched": (2, 3, 4)}.get(kind, (2, 6, 6, 4))
    return jax.random.normal(jax.random.key(1), shape)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("kind", ["linear", "general", "batched", "conv", "grouped", "transposed"])
def test_results_are_those_of_flax_in_half_precision_bit_for_bit(kind, dtype):
    ours, flax = layer(kind), layer(kind)
    for module in (ours, flax):
        module.bias.set_value(jax.random.normal(jax.random.key(2), module.bias.shape))
    apply_policy(ours, f"params=float32,compute={jnp.dtype(dtype).name},output={jnp.dtype(dtype).name}")
    flax.dtype = dtype
    with jax.numpy_dtype_promotion("standard"):
        got, expected = ours(inputs(kind)), flax(inputs(kind))
    assert got.dtype == dtype
    assert np.array_equal(got, expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linear", "general", "conv", "grouped", "transposed"])
def test_the_gradient_of_a_bias_is_summed_in_float32(kind):
    module, x = layer(kind), inputs(kind)
    apply_policy(module, "mixed_float16")
    graph, params = nnx.split(module)
    # float16 has 2048 and 2050 and nothing between, so that ones added to 2048 are lost.
    weights = jnp.ones(module(x).shape).at[0].set(2048.0)

    def loss_of(params):
        return jnp.sum(nnx.merge(graph, params)(x) * weights)

    expected = weights.reshape(-1, *module.bias.shape).sum(0)
    assert np.array_equal(jax.grad(loss_of)(params)["bias"][...], expected)


def test_the_gradient_of_a_bias_with_batch_axes_is_summed_in_float32_over_the_others():
    module = layer("batched")
    apply_policy(module, "mixed_float16")
    graph, params = nnx.split(module)
    weights = jnp.ones((2, 3, 8)).at[:, 0].set(2048.0)
    grads = jax.grad(lambda params: jnp.sum(nnx.merge(graph, params)(inputs("batched")) * weights))(params)
    assert np.array_equal(grads["bias"][...], np.full((2, 8), 2050.0))


def test_a_sum_of_a_million_pixels_is_whole():
    module = nnx.Conv(1, 1, (1, 1), rngs=nnx.Rngs(0))
    apply_policy(module, "mixed_float16")
    graph, params = nnx.split(module)
    x = jnp.zeros((1, 1024, 1024, 1))
    grad = jax.jit(jax.grad(lambda params: jnp.sum(nnx.merge(graph, params)(x))))(params)
    assert float(grad["bias"][...][0]) == 2**20  # which float16 does not have at all


def test_the_gradient_of_an_embedding_is_summed_in_float32_and_only_rows_are_cast():
    module = nnx.Embed(5, 4, rngs=nnx.Rngs(0))
    apply_policy(module, "mixed_float16")
    graph, params = nnx.split(module)
    tokens = jnp.zeros(5000, jnp.int32)

    def loss_of(params):
        return jnp.sum(nnx.merge(graph, params)(tokens).astype(jnp.float32))

    assert np.array_equal(jax.grad(loss_of)(params)["embedding"][...][0], np.full(4, 5000.0))
    casts = [
        eqn
        for eqn in jax.make_jaxpr(lambda p: nnx.merge(graph, p)(tokens))(params).eqns
        if eqn.primitive.name == "convert_element_type" and eqn.params["new_dtype"] == jnp.float16
    ]
    assert [eqn.outvars[0].aval.shape for eqn in casts] == [(5000, 4)]


def test_an_embedding_used_for_logits_computes_them_in_half_precision():
    module = nnx.Embed(5, 4, rngs=nnx.Rngs(0))
    apply_policy(module, "p=f32,c=f16,o=f16")
    assert module.attend(jnp.ones((2, 4))).dtype == jnp.float16
    assert module.dtype == jnp.float16


def test_a_layer_without_a_bias_needs_nothing():
    bare = nnx.Linear(4, 8, use_bias=False, rngs=nnx.Rngs(0))
    apply_policy(bare, "mixed_float16")
    assert bare(jnp.ones((2, 4))).shape == (2, 8)


def test_a_later_policy_takes_it_back():
    module = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
    apply_policy(module, "mixed_float16")
    apply_policy(module, "float32")
    x = jnp.ones((2, 4))
    equations = jax.make_jaxpr(module)(x).eqns
    assert {eqn.outvars[0].aval.dtype for eqn in equations} == {jnp.dtype("float32")}


def test_a_users_subclass_keeps_its_own_call():
    class Doubled(nnx.Linear):
        def __call__(self, x):
            return super().__call__(x) * 2

    module, plain = Doubled(4, 8, rngs=nnx.Rngs(0)), nnx.Linear(4, 8, rngs=nnx.Rngs(0))
    for each in (module, plain):
        each.bias.set_value(jnp.ones(8))
        apply_policy(each, "p=f32,c=f16,o=f16")
    x = jnp.ones((2, 4))
    assert np.array_equal(module(x), 2 * plain(x))


@pytest.mark.parametrize("transform", [jax.vmap, lambda f: lambda x: jax.jvp(f, (x,), (x,))[1], jax.jit])
def test_all_transformations_pass_through(transform):
    module = layer("linear")
    apply_policy(module, "mixed_float16")
    assert transform(module)(inputs("linear")).shape == (2, 3, 8)


def test_models_after_the_same_policy_have_equal_graphs():
    one, other = layer("conv"), layer("conv")
    for module in (one, other):
        apply_policy(module, "mixed_float16")
    assert nnx.graphdef(one) == nnx.graphdef(other)
    assert isinstance(one, nnx.Conv)
    assert type(one).__name__ == "Conv"


@pytest.mark.slow
@settings(max_examples=25)
@example(batch=(3,), others=(3,), features=(4,), bias=True)
@given(
    batch=st.lists(st.integers(1, 3), max_size=2).map(tuple),
    others=st.lists(st.integers(1, 3), max_size=2).map(tuple),
    features=st.lists(st.integers(1, 3), min_size=1, max_size=2).map(tuple),
    bias=st.booleans(),
)
def test_a_bias_of_any_linear_general_is_added_by_axis_and_not_by_length(batch, others, features, bias):
    """Lengths repeat: only the axes tell where a bias belongs."""
    settings = {"batch_axis": dict(enumerate(batch)), "use_bias": bias, "bias_init": NORMAL}
    ours, flax = (nnx.LinearGeneral(2, features, **settings, rngs=nnx.Rngs(0)) for _ in range(2))
    apply_policy(ours, "params=float32,compute=float16,output=float16")
    flax.dtype = jnp.float16
    x = jnp.asarray(np.random.default_rng(0).normal(size=(*batch, *others, 2)), jnp.float16)
    assert np.asarray(ours(x)).tobytes() == np.asarray(flax(x)).tobytes()

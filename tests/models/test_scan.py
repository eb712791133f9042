"""Blocks compiled as one loop compute what they compute one by one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.errors import UsageError
from mpjax.models.gpt2 import GPT2
from mpjax.models.scan import through
from mpjax.precision import apply_policy, name_scopes
from mpjax.training.remat import apply_remat


TOKENS = jnp.arange(12).reshape(2, 6) % 11


class Narrow(nnx.Module):
    def __call__(self, x):
        return x.astype(jnp.float16)


def model(scan, *, policy="float32", dropout=0.0, depth=3, remat="none"):
    made = GPT2(
        vocabulary=11, length=6, width=8, depth=depth, heads=2, dropout=dropout, scan_blocks=scan, rngs=nnx.Rngs(0)
    )
    name_scopes(made)
    apply_policy(made, policy)
    apply_remat(made, remat)
    return made


def loss_and_gradients(made):
    graph, params, rest = nnx.split(made, nnx.Param, ...)

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(params, rest):
        made = nnx.merge(graph, params, rest, copy=True)
        total = jnp.mean(jnp.square(made(TOKENS).astype(jnp.float32)))
        return total, nnx.split(made, nnx.Param, ...)[2]

    (value, rest), grads = loss(params, rest)
    return value, nnx.to_pure_dict(grads), rest


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_loss_and_gradients_are_those_of_blocks_one_by_one(policy, remat):
    value, grads, _ = loss_and_gradients(model(False, policy=policy))
    scanned, gradients, _ = loss_and_gradients(model(True, policy=policy, remat=remat))
    exact = policy == "float32"
    assert float(scanned) == pytest.approx(float(value), rel=1e-6 if exact else 1e-3)
    for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4 if exact else 0.1, atol=1e-7 if exact else 1e-3)


def test_blocks_drop_different_features_and_keep_their_streams():
    """The counters of the random streams go on as they do block by block."""
    results = [loss_and_gradients(model(scan, dropout=0.5)) for scan in (False, True)]
    assert float(results[1][0]) == pytest.approx(float(results[0][0]), rel=1e-6)
    counts = [
        [int(x) for x in jax.tree.leaves(rest) if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
        for _, _, rest in results
    ]
    assert counts[0] == counts[1]
    assert sum(counts[0]) > 0


def test_the_program_is_as_long_for_nine_blocks_as_for_three():
    """But for the arrays that are stacked."""

    def products(depth):
        made = model(True, depth=depth)
        graph, state = nnx.split(made)
        text = jax.jit(lambda state: nnx.merge(graph, state)(TOKENS)).lower(state).as_text()
        return text.count("dot_general")

    assert products(3) == products(9) == 9


def test_a_rule_for_one_block_is_an_error():
    with pytest.raises(UsageError, match="block 1 differs from block 0, in structure, in precision"):
        model(True, policy="mixed_float16;blocks/1/mlp/up=float32")(TOKENS)
    assert model(True, policy="mixed_float16;blocks/*/mlp/up=float32")(TOKENS).shape == (2, 6, 11)


def test_a_block_that_changes_the_dtype_is_an_error():
    with pytest.raises(UsageError, match=r"a block makes float16\[2\] of float32\[2\]"):
        through([Narrow(), Narrow()], jnp.ones(2), scan=True)

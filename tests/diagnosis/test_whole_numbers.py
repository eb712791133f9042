"""Whole numbers that are held as floats and become indices: half precision takes other rows, which is a fault."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from mpjax.diagnosis import WITHOUT_ROUNDING, Reference, diagnose, outputs_of, program_of_function
from mpjax.precision import get_policy


def _index(x: jax.Array) -> jax.Array:
    return x.astype(jnp.int32)


ODD = jnp.arange(2051.0, 4096.0, 34.0)

FAST = ("positions", "ceil", "sorted")
INDICES = {
    "ids": (_index, ODD),
    "positions": (lambda steps: _index(jnp.cumsum(steps)) - 1, jnp.full(1300, 3.0)),
    "buckets": (lambda x: _index(x // 3), ODD),
    "floor": (lambda x: _index(jnp.floor(x / 5)), ODD),
    "ceil": (lambda x: _index(jnp.ceil(x / 5)), ODD),
    "remainder": (lambda x: _index(x % 64), ODD),
    "half": (lambda x: _index((x + 1) / 2), ODD),
    "distance": (lambda x: _index(jnp.abs(x - x[::-1])), jnp.cumsum(jnp.arange(1.0, 80.0))),
    "reversed": (lambda x: _index(4095 - x), ODD),
    "packed": (lambda x: _index(x * 2 + 1) % 4096, ODD / 4),
    "sorted": (lambda x: jnp.searchsorted(jnp.arange(4096.0).astype(x.dtype), x), ODD),
    "compared": (lambda x: jnp.digitize(x, jnp.arange(4096.0).astype(x.dtype)) - 1, ODD),
}


class Looked(nnx.Module):
    """Rows of a table: small ones in float32, and a large one wherever half precision takes another."""

    def __init__(self, index, x):
        self.index, self.dtype = index, jnp.float32
        rows = jnp.full((4096, 2), 3.3).at[index(x)].set(0.13)
        self.table = nnx.Param(rows)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.table[...].astype(self.dtype)[self.index(x.astype(self.dtype))]


class Net(nnx.Module):
    def __init__(self, index, x):
        self.embed = Looked(index, x)

    def __call__(self, x):
        return self.embed(x)


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        pytest.param(name, policy, marks=[] if name in FAST else pytest.mark.slow)
        for name, policy in zip(INDICES, itertools.cycle(("mixed_float16", "mixed_bfloat16")), strict=False)
    ],
)
def test_another_row_is_rounding_in_the_module_that_takes_it(name, policy):
    index, x = INDICES[name]
    found = diagnose(
        Net(index, x), lambda model, x: jnp.mean(jnp.square(model(x).astype(jnp.float32))), x, policy=policy
    )
    assert found.loss[0] > 2 * found.loss[1]
    assert (found.verdict, found.path, found.direction) == ("rounding", "embed", "forward")
    assert (found.rules, found.verified) == ({"embed": "float32"}, True)


def _determined(loss_fn, value) -> bool:
    program = program_of_function(lambda params, batch: loss_fn(params), jnp.float32(value), (), get_policy("float32"))
    return Reference(program, outputs_of(WITHOUT_ROUNDING, program, 1.0), 0.05).determined(slice(1))


@pytest.mark.parametrize(
    ("loss_fn", "value", "determined"),
    [
        (jnp.floor, 3.0, True),  # a whole number is exact
        (lambda x: jnp.floor(x * 4), 0.75, True),  # crossed in one direction only
        (lambda x: x - 0.1, 0.1 + 2e-8, False),  # either direction changes it
        (lambda x: x - 33554432.0, 33554436.0, False),  # too large to be a count
        (lambda x: x, 0.1, True),
    ],
)
def test_float32_determines_a_loss_unless_a_nudge_in_either_direction_changes_it(loss_fn, value, determined):
    assert _determined(loss_fn, value) == determined

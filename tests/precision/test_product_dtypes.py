"""What a policy asks of products, by module path."""

import jax.numpy as jnp
import pytest
from flax import nnx

from mpjax.precision import Policy, apply_policy, audit
from mpjax.precision.float8.recipes import FLOAT8
from mpjax.precision.policy import get_policy
from mpjax.precision.product_dtypes import AskedDtypes, asked_dtypes


BF16 = jnp.dtype("bfloat16")


class Net(nnx.Module):
    """A list of three layers of 64, the second one of which is small, between an own product and a head."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        sizes = [(64, 64), (64, 32), (32, 64), (64, 64), (64, 64)]
        self.blocks = nnx.List([nnx.Dict(linear=nnx.Linear(*size, rngs=rngs)) for size in sizes])
        self.head = nnx.Linear(64, 3, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block["linear"](x)
        return self.head(x)


def test_without_a_policy_nothing_is_asked_for():
    assert asked_dtypes(None, {})("blocks/0") is None


def test_large_linear_layers_are_to_be_in_float8_and_others_are_not():
    of = asked_dtypes(get_policy("mixed_float8"), {"": Net()})
    assert of("blocks/0/linear") == AskedDtypes(BF16, FLOAT8, required=True)
    assert of("blocks/1/linear") == AskedDtypes(BF16, refused=True)
    assert of("head") == AskedDtypes(BF16, refused=True)
    assert of("blocks") == AskedDtypes(BF16, FLOAT8)
    assert of("blocks/0/linear").accepted == {jnp.dtype("float8_e4m3fn"), jnp.dtype("float8_e5m2")}
    assert of("head").accepted == {BF16}
    assert of("blocks").accepted == {BF16, jnp.dtype("float8_e4m3fn"), jnp.dtype("float8_e5m2")}


def test_a_small_layer_may_be_in_float8_where_no_rule_takes_it_out():
    of = asked_dtypes(Policy("float32", "bfloat16", products=FLOAT8), {"": Net()})
    assert of("blocks/1/linear") == AskedDtypes(BF16, FLOAT8)
    assert of("head") == AskedDtypes(BF16, refused=True)  # 3 is no multiple of 16


@pytest.mark.parametrize("asked", ["mixed_float8", "mixed_bfloat16"])
@pytest.mark.parametrize("applied", ["mixed_float8", "mixed_bfloat16"])
def test_an_audit_tells_layers_that_are_not_in_the_dtypes_asked_for(asked, applied):
    model = Net()
    apply_policy(model, applied)
    wrong = {row.path for row in audit(model, jnp.ones((16, 64), jnp.bfloat16), policy=asked).products}
    assert wrong == (set() if asked == applied else {f"blocks/{number}/linear" for number in (0, 3, 4)})

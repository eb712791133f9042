"""check_dtypes: passes what is right, names everything that is not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.errors import DtypeError, UsageError
from mpjax.precision import check_dtypes


def test_every_offender_is_named_by_path_with_what_it_has_and_what_was_wanted():
    tree = {
        "conv": [{"w": jnp.zeros(2, jnp.float16)}, {"w": jnp.zeros(2, jnp.float32)}],
        "head": jnp.zeros(2, jnp.bfloat16),
    }
    with pytest.raises(DtypeError) as caught:
        check_dtypes(tree, "float32", name="params")
    assert str(caught.value).splitlines() == [
        "params: 2 leaves are not float32:",
        "  conv/0/w: float16",
        "  head: bfloat16",
        "wanted: float32",
    ]


def test_a_tree_that_keeps_its_promise_passes():
    check_dtypes({"w": jnp.zeros(2, jnp.float16), "v": np.zeros(2, np.float16)}, jnp.float16)


def test_integers_booleans_keys_and_numbers_are_not_looked_at():
    check_dtypes([jnp.arange(3), np.array(True), jax.random.key(0), 1.0, None, "text"], "bfloat16")


def test_abstract_arrays_are_checked():
    with pytest.raises(DtypeError, match="the value itself.: float32"):
        check_dtypes(jax.ShapeDtypeStruct((2,), jnp.float32), "float16")


def test_the_state_of_an_nnx_model_is_checked_by_module_path():
    model = nnx.Sequential(nnx.Linear(1, 1, rngs=nnx.Rngs(0)))
    with pytest.raises(DtypeError, match="layers/0/kernel"):
        check_dtypes(nnx.state(model), "bfloat16")


@pytest.mark.parametrize("kind", [UsageError, ValueError, TypeError])
def test_the_error_is_caught_as_any_of_its_kinds(kind):
    with pytest.raises(kind):
        check_dtypes(jnp.zeros(1), "float16")

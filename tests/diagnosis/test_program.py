"""The step that is diagnosed: what a loss function may give."""

import jax
import jax.numpy as jnp
import pytest

from mpjax.diagnosis import program_of_function
from mpjax.errors import UsageError
from mpjax.precision import get_policy


PARAMS, BATCH = {"w": jnp.ones((2, 2))}, {"x": jnp.ones((3, 2))}
HALF = get_policy("mixed_float16")


def loss(params, batch):
    return jnp.mean(batch["x"] @ params["w"])


@pytest.mark.parametrize("aux", [None, {"accuracy": jnp.float32(1)}, (1, 2)])
def test_a_loss_with_more_beside_it_is_that_loss(aux):
    alone = program_of_function(loss, PARAMS, BATCH, HALF)
    beside = program_of_function(lambda params, batch: (loss(params, batch), aux), PARAMS, BATCH, HALF)
    assert str(beside.jaxpr) == str(alone.jaxpr)


def test_a_parameter_without_a_path_has_a_name_in_messages():
    assert program_of_function(loss, PARAMS, BATCH, HALF).parameter(0) == "w"
    alone = program_of_function(lambda w, batch: loss({"w": w}, batch), PARAMS["w"], BATCH, HALF)
    assert alone.parameter(0) == "the parameter"


def test_flops_are_by_scope_and_leave_padding_out():
    """Along one side of 4 pixels a kernel of 3 has 2 + 3 + 3 + 2 pixels under it; one gradient doubles the count."""

    def convolved(params, batch):
        with jax.named_scope("conv"):
            x = jax.lax.conv_general_dilated(
                batch["image"], params["conv"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
        with jax.named_scope("head"):
            return jnp.mean(jnp.mean(x, axis=(1, 2)) @ params["head"])

    params = {"conv": jnp.ones((3, 3, 5, 6)), "head": jnp.ones((6, 2))}
    program = program_of_function(convolved, params, {"image": jnp.ones((7, 4, 4, 5))}, HALF)
    assert program.flops() == {"conv": 2 * 2 * 7 * 6 * 5 * 10 * 10, "head": 3 * 2 * 7 * 6 * 2}


@pytest.mark.parametrize(
    ("result", "says"),
    [
        ({"loss": 1.0}, r"or a pair \(loss, aux\), got dict"),
        (None, "got NoneType"),
        ((1.0, 2.0, 3.0), "got tuple"),
        (({"loss": 1.0}, 2.0), "got tuple"),
        (jnp.ones(3), r"a floating scalar, got float32\[3\]"),
        (jnp.int32(1), r"a floating scalar, got int32\[\]"),
    ],
)
def test_what_is_no_loss_is_an_error(result, says):
    with pytest.raises(UsageError, match=says):
        program_of_function(lambda params, batch: result, PARAMS, BATCH, HALF)

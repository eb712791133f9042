"""Another loss scale: the nearest power of two that is healthy, with room below it, and beside rules."""

import jax
import jax.numpy as jnp
import pytest

from mpjax.diagnosis import (
    WITHOUT_ROUNDING,
    Reference,
    emulated,
    healthy_scale,
    lower_scale,
    nowhere,
    outputs_of,
    program_of,
    scale_beside_rules,
)


def half_product(weight, x):
    return jnp.sum((weight.astype(jnp.float16) * x.astype(jnp.float16)).astype(jnp.float32))


def step(loss_of, weights=1.0, batch=1.0):
    program = program_of(loss_of, jnp.full(2, weights), {"batch": jnp.full(2, batch)})
    return Reference(program, outputs_of(WITHOUT_ROUNDING, program, 1.0), 0.05), program


def scaled_step(factor):
    """Whose gradients are `factor` each, times the loss scale in float16."""
    return step(lambda weight, x: half_product(weight, x) * factor)


# float16 has 2^-24 and 2^15, and neither 2^-25 nor 2^16.
@pytest.mark.parametrize(
    ("gradient", "scale", "factor", "healthy"),
    [
        (2.0**-30, 1.0, 2.0, 2.0**6),
        (2.0**-60, 1.0, 2.0, None),  # not with 2^24 either
        (1.0, 2.0**20, 0.5, 2.0**15),
        (1.0, 100_000.0, 0.5, 2.0**15),  # the next power of two is 2^16
        (1.75, 40_000.0, 0.5, 2.0**15),
        (50_000.0, 1.5, 0.5, 1.0),
        (2.0**16, 2.0**4, 0.5, None),  # not with 1 either
        (1.0, 100.0, 2.0, 2.0**7),
        (1.0, 2.0**-10, 2.0, 1.0),
    ],
)
def test_the_nearest_power_of_two_that_is_healthy_and_neither_below_1_nor_above_2_to_the_24(
    gradient, scale, factor, healthy
):
    assert healthy_scale(*scaled_step(gradient), scale, factor) == healthy


def test_the_scale_of_the_step_is_not_given_back():
    assert healthy_scale(*scaled_step(1.0), 1024.0, 0.5) == 512.0


def test_a_lower_scale_has_room_for_a_larger_batch_where_room_does_no_harm():
    assert lower_scale(*scaled_step(1.0), 2.0**20) == 2.0**11
    assert lower_scale(*scaled_step(2.0**13), 2.0**20) == 2.0**2  # a sixteenth of it is below 1


def test_what_does_not_round_has_no_part_in_the_scale():
    assert lower_scale(*scaled_step(1.0), 2.0**20, nowhere) == 2.0**15


def two(weight, x):
    """2^20 forward in one module; in the other gradients of four times the loss scale."""
    with jax.named_scope("forward"):
        large = half_product(weight * 2.0**10, x * 2.0**10)
    with jax.named_scope("backward"):
        return half_product(weight, x * 4.0) + large * 2.0**-20


def test_a_scale_beside_rules_is_one_without_what_overflows_forward():
    reference, program = step(two)
    assert lower_scale(reference, program, 2.0**15) is None
    assert scale_beside_rules(reference, program, emulated(program, 2.0**15), 2.0**15) == 2.0**9


def test_there_is_none_where_rules_alone_do():
    reference, program = step(two)
    assert scale_beside_rules(reference, program, emulated(program, 2.0**9), 2.0**9) is None

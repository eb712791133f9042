"""Whether a step is healthy: a loss near the reference's, gradients not lost to zero, and terms that cancel."""

import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.diagnosis import (
    WITHOUT_ROUNDING,
    Reference,
    distance,
    everywhere,
    is_repaired,
    lost_fractions,
    nowhere,
    outputs_of,
    program_of,
)


def product_program(factor):
    """A float16 product [2] of ones, summed in float32 and then made small."""

    def loss_of(weight, x):
        return jnp.sum((weight.astype(jnp.float16) * x.astype(jnp.float16)).astype(jnp.float32)) * factor

    return program_of(loss_of, jnp.ones(2), {"batch": jnp.ones(2)})


def reference_of(program, tolerance=0.05):
    return Reference(program, outputs_of(WITHOUT_ROUNDING, program, 1.0), tolerance)


@pytest.mark.parametrize(
    ("wanted", "got", "far"),
    [
        ([[3.0, 4.0]], [[3.0, 4.0]], 0.0),
        ([[3.0], [4.0]], [[3.0], [0.0]], 0.8),
        ([[0.0]], [[0.0]], 0.0),
        ([[0.0]], [[1e-9]], 1.0),
        ([[1e30]], [[2e30]], 1.0),
    ],
)
def test_a_distance_is_a_share_of_all_that_was_wanted_together(wanted, got, far):
    as_arrays = [[np.array(values, np.float32) for values in arrays] for arrays in (wanted, got)]
    assert distance(*as_arrays) == pytest.approx(far)


def test_a_loss_scale_is_taken_out_before_anything_is_compared():
    reference = Reference(None, [np.float32(2), np.array([1.0, -1.0])], 0.05)
    low = [np.float32(2 * 1024), np.array([1024.0, -1024.0])]
    assert reference.has_loss(low, 1024.0)
    assert reference.gradient_error(low, 1024.0) == 0
    assert reference.gradient_error(low, 512.0) == 1


def test_a_loss_or_a_gradient_that_is_nan_is_not_accurate():
    reference = Reference(None, [np.float32(2), np.ones(2)], 0.05)
    assert not reference.has_loss([np.float32(np.nan), np.ones(2)], 1.0)
    assert not reference.has_loss([np.float32(2), np.full(2, np.nan)], 1.0)


def test_gradients_that_become_zero_are_lost_and_with_a_larger_loss_scale_are_not():
    program = product_program(2.0**-30)
    reference = reference_of(program)
    for scale, share in ((4.0, 1.0), (2.0**10, 0.0)):
        low = [np.float32(scale * 2.0**-29), np.full(2, (1 - share) * scale * 2.0**-30)]
        assert lost_fractions(reference, program, scale, low) == [share]
        assert is_repaired(reference, program, scale) == (share == 0)


def test_a_step_is_repaired_where_what_went_wrong_does_not_round():
    program = product_program(2.0**-30)
    reference = reference_of(program)
    assert is_repaired(reference, program, 1.0, nowhere)
    assert not is_repaired(reference, program, 1.0, everywhere)


def test_a_step_that_is_not_finite_is_not_repaired():
    program = product_program(1.0)
    assert not is_repaired(reference_of(program), program, 2.0**16)
    assert is_repaired(reference_of(program), program, 2.0**15)


def test_terms_are_added_up_whatever_their_signs():
    def loss_of(weight, x):
        return jnp.sum(weight * x) - jnp.mean(x)

    program = program_of(loss_of, jnp.float32([1, 1, 1, 1]), {"batch": jnp.float32([3, -3, 2, -1])})
    assert reference_of(program).terms == 9 + 9 / 4


def test_a_loss_cancels_where_it_and_its_error_are_little_of_its_terms():
    program = program_of(lambda w, x: jnp.sum(w * x), jnp.float32([1, 1]), {"batch": jnp.float32([100, -99])})
    reference = reference_of(program, tolerance=0.05)  # of 199
    assert reference.terms_cancel([np.float32(9)], 1.0)
    assert not reference.terms_cancel([np.float32(12)], 1.0)
    assert reference.terms_cancel([np.float32(9 * 4)], 4.0)
    large = reference_of(product_program(1.0))
    assert not large.terms_cancel([np.float32(2)], 1.0)  # without an error, but all of its terms

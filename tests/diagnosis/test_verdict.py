"""What counts as wrong, and what is said of it: constants, ranges and bits that half precision has not."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.diagnosis import all_finite, diagnose, diagnose_function, flushed_fraction, loss_error


class Layer(nnx.Module):
    """A parameter of 1 times a function, in the dtype that the policy sets, of the input."""

    def __init__(self, function):
        self.function = function
        self.weight = nnx.Param(jnp.ones(()))
        self.dtype = jnp.float32

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.weight[...].astype(self.dtype) * self.function(x.astype(self.dtype))


class Model(nnx.Module):
    def __init__(self, function):
        self.layer = Layer(function)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layer(x)


def found(function, x, policy="mixed_float16", **options):
    """The diagnosis of the mean square of a layer's results."""

    def loss_fn(model, x):
        return jnp.mean(jnp.square(model(x).astype(jnp.float32)))

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "overflow encountered in cast")  # of a constant
        return diagnose(Model(function), loss_fn, jnp.asarray(x, jnp.float32), policy=policy, **options)


def place(diagnosis):
    return diagnosis.verdict, diagnosis.path, diagnosis.direction, diagnosis.operation


def test_a_constant_that_is_zero_in_half_precision_is_underflow():
    diagnosis = found(lambda x: x / (x + 1e-8), [0.0, 1.0])
    assert place(diagnosis) == ("underflow", "layer", "forward", "constant 1e-08")
    assert "constant 1e-08 in layer" in diagnosis.evidence
    assert "underflow to zero in float16, so div in layer" in diagnosis.evidence
    assert diagnosis.rules == {"layer": "float32"}
    assert diagnosis.verified
    assert np.isfinite(diagnosis.loss[1])


def test_the_share_of_one_operation_is_told_beside_that_of_its_module_in_the_table():
    diagnosis = found(lambda x: x * 40000 + 1, [[1.0, 2.0]])
    assert "1 of 2 values of mul in layer" in diagnosis.evidence
    row = next(row for row in diagnosis.table if (row.path, row.direction) == ("layer", "forward"))
    assert 0 < row.overflow < 0.5
    told = f"Of all half-precision results of layer (forward), {100 * row.overflow:.1f} % overflow: this share is in"
    assert told in diagnosis.evidence
    assert f"  {100 * row.overflow:.1f}  " in str(diagnosis)


def test_a_small_constant_that_is_not_zero_in_half_precision_is_not_named():
    diagnosis = found(lambda x: x / (x + 1e-8) + 1e-5, [0.0, 1.0])
    assert "constant 1e-08 in layer" in diagnosis.evidence
    assert "1e-05" not in diagnosis.evidence


def test_a_constant_that_is_infinite_in_half_precision_is_overflow():
    diagnosis = found(lambda x: (x + 1e6) - (x + 1e6), [0.0, 1.0])
    assert place(diagnosis) == ("overflow", "layer", "forward", "constant 1e+06")
    assert "overflow in float16 (magnitudes up to 2^20)" in diagnosis.evidence
    assert diagnosis.rules == {"layer": "float32"}


def test_a_constant_that_is_rounded_in_half_precision_is_rounding():
    diagnosis = found(lambda x: jnp.log(1.0001 - x), [0.0, 1.0])
    assert place(diagnosis) == ("rounding", "layer", "forward", "log")
    assert "1 of 2 values of log in layer" in diagnosis.evidence
    assert diagnosis.rules == {"layer": "float32"}


def test_a_constant_that_bfloat16_has_is_no_fault_of_it():
    assert found(lambda x: x / (x + 1e-8), [0.0, 1.0], "mixed_bfloat16").verdict == "healthy"


@pytest.mark.parametrize(
    ("policy", "x"), [("mixed_float16", 10.0), ("mixed_bfloat16", 6.0)], ids=["float16", "bfloat16"]
)
def test_the_logarithm_of_1_minus_a_probability_that_is_rounded_to_1_is_rounding(policy, x):
    diagnosis = found(lambda x: jnp.log(1 - jax.nn.sigmoid(x)), [0.0, x], policy)
    assert place(diagnosis) == ("rounding", "layer", "forward", "log")
    assert "1 of 2 values of log" in diagnosis.evidence
    assert "and not the range of" in diagnosis.evidence
    assert diagnosis.rules == {"layer": "float32"}


def half(x):
    """A probability that the code itself rounds: that of 10.0 is 1 in both half precisions."""
    return jax.nn.sigmoid(x.astype(jnp.float32)).astype(x.dtype)


CHOSEN = {
    "a logarithm": (lambda x: jnp.log(1 - half(x)), "log"),
    "an entropy": (lambda x: jax.scipy.special.rel_entr(1.0, 1 - half(x)), "select_n"),
    "inf for 1": (lambda x: jnp.where(half(x) < 1, x, jnp.inf), "select_n"),
    "nan for 1": (lambda x: jnp.where(half(x) < 1, x, jnp.nan), "select_n"),
}


@pytest.mark.parametrize("policy", ["mixed_float16", pytest.param("mixed_bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CHOSEN)
def test_inf_that_only_half_precision_comes_to_is_rounding_where_a_probability_was_rounded_to_1(case, policy):
    diagnosis = found(CHOSEN[case][0], [0.0, 10.0], policy)
    assert place(diagnosis) == ("rounding", "layer", "forward", CHOSEN[case][1])
    assert "1 of 2 values of" in diagnosis.evidence
    assert diagnosis.rules == {"layer": "float32"}
    assert diagnosis.verified


def test_inf_that_is_chosen_because_of_a_zero_is_underflow_where_it_became_zero():
    diagnosis = found(lambda x: jnp.where(jnp.exp(x) > 0, x, jnp.inf), [0.0, -18.0])
    assert place(diagnosis) == ("underflow", "layer", "forward", "exp")
    assert "so select_n in layer" in diagnosis.evidence


def test_the_logarithm_of_what_became_zero_is_underflow_where_it_became_zero():
    diagnosis = found(lambda x: jnp.log(jnp.exp(x)), [0.0, -18.0])
    assert place(diagnosis) == ("underflow", "layer", "forward", "exp")
    assert "50.0% of the values of exp in layer" in diagnosis.evidence


def test_the_same_with_zeros_that_do_no_harm_is_rounding():
    # The square of 1e-5 is zero too, but it is only added.
    diagnosis = found(lambda x: jnp.log(1 - jax.nn.sigmoid(x) + x * 1e-4 * 1e-4), [0.0, 10.0], "mixed_float16")
    assert place(diagnosis)[0] == "rounding"


def test_a_value_that_is_too_large_is_overflow_with_its_share_and_size():
    diagnosis = found(lambda x: x * x * 1e-3, [1.0, 300.0, 2.0])
    assert place(diagnosis) == ("overflow", "layer", "forward", "mul")
    assert "1 of 3 values of mul in layer" in diagnosis.evidence
    assert "overflow in float16 (magnitudes up to 2^17)" in diagnosis.evidence


def test_a_loss_scale_too_high_is_left_with_room():
    function = lambda x: x  # noqa: E731
    # The gradient of the weight is 2 (1 + 1) / 2 = 2, of which 2^15 is the first too many.
    high = found(function, [1.0, 1.0], loss_scale=2.0**15)
    assert (high.verdict, high.direction) == ("loss_scale", "backward")
    assert high.better_scale == 2.0**10
    assert "With a loss scale of 1024 instead of 32768" in high.evidence
    assert found(function, [1.0, 1.0], loss_scale=2.0**14).verdict == "healthy"


def test_without_room_the_largest_loss_scale_that_is_healthy():
    # The gradient of the weight is 8192 times the scale, of which 8 is too many, and no scale is less than 1.
    high = found(lambda x: x, [64.0, 64.0], loss_scale=8.0)
    assert (high.verdict, high.better_scale) == ("loss_scale", 4.0)
    # Times 1024, no scale from 1 on is small enough.
    none = found(lambda x: x, [2048.0, 2048.0], loss_scale=8.0)
    assert (none.verdict, none.direction, none.better_scale) == ("overflow", "backward", None)


def test_an_overflow_is_no_rounding_though_bits_are_wanting_later():
    # The logistic of 10 is 1 in float16.
    diagnosis = found(lambda x: x * x * 1e-3 + jnp.log(1 - jax.nn.sigmoid(x / 30)), [1.0, 300.0])
    assert place(diagnosis) == ("overflow", "layer", "forward", "mul")


def test_an_overflow_is_no_underflow_though_something_became_zero_before():
    diagnosis = found(lambda x: jnp.square(x + x * 1e-4 * 1e-4) * 1e-3, [1.0, 300.0])
    assert place(diagnosis) == ("overflow", "layer", "forward", "square")


def test_what_is_infinite_in_float32_too_and_does_no_harm_is_no_overflow():
    diagnosis = found(lambda x: jnp.exp(jnp.log(x)) + x * x * 1e-3, [0.0, 300.0])
    assert place(diagnosis) == ("overflow", "layer", "forward", "mul")


def test_zeros_that_are_zero_anyway_are_no_underflow():
    diagnosis = found(jax.nn.relu, [-1.0, 0.0, 1.0])
    assert {row.underflow for row in diagnosis.table} == {0.0}


def small_loss(model, x):
    return jnp.sum(model(x).astype(jnp.float32)) * 1e-12


def test_a_loss_scale_is_raised_until_no_gradient_is_lost():
    # 1e-12 times 2^16 is 6.6e-8, which float16 has; 2^12 times is 4.1e-9, which it has not.
    options = {"policy": "mixed_float16"}
    low = diagnose(Model(lambda x: x), small_loss, jnp.ones(1), loss_scale=1.0, **options)
    assert (low.verdict, low.direction, low.better_scale) == ("underflow", "backward", 2.0**16)
    assert diagnose(Model(lambda x: x), small_loss, jnp.ones(1), loss_scale=2.0**12, **options).verdict == "underflow"
    assert diagnose(Model(lambda x: x), small_loss, jnp.ones(1), loss_scale=2.0**16, **options).verdict == "healthy"


def test_an_underflow_begins_where_much_is_lost_and_not_where_little_is():
    # Forward 1e-8 becomes zero beside 3e-6; backward all does.
    diagnosis = diagnose(Model(lambda x: x + x * 1e-4 * 1e-4), small_loss, jnp.array([1.0, 300.0]))
    assert (diagnosis.verdict, diagnosis.direction) == ("underflow", "backward")


NEAR = [1.0, -1.0 + 2.0**-12]
"""Of which the second is -1 in float16, so that their sum is zero."""


def test_a_gradient_that_cancels_for_want_of_bits_is_not_lost_to_zero():
    def loss_fn(model, x):
        return jnp.sum(model(x).astype(jnp.float32)) + 1.0

    diagnosis = diagnose(Model(lambda x: x), loss_fn, jnp.array(NEAR))
    assert diagnosis.verdict == "healthy"
    assert diagnosis.flushed == {"layer/weight": 1.0}


def test_a_loss_without_a_right_bit_is_rounding_though_each_module_does_little():
    def loss_fn(params, x):
        with jax.named_scope("products"):
            y = (x[:, None] @ params[None, None]).astype(jnp.float32)
        with jax.named_scope("sum"):
            return jnp.sum(y)

    diagnosis = diagnose_function(loss_fn, jnp.float32(1), jnp.array(NEAR))
    assert (diagnosis.verdict, diagnosis.path) == ("rounding", "products")
    assert diagnosis.loss == (0.0, 2.0**-12)


def test_a_module_that_is_far_off_is_rounding_though_the_loss_is_near():
    # 1024.3 is 1024: of (0.3^2 + 1) / 2 the first term is missing.
    diagnosis = found(lambda x: (x + 1024) - 1024, [0.3, 1.0])
    assert place(diagnosis) == ("rounding", "layer", "forward", "sub")
    assert "The loss has a relative error of 0.083" in diagnosis.evidence
    assert "its result has a relative error of 0.29" in diagnosis.evidence


class Two(nnx.Module):
    """The sum of two layers, of which the first counts little."""

    def __init__(self):
        self.little = Layer(lambda x: (x + 1024) - 1024)  # 0 for 0.3
        self.much = Layer(lambda x: (x + 256) - 256)  # 0.25 for 0.3

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.little(x).astype(jnp.float32) * 2.0**-10 + self.much(x).astype(jnp.float32)


def test_rounding_is_where_the_loss_hangs_on_it_and_not_where_the_error_is_largest():
    def loss_fn(model, x):
        return jnp.mean(jnp.square(model(x).astype(jnp.float32)))

    diagnosis = diagnose(Two(), loss_fn, jnp.full(3, 0.3))
    assert place(diagnosis) == ("rounding", "much", "forward", "sub")
    assert diagnosis.rules == {"much": "float32"}


@jax.custom_vjp
def rough(x):
    """The same values, with a derivative of 0.25 for 0.28 in float16."""
    return x


rough.defvjp(lambda x: (x, None), lambda _, change: ((change + 64) - 64,))


class WithRough(nnx.Module):
    """A layer that makes the loss wrong, and a parameter whose gradient is wrong."""

    def __init__(self):
        self.much, self.weight = Layer(lambda x: (x + 256) - 256), nnx.Param(jnp.ones(()))
        self.dtype = jnp.float32

    def __call__(self, x: jax.Array) -> jax.Array:
        exact = rough(self.weight[...].astype(self.dtype) * x.astype(self.dtype))
        return jnp.square(self.much(x).astype(jnp.float32)) + jnp.float32(0.28) * exact.astype(jnp.float32)


def test_the_error_of_a_loss_is_no_error_of_a_gradient():
    """A gradient is 11 % off, which is tolerated, with a loss that is right without rounding in one module."""
    diagnosis = diagnose(WithRough(), lambda model, x: jnp.sum(model(x)), jnp.full(2, 0.27))
    assert place(diagnosis) == ("rounding", "much", "forward", "sub")
    assert "The loss has a relative error of 0.07, although" in diagnosis.evidence
    assert float(re.findall(r"the loss has a relative error of (\S+)\.", diagnosis.evidence)[0]) < 1e-3


def test_a_wrong_gradient_below_a_right_loss_is_what_the_evidence_begins_with():
    def loss_fn(model, x):
        return 100.0 + jnp.sum(model(x))

    diagnosis = diagnose(Model(lambda x: (x + 1024) - 1024), loss_fn, jnp.full(1, 0.3))
    assert diagnosis.verdict == "rounding"
    assert (
        "its loss has a relative error of 0.003, but the gradient of layer/weight has one of 1." in diagnosis.evidence
    )


def test_the_error_of_a_loss_of_zero_is_none_where_it_is_zero():
    assert loss_error(0.0, 0.0) == 0
    assert loss_error(2.0, 1.0) == 0.5
    assert loss_error(-2.0, -3.0) == 0.5


def test_a_share_counts_zeros_that_are_none_in_the_reference():
    assert flushed_fraction(np.array([0.0, 1.0, 2.0, 3.0]), np.array([0.0, 0.0, 2.0, 0.0])) == 0.5
    assert flushed_fraction(np.zeros(0), np.zeros(0)) == 0


def test_inf_and_nan_are_not_finite():
    assert all_finite([np.ones(2), 3.0])
    assert all_finite([])
    assert not all_finite([np.ones(2), np.array([1.0, np.inf])])
    assert not all_finite([np.nan])

"""The reference is float32's program, with the constants that half precision rounds, makes zero or makes infinite."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from mpjax.diagnosis import constants_of, diagnose, diagnose_function
from mpjax.precision.casting import autocast


class Stem(nnx.Module):
    """A function in the dtype that the policy sets, times a weight."""

    def __init__(self, function):
        self.function = function
        self.weight = nnx.Param(jnp.ones(8))
        self.dtype = jnp.float32

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.function(x.astype(self.dtype)) * self.weight[...].astype(self.dtype)[None]


class Net(nnx.Module):
    def __init__(self, function):
        self.stem = Stem(function)
        self.head = nnx.Linear(8, 4, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.stem(x))


def mean_square(model, x):
    return jnp.mean(jnp.square(model(x).astype(jnp.float32)))


X = jax.random.normal(jax.random.key(1), (16, 8))


def root_mean_square(x):
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-8)


def positions_from_30000(x):
    return x * jnp.sin((jnp.arange(8.0) + 30000.0).astype(x.dtype) * 0.5)[None]


def moving_average(x):
    zeros = jnp.zeros((16, 8), x.dtype)
    mean = jax.lax.scan(lambda mean, row: (mean * 0.999 + row * 0.001, None), zeros[0] + 1, zeros)[0]
    return x + 100 * (1 - mean)[None]


# Function, input, policy, verdict, and what is named.
FAULTS = {
    "an epsilon that is zero": (root_mean_square, 1e-4 * X, "mixed_float16", "underflow", "constant 1e-08"),
    "a floor that is zero": (
        lambda x: jnp.log(jnp.abs(x) + 1e-9),
        *(0 * X, "mixed_float16", "underflow", "constant 1e-09"),
    ),
    "a factor of few bits": (lambda x: x + (x * 0 + 100) * 1e-7 * 1e3, 1e-3 * X, "mixed_float16", "rounding", None),
    "a table that is zero": (
        lambda x: x * jnp.asarray(np.linspace(1e-8, 2e-8, 8), x.dtype)[None] * 1e4 * 1e4,
        *(X, "mixed_float16", "underflow", "constant"),
    ),
    "a divisor that is infinite": (
        lambda x: x * 0.1 + jnp.tanh(1e3 / (x * x + 1e5) * 1e2),
        *(X, "mixed_float16", "overflow", "constant 100000"),
    ),
    "a factor that is infinite": (lambda x: x * 1e5 / 1e5, X, "mixed_float16", "overflow", "constant 100000"),
    "a bound that is infinite": (
        lambda x: x + 70000.0 * jnp.tanh(jnp.clip(x, -1e5, 1e5)) / 70001.0,
        *(X, "mixed_float16", "overflow", "convert_element_type"),
    ),
    "positions of few bits": (positions_from_30000, X, "mixed_float16", "rounding", None),
    "a decay of one": (moving_average, 0.1 * X, "mixed_bfloat16", "rounding", None),
    "one and a little": (lambda x: jnp.log(1.0001 + x * 0) * 1e4, X, "mixed_float16", "rounding", "log"),
    "a whole number of nine bits": (lambda x: (x + 257.0) - 256.0, 0.1 * X, "mixed_bfloat16", "rounding", None),
    "a difference of constants": (lambda x: x * (x * 0 + 2049.0 - 2048.0), X, "mixed_float16", "rounding", None),
}
FAST = ("positions of few bits",)


@pytest.mark.parametrize("fault", [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in FAULTS])
def test_the_fault_of_a_constant_is_named_and_repaired(fault):
    function, x, policy, verdict, operation = FAULTS[fault]
    model = Net(function)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "overflow encountered in cast")
        found = diagnose(model, mean_square, x, policy=policy)
    assert (found.verdict, found.path, found.direction) == (verdict, "stem", "forward")
    assert operation in (None, found.operation)
    assert (found.rules, found.verified) == ({"stem": "float32"}, True)
    assert found.loss[1] == pytest.approx(float(mean_square(model, x)), rel=1e-5)


def test_a_constant_that_does_no_harm_is_healthy():
    # Of -1e9, which is -inf in float16, a softmax makes zero; 1e-8 is added to 1.
    function = lambda x: jax.nn.softmax(jnp.where(x > 0, x, -1e9), where=x > -9) / (x * 0 + 1 + 1e-8)  # noqa: E731
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "overflow encountered in cast")
        assert diagnose(Net(function), mean_square, X).verdict == "healthy"


def test_a_function_under_autocast_has_float32_s_constants_in_its_reference():
    def loss_fn(weight, x):
        return jnp.mean(((x @ weight) * np.full((8, 8), 1.0004)[:1] - 1.0).astype(jnp.float32) ** 2)

    x, weight = jnp.ones((4, 8)), jnp.full((8, 8), 0.125)
    found = diagnose_function(loss_fn, weight, x, policy="mixed_bfloat16")
    assert found.loss[1] == pytest.approx(float(loss_fn(weight, x)), rel=1e-4)


def test_where_float32_s_program_has_other_operations_it_is_run_itself():
    def twice_in_half(x):
        return x * 2 - 1e-8 * x if x.dtype == jnp.float16 else x

    model = Net(twice_in_half)
    found = diagnose(model, mean_square, X)
    assert found.loss[1] == pytest.approx(float(mean_square(model, X)), rel=1e-6)
    assert found.loss[0] == pytest.approx(4 * found.loss[1], rel=1e-2)
    assert (found.verdict, found.rules, found.verified) == ("rounding", {"stem": "float32"}, True)


def turns(x):
    # Twenty times 0.05 is less than 1 in float16, and 1 in float32.
    return jax.lax.while_loop(lambda s: s[0] < 1, lambda s: (s[0] + 0.05, s[1] * 1.4), (jnp.max(x) * 0, x))[1] * 1e-2


def branches(x):
    # 2048 and 1 is 2048 in float16.
    return jax.lax.cond(jnp.max(x) * 0 + 2048 + 1 > 2048.5, lambda x: x, lambda x: 1.4 * x, x)


@pytest.mark.slow
@pytest.mark.parametrize("function", [turns, branches])
def test_what_float32_decides_otherwise_is_in_the_reference(function):
    model = Net(function)
    found = diagnose(model, mean_square, X)
    assert found.loss[1] == pytest.approx(float(mean_square(model, X)), rel=1e-5)
    assert found.loss[0] == pytest.approx(1.96 * found.loss[1], rel=0.02)
    assert (found.verdict, found.rules, found.verified) == ("rounding", {"stem": "float32"}, True)


def test_a_program_of_its_own_that_is_off_in_half_precision_is_not_called_healthy():
    # Off by 44 %, though each operation of the half-precision program is as near as can be.
    model = Net(lambda x: 1.2 * x if x.dtype == jnp.float16 else x)
    found = diagnose(model, mean_square, X)
    assert (found.verdict, found.rules, found.verified) == ("rounding", {"stem": "float32"}, True)


def test_other_random_numbers_are_no_fault():
    noise = lambda x: x + 0.3 * jax.random.normal(jax.random.key(0), x.shape, x.dtype)  # noqa: E731
    found = diagnose(Net(noise), mean_square, X, policy="mixed_bfloat16")
    assert found.verdict == "healthy"


def test_code_that_is_in_half_precision_by_itself_is_told_of():
    def loss_fn(model, x):
        return jnp.mean(1 / (model(x).astype(jnp.float16) * 0 + 1e-8)).astype(jnp.float32)

    found = diagnose(Net(lambda x: x), loss_fn, X)
    assert found.verdict == "not_precision"
    assert "the code itself casts to half precision under any policy" in found.evidence


def _programs(function, *args):
    return (
        jax.make_jaxpr(function)(*(x.astype(jnp.float16) for x in args)),
        jax.make_jaxpr(function)(*args),
    )


@settings(max_examples=20)
@given(st.lists(st.floats(-1e9, 1e9).filter(lambda c: c != 0), min_size=1, max_size=4))
def test_every_constant_has_the_value_that_it_has_in_float32(numbers):
    def function(x):
        for number in numbers:
            x = jax.jit(lambda x: jnp.sin(x * number))(x) + jnp.sum(x * jnp.asarray(number, x.dtype))  # noqa: B023
        return x

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        half, full = _programs(function, jnp.ones(2))
    constants = constants_of(half, full)
    assert constants.complete
    found = {float(value) for value in constants.exact.values()}
    assert {float(np.float32(number)) for number in numbers} <= found


def test_operations_that_one_program_alone_has_are_told():
    half, full = _programs(lambda x: x + 0.1 if x.dtype == jnp.float16 else jnp.sin(x + 0.2), jnp.ones(2))
    constants = constants_of(half, full)
    assert not constants.complete
    assert [float(value) for value in constants.exact.values()] == [pytest.approx(0.2)]


def until_small(x):
    return jax.lax.while_loop(lambda s: ~s[1], lambda s: (s[0] / 2, jnp.all(s[0] < 1e-3)), (x, False))[0]


def as_often_as_it_says(x):
    return jax.lax.fori_loop(0, jnp.sum(x).astype(jnp.int32), lambda _, x: x / 2, x)


def of_integers(x):
    return x * jax.lax.while_loop(lambda n: n > 3, lambda n: n - 4, jnp.sum(x).astype(jnp.int32)).astype(x.dtype)


@pytest.mark.parametrize("function", [until_small, as_often_as_it_says, of_integers])
def test_a_loop_whose_turns_depend_on_floating_values_is_float32_s_own_in_the_reference(function):
    """The condition itself reads only booleans or integers."""
    assert not constants_of(*_programs(function, jnp.ones(2))).complete


def test_programs_of_autocast_are_matched_in_loops_and_branches():
    def function(w, x):
        def turn(carry, row):
            return jax.lax.cond(row[0] > 0.3, lambda c: jnp.tanh(c @ w) * 0.3, lambda c: c * 1e-7, carry), row

        return jax.lax.scan(turn, x, x)[0] + 0.1

    args = jnp.ones((4, 4)), jnp.ones((4, 4))
    half, full = (jax.make_jaxpr(autocast(function, policy))(*args) for policy in ("mixed_float16", "float32"))
    constants = constants_of(half, full)
    assert not constants.complete  # the branch depends on values
    assert {round(float(value), 7) for value in constants.exact.values()} >= {0.3, 1e-7, 0.1}


NUMBERS = st.sampled_from([1e-8, 1e-7, 3e-5, 0.1, 0.999, 1.0004, 2049.0, 7e4, 1e6])
STEPS = st.one_of(
    st.tuples(st.sampled_from(["add", "sub", "mul", "div"]), NUMBERS),
    st.tuples(st.sampled_from(["tanh", "abs", "sin"]), st.none()),
)


@settings(max_examples=10)
@given(st.lists(STEPS, min_size=1, max_size=4))
def test_the_reference_is_the_float32_program_whatever_its_constants(steps):
    def function(x):
        for name, number in steps:
            operation = getattr(jax.lax, name)
            x = operation(x) if number is None else operation(x, jnp.full_like(x, number))
        return x

    model = Net(function)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        found = diagnose(model, mean_square, X, search=False)
    wanted = float(mean_square(model, X))
    if np.isfinite(wanted):
        assert found.loss[1] == pytest.approx(wanted, rel=1e-4)
        assert found.verdict != "healthy" or abs(found.loss[0] - wanted) <= 0.5 * abs(wanted)
    else:
        assert found.verdict == "not_precision"

"""Scalars under autocast: none reaches a dtype that cannot hold it, whoever calls the program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from jax import lax

import mpjax
from mpjax.precision.casting import computed, holds, number_of


W = jnp.full((2, 2), 1e-3)
X = jnp.ones((2, 2))
F32 = jnp.float32


@pytest.mark.parametrize(
    ("dtype", "held", "lost"),
    [
        ("float16", [0.5, -65504.0, 0.1, 2**-14, 2.0**-24, 0.0, np.inf], [65520.0, 1e-5, 1e-8, -1e9]),
        ("bfloat16", [0.1, 1e9, -3e38, 1e-37, 0.0, -np.inf], [1e-42, 3.4e38]),
        ("float32", [1e-37, 3.4e38], [1e39, 1e-60]),
    ],
)
def test_a_dtype_holds_what_it_rounds_as_well_as_any_number(dtype, held, lost):
    dtype = jnp.dtype(dtype)
    assert [number for number in held + lost if holds(dtype, number)] == held


def test_a_number_is_held_up_to_half_of_the_distance_to_the_next_one():
    # Next to 1 float16's numbers are 2^-10 apart, below 2^-14 they are 2^-24: 2^-11 of 2^-13 there, half of a number.
    assert holds(jnp.dtype("float16"), 1 + 2.0**-11)
    assert holds(jnp.dtype("float16"), 2.0**-14 * (1 + 2.0**-11))
    assert not holds(jnp.dtype("float16"), 2.0**-15 * (1 + 2.0**-10))
    assert not holds(jnp.dtype("float16"), 1e-7)


NAMES = (
    *("sqrt", "cbrt", "exp", "exp2", "expm1", "log", "log1p", "sin", "cos", "tan"),
    *("tanh", "sign", "floor", "ceil", "square", "neg", "abs", "rsqrt", "logistic"),
)
UNARY = {
    **{name: getattr(lax, name) for name in NAMES},
    "integer_pow": lambda x: lax.integer_pow(x, 3),
    "integer_pow to zero": lambda x: lax.integer_pow(x, 0),
    "integer_pow to minus one": lambda x: lax.integer_pow(x, -1),
    "integer_pow to minus two": lambda x: lax.integer_pow(x, -2),
    "convert_element_type": lambda x: lax.convert_element_type(x, jnp.float16),
    "broadcast_in_dim": lambda x: lax.broadcast_in_dim(x, (2,), ()),
    "reshape": lambda x: lax.reshape(x, (1,)),
}
BINARY = {name: getattr(lax, name) for name in ("add", "sub", "mul", "div", "max", "min", "pow")}


@pytest.mark.parametrize("name", UNARY)
def test_a_function_of_a_known_number_is_jax_s(name):
    for number in (0.7, 1.0, 2.5):
        _assert_known(UNARY[name], F32(number))


@pytest.mark.parametrize("name", BINARY)
def test_a_function_of_two_known_numbers_is_jax_s(name):
    for numbers in ((7.0, 2.0), (0.3, 5.0), (1.0, 1.0)):
        _assert_known(BINARY[name], *map(F32, numbers))


@pytest.mark.parametrize(("x", "y", "quotient"), [(7, 2, 3), (-7, 2, -3), (6, 3, 2)])
def test_known_integers_are_divided_towards_zero(x, y, quotient):
    _assert_known(lax.div, jnp.int32(x), jnp.int32(y))
    assert int(lax.div(jnp.int32(x), jnp.int32(y))) == quotient


def _assert_known(function, *numbers):
    eqn = [eqn for eqn in jax.make_jaxpr(function)(*numbers).jaxpr.eqns if eqn.primitive.name != "pjit"][-1]
    np.testing.assert_allclose(computed(eqn, [float(n) for n in numbers]), np.ravel(function(*numbers))[0], rtol=1e-6)


@pytest.mark.parametrize("constant", [jnp.ones(1), np.ones((1, 1)), np.bool_(True)], ids=["[1]", "[1, 1]", "bool"])
def test_an_array_and_a_truth_value_are_no_numbers(constant):
    assert number_of(constant) is None


@pytest.mark.parametrize(
    ("number", "product"),
    [
        (lambda: F32(300.0) * F32(300.0), 180.07278),
        (lambda: 1.0 / F32(1e-5), 200.08087),
        (lambda: jnp.sqrt(F32(6e4)) * F32(6e4), 29405.762),
        (lambda: jnp.exp(12.0), 325.6429),
        (lambda: lax.integer_pow(F32(10.0), -8), 2.0008087e-11),
        (lambda: jnp.float32(7) ** 6, 235.394),
    ],
)
def test_a_number_computed_from_numbers_is_not_rounded_to_a_dtype_that_cannot_hold_it(number, product):
    scaled = mpjax.autocast(lambda x: (x @ W) * number(), "mixed_float16")
    for call in (scaled, jax.jit(scaled)):
        out = call(X)
        assert out.dtype == F32
        np.testing.assert_allclose(out, product, rtol=1e-4)


def test_an_epsilon_computed_from_numbers_keeps_zero_over_zero_finite():
    normed = mpjax.autocast(lambda x: (x @ W) / (x @ W + F32(1e-4) * 1e-5), "mixed_float16")
    assert np.array_equal(normed(jnp.zeros((2, 2))), np.zeros((2, 2)))


@pytest.mark.parametrize("s", [1e5, 1e-8, 0.5])
@pytest.mark.parametrize("operation", [jnp.multiply, jnp.divide, jnp.add])
def test_an_argument_is_as_in_eager_execution_and_under_jit(operation, s):
    fn = mpjax.autocast(lambda x, s: operation(x @ W, s), "mixed_float16")
    product = (X.astype(jnp.float16) @ W.astype(jnp.float16)).astype(F32)
    for out in (fn(X, s), fn(X, F32(s)), jax.jit(fn)(X, s), jax.jit(fn)(X, F32(s))):
        np.testing.assert_allclose(out.astype(F32), operation(product, F32(s)), rtol=2**-10)


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x * 0.5,
        lambda x: x / 0.7,
        lambda x: x / jnp.sqrt(64),
        lambda x: x / np.sqrt(64),
        lambda x: x * F32(8) ** -0.5,
        lambda x: x * jnp.exp(-1.0),
        lambda x: jnp.where(x > 0, x, 0.01 * x),
        lambda x: jnp.clip(x, -1.0, 6.0),
        lambda x: 1 - x,
    ],
)
def test_a_number_that_half_holds_keeps_the_array_s_dtype(fn, half):
    assert jax.eval_shape(mpjax.autocast(lambda x: fn(x @ W), half), X).dtype == half


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_an_array_filled_with_a_known_number_promotes_as_an_array(shape):
    assert jax.eval_shape(mpjax.autocast(lambda x: x @ W + jnp.ones(shape), "float16"), jnp.ones(shape)).dtype == F32


# --- Any expression

magnitudes = st.floats(-9, 9).map(lambda exponent: float(np.float32(10.0**exponent)))
constants = st.builds(lambda size, sign: size * sign, magnitudes, st.sampled_from([1.0, -1.0]))
leaves = st.one_of(
    constants.map(lambda c: ("python", c)),
    constants.map(lambda c: ("array", c)),
    constants.map(lambda c: ("argument", c)),
)
expressions = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(["add", "subtract", "multiply", "divide", "maximum"]), inner, inner),
        st.tuples(st.sampled_from(["sqrt", "tanh", "negative", "square"]), inner),
    ),
    max_leaves=4,
)


def arguments_of(tree) -> list[float]:
    if tree[0] in ("python", "array", "argument"):
        return [tree[1]] if tree[0] == "argument" else []
    return [value for inner in tree[1:] for value in arguments_of(inner)]


def evaluated(tree, arguments):
    """An expression in JAX; `arguments` gives its arguments one after another."""
    kind, *rest = tree
    if kind == "argument":
        return next(arguments)
    if kind in ("python", "array"):
        return rest[0] if kind == "python" else F32(rest[0])
    values = [evaluated(inner, arguments) for inner in rest]
    return getattr(jnp, kind)(*(jnp.abs(v) for v in values)) if kind == "sqrt" else getattr(jnp, kind)(*values)


def exactly(tree) -> float:
    """The value of an expression in float64."""
    kind, *rest = tree
    if kind in ("python", "array", "argument"):
        return np.float64(rest[0])
    values = [exactly(inner) for inner in rest]
    return getattr(np, kind)(*(np.abs(v) for v in values)) if kind == "sqrt" else getattr(np, kind)(*values)


@settings(max_examples=20)
@example(("multiply", ("array", 300.0), ("array", 300.0)), "multiply", "float16")
@example(("divide", ("python", 1.0), ("array", 1e-5)), "multiply", "float16")
@example(("argument", 1e-8), "divide", "bfloat16")
@given(expressions, st.sampled_from(["multiply", "divide", "add", "maximum"]), st.sampled_from(["float16", "bfloat16"]))
def test_any_scalar_is_what_float32_makes_of_it_in_eager_execution_jit_and_scan(tree, operation, half):
    """The result is that of float32, rounded once to the dtype it has; where that is half, the number was held."""
    arguments = [F32(value) for value in arguments_of(tree)]
    operation = getattr(jnp, operation)

    def fn(x, *arguments):
        return operation(x @ W, evaluated(tree, iter(arguments)))

    def looped(x, *arguments):
        return lax.scan(lambda carry, x: (carry, fn(x, *arguments)), 0, x[None])[1][0]

    scalar = np.float32(evaluated(tree, iter(arguments)))
    with np.errstate(all="ignore"):
        exact = exactly(tree)
    # Where terms cancel, as in -1 + (1 + x), XLA may add them in another order, which changes more than the last bits.
    assume(not np.isfinite(exact) or abs(scalar - exact) <= np.finfo(np.float32).eps * abs(exact))
    product = (X.astype(half) @ W.astype(half)).astype(F32)
    with np.errstate(all="ignore"):
        wanted = operation(product, scalar)
    outs = [mpjax.autocast(fn, half)(X, *arguments), jax.jit(mpjax.autocast(fn, half))(X, *arguments)]
    outs.append(mpjax.autocast(looped, half)(X, *arguments))
    assert len({out.dtype for out in outs}) == 1
    for out in outs:
        if out.dtype != F32:
            assert holds(np.dtype(half), float(scalar)) or np.isnan(scalar)
        info = jnp.finfo(out.dtype)
        with np.errstate(all="ignore"):
            rounded = np.asarray(wanted.astype(out.dtype), np.float32)
        np.testing.assert_allclose(
            np.asarray(out, np.float32), rounded, rtol=4 * float(info.eps), atol=float(info.tiny)
        )

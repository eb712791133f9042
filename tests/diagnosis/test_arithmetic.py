"""NumPy's operations on small arrays against the compiled ones, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Layout, with_layout_constraint

from mpjax.diagnosis import IN_NUMPY, compile_ahead, in_half_dtype, in_numpy, measure, results_of, round_to
from mpjax.precision import BFLOAT16, FLOAT16


# Every exponent of float32 but that of its subnormals, which XLA takes for zero on a CPU; ties; what is not finite.
GENERATOR = np.random.default_rng(0)
VALUES = np.exp2(GENERATOR.integers(-126, 127, 4096)) * GENERATOR.integers(2**10, 2**12, 4096) / 2**11
SPECIAL = [0.0, -0.0, 1.0, -1.0, 65504.0, 65519.9, 65520.0, 2.0**-14, 2.0**-24, 2.0**-25, 1.5 * 2**-24, np.inf, np.nan]
VALUES = np.concatenate([VALUES * GENERATOR.choice([-1, 1], 4096), SPECIAL, -np.array(SPECIAL)]).astype(np.float32)
VALUES = np.where(np.abs(VALUES) < 2.0**-126, np.float32(0), VALUES)
PAIRS = np.stack([VALUES, GENERATOR.permutation(VALUES)])


def _both(monkeypatch, function):
    """What a function gives in NumPy and compile_ahead."""
    mine = jax.tree.map(np.asarray, function())
    monkeypatch.setattr(compile_ahead, "SMALL", -1)
    return mine, jax.tree.map(np.asarray, function())


def _same(mine, theirs):
    """Equal, any NaN equal to any other, what is too small for float32's normal numbers equal to zero."""
    assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
    if mine.dtype == np.float32:
        mine = np.where(np.abs(mine) < 2.0**-126, np.float32(0), mine)
    np.testing.assert_array_equal(mine.astype(np.float64), theirs.astype(np.float64))


@pytest.mark.parametrize("top", [True, False], ids=["top", "no top"])
@pytest.mark.parametrize("bottom", [True, False], ids=["bottom", "no bottom"])
@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
def test_rounding(monkeypatch, dtype, top, bottom):
    _same(*_both(monkeypatch, lambda: round_to(VALUES, dtype, top=top, bottom=bottom)))


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
def test_narrowing(monkeypatch, dtype):
    rounded = np.asarray(round_to(VALUES, dtype))
    _same(*_both(monkeypatch, lambda: in_half_dtype(rounded, dtype)))


X, Y = PAIRS[0], PAIRS[1]
CALLS = {
    **{name: (getattr(jax.lax, name), X) for name in ("neg", "abs", "sign", "floor", "ceil", "square", "is_finite")},
    **{name: (getattr(jax.lax, name), X, Y) for name in ("add", "sub", "mul", "div", "max", "min")},
    **{name: (getattr(jax.lax, name), X, Y) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "add_any": (jax.lax.add, X, Y),
    "copy": (jnp.copy, X),
    "select_n": (jax.lax.select_n, X > 0, X, Y),
    "broadcast_in_dim": (lambda x: jax.lax.broadcast_in_dim(x, (2, 3, 4), (0, 2)), PAIRS[:, :4]),
    "reshape": (lambda x: jax.lax.reshape(x, (4, 2)), PAIRS[:, :4]),
    "squeeze": (lambda x: jax.lax.squeeze(x, (0,)), PAIRS[:1, :4]),
    "transpose": (lambda x: jax.lax.transpose(x, (1, 0)), PAIRS[:, :4]),
    "rev": (lambda x: jax.lax.rev(x, (1,)), PAIRS[:, :4]),
    "concatenate": (lambda *xs: jax.lax.concatenate(xs, 0), X[:3], Y[:4]),
}


@pytest.mark.parametrize("name", IN_NUMPY)
def test_an_operation(name):
    function, *arrays = CALLS[name]
    eqn = jax.make_jaxpr(function)(*arrays).jaxpr.eqns[-1]
    with np.errstate(all="ignore"):
        (mine,) = in_numpy(*arrays, primitive=eqn.primitive, params=tuple(eqn.params.items()))
    _same(mine, np.asarray(jax.jit(function)(*arrays)))


def test_what_numpy_does_otherwise_is_left_to_xla():
    divided = jax.make_jaxpr(jax.lax.div)(jnp.int32(-7), jnp.int32(2)).jaxpr.eqns[0]
    assert (
        in_numpy(np.int32(-7), np.int32(2), primitive=divided.primitive, params=tuple(divided.params.items())) is None
    )


def test_a_reading(monkeypatch):
    exact = np.where(np.abs(VALUES) < 2.0**100, VALUES, np.float32(1e5))
    low = np.asarray(round_to(exact, FLOAT16))
    wide = exact * np.float32(1.5)
    mine, theirs = _both(monkeypatch, lambda: measure(wide, exact, low, np.float32(2.0**-14), np.bool_(True)))
    assert mine.keys() == theirs.keys()
    assert {name: mine[name] for name in ("overflow", "underflow", "subnormal")} == {
        name: theirs[name] for name in ("overflow", "underflow", "subnormal")
    }
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), mine, theirs)


def test_a_constraint_on_the_layout_of_a_small_array_is_followed():
    """As after the position embeddings of a Transformer: without a kernel, small arrays are NumPy's."""
    jaxpr = jax.make_jaxpr(lambda x: with_layout_constraint(x, Layout((0, 1))))(jnp.ones((2, 3), jnp.float16)).jaxpr
    (eqn,) = jaxpr.eqns
    (result,) = results_of(eqn, [np.full((2, 3), 0.5, np.float32)], jaxpr.debug_info, true_half=True)
    assert (result.dtype, np.asarray(result).tolist()) == (np.float32, [[0.5] * 3] * 2)

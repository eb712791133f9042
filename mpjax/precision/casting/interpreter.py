"""Runs a jaxpr again, equation by equation, with the casts that autocast's lists ask for."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mpjax.precision.casting import control_flow, derivatives
from mpjax.precision.casting.equations import bind, standing_at
from mpjax.precision.casting.jaxprs import as_function, is_transposed, opened
from mpjax.precision.casting.numbers import computed, holds, number_of
from mpjax.precision.casting.operations import Operations
from mpjax.precision.casting.values import Value, avals_of, cast, cast_like, values_of
from mpjax.precision.casting.walk import evaluated
from mpjax.precision.dtypes import FLOAT32, FLOAT64, HALF, is_floating, widest


FULL_PRECISION = "mpjax_full_precision"
"""The name of the inner `jit` that marks a region to leave alone."""

HANDLERS = {**control_flow.HANDLERS, **derivatives.HANDLERS}


class Interpreter(NamedTuple):
    """How to run a jaxpr.

    Attributes:
      dtype_of: named scope to compute dtype, that of the low list; where it is float32, all lists are in float32.
      operations: the lists.
      scope: the named scopes that the jaxpr stands in.
    """

    dtype_of: Callable[[str], np.dtype]
    operations: Operations
    scope: str = ""

    def run(self, jaxpr, inputs: Sequence[Value]) -> list[Value]:
        """Returns the outputs of a jaxpr, open or closed, for inputs of whatever floating dtypes."""
        once = _CastOnce()
        narrowed = {eqn.outvars[0] for eqn in opened(jaxpr)[0].eqns if _narrows(eqn)}

        def apply(eqn, scope: str, inputs: list[Value], debug_info) -> list[Value]:
            with standing_at(eqn):
                if eqn.primitive.name in HANDLERS and not _is_full_precision(eqn):
                    return HANDLERS[eqn.primitive.name](self._replace(scope=scope).run, eqn, inputs, debug_info)
                if self._keeps_its_dtypes(eqn, inputs, narrowed):
                    return _as_traced(eqn, inputs, debug_info)
                return self._apply(eqn, inputs, self.dtype_of(scope), once)

        return evaluated(jaxpr, inputs, lambda atom, array: _constant(array), apply, self.scope)

    def _keeps_its_dtypes(self, eqn, inputs: list[Value], narrowed: set) -> bool:
        """Whether an equation runs in the dtypes of the original program, as nothing casts it or it asks for them."""
        if self.operations.rule(eqn.primitive.name) == "as_traced" or _is_full_precision(eqn) or _says_its_dtypes(eqn):
            return True
        floating = [aval.dtype for aval in avals_of((*eqn.invars, *eqn.outvars)) if is_floating(aval)]
        if any(dtype.itemsize == 1 or dtype == FLOAT64 for dtype in floating):
            return True
        if not set(floating) & set(HALF) or eqn.primitive.name == "convert_element_type":
            return False
        # Half precision that stands in the program: random numbers of that dtype, or a sum of which it was asked for
        # (without `dtype=`, jnp.sum and jnp.prod widen before they sum).
        if eqn.primitive.name in _REDUCTIONS and not is_transposed(eqn):
            return eqn.primitive.name in ("reduce_sum", "reduce_prod") or eqn.invars[0] in narrowed
        return _all_own(inputs)

    def _apply(self, eqn, inputs: list[Value], compute_dtype: np.dtype, once: "_CastOnce") -> list[Value]:
        name = eqn.primitive.name
        rule = self.operations.rule(name)
        if name == "convert_element_type":
            return [_converted(eqn, inputs[0])]
        if name in _EACH:
            own = FLOAT32 if compute_dtype == FLOAT32 else None
            return values_of(bind(eqn.primitive, [once.cast(value.array, own) for value in inputs], eqn.params))
        peak = any(value.peak for value in inputs)
        if rule == "low":
            dtype = compute_dtype
        else:
            # A square is a power, also when it is written x * x.
            square = name == "mul" and eqn.invars[0] is eqn.invars[1]
            full = rule == "full" or compute_dtype == FLOAT32 or square or (name == "sub" and peak)
            dtype = FLOAT32 if full else _widest(inputs, fills=name in _FILL)
        arrays = [once.cast(value.array, dtype) for value in inputs]
        outputs = bind(eqn.primitive, arrays, _product(eqn, dtype) if rule == "low" else eqn.params)
        number = computed(eqn, [value.number for value in inputs])
        peak = name == "reduce_max" or (peak and name in _KEEP_A_PEAK)
        return [Value(array, number, peak, _all_own(inputs)) for array in outputs]


class _CastOnce:
    """Widens each half-precision array once, so that the gradients of its uses in float32 add up in float32."""

    def __init__(self):
        self._widened: dict[int, tuple[Any, Any]] = {}

    def cast(self, array, dtype: np.dtype | None):
        if dtype != FLOAT32 or getattr(array, "dtype", None) not in HALF:
            return cast(array, dtype)
        if id(array) not in self._widened:
            # With the array itself, which keeps its id from being given to another.
            self._widened[id(array)] = array, cast(array, dtype)
        return self._widened[id(array)][1]


def _is_full_precision(eqn) -> bool:
    return eqn.primitive.name == "jit" and eqn.params["name"] == FULL_PRECISION


def _constant(array) -> Value:
    number = number_of(array)
    return Value(array, number, own=number is not None)


def _all_own(inputs: Sequence[Value]) -> bool:
    """Whether what is computed from these comes from keys, integers and numbers of the program alone."""
    return all(value.own for value in inputs if is_floating(value.array))


def _narrows(eqn) -> bool:
    """Whether an equation is a cast of the program's own to half precision."""
    return (
        eqn.primitive.name == "convert_element_type"
        and eqn.params["new_dtype"] in HALF
        and eqn.invars[0].aval.dtype != eqn.params["new_dtype"]
        and not is_transposed(eqn)
    )


def _says_its_dtypes(eqn) -> bool:
    """Whether parameters hold dtypes that casting would contradict: a product's algorithm, a function in a scatter."""
    if eqn.primitive.name == "scatter":
        return eqn.params.get("update_jaxpr") is not None
    return isinstance(eqn.params.get("precision"), jax.lax.DotAlgorithm | jax.lax.DotAlgorithmPreset)


def _as_traced(eqn, inputs: list[Value], debug_info) -> list[Value]:
    """An equation in the dtypes of the original program, as kernels and regions left alone need it."""
    arrays = cast_like((value.array for value in inputs), avals_of(eqn.invars))
    number = computed(eqn, [value.number for value in inputs])
    return [Value(array, number, own=_all_own(inputs)) for array in as_function(eqn, debug_info)(*arrays)]


def _converted(eqn, value: Value) -> Value:
    """A cast of the program itself; where it changed nothing but weakness, there is nothing to cast."""
    traced, new = eqn.invars[0].aval, eqn.params["new_dtype"]
    if is_floating(traced) and traced.dtype == new:
        return value
    return Value(jax.lax.convert_element_type(value.array, new), computed(eqn, [value.number]), own=_all_own([value]))


def _product(eqn, dtype: np.dtype | None) -> dict:
    """Parameters of a product: its result in the low dtype, unless the program asked for another than its inputs'.

    `jnp.matmul` and its like always ask for their inputs' own; of a convolution a dtype stands there only on request.
    """
    asked = eqn.params.get("preferred_element_type")
    if eqn.primitive.name == "conv_general_dilated" and asked is not None:
        return eqn.params
    floating = [aval.dtype for aval in avals_of(eqn.invars) if is_floating(aval)]
    implied = asked is not None and floating and asked == widest(*floating)
    return {**eqn.params, "preferred_element_type": dtype} if implied else eqn.params


def _widest(inputs: Sequence[Value], *, fills: bool) -> np.dtype | None:
    """Of the floating arrays, and of the known numbers that this does not hold.

    An array whose elements are one known number counts as an array, except where it `fills` gaps.
    """
    floating = [value for value in inputs if is_floating(value.array)]
    if not floating:
        return None
    arrays = [v for v in floating if v.number is None or (np.ndim(v.array) > 0 and not fills)] or floating
    dtype = widest(*(v.array.dtype for v in arrays))
    return widest(dtype, *(v.array.dtype for v in floating if v.number is not None and not holds(dtype, v.number)))


# How the largest of several values gets to the subtraction from them, in a softmax.
_KEEP_A_PEAK = frozenset(
    {"broadcast_in_dim", "max", "reshape", "select_n", "squeeze", "stop_gradient", "copy", "transpose"}
)

# Where an array made of one scalar stands for that scalar: the zeros of a `where`, the bounds of a clip.
_FILL = frozenset({"select_n", "max", "min", "clamp", "broadcast_in_dim", "reshape", "transpose", "eq", "ne"})

_REDUCTIONS = frozenset({"reduce_sum", "reduce_prod", "reduce_window_sum", "cumsum", "cumprod", "cumlogsumexp"})

# Several operands that have nothing to do with each other: each keeps its dtype.
_EACH = frozenset({"optimization_barrier", "sort", "psum", "psum_invariant", "pmax", "pmin", "device_put"})

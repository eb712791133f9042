"""Runs a jaxpr for autocast, equation by equation, with the casts that the lists of operations require."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mpjax.precision.casting import control_flow, derivatives
from mpjax.precision.casting.gradient_sums import (
    ManyReads,
    adds_between_casts,
    all_gather,
    gathers_from_many,
    is_half,
    rule_adds_in_half,
)
from mpjax.precision.casting.jaxprs import as_function, function_of, is_transposed, opened
from mpjax.precision.casting.one_equation import bind, standing_at
from mpjax.precision.casting.operations import Operations
from mpjax.precision.casting.primitives import ARRANGES, COMPARES, MATRIX_PRODUCTS, REPEATS, STRETCH
from mpjax.precision.casting.values import (
    Origin,
    Value,
    avals_of,
    bounds,
    cast,
    cast_like,
    computed,
    holds,
    joined,
    number_of,
    values_of,
)
from mpjax.precision.casting.walk import called, evaluated
from mpjax.precision.dtypes import FLOAT32, FLOAT64, HALF, is_floating, widest
from mpjax.precision.float8.operations import IN_FLOAT8, TAKEN_OUT, note, quantised_product, why_not_quantised
from mpjax.precision.float8.recipes import Recipe


FULL_PRECISION = "mpjax_full_precision"
"""The name of the inner `jit` that marks a region without casts."""

HANDLERS = {**control_flow.HANDLERS, **derivatives.HANDLERS}


def _in_compute_dtype(scope: str) -> None:
    """Gives None, no recipe, for any scope, so that all products are in the compute dtype."""


class Interpreter(NamedTuple):
    """Runs a jaxpr with each operation in the dtype that lists of primitives say.

    Attributes:
      dtype_of: a function from named scope to the compute dtype, that of the low list. Where it is float32, all lists
        use float32.
      operations: the lists of operations.
      recipe_of: a function from named scope to the recipe of products with a weight; None for products in `dtype_of`.
      scope: the named scopes around the jaxpr.
      closed_over: the origin of arrays that the program closes over.
      chosen_by_author: True if half precision in the program is its author's choice, such as `dtype=` of a sum; False
        if a policy put it there.
    """

    dtype_of: Callable[[str], np.dtype]
    operations: Operations
    recipe_of: Callable[[str], Recipe | None] = _in_compute_dtype
    scope: str = ""
    closed_over: Origin = Origin.UNKNOWN
    chosen_by_author: bool = True

    def run(self, jaxpr, inputs: Sequence[Value]) -> list[Value]:
        """Runs a jaxpr, open or closed, with casts, and gives the values of its outputs.

        The inputs may have other floating dtypes than when it was traced, and so may the outputs.
        """
        once, many = _CastOnce(), ManyReads(opened(jaxpr)[0])
        narrowed = {eqn.outvars[0] for eqn in opened(jaxpr)[0].eqns if _narrows(eqn)}

        def apply(eqn, scope: str, inputs: list[Value], debug_info) -> list[Value]:
            inputs = many.operands(eqn, inputs)
            name, handled = eqn.primitive.name, eqn.primitive.name in HANDLERS and not _is_full_precision(eqn)
            if handled and not self.chosen_by_author and name in derivatives.HANDLERS:
                handled = rule_adds_in_half(eqn, debug_info)
            if not handled and self._keeps_its_dtypes(eqn, inputs, narrowed):
                if name in MATRIX_PRODUCTS and self.recipe_of(scope) is not None:
                    note([_with_own_dtypes(eqn)])
                return _as_traced(eqn, inputs, debug_info)  # keeps scopes and source lines by itself
            with standing_at(eqn):
                if handled:
                    return HANDLERS[name](self._replace(scope=scope).run, eqn, inputs, debug_info)
                return self._apply(eqn, inputs, self.dtype_of(scope), self.recipe_of(scope), once)

        return evaluated(jaxpr, inputs, lambda atom, array: self._constant(array), apply, self.scope)

    def _constant(self, array) -> Value:
        number = number_of(array)
        is_number = number is not None
        return Value(
            array,
            number,
            from_numbers=is_number,
            constant=True,
            origin=Origin.NUMBERS if is_number else self.closed_over,
        )

    def _keeps_its_dtypes(self, eqn, inputs: list[Value], narrowed: set) -> bool:
        """True if an equation runs in the dtypes that it was traced in: no list casts it, or the program chose them.

        `narrowed` has the variables that the program itself casts to half precision.
        """
        if eqn.primitive.name in derivatives.HANDLERS:
            return True
        if self.operations.rule(eqn.primitive.name) == "as_traced" or _is_full_precision(eqn) or _says_its_dtypes(eqn):
            return True
        # Positions times frequencies: half precision lacks large positions, and the program chose the dtype.
        if self.operations.rule(eqn.primitive.name) == "low" and _all_constant(inputs):
            return True
        floating = [aval.dtype for aval in avals_of((*eqn.invars, *eqn.outvars)) if is_floating(aval)]
        if any(dtype.itemsize == 1 or dtype == FLOAT64 for dtype in floating):
            return True
        if not self.chosen_by_author or not set(floating) & set(HALF) or eqn.primitive.name == "convert_element_type":
            return False
        # The program itself asks for half precision: for random numbers, or for a sum or product with `dtype=`
        # (without it, jnp.sum and jnp.prod widen their input first).
        if eqn.primitive.name in _REDUCTIONS and not is_transposed(eqn):
            return eqn.primitive.name in ("reduce_sum", "reduce_prod") or eqn.invars[0] in narrowed
        return _all_from_numbers(inputs)

    def _apply(
        self, eqn, inputs: list[Value], compute_dtype: np.dtype, recipe: Recipe | None, once: "_CastOnce"
    ) -> list[Value]:
        name = eqn.primitive.name
        rule = "widest" if _is_outer(eqn, inputs) else self.operations.rule(name)
        if name == "convert_element_type":
            return [_converted(eqn, inputs[0])]
        if name in _EACH:
            dtype_of_all = FLOAT32 if compute_dtype == FLOAT32 else None
            outputs = bind(eqn.primitive, [once.cast(value.array, dtype_of_all) for value in inputs], eqn.params)
            return values_of(outputs, [Value(None, origin=value.origin) for value in inputs])
        peak = any(value.peak for value in inputs)
        if rule == "low":
            dtype = compute_dtype
        else:
            # x * x is a square too, and a difference from the largest value is part of an exponential.
            square, shift = name == "mul" and eqn.invars[0] is eqn.invars[1], name == "sub" and peak
            part_of = "square" if square else "exp" if shift else name
            full = "full" in (rule, self.operations.rule(part_of)) or compute_dtype == FLOAT32
            dtype = FLOAT32 if full else _widest(inputs, name)
        arrays = [once.cast(value.array, dtype) for value in inputs]
        repeats_a_number = name in REPEATS and inputs[REPEATS[name]].number is not None  # it has no gradient
        within = dtype in HALF and adds_between_casts(eqn) and not repeats_a_number
        if within:
            arrays = [once.cast(array, FLOAT32) for array in arrays]
        elif name in STRETCH and dtype in HALF:
            shape, known = eqn.outvars[0].aval.shape, [value.number is not None for value in inputs]
            arrays = [x if number else _stretched(x, shape, once) for x, number in zip(arrays, known, strict=True)]
        params = _product(eqn, dtype) if name in MATRIX_PRODUCTS else eqn.params
        outputs = _quantised(recipe, name, inputs, arrays, params) if rule == "low" else None
        if name == "all_gather" and dtype in HALF and gathers_from_many(eqn):
            outputs = [all_gather(eqn, arrays[0])]
        if outputs is None:
            outputs = bind(eqn.primitive, arrays, params)
        if within:
            outputs = [cast(output, dtype) for output in outputs]
        number = computed(eqn, [value.number for value in inputs])
        peak = name == "reduce_max" or (peak and name in _KEEP_A_PEAK)
        from_numbers, constant, origin = _all_from_numbers(inputs), _all_constant(inputs), joined(inputs)
        if origin == Origin.UNKNOWN and name in MATRIX_PRODUCTS:
            origin = Origin.BATCH  # one of the operands depends on the batch
        return [Value(array, number, peak, from_numbers, constant, origin) for array in outputs]


def _stretched(array, shape: tuple[int, ...], once: "_CastOnce"):
    """Broadcasts a half-precision operand to `shape`, through float32, so that its gradient is summed in float32.

    The result is in half precision again. An operand that has this shape, or is not in half precision, stays unchanged.
    """
    if np.shape(array) == shape or not is_half(array):
        return array
    return cast(jax.lax.broadcast_in_dim(once.cast(array, FLOAT32), shape, range(array.ndim)), array.dtype)


class _CastOnce:
    """Casts arrays, and casts the same half-precision array to float32 only once.

    All float32 uses of an array then share one cast, whose derivative adds their gradients in float32.
    """

    def __init__(self):
        self._widened: dict[int, tuple[Any, Any]] = {}

    def cast(self, array, dtype: np.dtype | None):
        if dtype != FLOAT32 or not is_half(array):
            return cast(array, dtype)
        if id(array) not in self._widened:
            # Keeps the array alive, so that no other array gets its id.
            self._widened[id(array)] = array, cast(array, dtype)
        return self._widened[id(array)][1]


def _quantised(recipe: Recipe | None, name: str, inputs: Sequence[Value], arrays: list, params: dict) -> list | None:
    """Multiplies in float8 with a recipe; None if the product is not to be in float8. Also notes the outcome (`note`).

    Args:
      recipe: the recipe; None if rules keep the product out of float8.
      name: the primitive of the product.
      inputs: the operands, whose origins show which one is the weight.
      arrays: the operands, cast to the compute dtype.
      params: the parameters of the primitive.
    """
    if recipe is None or name != "dot_general":
        note([TAKEN_OUT if recipe is None else f"by {name}"])
        return None
    origins = [value.origin for value in inputs]
    of_parameters = [index for index, origin in enumerate(origins) if origin == Origin.PARAMETERS]
    if not of_parameters and Origin.UNKNOWN not in origins:
        note(["of activations alone, as attention has"])
        return None
    weight = of_parameters[0] if len(of_parameters) == 1 else None
    if (reason := why_not_quantised(recipe, arrays, params, weight)) is not None:
        note([reason])
        return None
    note([IN_FLOAT8])
    return [quantised_product(recipe, arrays, params, weight)]


def _with_own_dtypes(eqn) -> str:
    """The outcome to note for a product that keeps its dtypes: `IN_FLOAT8` if the user's own casts are to float8."""
    in_float8 = all(aval.dtype.itemsize == 1 and is_floating(aval) for aval in avals_of(eqn.invars))
    return IN_FLOAT8 if in_float8 else "with dtypes of their own"


def _is_full_precision(eqn) -> bool:
    """True for a call in which nothing is cast: a `full_precision` region, or a numerical function of JAX.

    These are the functions of jax.scipy and jnp.linalg, jnp.cov and jnp.corrcoef.
    """
    if eqn.primitive.name not in ("jit", "custom_jvp_call"):
        return False
    name, file = function_of(called(eqn))
    numerical = any(folder in file for folder in ("/jax/_src/scipy/", "/jax/_src/numpy/linalg.py"))
    statistics = name in ("cov", "corrcoef") and "/jax/_src/numpy/" in file
    return eqn.params.get("name") == FULL_PRECISION or numerical or statistics


def _all_from_numbers(inputs: Sequence[Value]) -> bool:
    """True if the program made all floating inputs only from keys, integers and its own numbers; also without any."""
    return all(value.from_numbers for value in inputs if is_floating(value.array))


def _all_constant(inputs: Sequence[Value]) -> bool:
    return all(value.from_numbers or value.constant for value in inputs if is_floating(value.array))


def _is_outer(eqn, inputs: Sequence[Value]) -> bool:
    """True for a `dot_general` that adds no terms: an outer product.

    The contracted axes may also have size 1, if the program made one operand from its own numbers, such as positions
    that multiply learned frequencies.
    """
    if eqn.primitive.name != "dot_general":
        return False
    (contracted, _), _ = eqn.params["dimension_numbers"]
    terms = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
    return not contracted or (terms == 1 and any(value.from_numbers for value in inputs))


def _narrows(eqn) -> bool:
    """True for a cast to half precision in the program, outside a backward pass."""
    return (
        eqn.primitive.name == "convert_element_type"
        and eqn.params["new_dtype"] in HALF
        and eqn.invars[0].aval.dtype != eqn.params["new_dtype"]
        and not is_transposed(eqn)
    )


def _says_its_dtypes(eqn) -> bool:
    """True if the parameters of an equation fix its dtypes: a product's algorithm, or the function in a scatter."""
    if eqn.primitive.name == "scatter":
        return eqn.params.get("update_jaxpr") is not None
    return isinstance(eqn.params.get("precision"), jax.lax.DotAlgorithm | jax.lax.DotAlgorithmPreset)


def _as_traced(eqn, inputs: list[Value], debug_info) -> list[Value]:
    """Casts the operands of an equation to the dtypes that it was traced in, and runs it unchanged."""
    arrays = cast_like((value.array for value in inputs), avals_of(eqn.invars))
    number = computed(eqn, [value.number for value in inputs])
    from_numbers, origin = _all_from_numbers(inputs), joined(inputs)
    constant = _all_constant(inputs) and eqn.primitive.name not in MATRIX_PRODUCTS
    return [
        Value(array, number, from_numbers=from_numbers, constant=constant, origin=origin)
        for array in as_function(eqn, debug_info)(*arrays)
    ]


def _converted(eqn, value: Value) -> Value:
    """Applies a `convert_element_type` of the program to a value.

    Where it kept the floating dtype when traced, and changed only the weak type, returns the value as it is.
    """
    traced, new = eqn.invars[0].aval, eqn.params["new_dtype"]
    if is_floating(traced) and traced.dtype == new:
        return value
    array = jax.lax.convert_element_type(value.array, new)
    from_numbers, constant = _all_from_numbers([value]), _all_constant([value])
    return Value(
        array, computed(eqn, [value.number]), from_numbers=from_numbers, constant=constant, origin=value.origin
    )


def _product(eqn, dtype: np.dtype | None) -> dict:
    """Copies the parameters of a product, with `dtype` as that of its result unless the program asked for another.

    `jnp.matmul` and similar functions always ask for the dtype of their inputs, which is replaced. A convolution has
    a `preferred_element_type` only if the program asked for it.
    """
    preferred = eqn.params.get("preferred_element_type")
    if eqn.primitive.name == "conv_general_dilated" and preferred is not None:
        return eqn.params
    floating = [aval.dtype for aval in avals_of(eqn.invars) if is_floating(aval)]
    implied = preferred is not None and floating and preferred == widest(*floating)
    return {**eqn.params, "preferred_element_type": dtype} if implied else eqn.params


def _widest(inputs: Sequence[Value], name: str) -> np.dtype | None:
    """Finds the widest dtype of the floating inputs of the primitive `name`; None without floating inputs.

    A scalar whose number is known at trace time counts only if the dtype of the others cannot hold its number. An array
    filled with one known number counts like other arrays, except where the primitive fills or bounds with it.
    """
    fills, held = name in _FILL, bounds if name in _BOUND else holds
    floating = [value for value in inputs if is_floating(value.array)]
    if not floating:
        return None
    arrays = [v for v in floating if v.number is None or (np.ndim(v.array) > 0 and not fills)] or floating
    dtype = widest(*(v.array.dtype for v in arrays))
    return widest(dtype, *(v.array.dtype for v in floating if v.number is not None and not held(dtype, v.number)))


# Primitives between the maximum and the subtraction in a softmax.
_KEEP_A_PEAK = ARRANGES | {"max", "select_n"}

# Primitives that treat an array of one repeated scalar as that scalar: zeros of a `where`, bounds of a clip.
_FILL = ARRANGES | {"select_n", "max", "min", "clamp", "eq", "ne"}

# Primitives that compare with a number, or replace values by it.
_BOUND = (COMPARES - {"eq", "ne"}) | {"max", "min", "clamp", "select_n"}

_REDUCTIONS = frozenset({"reduce_sum", "reduce_prod", "reduce_window_sum", "cumsum", "cumprod", "cumlogsumexp"})

# Primitives with independent operands: each keeps its dtype.
_EACH = frozenset({"optimization_barrier", "sort", "pmax", "pmin", "device_put"})

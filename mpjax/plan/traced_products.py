"""Reads a jaxpr: the products, convolutions, attentions and sums over devices that it asks for, and their dtypes."""

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from mpjax.plan.compiled_products import in_order
from mpjax.plan.hlo import Module, module_named
from mpjax.plan.verdicts import NARROWER, WIDER, compared, dtype_of_bits, together
from mpjax.precision.casting.flops import product_flops, stands_in
from mpjax.precision.casting.interpreter import FULL_PRECISION
from mpjax.precision.casting.jaxprs import is_jaxpr, is_recomputed, is_transposed, opened, scan_counts
from mpjax.precision.casting.primitives import ARRANGES, CALLS, CASTS, CHOOSES, MATRIX_PRODUCTS, REPEATS, SCALES, TAKES
from mpjax.precision.casting.walk import Body, equations, evaluated, held_by, holds_bodies
from mpjax.precision.dtypes import is_floating


_ATTENTION = {"dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper"}
_SUMS = {"psum", "psum2", "psum_invariant", "reduce_scatter", "psum_scatter"}
_KEEPS = ARRANGES | SCALES | {"clamp", "convert_element_type", "neg", "pad", "slice"}
"""Primitives that only cast, scale or arrange an operand: a gradient stays a gradient."""
_MOVES = CASTS | ARRANGES | REPEATS.keys() | TAKES | CHOOSES | {"abs", "neg"}
"""Primitives whose results consist of values of their operands: rounded values stay rounded."""


@dataclasses.dataclass(frozen=True)
class TracedProduct:
    """A product, convolution or attention of a traced program.

    Attributes:
      kind: "product", "convolution", "attention", or "kernel" for a Pallas kernel with products.
      module: the module and pass of the product.
      differentiated: whether the product belongs to a differentiated function, in its forward or backward pass.
      operands: the dtypes of the operands, in alphabetical order; a quantised operand has the dtype before it was
        widened.
      result: the dtype of the result.
      size: the number of scalar multiplications of a matrix product; 0 for other kinds.
      elements: the number of elements of the result; 0 for a kernel.
      quantised: whether an operand was quantised and widened again.
      rounded: the narrowest dtype that each operand was rounded to before the product, only of operands for which a
        rounding is known.
      blocks: whether the product replaces a product of blocks that share a scale, on a platform without units for them.
      kept: whether the product is inside `mpjax.full_precision`, where no policy applies.
      recomputed: whether the product repeats a product of the forward pass (`jax.checkpoint`).
      in_loop: whether the product is in the body of a loop; it counts once.
      constant: whether the operands depend on no input of the program.
      values: a key of each operand of a matrix product, equal for another product that sums over the same axes of the
        same operand; empty for other kinds.
      same: a key that is equal for products with the same operands and parameters, such as strides and precision.
    """

    kind: str
    module: Module
    differentiated: bool
    operands: tuple[str, ...]
    result: str
    size: int
    elements: int
    quantised: bool = False
    rounded: tuple[str, ...] = ()
    blocks: bool = False
    kept: bool = False
    recomputed: bool = False
    in_loop: bool = False
    constant: bool = False
    values: tuple = ()
    same: Any = None


@dataclasses.dataclass(frozen=True)
class TracedProgram:
    """The products and sums that a traced program asks for.

    Attributes:
      products: the products, convolutions and attentions that an output depends on. The body of a loop counts once.
      sums: the dtype of each floating array that is added over more than one device.
      cast: the narrowest dtype that each array of `sums` was cast to since it was computed; empty for no cast.
      gradients: for each output, whether it is a gradient, before or after casts and scales.
      rounded: for each output, the narrowest dtype that it was rounded to since it was computed; empty for no rounding.
    """

    products: tuple[TracedProduct, ...]
    sums: tuple[str, ...]
    gradients: tuple[bool, ...]
    rounded: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()


UNTRACED = TracedProgram((), (), ())
"""The empty `TracedProgram`, for a program whose jaxpr is not known."""


@dataclasses.dataclass(eq=False)
class _Value:
    """The known properties of a value of a jaxpr. Two values are equal only if they are the same object.

    Equal operations on the same values have the same results, since XLA computes them once.

    Attributes:
      narrow: the float8 dtype that the value was quantised to, even if it was widened again; empty for none.
      constant: whether the value depends on no input.
      gradient: whether a backward pass computed the value.
      rounded: the narrowest dtype that the value, or a part of it, was rounded to since it was computed, or empty.
      cast: the narrowest dtype that the value itself was cast to since it was computed, or empty.
    """

    narrow: str = ""
    constant: bool = False
    gradient: bool = False
    rounded: str = ""
    cast: str = ""


@dataclasses.dataclass(frozen=True)
class _Context:
    """The calls, loops and scopes around an equation.

    Attributes:
      stack: the name stack around it.
      in_loop: whether it is in the body of a loop.
      kept: whether it is inside `mpjax.full_precision`.
      blocks: whether it belongs to a computation that replaces a product of blocks that share a scale.
      sizes: the names and sizes of the mesh axes of the `shard_map` around it; empty without one.
    """

    stack: str = ""
    in_loop: bool = False
    kept: bool = False
    blocks: bool = False
    sizes: tuple[tuple[str, int], ...] = ()


def traced_program(jaxpr: Any) -> TracedProgram:
    """Reads a jaxpr, open or closed: its products and sums over devices, and which outputs are gradients or rounded."""
    body = opened(jaxpr)[0]
    needed: set[int] = set()
    _mark_needed(body, [True] * len(body.outvars), needed)
    products: list[TracedProduct] = []
    sums: list[tuple[str, str]] = []
    computed: dict[Hashable, Any] = {}
    apply = functools.partial(
        _apply, context=_Context(), needed=needed, products=products, sums=sums, computed=computed
    )
    outputs = evaluated(jaxpr, [_Value() for _ in body.invars], _constant(computed), apply)
    gradients, rounded = (output.gradient for output in outputs), (output.rounded for output in outputs)
    dtypes, cast = ([pair[index] for pair in sums] for index in (0, 1))
    return TracedProgram(tuple(products), tuple(dtypes), tuple(gradients), tuple(rounded), tuple(cast))


def _constant(computed: dict[Hashable, Any]) -> Callable[[Any, Any], _Value]:
    """Makes the function from a constant to its `_Value`: one for equal numbers, one for each array."""

    def constant(variable: Any, value: Any) -> _Value:
        is_number = np.ndim(value) == 0 and jnp.issubdtype(getattr(value, "dtype", type(value)), np.number)
        # Not repr, which shortens numbers.
        number = (str(variable.aval), np.asarray(value).tobytes()) if is_number else id(value)
        return computed.setdefault(("constant", number), _Value(constant=True))

    return constant


def _divided(eqn: Any, specs: str, values: list[_Value], computed: dict[Hashable, Any]) -> list[_Value]:
    """The values that a `shard_map` divides over devices or puts together: equal if they are so by the same `specs`."""
    if eqn.primitive.name != "shard_map":
        return values
    mesh = str(eqn.params["mesh"])
    return [
        computed.setdefault((specs, mesh, str(spec), value), dataclasses.replace(value))
        for spec, value in zip(eqn.params[specs], values, strict=True)
    ]


def _operation(eqn: Any, context: _Context) -> Hashable:
    """A key of what an equation does to its operands: equal only for the same primitive, parameters and shapes."""
    # Equal values may have other shapes inside of another shard_map, and axes other sizes.
    shapes = tuple(str(var.aval) for var in eqn.invars)
    return (eqn.primitive.name, shapes, context.sizes, *((name, _key(eqn.params[name])) for name in sorted(eqn.params)))


def _key(param: Any) -> Hashable:
    """A key of a parameter of an equation; a jaxpr's is its text and its constants."""
    if is_jaxpr(param):
        return str(param), tuple(map(id, opened(param)[1]))
    try:
        hash(param)
    except TypeError:
        return id(param)
    return type(param), param


def _apply(
    eqn: Any,
    scope: str,
    operands: list[_Value],
    debug_info: Any,
    *,
    context: _Context,
    needed: set[int],
    products: list[TracedProduct],
    sums: list[tuple[str, str]],
    computed: dict[Hashable, Any],
) -> Sequence[_Value]:
    """Computes the known properties of the results of an equation, as `evaluated` calls it.

    If an output depends on the equation (`needed`), its product is added to `products`, and the dtype and `cast` of
    each array that it adds over devices to `sums`. Equations inside calls, loops and branches are visited too.
    `computed` has the results so far, by operation, pass and operands; one for each output.
    """
    name = eqn.primitive.name
    if holds_bodies(eqn):
        inside = _inside(eqn, context)
        apply_inside = functools.partial(
            _apply, context=inside, needed=needed, products=products, sums=sums, computed=computed
        )
        results = _entered(eqn, _divided(eqn, "in_specs", operands, computed), apply_inside, _constant(computed))
        return _divided(eqn, "out_specs", results, computed)
    if id(eqn) in needed:
        if name == "pallas_call" and (inside := _products_inside(eqn)):
            products.append(_kernel(eqn, inside, context))
        if (name in MATRIX_PRODUCTS or name in _ATTENTION) and all(map(is_floating, _avals(eqn))):
            products.append(_traced_product(eqn, operands, context))
        elif name in _SUMS and _devices(eqn, context) > 1:
            added = zip(eqn.invars, operands, strict=True)
            sums += [(str(var.aval.dtype), value.cast) for var, value in added if is_floating(var.aval)]
    if name == "optimization_barrier":
        return list(operands)
    result = _result(eqn, operands, context)
    results = tuple(dataclasses.replace(result) for _ in eqn.outvars)
    key = _operation(eqn, context), result.gradient, *operands
    return results if eqn.effects else computed.setdefault(key, results)


def _traced_product(eqn: Any, operands: list[_Value], context: _Context) -> TracedProduct:
    name = eqn.primitive.name
    attention = name in _ATTENTION
    stack = _joined(context.stack, str(eqn.source_info.name_stack))
    module = module_named(_joined(stack, name))
    dtypes = [str(aval.dtype) for aval in _avals(eqn)]
    quantised = ["" if attention else value.narrow for value in operands[:2]]
    result = eqn.outvars[0].aval
    convolution = name == "conv_general_dilated"
    return TracedProduct(
        kind="attention" if attention else "convolution" if convolution else "product",
        module=module,
        differentiated="jvp(" in stack,
        operands=in_order(narrow or dtype for narrow, dtype in zip(quantised, dtypes, strict=True)),
        result=str(result.dtype),
        size=product_flops(eqn) // 2 if name == "dot_general" else 0,
        elements=math.prod(result.shape),
        quantised=any(narrow and narrow != dtype for narrow, dtype in zip(quantised, dtypes, strict=True)),
        rounded=tuple(filter(None, (value.rounded for value in operands[:2]))),
        blocks=context.blocks,
        kept=context.kept,
        recomputed=is_recomputed(eqn) or "rematted_computation" in stack,
        in_loop=context.in_loop,
        constant=all(value.constant for value in operands[:2]),
        values=_summed(eqn, operands) if name == "dot_general" else (),
        same=(_operation(eqn, context), *operands),
    )


def _summed(eqn: Any, operands: list[_Value]) -> tuple:
    """For each operand of a matrix product: its `_Value`, the axes that are summed, and the axes of the batch."""
    summed, batch = eqn.params["dimension_numbers"]
    return tuple(zip(operands, map(tuple, summed), map(tuple, batch), strict=True))


def _kernel(eqn: Any, inside: list[Any], context: _Context) -> TracedProduct:
    """Describes a Pallas kernel as one product, with the operand dtypes of the first of the products `inside` it."""
    stack = _joined(context.stack, str(eqn.source_info.name_stack))
    operands = in_order(str(aval.dtype) for aval in _avals(inside[0]))
    module = module_named(_joined(stack, "pallas_call"))
    result = str(eqn.outvars[0].aval.dtype)
    return TracedProduct(
        "kernel", module, "jvp(" in stack, operands, result, 0, 0, in_loop=context.in_loop, same=object()
    )


def _products_inside(eqn: Any) -> list[Any]:
    return [inner for _, inner in equations(eqn.params["jaxpr"]) if inner.primitive.name in MATRIX_PRODUCTS]


def _avals(eqn: Any) -> list[Any]:
    return [var.aval for var in eqn.invars[:2]]


def _result(eqn: Any, operands: list[_Value], context: _Context) -> _Value:
    constant = all(value.constant for value in operands)
    rounded = _rounded_by(eqn, [value.rounded for value in operands])
    cast = _cast_by(eqn, [value.cast for value in operands])
    if not eqn.outvars or not is_floating(eqn.outvars[0].aval):
        return _Value(constant=constant, rounded=rounded)
    dtype = np.dtype(eqn.outvars[0].aval.dtype)
    gradient = is_transposed(eqn) or "transpose(" in context.stack
    narrow = str(dtype) if dtype.itemsize == 1 else ""
    if operands and eqn.primitive.name in _KEEPS:
        sizes = [math.prod(var.aval.shape) for var in eqn.invars]
        main = operands[sizes.index(max(sizes))]
        return _Value(narrow or main.narrow, constant, gradient or main.gradient, rounded, cast)
    return _Value(narrow, constant, gradient, rounded, cast)


def _devices(eqn: Any, context: _Context) -> int:
    """The number of devices that a sum adds over: the product of its axes' sizes, with 2 for an unknown size."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    sizes = dict(context.sizes)
    return math.prod(sizes.get(axis, 2) for axis in ((axes,) if isinstance(axes, str) else axes))


def _inside(eqn: Any, context: _Context) -> _Context:
    mesh = eqn.params.get("mesh") if eqn.primitive.name == "shard_map" else None
    return _Context(
        stack=_joined(context.stack, str(eqn.source_info.name_stack)),
        in_loop=context.in_loop or eqn.primitive.name in ("scan", "while"),
        kept=context.kept or eqn.params.get("name") == FULL_PRECISION,
        blocks=context.blocks or stands_in(Body("", (), (), (eqn,))),
        sizes=context.sizes if mesh is None else tuple(mesh.shape.items()),
    )


def _joined(*stacks: str) -> str:
    return "/".join(filter(None, stacks))


def _entered(eqn: Any, operands: list[_Value], apply: Any, constant: Callable[[Any, Any], _Value]) -> list[_Value]:
    """Evaluates the bodies of a call, loop or branch with `apply`; returns the known properties of its results.

    Of the results of loops and branches, only roundings are known.
    """
    bodies = held_by(eqn)
    name = eqn.primitive.name
    outputs: list[list[_Value]] = []
    for held in bodies:
        inputs = opened(held)[0].invars
        arguments = operands[1:] if name == "cond" else operands
        # The carry of a loop may be quantised in some iterations only.
        known = len(arguments) == len(inputs) and name != "while"
        values = list(arguments) if known and name != "scan" else [_Value() for _ in inputs]
        if known and name == "scan":
            values = [_Value(rounded=value.rounded) for value in arguments]
            consts, carried = scan_counts(eqn.params)
            # A rounded carry is an operand of the next iteration.
            once = evaluated(held, list(values), constant, functools.partial(apply, products=[], sums=[]))
            for number, carry in enumerate(once[:carried], start=consts):
                values[number] = _Value(rounded=together([values[number].rounded, carry.rounded]))
        outputs.append(evaluated(held, values, constant, apply))
    fitting = [results for results in outputs if len(results) == len(eqn.outvars)]
    if len(bodies) == 1 and name != "scan" and fitting:
        return fitting[0]
    return [_Value(rounded=together([results[n].rounded for results in fitting])) for n in range(len(eqn.outvars))]


def _mark_needed(body: Any, wanted: Iterable[bool], needed: set[int]) -> list[bool]:
    """Adds to `needed` the ids of the equations that a wanted output depends on, and those with side effects.

    Bodies of calls are followed output by output. In loops and branches, all outputs count as wanted.

    Args:
      body: the jaxpr to search.
      wanted: for each output of `body`, whether it is wanted.
      needed: the set that the ids are added to.

    Returns:
      For each input of `body`, whether a needed equation or a wanted output uses it.
    """
    used = {id(var) for var, want in zip(body.outvars, wanted, strict=True) if want}
    for eqn in reversed(body.eqns):
        outputs = [id(var) in used for var in eqn.outvars]
        if not (any(outputs) or eqn.effects):
            continue
        needed.add(id(eqn))
        inputs = [True] * len(eqn.invars)
        bodies = [opened(held)[0] for held in held_by(eqn)]
        for inner in bodies:
            straight = eqn.primitive.name in (CALLS | {"shard_map"}) and len(inner.outvars) == len(outputs)
            inner_inputs = _mark_needed(inner, outputs if straight else [True] * len(inner.outvars), needed)
            if straight and len(bodies) == 1 and len(inner_inputs) == len(inputs):
                inputs = inner_inputs
        used |= {id(var) for var, use in zip(eqn.invars, inputs, strict=True) if use}
    return [id(var) in used for var in body.invars]


def _rounded_by(eqn: Any, operand_dtypes: Sequence[str]) -> str:
    """Finds the narrowest dtype that the results of an equation were rounded to since they were computed.

    Casts, rearrangements and scaling keep the rounding of the operand that they cast, rearrange or scale. The result of
    other arithmetic with rounded operands counts as rounded only if its dtype is as narrow: it is then rounded again.

    Args:
      eqn: the equation; neither control flow nor a call.
      operand_dtypes: the narrowest dtype that each operand was rounded to; empty for no rounding.

    Returns:
      The name of the dtype; empty if no rounding is known.
    """
    if not eqn.outvars or not is_floating(eqn.outvars[0].aval):
        return ""
    name, dtype = eqn.primitive.name, str(eqn.outvars[0].aval.dtype)
    if name in CASTS:
        source = eqn.invars[0].aval
        bits = eqn.params.get("exponent_bits"), eqn.params.get("mantissa_bits")
        target = dtype_of_bits(*bits) if name == "reduce_precision" else dtype
        rounds = is_floating(source) and compared([str(source.dtype)], [target]) == NARROWER
        return together([operand_dtypes[0], target if rounds else ""])
    if name in _MOVES:
        return together(operand_dtypes)
    if (main := _scaled(eqn)) is not None:
        return operand_dtypes[main]
    known = together(operand_dtypes)
    return dtype if known and compared([known], [dtype]) != WIDER else ""


def _scaled(eqn: Any) -> int | None:
    """The index of the operand that a `mul` or `div` scales by an operand of fewer elements; None if it does not scale.

    A product of two arrays of equal size does not scale, nor does the division of a smaller array by a larger one: both
    are arithmetic.
    """
    if eqn.primitive.name not in SCALES:
        return None
    first, second = (var.aval.size for var in eqn.invars)
    if first > second:
        return 0
    return 1 if first < second and eqn.primitive.name == "mul" else None


def _cast_by(eqn: Any, operand_dtypes: Sequence[str]) -> str:
    """Finds the narrowest dtype that the results of an equation were cast to since they were computed; empty for none.

    It is `_rounded_by` for casts, rearrangements and scaling. The results of other arithmetic are not cast, however
    narrow they are. `operand_dtypes` has the narrowest dtype that each operand was cast to, or an empty text.
    """
    return _rounded_by(eqn, operand_dtypes) if eqn.primitive.name in _MOVES or _scaled(eqn) is not None else ""

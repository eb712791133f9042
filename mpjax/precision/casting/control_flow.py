"""Runs control flow for autocast: each body runs with casts, inside the same construct as before.

The carry of a loop keeps its traced dtypes. An output of several branches gets the dtype that theirs promote to. Each
handler takes the function that runs a jaxpr (`Interpreter.run`), the equation, its inputs (a list of `Value`), and the
debug information of its program. It returns the outputs, a list of `Value`.
"""

import functools
from collections.abc import Callable

import jax

from mpjax.precision.casting.gradient_sums import adding_to, is_half, with_sum
from mpjax.precision.casting.jaxprs import manual_axes, open_shardings, opened, scan_counts
from mpjax.precision.casting.primitives import KERNEL_CALL
from mpjax.precision.casting.values import (
    Origin,
    Value,
    arrays_of,
    avals_of,
    cast_like,
    computed_from,
    values_of,
)
from mpjax.precision.casting.walk import called
from mpjax.precision.dtypes import is_floating, widest
from mpjax.precision.float8.operations import note, noted


def jit(run, eqn, inputs, debug_info) -> list:
    """Runs an inner `jit` equation as a `jit` of its body with casts, with the same name and shardings.

    Facts about its inputs, such as known numbers and origins, hold inside; facts about its outputs hold outside.
    """
    params = eqn.params
    facts = tuple(value.fact for value in inputs)
    shardings = open_shardings(params["in_shardings"]), open_shardings(params["out_shardings"])
    # The cache key is the interpreter, because interpreters with equal fields are equal. Their bound methods are not.
    inner, out_facts, products = _jitted(run.__self__, params["jaxpr"], params["name"], facts, *shardings)
    arrays = inner(*arrays_of(inputs))
    note(products)
    return values_of(arrays, out_facts if len(out_facts) == len(arrays) else ())


@functools.lru_cache(maxsize=256)
def _jitted(
    interpreter, jaxpr, name: str, facts: tuple, in_shardings: tuple, out_shardings: tuple
) -> tuple[Callable, list, list]:
    """Builds a `jit` of a body with casts, and two lists: facts about the outputs, and outcomes of float8 products.

    The lists are empty until the function is first traced. Cached for equal arguments, so that a repeated call does not
    compile again.
    """
    out_facts: list[Value] = []
    products: list[str] = []

    def inner(*arrays):
        with noted() as notes:
            outputs = interpreter.run(jaxpr, values_of(arrays, facts))
        out_facts[:] = [value.fact for value in outputs]
        products[:] = notes
        return arrays_of(outputs)

    inner.__name__ = name
    shardings = {"in_shardings": in_shardings, "out_shardings": list(out_shardings)}
    options = {which: value for which, value in shardings.items() if any(s is not None for s in value)}
    return jax.jit(inner, **options), out_facts, products


def scan(run, eqn, inputs, debug_info) -> list:
    """Runs a `lax.scan` equation as a scan whose body has casts. The carry keeps its traced dtypes.

    Gradients of half-precision arrays that all iterations read are added in float32.
    """
    params = eqn.params
    num_consts, num_carry = scan_counts(params)
    body, _ = opened(params["jaxpr"])
    carry_avals = avals_of(body.invars[num_consts : num_consts + num_carry])
    arrays = arrays_of(inputs)
    consts, xs = arrays[:num_consts], arrays[num_consts + num_carry :]
    # Each iteration adds to the gradient of an array that all of them read.
    sums = [with_sum(const) if is_half(const) else None for const in consts]
    # The carry may be another array later. Slices of the other inputs have the origin of the whole.
    facts = [value.fact for value in inputs[:num_consts]]
    facts += [_carried(value) for value in inputs[num_consts : num_consts + num_carry]]
    facts += [Value(None, origin=value.origin) for value in inputs[num_consts + num_carry :]]
    init = cast_like(arrays[num_consts : num_consts + num_carry], carry_avals)

    def step(carry, x):
        read = [const if args is None else adding_to(*args) for const, args in zip(consts, sums, strict=True)]
        out = arrays_of(run(params["jaxpr"], values_of([*read, *carry, *x], facts)))
        return cast_like(out[:num_carry], carry_avals), out[num_carry:]

    carry, ys = jax.lax.scan(
        step, init, xs, length=params["length"], reverse=params["reverse"], unroll=params["unroll"]
    )
    return computed_from(inputs, [*carry, *ys])


def _carried(initial: Value) -> Value:
    """The facts about a loop's carry that hold in every iteration, from its initial value.

    Only the origin is kept, and only if it is `BATCH`: an iteration may change all else.
    """
    return Value(None, origin=Origin.BATCH if initial.origin == Origin.BATCH else Origin.UNKNOWN)


def while_loop(run, eqn, inputs, debug_info) -> list:
    """Runs an equation of `lax.while_loop` or `lax.fori_loop` as a while loop whose condition and body have casts.

    The carry keeps its traced dtypes.
    """
    params = eqn.params
    facts = [value.fact for value in inputs]
    split = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    arrays = arrays_of(inputs)
    cond_consts, body_consts = arrays[: split[0]], arrays[split[0] : split[1]]
    unknown = [_carried(value) for value in inputs[split[1] :]]
    avals = avals_of(eqn.outvars)

    def go_on(carry):
        return run(params["cond_jaxpr"], values_of([*cond_consts, *carry], facts[: split[0]] + unknown))[0].array

    def body(carry):
        values = values_of([*body_consts, *carry], facts[split[0] : split[1]] + unknown)
        return cast_like(arrays_of(run(params["body_jaxpr"], values)), avals)

    return computed_from(inputs, jax.lax.while_loop(go_on, body, cast_like(arrays[split[1] :], avals)))


def cond(run, eqn, inputs, debug_info) -> list:
    """Runs an equation of `lax.cond`, `lax.switch` or `lax.platform_dependent`, and each of its branches by `run`.

    A floating output gets the dtype that its dtypes in all branches promote to (`widest`).
    """
    index, *operands = arrays_of(inputs)
    facts = [value.fact for value in inputs[1:]]

    def branch(jaxpr) -> Callable:
        return lambda *arrays: arrays_of(run(jaxpr, values_of(arrays, facts)))

    branches = [branch(jaxpr) for jaxpr in eqn.params["branches"]]
    shapes = zip(*(jax.eval_shape(fn, *operands) for fn in branches), strict=True)
    dtypes = [widest(*(s.dtype for s in outs)) if is_floating(outs[0]) else None for outs in shapes]

    def same_dtypes(fn: Callable) -> Callable:
        return lambda *arrays: [a if d is None else a.astype(d) for a, d in zip(fn(*arrays), dtypes, strict=True)]

    branches = [same_dtypes(fn) for fn in branches]
    platforms = eqn.params.get("branches_platforms")
    if platforms is None:
        return computed_from(inputs, jax.lax.switch(index, branches, *operands))
    # Each branch is compiled only for its own platforms. A branch without platforms is the default.
    of_platform = {name: fn for names, fn in zip(platforms, branches, strict=True) for name in names or ("default",)}
    return computed_from(inputs, jax.lax.platform_dependent(*operands, **of_platform))


def remat(run, eqn, inputs, debug_info) -> list:
    """Runs a `jax.checkpoint` equation as a checkpoint of its body with casts, with the same policy."""
    facts = [value.fact for value in inputs]

    def inner(*arrays):
        return arrays_of(run(eqn.params["jaxpr"], values_of(arrays, facts)))

    options = {name: eqn.params[name] for name in ("prevent_cse", "policy")}
    return computed_from(inputs, jax.checkpoint(inner, **options)(*arrays_of(inputs)))


def call(run, eqn, inputs, debug_info) -> list:
    """Runs the body of a call in place of the call, with casts, for calls that mean nothing beyond their body."""
    return run(called(eqn), inputs)


def shard_map(run, eqn, inputs, debug_info) -> list:
    """Runs a `jax.shard_map` equation as a `shard_map` of its body with casts, over the same mesh axes."""
    params = eqn.params
    facts = [value.fact for value in inputs]

    def inner(*arrays):
        return tuple(arrays_of(run(params["jaxpr"], values_of(arrays, facts))))

    mapped = jax.shard_map(
        inner,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        check_vma=params["check_vma"],
        axis_names=set(manual_axes(params)),
    )
    return computed_from(inputs, mapped(*arrays_of(inputs)))


HANDLERS = {
    "jit": jit,
    "scan": scan,
    "while": while_loop,
    "cond": cond,
    "remat2": remat,
    "checkpoint": remat,
    KERNEL_CALL: call,
    "closed_call": call,
    "core_call": call,
    "eval_jaxpr": call,
    "call": call,
    "shard_map": shard_map,
}

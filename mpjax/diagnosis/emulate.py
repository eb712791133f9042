"""Runs a half-precision program twice at once: as it is, and as it would be without rounding.

Half-precision values are held in float32 and rounded after each operation, so that one can see what rounding did, leave
it out, or leave it out in some modules only. The second run, of the same operations without any rounding, is the
reference: the program in float32.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core

from mpjax.diagnosis.rounding import round_to
from mpjax.precision.casting.jaxprs import as_function, is_transposed, opened, scan_counts, scope_of
from mpjax.precision.casting.operations import OPERATIONS
from mpjax.precision.casting.provenance import source_of
from mpjax.precision.casting.values import cast_like
from mpjax.precision.dtypes import FLOAT32, HALF, is_floating


class Pair(NamedTuple):
    """A value of the program.

    Attributes:
      wide: as it is in the reference.
      low: as it is in half precision; the same array where nothing has been rounded yet.
      path: the module that made it; None for an input.
      free: whether a module that does not round made it, or it comes from such a value: then it is float32, and what
        is not a product stays float32 with it, as JAX promotes.
    """

    wide: Any
    low: Any
    path: str | None = None
    free: Any = False


class Site(NamedTuple):
    """An equation of the program.

    Attributes:
      path: named scopes (module path); empty outside all of them.
      direction: "forward" or "backward".
      operation: the primitive.
      dtype: of its result.
      shape: of its result.
      source: the user's file and line.
    """

    path: str
    direction: str
    operation: str
    dtype: np.dtype
    shape: tuple[int, ...]
    source: str


class Step(NamedTuple):
    """What an equation did.

    Attributes:
      site: which equation.
      inputs: its operands in half precision, as it got them.
      wide_inputs: its operands in the reference.
      wide: its result in the reference.
      exact: its result in half precision, before rounding.
      low: and after.
    """

    site: Site
    inputs: list
    wide_inputs: list
    wide: jax.Array
    exact: jax.Array
    low: jax.Array


@dataclasses.dataclass(frozen=True)
class Emulator:
    """How to run a program.

    Attributes:
      rounds: module path to whether its operations round (a bool, or a bool scalar while tracing).
      isolated: whether each module gets the reference's values, rounded, as its inputs, so that what it does wrong is
        its own; else errors are carried on.
      observe: gets the `Step` of each equation with a floating result.
    """

    rounds: Callable[[str], Any] = lambda path: True
    isolated: bool = False
    observe: Callable[[Step], None] | None = None

    def run(self, jaxpr, inputs: Sequence) -> list[Pair]:
        """The outputs of a closed jaxpr for arrays as inputs."""
        pairs = [self._input(var.aval, value) for var, value in zip(opened(jaxpr)[0].invars, inputs, strict=True)]
        return self._run(jaxpr, pairs, "", False, ())

    def _input(self, aval, value) -> Pair:
        value = _widened(value)
        return Pair(value, _rounded(value, aval.dtype, self.rounds("")))

    def _run(self, jaxpr, inputs: Sequence[Pair], outer: str, backward: bool, callers: tuple) -> list[Pair]:
        body, consts = opened(jaxpr)
        env: dict[Any, Pair] = {var: self._input(var.aval, c) for var, c in zip(body.constvars, consts, strict=True)}
        env.update(zip(body.invars, inputs, strict=True))
        last = _last_uses(body)

        def read(atom) -> Pair:
            if isinstance(atom, core.Literal):
                value = _widened(np.asarray(atom.val))
                return Pair(value, value)
            return env[atom]

        for index, eqn in enumerate(body.eqns):
            scope, back = scope_of(eqn, outer), backward or is_transposed(eqn)
            pairs = [read(atom) for atom in eqn.invars]
            run = _CONTROL.get(eqn.primitive.name)
            if run is not None:
                outputs = run(self, eqn, pairs, scope, back, (eqn, *callers))
            else:
                outputs = self._apply(eqn, pairs, scope, back, callers, body.debug_info)
            env.update(zip(eqn.outvars, outputs, strict=True))
            for var in last.get(index, ()):
                del env[var]
        return [read(atom) for atom in body.outvars]

    def _apply(self, eqn, pairs: list[Pair], path: str, backward: bool, callers: tuple, debug_info) -> list[Pair]:
        avals = [atom.aval for atom in eqn.invars]
        half = [is_floating(v.aval) and v.aval.dtype in HALF for v in (*eqn.outvars, *eqn.invars)]
        rounds = self.rounds(path)
        if not _casts_down(eqn):
            for pair in pairs:
                rounds = _both(rounds, _not(pair.free))
        lows = [self._taken(pair, aval, path, rounds) for pair, aval in zip(pairs, avals, strict=True)]
        wides = [pair.wide for pair in pairs]
        opaque = any(half) and _is_opaque(eqn)
        wide = _bind(eqn, wides, debug_info, true_half=opaque)
        same = all(low is w for low, w in zip(lows, wides, strict=True))
        exact = wide if same else _bind(eqn, lows, debug_info, true_half=opaque)
        if any(half) and eqn.primitive.name in _ACCUMULATE:
            low = [_chosen(rounds, lambda: _bind(eqn, lows, debug_info, true_half=True)[0], exact[0])]
        else:
            low = [_rounded(x, var.aval.dtype, rounds) for x, var in zip(exact, eqn.outvars, strict=True)]
        if self.observe is not None:
            for var, w, x, y in zip(eqn.outvars, wide, exact, low, strict=True):
                if is_floating(var.aval):
                    self.observe(Step(_site(eqn, var, path, backward, callers), lows, wides, w, x, y))
        free = _not(rounds) if any(half) else False
        return [Pair(w, y, path, free) for w, y in zip(wide, low, strict=True)]

    def _taken(self, pair: Pair, aval, path: str, rounds):
        """An operand as an equation in `path` gets it: in its dtype, and if isolated free of other modules' errors."""
        if not is_floating(aval):
            return pair.low
        value = pair.wide if self.isolated and pair.path != path else pair.low
        return _rounded(value, aval.dtype, rounds)


def _casts_down(eqn) -> bool:
    """Whether operands are brought to half precision whatever they are: by a product in a layer, or by a cast."""
    name = eqn.primitive.name
    to_half = name == "convert_element_type" and eqn.params["new_dtype"] in HALF
    return to_half or OPERATIONS.rule(name) == "low"


def _rounded(value, dtype, rounds):
    return _chosen(rounds, lambda: round_to(value, dtype), value) if dtype in HALF else value


def _chosen(rounds, rounded: Callable[[], Any], value):
    """What rounding makes of a value, if it `rounds`: a bool, or while tracing a bool scalar, and both are computed."""
    if isinstance(rounds, bool):
        return rounded() if rounds else value
    return jnp.where(rounds, rounded(), value)


def _both(first, second):
    if isinstance(first, bool):
        return second if first else False
    if isinstance(second, bool):
        return first if second else False
    return first & second


def _not(flag):
    return not flag if isinstance(flag, bool) else ~flag


def _site(eqn, var, path: str, backward: bool, callers: tuple) -> Site:
    return Site(
        path,
        "backward" if backward else "forward",
        eqn.primitive.name,
        np.dtype(var.aval.dtype),
        tuple(var.aval.shape),
        source_of((eqn, *callers)),
    )


def _last_uses(body) -> dict[int, list]:
    """After which equation each variable can be forgotten."""
    kept = {var for var in body.outvars if not isinstance(var, core.Literal)}
    last: dict[Any, int] = {}
    for index, eqn in enumerate(body.eqns):
        for var in (*eqn.invars, *eqn.outvars):
            if not isinstance(var, core.Literal):
                last[var] = index
    after: dict[int, list] = {}
    for var, index in last.items():
        if var not in kept:
            after.setdefault(index, []).append(var)
    return after


def _widened(value):
    return jnp.asarray(value).astype(FLOAT32) if getattr(value, "dtype", None) in HALF else value


_ACCUMULATE = frozenset(
    {
        *("reduce_sum", "reduce_prod", "reduce_window_sum", "cumsum", "cumprod", "cumlogsumexp"),
        *("scatter-add", "scatter-sub", "scatter-mul"),
    }
)
"""They round after each of many additions, which only the device itself does as it does."""

_BITS = frozenset({"nextafter", "bitcast_convert_type"})


def _is_opaque(eqn) -> bool:
    """Whether an equation means something in its own dtypes only: kernels, bits."""
    return eqn.primitive.name in _BITS or OPERATIONS.rule(eqn.primitive.name) == "as_traced"


def _bind(eqn, values: list, debug_info, *, true_half: bool) -> list:
    """The results of an equation, those of half precision held in float32."""
    if true_half:
        given = cast_like(values, (atom.aval for atom in eqn.invars))
        return [_widened(x) for x in as_function(eqn, debug_info)(*given)]
    if eqn.primitive.name == "convert_element_type":
        new = eqn.params["new_dtype"]
        return [jax.lax.convert_element_type(values[0], FLOAT32 if new in HALF else new)]
    params = {
        name: FLOAT32 if name in ("preferred_element_type", "dtype") and value in HALF else value
        for name, value in eqn.params.items()
    }
    if eqn.primitive.name in _SCATTERS:
        kept = {name: params[name] for name in ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")}
        return [_SCATTERS[eqn.primitive.name](*values, **kept)]
    out = eqn.primitive.bind(*values, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


_SCATTERS = {
    "scatter": jax.lax.scatter,
    "scatter-add": jax.lax.scatter_add,
    "scatter-sub": jax.lax.scatter_sub,
    "scatter-mul": jax.lax.scatter_mul,
    "scatter-min": jax.lax.scatter_min,
    "scatter-max": jax.lax.scatter_max,
}


def _call(emulator: Emulator, eqn, pairs, path, backward, callers) -> list[Pair]:
    """A call: its body, in place."""
    params = eqn.params
    jaxpr = params.get("jaxpr", params.get("call_jaxpr"))
    return emulator._run(jaxpr, pairs, path, backward, callers)


def _cond(emulator: Emulator, eqn, pairs, path, backward, callers) -> list[Pair]:
    """The branch that the half-precision run takes, for both."""
    index, *operands = pairs
    branches = eqn.params["branches"]
    if not isinstance(index.low, Tracer):
        chosen = branches[int(np.clip(int(index.low), 0, len(branches) - 1))]
        return emulator._run(chosen, operands, path, backward, callers)
    quiet = dataclasses.replace(emulator, observe=None)

    def run(branch):
        def of_arrays(wides, lows):
            outputs = quiet._run(branch, _pairs(wides, lows), path, backward, callers)
            return _arrays(outputs)

        return of_arrays

    wides, lows = jax.lax.switch(index.low, [run(branch) for branch in branches], *_arrays(operands))
    return _pairs(wides, lows, path)


def _while(emulator: Emulator, eqn, pairs, path, backward, callers) -> list[Pair]:
    """As often as the half-precision run goes round, for both."""
    params = eqn.params
    cond_consts, body_consts, carry = _split(pairs, params["cond_nconsts"], params["body_nconsts"])

    def go_on(emulator, carry):
        return emulator._run(params["cond_jaxpr"], [*cond_consts, *carry], path, backward, callers)[0].low

    def once(emulator, carry):
        return emulator._run(params["body_jaxpr"], [*body_consts, *carry], path, backward, callers)

    if emulator.observe is not None and not _traced(pairs):
        while bool(go_on(emulator, carry)):
            carry = once(emulator, carry)
        return carry
    quiet = dataclasses.replace(emulator, observe=None)
    wides, lows = jax.lax.while_loop(
        lambda state: go_on(quiet, _pairs(*state)), lambda state: _arrays(once(quiet, _pairs(*state))), _arrays(carry)
    )
    return _pairs(wides, lows, path)


def _scan(emulator: Emulator, eqn, pairs, path, backward, callers) -> list[Pair]:
    params = eqn.params
    num_consts, num_carry = scan_counts(params)
    consts, carry, xs = _split(pairs, num_consts, num_carry)

    def once(emulator, carry, x):
        out = emulator._run(params["jaxpr"], [*consts, *carry, *x], path, backward, callers)
        return out[:num_carry], out[num_carry:]

    if emulator.observe is not None and not _traced(pairs):
        ys = []
        turns = range(params["length"])
        for turn in reversed(turns) if params["reverse"] else turns:
            carry, y = once(emulator, carry, [Pair(p.wide[turn], p.low[turn], p.path) for p in xs])
            ys.append(y)
        if params["reverse"]:
            ys.reverse()
        columns = [_arrays(column) for column in zip(*ys, strict=True)]
        return [*carry, *(Pair(jnp.stack(wides), jnp.stack(lows), path) for wides, lows in columns)]
    quiet = dataclasses.replace(emulator, observe=None)

    def body(state, x):
        carry, y = once(quiet, _pairs(*state), _pairs(*x))
        return _arrays(carry), _arrays(y)

    options = {"length": params["length"], "reverse": params["reverse"]}
    carry, ys = jax.lax.scan(body, _arrays(carry), _arrays(xs), **options)
    return [*_pairs(*carry, path), *_pairs(*ys, path)]


def _split(pairs: Sequence[Pair], first: int, second: int) -> tuple[list[Pair], list[Pair], list[Pair]]:
    return list(pairs[:first]), list(pairs[first : first + second]), list(pairs[first + second :])


def _arrays(pairs: Sequence[Pair]) -> tuple[list, list]:
    return [jnp.asarray(p.wide) for p in pairs], [jnp.asarray(p.low) for p in pairs]


def _pairs(wides: Sequence, lows: Sequence, path: str | None = None) -> list[Pair]:
    return [Pair(w, low, path) for w, low in zip(wides, lows, strict=True)]


def _traced(pairs: Sequence[Pair]) -> bool:
    return any(isinstance(value, Tracer) for pair in pairs for value in (pair.wide, pair.low))


_CONTROL = {
    "cond": _cond,
    "while": _while,
    "scan": _scan,
    **dict.fromkeys(
        (
            *("jit", "remat2", "checkpoint", "closed_call", "core_call", "eval_jaxpr", "call"),
            *("custom_jvp_call", "custom_vjp_call"),
        ),
        _call,
    ),
}

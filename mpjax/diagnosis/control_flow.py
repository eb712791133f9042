"""Emulates control flow: loops are compiled, and both runs take the same branch of a conditional.

`Pair.free` of each carried value is determined before a loop runs: like a dtype, it is the same in all iterations.
Under `jax.shard_map`, every device runs the body on its shards of both values, and readings are combined.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core
from jax.sharding import PartitionSpec

from mpjax.diagnosis.formats import NARROW
from mpjax.diagnosis.measurements import Marks, Measured, apart, joined, none_like
from mpjax.diagnosis.pairs import Pair, Place
from mpjax.diagnosis.readings import Site
from mpjax.precision.casting.jaxprs import closed, expanded, manual_axes, opened, scan_counts
from mpjax.precision.casting.one_equation import standing_at
from mpjax.precision.dtypes import FLOAT32, is_floating


class BodyRunner(Protocol):
    """The methods of `Emulator` that control flow uses to run its bodies."""

    @property
    def recorder(self) -> Any:
        """The recorder of the readings; None if no readings are taken."""
        ...

    @property
    def isolated(self) -> bool:
        """True if each module gets the reference's values as inputs."""
        ...

    def run_body(self, jaxpr, inputs: list[Pair], place: Place) -> list[Pair]:
        """Emulates a jaxpr, and returns a pair for each output. Empties `inputs`."""
        ...

    def held(self, pair: Pair, aval) -> Pair:
        """Stores a rounded value in its half dtype until its next use."""
        ...

    def recording(self, recorder) -> Self:
        """Copies the emulator with another recorder; None takes no readings."""
        ...


def cond(emulator: BodyRunner, eqn, pairs: list[Pair], place: Place) -> list[Pair]:
    """Emulates `lax.cond` or `lax.switch`. The reference also takes the branch that the half-precision run selects.

    An index out of range selects the nearest branch. Inside a compiled loop the branches take no readings.
    """
    index, *operands = pairs
    branches = eqn.params["branches"]
    if not isinstance(index.low, Tracer):
        return emulator.run_body(branches[int(np.clip(int(index.low), 0, len(branches) - 1))], operands, place)
    quiet = emulator.recording(None)
    free: list[bool] = [False] * len(eqn.outvars)

    def taking(branch) -> Callable:
        def of_arrays(arrays):
            inputs = [pair._replace(wide=wide, low=low) for pair, (wide, low, _) in zip(operands, arrays, strict=True)]
            outputs = quiet.run_body(branch, inputs, place)
            free[:] = [was or pair.free for was, pair in zip(free, outputs, strict=True)]
            return [array[:2] for array in arrays_of(outputs)]

        return of_arrays

    outputs = jax.lax.switch(index.low, [taking(branch) for branch in branches], arrays_of(operands))
    results = [Pair(wide, low, place.path, f) for (wide, low), f in zip(outputs, free, strict=True)]
    return held(emulator, results, eqn)


def while_loop(emulator: BodyRunner, eqn, pairs: list[Pair], place: Place) -> list[Pair]:
    """Emulates `lax.while_loop` as one compiled loop for the half-precision run and the reference.

    The half-precision run alone decides when the loop ends, so the reference takes as many iterations. The readings of
    all iterations are combined.
    """
    params = eqn.params
    cond_consts, body_consts, carry = _split(pairs, params["cond_nconsts"], params["body_nconsts"])

    def once(emulator: BodyRunner, carry: list[Pair]) -> tuple[list[Pair], list[Pair]]:
        return emulator.run_body(params["body_jaxpr"], [*body_consts, *carry], place), []

    loop = _Loop(emulator, once, carry, place.path)
    quiet = emulator.recording(None)

    def go_on(state):
        return quiet.run_body(params["cond_jaxpr"], [*cond_consts, *loop.pairs(state)], place)[0].low

    turn = lambda state: loop.turn(state)[0]  # noqa: E731
    state = with_every_rounding(lambda start: jax.lax.while_loop(go_on, turn, start), loop.start)
    return held(emulator, loop.ended(state), eqn)


def scan(emulator: BodyRunner, eqn, pairs: list[Pair], place: Place) -> list[Pair]:
    """Emulates `lax.scan` as one compiled loop for the half-precision run and the reference.

    The readings of all iterations are combined.
    """
    params = eqn.params
    num_consts, num_carry = scan_counts(params)
    consts, carry, xs = _split(pairs, num_consts, num_carry)
    columns = [(pair.wide, pair.low) for pair in xs]
    row = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), columns)

    def once(emulator: BodyRunner, carry: list[Pair], row) -> tuple[list[Pair], list[Pair]]:
        x = [pair._replace(wide=wide, low=low) for pair, (wide, low) in zip(xs, row, strict=True)]
        outputs = emulator.run_body(params["jaxpr"], [*consts, *carry, *x], place)
        return outputs[:num_carry], outputs[num_carry:]

    loop = _Loop(emulator, once, carry, place.path, row)
    options = {"length": params["length"], "reverse": params["reverse"]}
    scanned = lambda start, columns: jax.lax.scan(loop.turn, start, columns, **options)  # noqa: E731
    state, ys = with_every_rounding(scanned, loop.start, columns)
    stacked = [
        Pair(wide, low, place.path, free, Marks(m.finite.all(), m.reference_finite.all(), m.flushed.max(initial=-1)))
        for (wide, low, m), free in zip(ys, loop.free_ys, strict=True)
    ]
    return held(emulator, [*loop.ended(state), *stacked], eqn)


def with_every_rounding(function: Callable, *args):
    """Computes `function(*args)` as one compiled program in which XLA rounds the result of every operation.

    By default XLA may compute several operations in float32 and round once (`xla_allow_excess_precision`). While an
    outer program is traced, such as a loop or a jitted step, `function` becomes a part of it, and its options decide.
    """
    program, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    body, consts = opened(program)
    inputs = [*consts, *jax.tree.leaves(args)]
    call = core.jaxpr_as_fun(closed(body.replace(constvars=[], invars=[*body.constvars, *body.invars]), ()))
    traced = isinstance(jnp.zeros(()), Tracer)  # the inputs of a traced loop may all be constants
    if not traced and not any(isinstance(x, Tracer) for x in inputs):
        call = jax.jit(call, compiler_options={"xla_allow_excess_precision": False})
    return jax.tree.unflatten(jax.tree.structure(shapes), call(*inputs))


class _Loop:
    """A loop that runs in half precision and in float32 together.

    Its state, for `lax.scan` or `lax.while_loop`, is the carry of both runs and the readings so far. `start` is the
    first.

    Args:
      emulator: the emulator; its recorder, if any, gets the readings of all iterations, combined.
      once: one iteration: `(emulator, carry, *xs) -> (carry, other outputs)`.
      carry: the initial carry.
      path: the module of the loop. The carry belongs to it too, so that even an isolated run accumulates errors over
        the iterations.
      xs: the shapes of the other inputs of an iteration.
    """

    def __init__(self, emulator: BodyRunner, once: Callable, carry: list[Pair], path: str, *xs):
        self.emulator, self.once, self.path, self.free_ys = emulator, once, path, []
        if emulator.isolated:
            carry = [p._replace(low=p.wide) if p.path != path and is_floating(p.wide) else p for p in carry]
        quiet = emulator.recording(None)
        self.free: list[bool] = []
        after = [pair.free for pair in carry]
        while after != self.free:
            self.free = after
            jax.eval_shape(lambda state, *xs: self._run(quiet, state, xs)[0], (arrays_of(carry), {}), *xs)
            after = [was or now for was, now in zip(self.free, self._free_after, strict=True)]
        self.sites: list[Site] = []
        shapes = jax.eval_shape(lambda state, *xs: self._recorded(state, xs)[1], (arrays_of(carry), {}), *xs)
        self.start = arrays_of(carry), none_like(shapes)

    def pairs(self, state) -> list[Pair]:
        """Makes pairs of the carry in a state of the loop, which is `(arrays of the carry, readings so far)`."""
        return [Pair(wide, low, self.path, free, m) for (wide, low, m), free in zip(state[0], self.free, strict=True)]

    def turn(self, state, *xs):
        """Runs one iteration on a state. Returns the next state, and the arrays of the outputs that are not carried."""
        outputs, measured = self._recorded(state, xs)
        carry, ys = outputs
        return (carry, joined(state[1], measured)), ys

    def ended(self, state) -> list[Pair]:
        """Hands the readings in the final state to the recorder, and returns the final carry as pairs."""
        if self.emulator.recorder is not None:
            self.emulator.recorder.extend(self.sites, apart(state[1], len(self.sites)))
        return self.pairs(state)

    def _recorded(self, state, xs):
        """Runs one iteration.

        Returns the arrays of its outputs, and its readings, which are empty without a recorder.
        """
        recorder = self.emulator.recorder and self.emulator.recorder.within()
        outputs = self._run(self.emulator.recording(recorder), state, xs)
        if recorder is None:
            return outputs, {}
        self.sites = recorder.sites
        return outputs, recorder.stacked()

    def _run(self, emulator: BodyRunner, state, xs):
        """Runs one iteration, and stores which of its outputs are free. Returns the arrays of its outputs."""
        carry, ys = self.once(emulator, self.pairs(state), *xs)
        self._free_after, self.free_ys = [pair.free for pair in carry], [pair.free for pair in ys]
        return arrays_of(carry), arrays_of(ys)


def _split(pairs: Sequence[Pair], first: int, second: int) -> tuple[list[Pair], list[Pair], list[Pair]]:
    """Splits pairs into the first `first`, the next `second`, and the rest."""
    return list(pairs[:first]), list(pairs[first : first + second]), list(pairs[first + second :])


def arrays_of(pairs: Sequence[Pair]) -> list[tuple]:
    """Unpacks each pair into a tuple for a compiled loop: its value in the reference, in half precision, its marks.

    Half-precision values are cast to float32, because the input of an iteration may be rounded and its output not.
    """
    return [(_array(p.wide), _array(p.low), Marks(*map(jnp.asarray, p.marks))) for p in pairs]


def _array(value) -> jax.Array:
    """Converts a value to a JAX array, and half precision to float32."""
    value = jnp.asarray(value)  # a loop's carry needs arrays with a dtype
    return value.astype(FLOAT32) if value.dtype in NARROW else value


def held(emulator: BodyRunner, pairs: list[Pair], eqn) -> list[Pair]:
    """Stores the rounded outputs of an equation in their half dtypes until their next use."""
    return [emulator.held(pair, var.aval) for pair, var in zip(pairs, eqn.outvars, strict=True)]


def function(emulator: BodyRunner, eqn, pairs: list[Pair], place: Place) -> list[Pair]:
    """Emulates a primitive that stands for a JAX function, such as a search among sorted values."""
    with standing_at(eqn):
        body = expanded(eqn)
    return emulator.run_body(body, pairs, place)


HANDLERS = {"cond": cond, "while": while_loop, "scan": scan, "call_hi_primitive": function}


def shard_map(emulator: BodyRunner, eqn, pairs: list[Pair], place: Place) -> list[Pair]:
    """Emulates `jax.shard_map`: the half-precision run and the reference, both on the devices of its mesh.

    Inputs and outputs pass through the host. The readings of all devices are combined.
    """
    params = eqn.params
    axes = sorted(manual_axes(params))
    devices = PartitionSpec(tuple(axes))
    free: list[bool] = []
    sites: list[Site] = []

    def on_a_device(arrays):
        inputs = [pair._replace(wide=w, low=x, marks=m) for pair, (w, x, m) in zip(pairs, arrays, strict=True)]
        recorder = emulator.recorder and emulator.recorder.within()
        outputs = emulator.recording(recorder).run_body(params["jaxpr"], inputs, place)
        free[:], sites[:] = [pair.free for pair in outputs], [] if recorder is None else recorder.sites
        values = arrays_of(outputs)
        of_device = [marks for *_, marks in values], {} if recorder is None else recorder.stacked()
        return [value[:2] for value in values], jax.tree.map(lambda x: x[None], of_device)

    on_devices = jax.shard_map(
        on_a_device,
        mesh=params["mesh"],
        in_specs=([(spec, spec, PartitionSpec()) for spec in params["in_specs"]],),
        out_specs=([(spec, spec) for spec in params["out_specs"]], devices),
        axis_names=set(axes),
        check_vma=False,  # the body itself marks where values begin to vary
    )
    # Fetches the inputs, so that the mesh may place them, and the outputs, for the operations that follow.
    values, (marks, measured) = _fetched(with_every_rounding(on_devices, _fetched(arrays_of(pairs))))
    if emulator.recorder is not None:
        emulator.recorder.extend(list(sites), apart(_over_devices(measured), len(sites)))
    outputs = [
        Pair(wide, low, place.path, f, Marks(m.finite.all(), m.reference_finite.all(), m.flushed.max()))
        for (wide, low), f, m in zip(values, free, marks, strict=True)
    ]
    return held(emulator, outputs, eqn)


def _fetched(tree: Any) -> Any:
    """Fetches the arrays of a pytree to the host. Tracers are unchanged."""
    return jax.tree.map(lambda x: x if isinstance(x, Tracer) else jax.device_get(x), tree)


def _over_devices(measured: Measured) -> Measured:
    """Combines the readings of all devices, stacked along the first axis, into one; empty if there are none."""
    devices = [x.shape[0] for x in jax.tree.leaves(measured)[:1]]
    return functools.reduce(joined, apart(measured, *devices)) if devices else {}

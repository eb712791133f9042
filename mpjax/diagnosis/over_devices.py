"""Emulates `jax.shard_map`: every device runs the body on its shards of both values, and readings are combined."""

import functools
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import PartitionSpec

from mpjax.diagnosis.control_flow import BodyRunner, arrays_of, held, with_every_rounding
from mpjax.diagnosis.measurements import Marks, joined
from mpjax.diagnosis.pairs import Pair, Place
from mpjax.diagnosis.readings import Site
from mpjax.precision.casting.jaxprs import manual_axes


def shard_map(emulator: BodyRunner, eqn, pairs: list[Pair], place: Place) -> list[Pair]:
    """Emulates `jax.shard_map`: the half-precision run and the reference, both on the devices of its mesh."""
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
        of_device = [marks for *_, marks in values], [] if recorder is None else recorder.measured
        return [value[:2] for value in values], jax.tree.map(lambda x: x[None], of_device)

    run = jax.shard_map(
        on_a_device,
        mesh=params["mesh"],
        in_specs=([(spec, spec, PartitionSpec()) for spec in params["in_specs"]],),
        out_specs=([(spec, spec) for spec in params["out_specs"]], devices),
        axis_names=set(axes),
        check_vma=False,  # the body itself marks where values begin to vary
    )
    # Fetches the inputs, so that the mesh may place them, and the outputs, for the operations that follow.
    values, (marks, measured) = _fetched(with_every_rounding(run, _fetched(arrays_of(pairs))))
    if emulator.recorder is not None:
        emulator.recorder.extend(list(sites), [_over_devices(reading) for reading in measured])
    outputs = [
        Pair(wide, low, place.path, f, Marks(m.finite.all(), m.reference_finite.all(), m.flushed.max()))
        for (wide, low), f, m in zip(values, free, marks, strict=True)
    ]
    return held(emulator, outputs, eqn)


def _fetched(tree: Any) -> Any:
    """Fetches arrays to the host; tracers are unchanged."""
    return jax.tree.map(lambda x: x if isinstance(x, Tracer) else jax.device_get(x), tree)


def _over_devices(reading: Any) -> Any:
    """Combines the readings of all devices, which are stacked along the first axis."""
    count = jax.tree.leaves(reading)[0].shape[0]
    return functools.reduce(joined, (jax.tree.map(lambda x, i=i: x[i], reading) for i in range(count)))

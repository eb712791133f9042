"""Tunes the rules of a run: adds rules for the modules that are faster in float32 on this device."""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping

import jax

from mpjax.commands.build import Run, build_run, fresh_state
from mpjax.config import Config
from mpjax.config.folders import cache_folder
from mpjax.precision.dtypes import HALF
from mpjax.training.mesh import place
from mpjax.training.tuning.products import Product, products_of
from mpjax.training.tuning.timing import Timing, side_by_side
from mpjax.training.tuning.tune_products import kinds_of, read_tuning, tune, write_tuning


def tuned(config: Config) -> tuple[Config, str]:
    """Clears `tune` in the settings and adds the rules of the tuning; also returns a message for the user.

    Without `precision.tune` the settings are unchanged. `tune` is cleared because the rules alone repeat the run. A
    resumed run keeps its rules.

    Raises:
      UsageError: as `build_run`.
    """
    if not config.precision.tune:
        return config, ""
    settled = _with_rules(config, {})
    if config.resume:
        return settled, "--precision.tune does nothing: a resumed run keeps its rules"
    run = build_run(settled)
    policy = run.plan.policy
    if policy.compute_dtype not in HALF:
        return settled, f"nothing to tune: {config.precision.policy} computes in {policy.compute_dtype}"
    batch = next(iter(run.batches.from_position(0)))
    shares = run.layout.shares * config.training.accumulate
    shapes = {
        name: jax.ShapeDtypeStruct((max(1, x.shape[0] // shares), *x.shape[1:]), x.dtype) for name, x in batch.items()
    }
    products = products_of(run.task, policy, shapes)
    key = _key(run, products)
    folder = cache_folder(config) / "tuning"
    tuning = read_tuning(folder, key)
    when = "found earlier"
    if tuning is None:
        print(f"tuning: {len(kinds_of(products))} kinds of products in both dtypes, then the step", flush=True)
        tuning = tune(run.task, products, lambda rules: _time_step(run, rules, batch))
        when = f"kept in {write_tuning(folder, key, tuning)}"
    return _with_rules(settled, tuning.rules), f"tuned on {key['device']}: {tuning}; {when}"


def _with_rules(config: Config, rules: Mapping[str, str]) -> Config:
    precision = dataclasses.replace(config.precision, rules={**config.precision.rules, **rules}, tune=False)
    return dataclasses.replace(config, precision=precision)


def _key(run: Run, products: list[Product]) -> dict:
    """What the timings depend on, by name: a stored tuning is used again if all of it is the same."""
    programs = "\n".join(f"{product.path}\n{product.half.text}\n{product.full.text}" for product in products)
    return {
        "device": jax.devices()[0].device_kind,
        "devices": run.layout.mesh.size,
        "jax": jax.__version__,
        "model": str(run.config.model.name),
        "policy": str(run.plan.policy),
        "mode": run.plan.mode,
        "batch_size": run.config.data.batch_size,
        "accumulate": run.config.training.accumulate,
        "remat": run.config.training.remat,
        "optimizer": str(run.config.optimizer.name),
        "programs": hashlib.sha256(programs.encode()).hexdigest(),
    }


def _time_step(run: Run, rules: Mapping[str, str], batch) -> Timing:
    """Times the step of a run without the added `rules` and with them, in turns."""
    changed = build_run(_with_rules(run.config, rules))
    return side_by_side(_ready(run, batch), _ready(changed, batch))


def _ready(run: Run, batch) -> Callable[[], jax.Array]:
    """Builds a function that runs the compiled step once, on a state of its own that it keeps for its next call."""
    state = run.packing.pack(fresh_state(run))
    placed = place(batch, run.split)
    step = run.train_step.lower(state, placed).compile()

    def once():
        nonlocal state
        state, metrics = step(state, placed)
        return metrics

    return once

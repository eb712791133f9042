"""A whole run on one page: settings in; data, model, precision, step, loop; results out."""

import contextlib
import functools
import itertools
import pathlib
import sys
import time
import types
from collections.abc import Callable
from typing import NamedTuple

import jax
import optax
from jax.sharding import Mesh, NamedSharding

from mpjax import data, report
from mpjax.config import Config, to_toml
from mpjax.config.changes import changes
from mpjax.config.check import check
from mpjax.config.folders import cache_folder, check_run_folder, data_folder, run_folder, run_settings
from mpjax.config.load import CONFIG_FILE
from mpjax.config.task import TASKS
from mpjax.diagnosis.training import make_probe
from mpjax.loop.checkpoint import Checkpoints, complete_checkpoints, read_checkpoint, set_aside
from mpjax.loop.divergence import Limits
from mpjax.loop.interrupt import stop_on_signals
from mpjax.loop.lock import locked
from mpjax.loop.profile import profiled
from mpjax.loop.restore import adopt
from mpjax.loop.train import train
from mpjax.loop.when import When
from mpjax.precision.loss_scale import loss_scale_state
from mpjax.training import TrainState, evaluate, make_eval_step
from mpjax.training.feed import Feed, feed_of
from mpjax.training.mesh import batch_sharding, data_mesh, evaluation_sharding, place, replicated
from mpjax.training.precision import PrecisionPlan, advice, floor_of, plan_precision
from mpjax.training.setup import Task, initial_state, make_step, pretrained_arrays
from mpjax.training.structure import Arrays
from mpjax.training.train_call import compile_calls, make_train_call


CHECKPOINTS = "checkpoints"
"""The folder of checkpoints inside a run's folder."""

ENVIRONMENT_FILE = "environment.json"
"""With what the run was made, and by which process."""


class Parts(NamedTuple):
    """What a run is made of, before it has a folder and a state.

    Attributes:
      plan: the precision decision.
      source: the training and test examples.
      mesh: all devices.
      batches: training data.
      split: how a training batch is divided among devices.
      feed: what compiled calls are given of the training data.
      tests: evaluation data.
      when: the length of training, and what is due when.
      task: model, precision, objective.
      tx: the optimizer.
      train_step: `(state, batch) -> (state, metrics)`, compiled at its first call.
      train_call: `(state, fed, count) -> (state, metrics)`: so many steps, compiled at the first call of each count.
      eval_step: `(params, stats, batch) -> sums`.
      probe: `(state, fed, count) -> Layers`: of the first step of a call.
    """

    plan: PrecisionPlan
    source: data.Source
    mesh: Mesh
    batches: data.Batches
    split: NamedSharding
    feed: Feed
    tests: data.EvalBatches
    when: When
    task: Task
    tx: optax.GradientTransformation
    train_step: Callable
    train_call: Callable
    eval_step: Callable
    probe: Callable


def make_parts(config: Config) -> Parts:
    """The parts of the run that `config` describes.

    Raises:
      UsageError: settings that cannot be, data that is not there.
    """
    # Settings
    check(config)
    plan = plan_precision(config.precision)
    set_up_jax(config, plan)
    mesh = data_mesh()
    batch_size = config.data.batch_size
    split = batch_sharding(mesh, batch_size=batch_size, accumulate=config.training.accumulate)

    # Data
    source = data.open_source(config.data, data_folder(config), config.task)
    share = data.Share(jax.process_index(), jax.process_count())
    batches = data.train_batches(source, config.data, config.seed, share)
    tests = data.eval_batches(source, config.data, share)

    # Durations, now that the length of an epoch is known
    def steps(duration) -> int:
        return duration.in_steps(batch_size, batches.steps_per_epoch)

    every = config.loop
    when = When(
        steps(config.steps),
        log=steps(every.log_every),
        evaluate=steps(every.eval_every),
        save=steps(every.save_every),
        layers=steps(config.diagnosis.every),
        per_call=config.training.steps_per_call,
    )
    feed = feed_of(batches, split, most_steps=when.per_call, device_bytes=config.data.on_device_mb * 2**20)

    # Model, precision, optimizer, training step
    fields = data.batch_fields(source, config.data)
    warmup = steps(config.optimizer.warmup)
    task, tx, train_step = make_step(config, plan, fields, steps=when.steps, warmup=warmup)

    # What is compiled around it
    train_call = make_train_call(train_step, feed.batch)
    eval_step = make_eval_step(task.structure, task.objective.measure, cast=task.cast)
    look = make_probe(task, tx, seed=config.seed, accumulate=config.training.accumulate)
    probe = jax.jit(lambda state, fed, count: look(state, feed.batch(fed, 0)), static_argnums=2)
    return Parts(
        plan, source, mesh, batches, split, feed, tests, when, task, tx, train_step, train_call, eval_step, probe
    )


def fresh_state(config: Config, parts: Parts, pretrained: Arrays | None = None) -> TrainState:
    """The state before the first step, on all devices, with the pretrained arrays by path in it."""
    return initial_state(
        parts.task,
        parts.tx,
        seed=config.seed,
        ema=config.training.ema > 0,
        sharding=replicated(parts.mesh),
        pretrained=pretrained,
    )


def run(config: Config) -> dict:
    """Trains as `config` says and leaves the results in its `output_dir`.

    Returns:
      What is also in `summary.json`.

    Raises:
      UsageError: settings that cannot be, a folder that exists without `resume`, data that is not there.
      Diverged: values stay non-finite at the smallest loss scale; the message names the first bad layer.
      Interrupted: SIGINT or SIGTERM came; a checkpoint is saved.
    """
    from mpjax.inquiry import explain  # which runs again what is run here
    from mpjax.tuning import tuned  # likewise

    began = time.perf_counter()
    check_run_folder(config)  # before anything takes time
    config, tuning = tuned(config)
    parts = make_parts(config)
    plan, when = parts.plan, parts.when

    folder = run_folder(config)
    with contextlib.ExitStack() as opened:
        opened.enter_context(locked(folder, lambda: report.process_of(folder / ENVIRONMENT_FILE)))

        # State: new, or from the last checkpoint
        begun = config.resume and bool(complete_checkpoints(folder / CHECKPOINTS))
        arrays, report_of_weights = (None, None) if begun else pretrained_arrays(parts.task, config.model)
        state = fresh_state(config, parts, arrays)
        about = {
            "policy": str(plan.policy),
            "loss_scale": str(plan.loss_scale),
            "seed": config.seed,
            "config": to_toml(config),
        }
        start, state, before = resumed(state, folder, about) if begun else (0, state, {})
        spent = {name: float(before.get(name, 0.0)) for name in ("seconds", "compile_seconds")}  # by earlier processes
        report.write_environment(folder / ENVIRONMENT_FILE, [str(device.device_kind) for device in jax.devices()])
        report.write_atomically(folder / CONFIG_FILE, run_settings(config, folder).encode())

        resume_step = start if config.resume else None
        writer = opened.enter_context(contextlib.closing(report.open_writers(folder, config, when.steps, resume_step)))
        writer.message(f"run folder: {folder}")
        if config.resume:
            writer.message(f"resumed from step {start}")
        for name, old, new in changes(before["config"], about["config"]) if begun else ():
            writer.message(f"resumed with another {name}: {new}, before {old}")
        if report_of_weights:
            writer.message(f"pretrained: {report_of_weights.totals}")
        if start >= when.steps:
            writer.message(f"nothing left to train: --steps is {when.steps}")
        for note in filter(None, [tuning, when.advice(start), *advice(plan, jax.devices()[0])]):
            writer.message(note)
        checkpoints = Checkpoints(folder / CHECKPOINTS, keep=config.loop.keep)
        opened.enter_context(contextlib.closing(checkpoints))
        stop = opened.enter_context(stop_on_signals())

        feed = parts.feed.calls(start, when.call_counts(start))
        first = next(feed, None)  # none is left of a finished run
        compiling = time.perf_counter()
        feeds = {count: parts.feed.like(first, count) for count in when.kinds_of_calls(start)}
        train_call = compile_calls(parts.train_call, state, feeds)
        probe = compile_calls(parts.probe, state, feeds) if when.layers and feeds else None
        compile_seconds = spent["compile_seconds"] + time.perf_counter() - compiling

        def so_far() -> dict[str, float]:
            seconds = spent["seconds"] + time.perf_counter() - began
            return {"seconds": seconds, "compile_seconds": compile_seconds}

        explained = functools.partial(explain, config, parts, train_call, folder)
        if config.profile:
            train_call = opened.enter_context(profiled(train_call, folder / "tensorboard", when.call_counts(start)))

        # The loop
        started = time.perf_counter()
        state = train(
            state,
            train_call,
            itertools.chain([first], feed),
            start=start,
            when=when,
            batch_size=config.data.batch_size,
            limits=Limits(floor_of(plan, config.precision), config.precision.patience),
            writer=writer,
            evaluate=functools.partial(
                evaluate_state,
                parts.eval_step,
                parts.tests,
                evaluation_sharding(parts.mesh, config.data.eval_batch_size),
                parts.task.objective.conclude,
            ),
            score=TASKS[config.task].score,
            save=lambda position, state, score: checkpoints.save(position, state, about | so_far(), score=score),
            explain=explained,
            stop=stop,
            probe=probe,
        )

    # Results
    records = report.read_metrics(folder / "metrics.jsonl")
    summary = report.summarise(
        records,
        score=TASKS[config.task].score,
        steps=int(state.step),
        attempts=int(state.attempts),
        skipped=int(loss_scale_state(state.opt_state).skipped),
        **so_far(),
        startup_seconds=started - began,
        examples_per_second=report.throughput(records),
        policy=str(plan.policy),
        parameters=sum(p.size for p in state.params.values()),
        output_dir=str(folder),
    )
    report.write_summary(folder / "summary.json", summary)
    if config.report.plot:
        report.plot_curves(records, folder / "curves.png", title=str(folder))
    print(report.summary_table(summary))
    return summary


def set_up_jax(config: Config, plan: PrecisionPlan) -> None:
    """Compiled programs are kept in the cache folder; float64 policies switch 64-bit arrays on. Before any array."""
    jax.config.update("jax_compilation_cache_dir", str(cache_folder(config) / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    if plan.float64:
        jax.config.update("jax_enable_x64", True)


def resumed(state: TrainState, folder: pathlib.Path, about: dict) -> tuple[int, TrainState, dict]:
    """The last checkpoint's position, state and description."""
    position, saved, then = read_checkpoint(folder / CHECKPOINTS)
    set_aside(folder / CHECKPOINTS, after=position)
    return position, adopt(state, saved, same_scaling=then["loss_scale"] == about["loss_scale"]), then


def evaluate_state(eval_step, batches, sharding, conclude: Callable, state: TrainState) -> dict[str, float]:
    """Metrics over the test set, of the parameters and of their moving average if there is one."""

    def metrics_of(params) -> dict[str, float]:
        placed = (place(batch, sharding) for batch in batches)
        return evaluate(eval_step, params, state.stats, placed, conclude)

    metrics = {f"test/{name}": value for name, value in metrics_of(state.params).items()}
    if state.ema:
        metrics |= {f"ema/{name}": value for name, value in metrics_of(state.ema).items()}
    return metrics


class _CallableModule(types.ModuleType):
    """`mpjax.run` is the function, and importing this module makes it the module: so the module can be called too."""

    def __call__(self, config: Config) -> dict:
        return run(config)


sys.modules[__name__].__class__ = _CallableModule

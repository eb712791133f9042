"""Runs a whole training: settings, data, model, precision, step, loop, results."""

import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from mpjax import data, extend, report
from mpjax.commands.evaluate import evaluate_state
from mpjax.commands.objective import metrics_of
from mpjax.commands.out_of_memory import memory_told, require_memory
from mpjax.commands.parts import (
    CHECKPOINTS,
    ENVIRONMENT_FILE,
    fresh_state,
    make_parts,
    model_with,
)
from mpjax.commands.run_folder import restored_if_refused, resumed, resumption_told, run_folder_of
from mpjax.commands.run_records import Records, put_records
from mpjax.config import Config, from_toml, to_toml
from mpjax.config.folders import check_run_folder
from mpjax.config.limits import is_auto, require_types
from mpjax.config.load import CONFIG_FILE
from mpjax.config.save import changes
from mpjax.config.schema import Distributed
from mpjax.config.score import score_of
from mpjax.data.fingerprint import differences, fingerprint_of
from mpjax.errors import UsageError
from mpjax.loop.checkpoint import Checkpoints
from mpjax.loop.company import Alone, Company
from mpjax.loop.first_calls import estimated, profiled
from mpjax.loop.join import joined
from mpjax.loop.process import Stop, locked, stop_on_signals
from mpjax.loop.stored import complete_checkpoints
from mpjax.loop.train import NO_CALLBACKS, Explain, Limits, train_loop
from mpjax.precision.scale_state import loss_scale_state
from mpjax.report.wording import duration
from mpjax.training import TrainState
from mpjax.training.optimizer import advice_on
from mpjax.training.precision_plan import advice, floor_of
from mpjax.training.setup import pretrained_arrays
from mpjax.training.train_call import compile_calls


Stopping = Callable[[Stop], contextlib.AbstractContextManager[None]]
"""A context that passes on requests to stop a run."""


def run(
    config: Config,
    *,
    model: Callable | None = None,
    source: Any = None,
    preprocess: Callable | None = None,
    augment: extend.Augmentation | None = None,
    objective: extend.Objective | Callable | None = None,
    metrics: Iterable[extend.Metric] = (),
    optimizer: Callable | None = None,
    schedule: Callable | None = None,
    callbacks: Iterable[Any] = (),
    writers: Iterable[report.Writer] = (),
    stopping: Stopping = stop_on_signals,
) -> dict:
    """Trains by the settings in `config` and writes the results to its `output_dir`.

    With several processes, each calls this with the same settings but its own `distributed.process`; the first prints
    and writes.

    Your own parts replace those that the settings name; `mpjax.extend` documents their arguments.

    Args:
      config: the settings.
      model: `(fields, *, rngs)` to an `nnx.Module`, in place of `model.name`.
      source: the training and test examples, or a function that returns them, in place of `data.name`.
      preprocess: a function from a stored example to an example, in place of `data.preprocess`.
      augment: `(batch, key) -> batch` on the device, in place of `data.augment`.
      objective: the loss and the metrics of each example, in place of `training.objective`.
      metrics: metrics of the test set besides those of `training.metrics`.
      optimizer: `(learning_rate, ...)` to an optax transformation, in place of `optimizer.name`.
      schedule: a function to an optax schedule, in place of `optimizer.schedule`.
      callbacks: objects with methods of `mpjax.extend.Callback`, besides those of `loop.callbacks`.
      writers: receive metrics, messages and checkpoints besides the run's own files and console. Each process calls its
        own, at the same steps with the same values; all are closed at the end.
      stopping: the context of the training loop. A request that it passes on, by `ask`, stops the run after the current
        step. By default it listens to SIGINT and SIGTERM, which Python allows in the main thread only.

    Returns:
      The contents of `summary.json`.

    Raises:
      UsageError: the settings are invalid, the folder exists and `resume` is off, or the data or a process is missing.
      CallbackError: a callback or a writer failed; a checkpoint was saved.
      Diverged: too many steps in a row were skipped, the last at the smallest loss scale; or, without loss scaling, a
        loss or gradient norm is not finite; or the last test loss is not. The message names the first bad layer.
      Interrupted: SIGINT or SIGTERM arrived; a checkpoint was saved.
    """
    if not isinstance(config, Config):
        raise UsageError(f"mpjax.run wants an mpjax.Config as its first argument, got a {type(config).__name__}")
    parts = {
        "model": model,
        "source": source,
        "preprocess": preprocess,
        "augment": augment,
        "objective": objective,
        "metrics": metrics if metrics != () else None,
        "optimizer": optimizer,
        "schedule": schedule,
        "callbacks": callbacks if callbacks != () else None,
    }
    if any(part is not None for part in parts.values()):
        from mpjax.commands.own_parts import with_parts  # local, like all imports that few runs need

        config = with_parts(config, **parts)
    if writers != ():
        from mpjax.commands.own_parts import require_several
        from mpjax.report.user_writers import require_writer

        writers = require_several("writers", writers)
        for writer in writers:
            require_writer(writer, "writers has")
    require_types(config)  # before any slow work
    if config.seeds:
        raise UsageError(
            f"seeds {config.seeds}: mpjax.run trains one seed; call mpjax.commands.seeds.sweep for several"
        )
    with joined(config) as company:
        return _train(dataclasses.replace(config, distributed=Distributed()), company, tuple(writers), stopping)


def _train(config: Config, company: Alone | Company, writers: Sequence[report.Writer], stopping: Stopping) -> dict:
    began = time.perf_counter()
    first = company.first  # this process prints and writes
    if company.processes > 1 and config.precision.tune:
        raise UsageError(
            "--precision.tune times one process: run scripts/train.py alone with it (--distributed.processes 1 --steps "
            "1), and give all processes the rules that it finds as --precision.rules"
        )
    if first:
        check_run_folder(config)  # before any slow work
    fit, tuning = "", ""
    try:
        if is_auto(config):
            from mpjax.commands.fit import fitted

            config, fit = fitted(config, company.gather, print if first else lambda line: None)
        if config.precision.tune:
            from mpjax.commands.tune import tuned

            config, tuning = tuned(config)
        parts = make_parts(config)
    except UsageError as error:
        from mpjax.commands.lacking import with_following

        followed = with_following(error, config)
        raise followed from followed.__cause__
    if config.loop.best:
        from mpjax.commands.own_parts import require_metric

        require_metric(config.loop.best, metrics_of(parts.task, data.batch_fields(parts.source, config.data)))
    plan, when, score = parts.plan, parts.when, score_of(config)

    with contextlib.ExitStack() as opened:
        # Processes may have different writers, but call the same callbacks.
        failures, callbacks = None, NO_CALLBACKS
        if any(company.gather(bool(writers or config.report.writers))):
            from mpjax.report.user_writers import failures_of_writers

            failures = opened.enter_context(failures_of_writers())
        if failures is not None or config.loop.callbacks or config.loop.stop_after:
            from mpjax.commands.own_parts import callbacks_of

            callbacks = callbacks_of(config, company.gather, failures)

        folder = run_folder_of(config, company)
        if first:
            opened.enter_context(locked(folder, lambda: report.process_of(folder / ENVIRONMENT_FILE)))
        restored = functools.partial(restored_if_refused, folder, new=not config.resume)
        begin = opened.enter_context(restored() if first else contextlib.nullcontext(lambda: None))
        opened.enter_context(memory_told(config))

        # State: new, or from the last checkpoint
        begun = config.resume and bool(company.gather(complete_checkpoints(folder / CHECKPOINTS))[0])
        data_read = fingerprint_of(parts.source, config.data, parts.batches, parts.tests) if first else None
        about = {
            "policy": str(plan.policy),
            "loss_scale": str(plan.loss_scale),
            "seed": config.seed,
            "config": to_toml(config),
            "data": company.gather(data_read)[0],
        }
        report_of_weights = None
        if begun:
            start, state, before = resumed(config, parts, folder, about, company)
        else:
            arrays, report_of_weights = pretrained_arrays(parts.task, config.model)
            start, state, before = 0, fresh_state(config, parts, arrays), {}
        spent = {name: float(before.get(name, 0.0)) for name in ("seconds", "compile_seconds")}  # by earlier processes
        metrics = folder / "metrics.jsonl"
        records = report.read_metrics(metrics) if begun and metrics.exists() else []
        info = extend.RunInfo(folder, config, start, when.steps, first, records)
        under = Records(writing=first, waiting=config.resume)
        history, own = [], ()
        if first:
            history = put_records(under, config, folder, start, about, before, records, parts.compiler_options)
            resume_step = start if config.resume else None
            files = report.open_writers(folder, when.steps, resume_step, tensorboard=config.report.tensorboard)
            with contextlib.ExitStack() as unfinished:
                unfinished.callback(files.close)
                own = (files,)
                if config.report.writers:
                    from mpjax.report.user_writers import open_named_writers

                    writers = *open_named_writers(config.report.writers, info), *writers
                unfinished.pop_all()
        if failures is not None:
            from mpjax.report.user_writers import UserWriters

            own = *own, UserWriters(writers, failures)
        writer = opened.enter_context(contextlib.closing(report.Writers(own)))
        writer.message(f"run folder: {folder}")
        if config.resume:
            fresh = "no checkpoint to resume from: starting at step 0"
            writer.message(f"resumed from step {start}" if begun else fresh)
        if begun and start < when.steps:
            for name, old, new in changes(before["config"], about["config"]):
                writer.message(f"resumed with another {name}: {new}, before {old}")
            for said in differences(before.get("data"), about["data"]):
                writer.message(f"resumed on other data: {said}")
            for name, old, new in report.other_versions(history):
                writer.message(f"resumed with {name} {new}, before {old}")
        about["history"] = company.gather(history)[0]
        if report_of_weights:
            writer.message(f"pretrained: {report_of_weights.totals}")
        if start >= when.steps:
            writer.message(f"nothing left to train: --steps is {when.steps}")
        notes = *advice(plan, jax.devices()[0], tuned=bool(tuning)), *advice_on(config.optimizer)
        for note in filter(None, [fit, tuning, when.advice(start), *parts.source.notes, *notes]):
            writer.message(note)
        checkpoints = Checkpoints(folder / CHECKPOINTS, keep=config.loop.keep, first=first)
        opened.enter_context(contextlib.closing(checkpoints))

        state = parts.packing.pack(state)
        feed = parts.feed.calls(start, when.call_counts(start))
        fed = next(feed, None)  # None for a finished run
        if fed is not None:
            writer.message("compiling the training step")
        compiling = time.perf_counter()
        abstract = {count: parts.feed.abstract(fed, count) for count in when.kinds_of_calls(start)}
        programs: dict[int, Any] = {}
        options = parts.compiler_options
        train_call = compile_calls(parts.train_call, state, abstract, options, see=programs.__setitem__)
        probe = compile_calls(parts.probe, state, abstract) if parts.probe and abstract else None
        compile_seconds = spent["compile_seconds"] + time.perf_counter() - compiling
        if company.processes > 1:
            from mpjax.commands.agreement import require_agreement

            require_agreement(company, parts, {count: program.lowered for count, program in programs.items()}, state)
        require_memory(company, [program.compiled for program in programs.values()])
        if programs and (first or config.precision.strict):
            from mpjax.commands.receipt_of_run import check_receipt

            writer.message(check_receipt(config, parts, programs, folder, under.put))
        programs.clear()  # traced programs are large

        def so_far() -> dict[str, float]:
            seconds = spent["seconds"] + time.perf_counter() - began
            return {"seconds": seconds, "compile_seconds": compile_seconds}

        def save(position: int, state: TrainState, score: float | None) -> None:
            checkpoints.save(position, parts.packing.unpack(state), about | so_far(), score=score)
            writer.saved(position)

        def tested(state: TrainState) -> dict[str, float]:
            sharding = parts.layout.evaluation(config.data.eval_batch_size)
            conclude = parts.task.objective.conclude
            return evaluate_state(parts.eval_step, parts.tests, sharding, conclude, parts.packing.unpack(state))

        pictures = None
        if config.task == "segmentation" and any(company.gather(writer.takes_images)):
            from mpjax.commands.pictures import pictures_of

            pictures = pictures_of(config, parts)

        def explain() -> Explain:
            from mpjax.commands.diagnose import explain_later, explain_now

            return explain_later(folder) if company.processes > 1 else explain_now(config, parts, train_call, folder)

        watched = train_call
        if config.profile and first:
            watched = opened.enter_context(profiled(watched, folder / "tensorboard", when.call_counts(start)))
        watched = under.written_after(watched)

        def say(position: int, seconds: float) -> None:
            rest = f"{when.steps - position} of {when.steps} steps"
            writer.message(f"{rest} are left: about {duration(seconds)}, without evaluations")

        if callbacks.call("started", info) & {"stop"}:
            raise UsageError("a callback asked to stop before the first step")
        if first and stopping is stop_on_signals:  # another context means that the run was started by other means
            opened.enter_context(resumption_told(config, folder))
        opened.enter_context(stopping(company.stop))
        begin()
        started = time.perf_counter()
        state = train_loop(
            state,
            estimated(watched, start=start, steps=when.steps, say=say),
            itertools.chain([fed], feed),
            start=start,
            when=when,
            batch_size=config.data.batch_size,
            limits=Limits(floor_of(plan, config.precision), config.precision.patience),
            writer=writer,
            evaluate=tested,
            score=score,
            save=save,
            explain=explain,
            stop=company.stop,
            probe=probe,
            draw=pictures and (lambda state: pictures(parts.packing.unpack(state))),
            callbacks=callbacks,
            model_of=lambda state: functools.partial(model_with, parts, state),
        )
        if (attempts := int(state.attempts)) < when.steps:
            writer.message(f"stopped at step {attempts} of {when.steps}{callbacks.reason}")

        # Results come before the writers close, because loggers store these files.
        summary = None
        if first and start >= when.steps:  # the results belong to the steps that ran, not to this command
            config, history = from_toml(folder / CONFIG_FILE), history[:-1]
        ran = {
            "steps": int(state.step),
            "attempts": attempts,
            "policy": report.policies_of(history, str(plan.policy)),
            **report.entries_of(history),
        }
        if first and start >= when.steps:
            summary = report.summary_of(folder / "summary.json", ran)
        if first and not summary:
            records = report.read_metrics(metrics) if metrics.exists() else []
            summary = report.summarise(
                records,
                score=score,
                skipped=int(loss_scale_state(state.opt_state).skipped),
                **so_far(),
                startup_seconds=started - began,
                examples_per_second=report.throughput(records),
                parameters=sum(p.size for p in state.params.values()),
                output_dir=str(folder),
                **ran,
            )
            report.write_summary(folder / "summary.json", summary)
            for file in report.image_files(folder / "curves", config.report):
                report.plot_curves(records, file, report.title_of(config, history), history)

    if summary is not None:
        print(report.summary_table(summary))
    summary = company.gather(summary)[0]
    callbacks.call("ended", summary)
    return summary

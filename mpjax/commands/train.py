"""Runs a whole training: settings, data, model, precision, step, loop, results."""

import contextlib
import dataclasses
import functools
import itertools
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from mpjax import extend
from mpjax.commands.build import Run, build_run, layer_probe, model_with
from mpjax.commands.evaluate import evaluate_state
from mpjax.commands.objective import metrics_of
from mpjax.commands.out_of_memory import memory_told, require_memory
from mpjax.commands.run_folder import begin, held_folder, resumption_told
from mpjax.commands.run_records import Records, put_records, put_results
from mpjax.config.folders import check_run_folder
from mpjax.config.limits import is_auto, require_types
from mpjax.config.schema import Config, Distributed
from mpjax.config.score import score_of
from mpjax.config.tasks import NEXT_TOKEN
from mpjax.config.user_code import forget_files, may_name_code
from mpjax.data.example_reader import batch_fields
from mpjax.errors import CallbackError, UsageError
from mpjax.extend import Writer
from mpjax.loop.best import best_since
from mpjax.loop.callbacks import Callbacks
from mpjax.loop.checkpoint import Checkpoints
from mpjax.loop.company import Alone, Company
from mpjax.loop.first_calls import estimated, profiled
from mpjax.loop.join import joined
from mpjax.loop.signals import Stop, stop_on_signals
from mpjax.loop.stored import CHECKPOINTS
from mpjax.loop.train import NO_CALLBACKS, Explain, Limits, train_loop
from mpjax.models.build import advice_on as advice_on_model
from mpjax.report.jsonl import written_lines
from mpjax.report.results import summary_table
from mpjax.report.wording import duration
from mpjax.report.writer import Writers, open_all, open_writers
from mpjax.training.feed import CallProgram, compile_calls
from mpjax.training.optimizer import advice_on
from mpjax.training.precision_plan import advice, floor_of
from mpjax.training.state import TrainState


Stopping = Callable[[Stop], contextlib.AbstractContextManager[None]]
"""A function from the `Stop` of a run to the context of its training loop, which calls `ask` to request a stop."""


def train_all(config: Config) -> dict:
    """Trains the run that `config` describes, or one for each of its `seeds`; returns the contents of `summary.json`.

    Raises:
      UsageError, Diverged: as `run` and `mpjax.commands.seeds.sweep`.
      CallbackError, Interrupted: as `run`.
    """
    if config.seeds:
        from mpjax.commands.seeds import sweep  # local, because few runs have several seeds

        return sweep(config, run)
    return run(config)


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
    writers: Iterable[Any] = (),
    stopping: Stopping = stop_on_signals,
) -> dict:
    """Trains by the settings in `config` and writes the results to its `output_dir`.

    With several processes, each calls this with the same settings but its own `distributed.process`; the first prints
    and writes.

    Objects that you pass replace what the settings name; `mpjax.extend` documents how they are called.

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
      UsageError: the settings are invalid or have `seeds`, the folder is not empty and `resume` is off, the data or a
        process is missing, the memory does not suffice, or a callback requests a stop before the first step.
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
            f"seeds {config.seeds}: mpjax.run trains one seed; call mpjax.commands.train.train_all for several"
        )
    if config.distributed.elastic:
        raise UsageError(
            "distributed.elastic: mpjax.run trains in this process; mpjax.commands.elastic.supervise starts "
            "another, or use the command"
        )
    with joined(config) as company:
        return _train(dataclasses.replace(config, distributed=Distributed()), company, tuple(writers), stopping)


def _train(config: Config, company: Alone | Company, writers: Sequence[Writer], stopping: Stopping) -> dict:
    entered = time.perf_counter()
    forget_files()
    if company.first:  # the first process prints and writes
        check_run_folder(config)  # before any slow work
    run, notes = _built(config, company)
    config, when = run.config, run.when

    with contextlib.ExitStack() as stack:
        callbacks, failures = _listeners(config, company, writers, stack)
        folder, keep_folder = stack.enter_context(held_folder(config, company))
        stack.enter_context(memory_told(config))

        beginning = begin(run, folder, company)
        records = Records(writing=company.first, waiting=config.resume)
        history = put_records(records, run, folder, beginning) if company.first else []
        about = beginning.about | {"history": company.gather(history)[0]}
        since = best_since(about["history"])
        info = extend.RunInfo(folder, config, beginning.step, when.steps, company.first, beginning.metrics, since)
        opened = _opened_writers(info, company, writers, failures)
        writer = stack.enter_context(contextlib.closing(Writers(opened)))
        told = *beginning.told(run, history), when.advice(beginning.step), *notes
        for line in filter(None, [f"run folder: {folder}", *told]):
            writer.message(line)
        checkpoints = Checkpoints(folder / CHECKPOINTS, keep=config.loop.keep, since=since, first=company.first)
        stack.enter_context(contextlib.closing(checkpoints))

        state = run.packing.pack(beginning.state)
        feed = run.feed.calls(beginning.step, when.call_counts(beginning.step))
        fed = next(feed, None)  # None for a finished run
        if fed is not None:
            writer.message("compiling the training step")
        compiling = time.perf_counter()
        abstract = {count: run.feed.abstract(fed, count) for count in when.kinds_of_calls(beginning.step)}
        programs: dict[int, CallProgram] = {}
        train_call = compile_calls(run.train_call, state, abstract, run.compiler_options, see=programs.__setitem__)
        probe = compile_calls(layer_probe(run), state, abstract) if when.layers and abstract else None
        compile_seconds = beginning.spent("compile_seconds") + time.perf_counter() - compiling
        if line := _checked(run, programs, state, company, folder, records):
            writer.message(line)
        programs.clear()  # traced programs are large

        def seconds() -> dict[str, float]:
            spent = beginning.spent("seconds") + time.perf_counter() - entered
            return {"seconds": spent, "compile_seconds": compile_seconds}

        def save(position: int, state: TrainState, score: float | None) -> None:
            lines = written_lines(folder / "metrics.jsonl") if company.first else 0
            so_far = seconds() | {"metrics_lines": lines}
            whole = run.packing.unpack(state)
            if config.training.lora:
                from mpjax.commands.base_weights import without_base

                whole = without_base(run.task, whole, about)
            checkpoints.save(position, whole, about | so_far, score=score)
            writer.saved(position)

        def evaluate(state: TrainState) -> dict[str, float]:
            sharding = run.layout.evaluation(config.data.tested)
            conclude = run.task.objective.conclude
            return evaluate_state(run.eval_step, run.tests, sharding, conclude, run.packing.unpack(state))

        def explain() -> Explain:
            from mpjax.commands.diagnose import explain_later, explain_now

            return explain_later(folder) if company.processes > 1 else explain_now(run, train_call, folder)

        def estimate(position: int, seconds: float) -> None:
            rest = f"{when.steps - position} of {when.steps} steps"
            writer.message(f"{rest} are left: about {duration(seconds)}, without evaluations")

        draw = None
        if config.task == "segmentation" and any(company.gather(writer.takes_images)):
            from mpjax.commands.pictures import pictures_of

            draw = pictures_of(run)
        call = train_call
        if config.profile and company.first:
            call = stack.enter_context(profiled(call, folder / "tensorboard", when.call_counts(beginning.step)))
        call = estimated(records.written_after(call), start=beginning.step, steps=when.steps, say=estimate)
        if callbacks.call("started", info) & {"stop"}:
            raise UsageError("a callback asked to stop before the first step")
        if company.first and stopping is stop_on_signals:  # other contexts mean that the run was started by other means
            stack.enter_context(resumption_told(config, folder))
        stack.enter_context(stopping(company.stop))
        keep_folder()
        started = time.perf_counter()
        state = train_loop(
            state,
            call,
            itertools.chain([fed], feed),
            start=beginning.step,
            when=when,
            batch_size=config.data.batch_size,
            limits=Limits(floor_of(run.plan, config.precision), config.precision.patience),
            writer=writer,
            evaluate=evaluate,
            score=score_of(config),
            save=save,
            explain=explain,
            stop=company.stop,
            probe=probe,
            draw=draw and (lambda state: draw(run.packing.unpack(state))),
            callbacks=callbacks,
            model_of=lambda state: functools.partial(model_with, run, state),
        )
        if (attempts := int(state.attempts)) < when.steps:
            writer.message(f"stopped at step {attempts} of {when.steps}{callbacks.reason}")
        elif config.task in NEXT_TOKEN and config.model.weights and company.processes == 1 and run.plan.is_half:
            from mpjax.commands.mismatch_of_run import told_of_mismatch

            writer.message(told_of_mismatch(run, state))
        # Results come before the writers close, because loggers store these files.
        summary, best_step = None, checkpoints.best()
        if company.first:
            spent = seconds() | {"startup_seconds": started - entered}
            summary = put_results(
                run, folder, state, history, spent, best_step=best_step, ran=beginning.step < when.steps
            )

    if summary is not None:
        print(summary_table(summary))
    summary = company.gather(summary)[0]
    callbacks.call("ended", summary)
    return summary


def _built(config: Config, company: Alone | Company) -> tuple[Run, list[str]]:
    """Replaces sizes that are `auto` by numbers, and builds the run; also returns lines of advice for the user.

    Some of the lines may be empty.

    Raises:
      UsageError: as `build_run`; the message also lists the flags that the command lacks (`raise_together`). Or
        `loop.best` is no metric of the test set.
    """
    fit = ""
    try:
        if is_auto(config):
            from mpjax.commands.fit import fitted

            config, fit = fitted(config, company.gather, print if company.first else lambda line: None)
        stored = None
        if config.is_encoded and config.resume:
            from mpjax.commands.encoding_of_run import encoding_to_resume

            stored = encoding_to_resume(check_run_folder(config))
        run = build_run(config, stored)
    except UsageError as error:
        from mpjax.commands.lacking import raise_together

        raise_together(error, config)
    fields = batch_fields(run.source, config.data)
    if config.loop.best:
        from mpjax.commands.own_parts import require_metric

        require_metric(config.loop.best, metrics_of(run.task, fields))
    advised = [*advice(run.plan, config.precision, jax.devices()[0]), *advice_on(config.optimizer)]
    if config.training.lora:
        from mpjax.commands.base_weights import told_of_adapters

        advised.append(told_of_adapters(run.task, config.model))
    return run, [fit, *run.source.notes, *advised, *advice_on_model(config.model, fields)]


def _listeners(
    config: Config, company: Alone | Company, writers: Sequence[Writer], stack: contextlib.ExitStack
) -> tuple[Callbacks, list[CallbackError] | None]:
    """Loads the callbacks of a run; also returns an empty list to which failures of the user's writers are added.

    The list is None if no process has a writer of the user. All processes must call this function, because they may
    have different writers, but call the same callbacks. If an error ends the context `stack`, a LoggerWarning tells of
    each failure that is left in the list.
    """
    failures = None
    if any(company.gather(bool(writers or config.report.writers))):
        from mpjax.report.user_writers import failures_of_writers

        failures = stack.enter_context(failures_of_writers())
    if failures is None and not config.loop.callbacks and not config.loop.stop_after:
        return NO_CALLBACKS, None
    from mpjax.commands.own_parts import callbacks_of

    return callbacks_of(config, company.gather, failures), failures


def _opened_writers(
    info: extend.RunInfo,
    company: Alone | Company,
    writers: Sequence[Writer],
    failures: list[CallbackError] | None,
) -> tuple[Writer, ...]:
    """Opens the run's files, the console and the writers that the settings name, in the first process only.

    The user's `writers`, which are open already, are added in every process. Failures of the user's writers, named or
    passed, are added to `failures`; None means that no process has such writers. If one cannot be opened, those before
    it are closed.
    """
    config, files, named = info.config, (), ()
    if company.first:
        start = info.start if config.resume else None
        tensorboard = config.report.tensorboard
        openers = [lambda: open_writers(info.folder, info.steps, start, tensorboard=tensorboard)]
        if config.report.writers:
            from mpjax.report.user_writers import openers_of

            openers += openers_of(config.report.writers, info)
        first, *named = open_all(openers)
        files = (first,)
    if failures is None:
        return files
    from mpjax.report.user_writers import UserWriters

    return *files, UserWriters((*named, *writers), failures)


def _checked(
    run: Run,
    programs: Mapping[int, CallProgram],
    state: TrainState,
    company: Alone | Company,
    folder: pathlib.Path,
    records: Records,
) -> str:
    """Checks that processes agree and that the programs fit into host memory; puts the receipt into `records`.

    Returns:
      The line of the receipt for the user; empty without programs (a finished run), and in other processes than the
        first unless `precision.strict` is set.

    Raises:
      UsageError: as `require_agreement`, `check_receipt` and, for texts in parts, `require_same_logits`.
      MemoryError: as `require_memory`.
      DtypeError: as `check_receipt`.
    """
    if company.processes > 1:
        from mpjax.commands.agreement import require_agreement

        require_agreement(company, run, {count: program.lowered for count, program in programs.items()}, state)
    require_memory(company, [program.compiled for program in programs.values()])
    if run.layout.context and may_name_code(run.config.model.name) and not run.config.model.folder:
        from mpjax.commands.parts_of_texts import require_same_logits

        require_same_logits(run, run.packing.unpack(state))
    if not programs or not (company.first or run.config.precision.strict):
        return ""
    from mpjax.commands.receipt_of_run import check_receipt

    return check_receipt(run, programs, folder, records.put)

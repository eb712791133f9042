"""Evaluates a checkpoint of a run."""

import dataclasses
import pathlib
import shlex
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import optax

from mpjax import strict_json
from mpjax.commands.build import read_whole, stored_encoding
from mpjax.commands.learner import open_task
from mpjax.config.commands import Evaluation, Prediction
from mpjax.config.folders import config_of_run, data_of_run, with_policy
from mpjax.config.load import CONFIG_FILE, from_toml
from mpjax.config.save import changes, to_toml
from mpjax.config.schema import Config, with_settings
from mpjax.data.batches import eval_batches
from mpjax.data.examples import Source
from mpjax.data.stored_fields import source_without_examples
from mpjax.errors import CheckpointWarning, UsageError, printable
from mpjax.loop.best import BEST_ANEW
from mpjax.loop.resume import adopt
from mpjax.loop.stored import CHECKPOINTS, FIELDS, complete_checkpoints, read_description
from mpjax.precision.loss_scale import no_loss_scaling
from mpjax.report.history import HISTORY_FILE, begins, history_in, policies_of, read_history
from mpjax.training.eval_step import evaluate, make_eval_step
from mpjax.training.layout import Layout
from mpjax.training.mesh import make_mesh, put_on_devices
from mpjax.training.precision_plan import PrecisionPlan
from mpjax.training.setup import Task, state_shapes
from mpjax.training.state import TrainState


_OF_ONE_RUN = ("seed", "task", "data.name", "data.train_split", "model.")
"""Prefixes of settings that a resumed run seldom changes, unlike its learning rate or its policy."""


_OF_FORM = ("model.scan_blocks",)
"""Settings with a prefix of `_OF_ONE_RUN` that may still differ: they change only the format of a checkpoint."""


def evaluate_run(settings: Evaluation) -> dict[str, float]:
    """Computes the metrics of a checkpoint on a split of its run's data, and prints them.

    Returns:
      `test/loss` and the other metrics of the task over all examples of the split; with `settings.ema` also the same
        metrics of the moving average, as `ema/…`.

    Raises:
      UsageError: there is no such run, checkpoint or split, or the policy is invalid.
    """
    folder = pathlib.Path(settings.run)
    config = stored_settings(settings)
    plan, source, task = open_split(settings, config)
    tell_notes(source, config)
    tests = eval_batches(source, config.data)

    layout = Layout(make_mesh())
    position, state, about = trained_state(task, config, source, folder, settings.checkpoint, layout, ema=settings.ema)

    eval_step = make_eval_step(task.structure, task.objective.measure, cast=task.cast, layout=layout)
    sharding = layout.evaluation(config.data.tested)
    metrics = evaluate_state(eval_step, tests, sharding, task.objective.conclude, state)
    if settings.json:
        print(strict_json.encode({"checkpoint": position, "policy": str(plan.policy), **metrics}))
    else:
        trained = policies_of(history_in(about, position))
        heading = f"checkpoint {position} of {folder}, trained under {trained}, evaluated under {plan.policy}"
        print(printable(heading))
        width = max(16, *(len(name) + 2 for name in metrics))
        for name, value in metrics.items():
            print(f"  {name:<{width}}{value:.6f}")
    return metrics


def tell_notes(source: Source, config: Config) -> None:
    """Prints the notes of a data set to stderr, without the notes of the training split alone."""
    train, test = config.data.train_split, config.data.test_split
    for note in source.notes:
        if train == test or not note.startswith((f"{train}: ", f"split '{train}' of ")):
            print(printable(note), file=sys.stderr)


def stored_settings(settings: Evaluation | Prediction) -> Config:
    """Reads the settings of a stored run, and replaces its policy and test split by those of the command, if given.

    Raises:
      UsageError: there is no run, its code is not trusted, or `settings.ema` is set and it kept no moving average.
    """
    folder = pathlib.Path(settings.run)
    config = config_of_run(folder, trust_code=settings.trust_code)
    if settings.policy:
        config = with_policy(config, settings.policy)
    if settings.split:
        config = with_settings(config, {"data.test_split": settings.split})
    if settings.ema and not config.training.ema:
        raise UsageError(f"--ema: the run in {folder} kept no moving average (training.ema is 0)")
    return config


def open_split(settings: Evaluation | Prediction, config: Config) -> tuple[PrecisionPlan, Source, Task]:
    """Calls `open_task` with the statistics of the run, if it has any, and with an error message for `--split`.

    `config` is the result of `stored_settings`.

    Raises:
      UsageError: as `open_task`. If only the split of the command is at fault, the message suggests the test split of
        the run.
    """
    folder = pathlib.Path(settings.run)
    stored = stored_encoding(config, folder)
    with data_of_run(folder):
        try:
            return open_task(config, stored)
        except UsageError as error:
            split = from_toml(folder / CONFIG_FILE).data.test_split
            if settings.split in ("", split):
                raise
            cause = error
        # This raises if the data itself is bad.
        open_task(with_settings(config, {"data.test_split": split}), stored)
    fact = str(cause).partition("; write --data.")[0]  # without the flags of `train`
    raise UsageError(
        f"--split {settings.split}: {fact}; write --split {shlex.quote(split)}, which is the test split of the run, or "
        "another split that the data has"
    ) from cause


def open_to_predict(settings: Prediction, config: Config) -> tuple[PrecisionPlan, Source, Task]:
    """Calls `open_split` with `settings.split`; without it, no data set is opened if the checkpoint describes one."""
    if settings.split:
        return open_split(settings, config)
    folder = pathlib.Path(settings.run)
    with data_of_run(folder):
        return open_task(config, stored_encoding(config, folder), described_source(config, folder, settings.checkpoint))


def described_source(config: Config, folder: pathlib.Path, checkpoint: str) -> Source | None:
    """The data set that a checkpoint describes, without examples; None if it describes none that this mpjax knows."""
    about = read_description(folder / CHECKPOINTS, checkpoint)
    if not about or FIELDS not in about:
        return None
    return source_without_examples(str(config.data.name), about[FIELDS], stored_encoding(config, folder))


def trained_state(
    task: Task, config: Config, source: Source, folder: pathlib.Path, checkpoint: str, layout: Layout, *, ema: bool
) -> tuple[int, TrainState, dict]:
    """Reads the parameters and statistics of a checkpoint, without its optimizer state, in the dtypes of `task`.

    Args:
      task: the run's task.
      config: its settings.
      source: its data.
      folder: the run's folder.
      checkpoint: `best`, `latest`, or a position (attempted steps).
      layout: the layout over all devices.
      ema: True to read the moving average of the parameters too.

    Returns:
      The position, the unpacked state with an empty `opt_state`, and the checkpoint's description.

    Warns:
      CheckpointWarning: a damaged checkpoint was skipped, or the checkpoint was written under another model, seed, task
        or training set than the settings of the run have; or as `require_same_outputs`.
      PrecisionWarning: see `adopt`.

    Raises:
      UsageError: there is no such checkpoint, it is damaged, or it is of another model; or `read_whole` or
        `require_same_outputs` raises.
    """
    position, saved, about = read_whole(task, config, source, layout, folder, checkpoint)
    require_same_outputs(folder, position, about, advice="write --checkpoint latest for the last one")
    differences = changes(about["config"], to_toml(from_toml(folder / CONFIG_FILE)))
    others = [change for change in differences if change[0].startswith(_OF_ONE_RUN) and change[0] not in _OF_FORM]
    if others and not begins(read_history(folder / HISTORY_FILE), about):
        warnings.warn(
            f"checkpoint {position} of {folder} may be of another run: it was written under other settings than its "
            f"{CONFIG_FILE} has: " + "; ".join(f"{name} {old}, not {new}" for name, old, new in others),
            CheckpointWarning,
            stacklevel=2,
        )
    # Shapes only: the checkpoint replaces every initial value.
    bare = no_loss_scaling(optax.identity())
    shapes = state_shapes(task, bare, ema=ema, layout=layout)
    state = adopt(shapes, saved, same_scaling=False)
    return position, dataclasses.replace(state, opt_state=()), about


def require_same_outputs(folder: pathlib.Path, position: int, about: Mapping[str, Any], *, advice: str) -> None:
    """Checks that the settings of a run, by which a checkpoint is read, are those that it was trained with.

    Args:
      folder: the folder of the run.
      position: the position of the checkpoint.
      about: its description.
      advice: how to read the latest checkpoint.

    Warns:
      CheckpointWarning: the search for the best checkpoint began anew after this one, with another test set or model,
        by which the checkpoint is read now.

    Raises:
      UsageError: a setting that decides what its network computes from an example has another value now.
    """
    from mpjax.config.meaning import changes_of_outputs, of_reading  # local, because training reads no checkpoint

    others = changes_of_outputs(about["config"], to_toml(from_toml(folder / CONFIG_FILE)))
    newest = max(complete_checkpoints(folder / CHECKPOINTS))
    if others:
        settings = "; ".join(f"{name} {old}, and the run has {new} now" for name, old, new in others)
        no_other = "resume the run, whose next checkpoint is trained as it is now"
        raise UsageError(
            f"checkpoint {position} of {folder} was trained with {settings}: its outputs would be others; "
            + (no_other if position == newest else advice)
        )
    lines = [line for line in read_history(folder / HISTORY_FILE) if line["step"] >= position]
    if since := [text for line in lines for text in line.get(BEST_ANEW, []) if of_reading(text)]:
        warnings.warn(
            f"checkpoint {position} of {folder} is of before a change, and is read as the run is now: "
            f"{'; '.join(since)}" + ("" if position == newest else f"; {advice}"),
            CheckpointWarning,
            stacklevel=3,
        )


def evaluate_state(eval_step, batches, sharding, conclude: Callable, state: TrainState) -> dict[str, float]:
    """Computes the metrics of a test set: `test/...` of the parameters, and `ema/...` of their moving average, if any.

    Args:
      eval_step: `(params, stats, batch) -> sums`, such as the result of `make_eval_step`.
      batches: the batches of the test set, on the host.
      sharding: the sharding of a batch on the devices.
      conclude: converts the sums over all batches to metrics.
      state: the unpacked state.
    """

    def metrics_of(params) -> dict[str, float]:
        placed = (put_on_devices(batch, sharding) for batch in batches)
        return evaluate(eval_step, params, state.stats, placed, conclude)

    metrics = {f"test/{name}": value for name, value in metrics_of(state.params).items()}
    if state.ema:
        metrics |= {f"ema/{name}": value for name, value in metrics_of(state.averaged).items()}
    return metrics

"""Creates or opens the folder of a run, for all its processes, and the state in which the run begins."""

import contextlib
import dataclasses
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mpjax.commands.build import ENVIRONMENT_FILE, Run, fresh_state, read_whole, resumed_state
from mpjax.commands.outside_files import described_files
from mpjax.config.choices import RANDOM
from mpjax.config.folders import resume_command, run_folder
from mpjax.config.load import CONFIG_FILE
from mpjax.config.save import changes, to_toml
from mpjax.config.schema import Config
from mpjax.data.fingerprint import differences, fingerprint_of
from mpjax.errors import CallbackError, Interrupted, UsageError
from mpjax.files import locked
from mpjax.loop.company import Alone, Company
from mpjax.loop.join import numbers
from mpjax.loop.resume import adopt, places_in
from mpjax.loop.stored import BASE, CHECKPOINTS, complete_checkpoints, set_aside
from mpjax.models.pretrained.report import PretrainedReport
from mpjax.report.history import History, other_versions
from mpjax.report.jsonl import read_metrics
from mpjax.report.results import process_of
from mpjax.training.optimizer import has_moments_of
from mpjax.training.setup import pretrained_arrays
from mpjax.training.state import TrainState


def run_folder_of(config: Config, company: Alone | Company) -> pathlib.Path:
    """Creates the folder of the run (with `resume`, finds it) in the first process, and returns its path in all.

    All processes must call it.

    Raises:
      UsageError: as `run_folder`, or a process does not see the folder. A new folder is then removed.
    """
    folder = pathlib.Path(company.gather(str(run_folder(config)) if company.first else None)[0])
    present = company.gather((folder / CONFIG_FILE).exists())
    if not all(present):
        if company.first and not config.resume:
            shutil.rmtree(folder, ignore_errors=True)  # the new folder would block the corrected command
        blind = numbers([process for process, sees in enumerate(present) if not sees])
        raise UsageError(
            f"{folder} of process 0 is not there for process {blind}: all processes need one storage for the run; "
            "write an --output_dir that all of them share"
        )
    return folder


@contextlib.contextmanager
def restored_if_refused(folder: pathlib.Path, *, new: bool) -> Iterator[Callable[[], None]]:
    """Context that removes files added to a run's folder if a UsageError or CallbackError comes before the first step.

    So the corrected command finds the folder as the refused one did. The context yields a function to call right before
    the first step; after that call, nothing is removed. Of a `new` run, the folder itself is removed too. Files that
    were there before are never touched; a resumed run replaces them only after its first step (`Records`). The error
    passes on. The caller holds the lock of the folder, so no other process writes.
    """
    kept = () if new else {path.name for path in folder.iterdir()}
    calls = []
    try:
        yield lambda: calls.append(True)
    except (UsageError, CallbackError):
        if not calls:
            for path in folder.iterdir():
                if path.name not in kept:
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
            if new:
                with contextlib.suppress(OSError):  # a mount, for example, cannot be removed; an empty folder is enough
                    folder.rmdir()
        raise


@contextlib.contextmanager
def resumption_told(config: Config, folder: pathlib.Path) -> Iterator[None]:
    """Context that adds the shell command that resumes the run to the message of an `Interrupted`.

    The message stays as it is if parts of the run were passed in Python, which a command cannot do.
    """
    try:
        yield
    except Interrupted as error:
        if not (line := resume_command(config, folder)):
            raise
        raise Interrupted(f"{error}; to resume:\n{line}", error.signal_number) from error


@contextlib.contextmanager
def held_folder(config: Config, company: Alone | Company) -> Iterator[tuple[pathlib.Path, Callable[[], None]]]:
    """Context that creates or opens the folder of a run; the first process holds its lock inside the `with` block.

    All processes must enter it.

    Yields:
      The folder, and a function to call right before the first step; see `restored_if_refused`. In other processes than
        the first, the function does nothing.

    Raises:
      UsageError: as `run_folder_of`, or another process holds the lock.
    """
    folder = run_folder_of(config, company)
    if not company.first:
        yield folder, lambda: None
        return
    with (
        locked(folder, lambda: process_of(folder / ENVIRONMENT_FILE)),
        restored_if_refused(folder, new=not config.resume) as keep,
    ):
        yield folder, keep


@dataclasses.dataclass(frozen=True)
class Beginning:
    """The state in which a run begins, from its last checkpoint or new.

    Attributes:
      step: the attempted steps so far; 0 for a new run.
      state: the unpacked state.
      about: the description to store with the next checkpoints: policy, loss scale, seed, settings and data.
      before: the description that the last checkpoint holds; empty without a checkpoint.
      metrics: the lines of metrics.jsonl; empty without a checkpoint.
      weights: the report of pretrained weights; None without any, and for a resumed run.
    """

    step: int
    state: TrainState
    about: dict[str, Any]
    before: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    weights: PretrainedReport | None

    @property
    def best_anew(self) -> list[str]:
        """What has changed so that earlier metrics of the test set are not comparable; empty if they are."""
        if not self.before:
            return []
        from mpjax.config.meaning import changes_of_meaning  # local, because a new run has nothing to compare

        settings = changes_of_meaning(self.before["config"], self.about["config"])
        data = differences(self.before.get("data"), self.about["data"])
        return [f"{name} {new}, before {old}" for name, old, new in settings] + [
            line for line in data if line.startswith("test: ")
        ]

    def spent(self, name: str) -> float:
        """The seconds that earlier commands of the run spent up to its checkpoint; 0 for a new run.

        `name` is `seconds` (in all) or `compile_seconds`.
        """
        return float(self.before.get(name, 0.0))

    def told(self, run: Run, history: History) -> Iterator[str]:
        """Yields the lines to show to the user before the first step.

        They say from which step the run resumes, which settings, data and versions have changed since, what was loaded
        as pretrained weights, and whether no step is left to train.
        """
        if run.config.resume:
            fresh = "no checkpoint to resume from: starting at step 0"
            yield f"resumed from step {self.step}" if self.before else fresh
        if self.before and self.step < run.when.steps:
            for name, old, new in changes(self.before["config"], self.about["config"]):
                yield f"resumed with another {name}: {new}, before {old}"
            for line in differences(self.before.get("data"), self.about["data"]):
                yield f"resumed on other data: {line}"
            for name, old, new in other_versions(history):
                yield f"resumed with {name} {new}, before {old}"
            if anew := self.best_anew:
                yield f"the search for the best checkpoint begins anew after step {self.step}: {'; '.join(anew)}"
        if self.weights:
            yield f"pretrained: {self.weights.totals}"
        if run.config.model.pretrained == RANDOM and not self.before:
            yield "the model begins with random weights: --model.pretrained none"
        if self.step >= run.when.steps:
            yield f"nothing left to train: --steps is {run.when.steps}"


def begin(run: Run, folder: pathlib.Path, company: Alone | Company) -> Beginning:
    """Creates the first state of a run or, with `resume`, reads its last checkpoint, if there is one.

    All processes must call it. With `resume` and no checkpoint, the run starts at step 0. Checkpoints later than the
    one that is read, which are damaged, are renamed.

    Raises:
      UsageError: all checkpoints are damaged, or the last undamaged one is of another model; or it is of other data and
        `config.other_data` is off.
    """
    data = fingerprint_of(run.source, run.config.data, run.batches, run.tests) if company.first else None
    about = {
        "policy": str(run.plan.policy),
        "loss_scale": str(run.plan.loss_scale),
        "seed": run.config.seed,
        "config": to_toml(run.config),
        "data": company.gather(data)[0],
    }
    about |= described_files(run.config, run.source)
    if run.config.training.lora:
        from mpjax.commands.base_weights import described_base  # local, as few runs have adapters

        about |= described_base(run.task, run.config.model)
    if not (run.config.resume and company.gather(complete_checkpoints(folder / CHECKPOINTS))[0]):
        arrays, weights = pretrained_arrays(run.task, run.config.model)
        return Beginning(0, fresh_state(run, arrays), about, {}, [], weights)
    step, state, before = _resumed(run, folder, about, company)
    if BASE in about:
        from mpjax.commands.base_weights import of_file_alone

        about = of_file_alone(run.task, about, before)
    metrics = folder / "metrics.jsonl"
    return Beginning(step, state, about, before, read_metrics(metrics) if metrics.exists() else [], None)


def adopted(shapes: TrainState, saved: Mapping[str, Any], before: Mapping[str, Any], run: Run) -> TrainState:
    """Calls `adopt` with the arrays of a checkpoint and what `before`, its description, has in common with the run."""
    changed = changes(before["config"], to_toml(run.config))
    renamed = ((old, new) for name, old, new in changed if name == "optimizer.name")
    return adopt(
        shapes,
        saved,
        same_scaling=before["loss_scale"] == str(run.plan.loss_scale),
        same_moments=all(has_moments_of(old, new) for old, new in renamed),
    )


_OF_MODEL = ("model.", "training.lora", "data.num_classes", "task")
"""Prefixes of the settings that say which arrays a model has."""


def _resumed(run: Run, folder: pathlib.Path, about: dict, company: Alone | Company) -> tuple[int, TrainState, dict]:
    """Reads the last undamaged checkpoint; returns its position (attempted steps), unpacked state and description.

    Later checkpoints, which are damaged, are renamed to `<position>.damaged`.

    Raises:
      UsageError: there is no undamaged checkpoint, it is of another model, or it is of other data and
        `run.config.other_data` is off.
    """
    checkpoint: list = []

    def read(shapes: TrainState) -> TrainState:
        position, saved, then = read_whole(
            run.task,
            run.config,
            run.source,
            run.layout,
            folder,
            places=places_in(shapes),
            gather=company.gather,
        )
        if not run.config.other_data and (lines := differences(then.get("data"), about["data"])):
            raise UsageError(
                f"--resume: the data is not that of checkpoint {position} in {folder}:\n  "
                + "\n  ".join(lines)
                + "\nresume with the data of before, or, if this is meant, write --other_data"
            )
        checkpoint.extend((position, then))
        try:
            return adopted(shapes, saved, then, run)
        except UsageError as error:
            since = changes(then["config"], about["config"])
            lines = [f"--{name} is {new}, before {old}" for name, old, new in since if name.startswith(_OF_MODEL)]
            raise UsageError(
                "\n  ".join([f"{error}\nthese settings are others:", *lines] if lines else [str(error)])
            ) from None

    state = resumed_state(run, read)
    position, then = checkpoint
    if company.first:
        set_aside(folder / CHECKPOINTS, after=position)
    company.gather(None)  # no process writes checkpoints before the later ones are set aside
    return position, state, then

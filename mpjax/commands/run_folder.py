"""The folder of a run: created by the first of its processes, and read again by all on resumption."""

import contextlib
import pathlib
import shutil
from collections.abc import Callable, Iterator

from mpjax.commands.parts import CHECKPOINTS, Parts, resumed_state
from mpjax.config import Config
from mpjax.config.folders import resume_command, run_folder
from mpjax.config.load import CONFIG_FILE
from mpjax.data.fingerprint import differences
from mpjax.errors import CallbackError, Interrupted, UsageError
from mpjax.loop.company import Alone, Company
from mpjax.loop.resume import adopt, places_in
from mpjax.loop.roll_call import numbers
from mpjax.loop.stored import read_checkpoint, set_aside
from mpjax.training import TrainState


def run_folder_of(config: Config, company: Alone | Company) -> pathlib.Path:
    """Creates the folder of the run in the first process, and returns it in all.

    Raises:
      UsageError: as `run_folder`, or a process does not see the folder.
    """
    folder = pathlib.Path(company.gather(str(run_folder(config)) if company.first else None)[0])
    seen = company.gather((folder / CONFIG_FILE).exists())
    if not all(seen):
        if company.first and not config.resume:
            shutil.rmtree(folder, ignore_errors=True)  # the new folder would block the corrected command
        blind = numbers([process for process, sees in enumerate(seen) if not sees])
        raise UsageError(
            f"{folder} of process 0 is not there for process {blind}: all processes need one storage for the run; "
            "write an --output_dir that all of them share"
        )
    return folder


@contextlib.contextmanager
def restored_if_refused(folder: pathlib.Path, *, new: bool) -> Iterator[Callable[[], None]]:
    """Restores the folder of a run after an error of the user, unless the yielded function was called before.

    No step has run then, and the corrected command must not find a folder. New files in the folder are removed. The
    files of a resumed run stay until its first step (`Records`). The caller holds the lock of the folder, so no other
    process writes.

    Args:
      folder: the folder of the run.
      new: whether this command created it.
    """
    kept = () if new else {path.name for path in folder.iterdir()}
    begun = []
    try:
        yield lambda: begun.append(True)
    except (UsageError, CallbackError):
        if not begun:
            for path in folder.iterdir():
                if path.name not in kept:
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
            if new:
                with contextlib.suppress(OSError):  # a mount, for example, cannot be removed; an empty folder is enough
                    folder.rmdir()
        raise


@contextlib.contextmanager
def resumption_told(config: Config, folder: pathlib.Path) -> Iterator[None]:
    """Adds the command that resumes a run to the message of its interruption."""
    try:
        yield
    except Interrupted as error:
        if not (line := resume_command(config, folder)):
            raise
        raise Interrupted(f"{error}; to resume:\n{line}", error.signal_number) from error


def resumed(
    config: Config, parts: Parts, folder: pathlib.Path, about: dict, company: Alone | Company
) -> tuple[int, TrainState, dict]:
    """Reads the last checkpoint; returns its position, the state and its description.

    Raises:
      UsageError: there is none, it is of another model, or of other data, and `config.other_data` is off.
    """
    found: list = []

    def read(shapes: TrainState) -> TrainState:
        position, saved, then = read_checkpoint(folder / CHECKPOINTS, places=places_in(shapes), gather=company.gather)
        if not config.other_data and (said := differences(then.get("data"), about["data"])):
            raise UsageError(
                f"--resume: the data is not that of checkpoint {position} in {folder}:\n  "
                + "\n  ".join(said)
                + "\nresume with the data of before, or, if this is meant, write --other_data"
            )
        found.extend((position, then))
        return adopt(shapes, saved, same_scaling=then["loss_scale"] == about["loss_scale"])

    state = resumed_state(config, parts, read)
    position, then = found
    if company.first:
        set_aside(folder / CHECKPOINTS, after=position)
    company.gather(None)  # no process writes checkpoints before the later ones are set aside
    return position, state, then

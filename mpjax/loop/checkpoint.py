"""Checkpoints of a run on disk: named arrays and a description, written in the background, complete or not at all."""

import contextlib
import errno
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from mpjax.errors import UsageError
from mpjax.precision.check import path_name


FORMAT = 1
"""Version of the layout; a reader refuses a later one."""

NOT_MEASURED = -math.inf
"""The score of a checkpoint that was not evaluated: never the best where another was."""


class Checkpoints:
    """The checkpoints of one run.

    Args:
      directory: where they are; made if absent.
      keep: the newest to keep; the one with the best score is kept besides.
    """

    def __init__(self, directory: pathlib.Path, *, keep: int = 2):
        policies = ocp.checkpoint_managers
        best = policies.BestN(get_metric_fn=_score, n=1)
        options = ocp.CheckpointManagerOptions(
            # Without best_fn scores would not be written, and a resumed run would not know its best checkpoint.
            best_fn=_score,
            preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(keep), best]),
        )
        self._directory = directory
        self._manager = ocp.CheckpointManager(directory.resolve(), options=options, item_names=("state", "about"))

    def save(self, position: int, state, about: Mapping[str, Any], *, score: float | None) -> None:
        """Starts to write a checkpoint, unless there is one of this position.

        Args:
          position: attempted steps so far.
          state: any pytree of arrays.
          about: what a reader needs besides, as JSON.
          score: how good it is, if that was measured: higher is better.
        """
        if position in self._manager.all_steps():
            return
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(to_arrays(state)), about=ocp.args.JsonSave({**about, "format": FORMAT})
        )
        with _written_to(self._directory):
            self._manager.save(position, args=items, metrics={"score": NOT_MEASURED if score is None else score})

    def close(self) -> None:
        """Waits until the last checkpoint is complete."""
        with _written_to(self._directory):
            self._manager.wait_until_finished()
        self._manager.close()


def complete_checkpoints(directory: pathlib.Path) -> list[int]:
    """The positions of the complete checkpoints in a folder, which need not exist; one cut short is none."""
    return sorted(ocp.utils.checkpoint_steps(directory)) if directory.is_dir() else []


def read_checkpoint(directory: pathlib.Path, which: str = "latest") -> tuple[int, dict[str, np.ndarray], dict]:
    """Reads a complete checkpoint.

    Args:
      directory: the run's `checkpoints` folder.
      which: "latest", "best", or a position.

    Returns:
      Its position, its arrays by path (on the host, as stored), and its description.

    Raises:
      UsageError: there is no such checkpoint, or a later version of mpjax wrote it.
    """
    steps = complete_checkpoints(directory)
    if not steps:
        raise UsageError(f"no complete checkpoint in {directory}")
    handlers = {"state": ocp.StandardCheckpointHandler(), "about": ocp.JsonCheckpointHandler()}
    with ocp.CheckpointManager(directory.resolve(), item_handlers=handlers) as manager:
        position = _choose(manager, steps, which)
        try:
            shapes = manager.item_metadata(position)["state"]
            like = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), dict(shapes))
            items = ocp.args.Composite(state=ocp.args.StandardRestore(like), about=ocp.args.JsonRestore())
            restored = manager.restore(position, args=items)
        except Exception as error:  # Orbax and tensorstore have many for a file that is cut short
            reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            raise UsageError(
                f"checkpoint {directory / str(position)} is damaged; remove it to use another: {reason}"
            ) from error
    about = restored["about"]
    if about["format"] > FORMAT:
        raise UsageError(f"{directory}/{position} has format {about['format']}; this mpjax reads up to {FORMAT}")
    return position, restored["state"], about


@contextlib.contextmanager
def _written_to(directory: pathlib.Path) -> Iterator[None]:
    """Turns what Orbax and tensorstore raise on a full disk, a ValueError, into an OSError that names the folder."""
    try:
        yield
    except Exception as error:
        full = "RESOURCE_EXHAUSTED" in str(error) or "No space left" in str(error)
        reason = "No space left on device" if full else str(error).partition("\n")[0][:200]
        raise OSError(errno.ENOSPC if full else errno.EIO, reason, str(directory)) from error


def _choose(manager: ocp.CheckpointManager, steps: list[int], which: str) -> int:
    if which == "latest":
        return steps[-1]
    if which == "best":
        return max(steps, key=lambda step: (_score(manager.metrics(step)), step))
    if not which.isdecimal() or int(which) not in steps:
        raise UsageError(f"no checkpoint '{which}': wanted latest, best or one of {', '.join(map(str, steps))}")
    return int(which)


def _score(metrics: Any) -> float:
    return metrics["score"]


def to_arrays(state) -> dict[str, Any]:
    """The leaves of `state` by path."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}

"""Writes checkpoints to disk: named arrays and a JSON description, in the background and atomically."""

import contextlib
import dataclasses
import errno
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from mpjax.errors import reason_of
from mpjax.loop.best import NOT_MEASURED, best_of
from mpjax.loop.checksums import checksums_of, digest_of
from mpjax.loop.stored import FORMAT, UNREADABLE, best_position, complete_checkpoints, score_file, stored_score
from mpjax.precision.dtypes import path_name


class Checkpoints:
    """Writes the checkpoints of one run, and removes old ones.

    Args:
      directory: the folder of the checkpoints; created if absent.
      keep: the number of latest checkpoints to keep. The best (`best_of`) is kept too.
      since: the position up to which checkpoints do not count in the search for the best (`best_since`).
      first: True in process 0, which first rewrites unreadable score files of earlier checkpoints. The other processes
        only write their shards of the arrays.
    """

    def __init__(self, directory: pathlib.Path, *, keep: int = 2, since: int = 0, first: bool = True):
        policies = ocp.training.preservation_policies
        kept: Any = policies.AnyPreservationPolicy([policies.LatestN(keep), _Best(since)])
        self._directory, self._first = directory, first
        if first:
            _write_lost_scores(directory)
        folder = str(directory.resolve())
        self._checkpointer = ocp.training.Checkpointer(folder, context=_context(), preservation_policy=kept)
        self._saving: tuple[int, ocp.AsyncResponse[bool]] | None = None

    def save(self, position: int, state, about: Mapping[str, Any], *, score: float | None) -> None:
        """Starts to write a checkpoint, and returns while the files are still being written.

        It first waits for the previous write to end. It does nothing if a checkpoint of this position exists. All
        processes call it together.

        Args:
          position: the number of steps attempted so far, which names the checkpoint.
          state: any pytree of arrays.
          about: the description, JSON values by name; `format`, `score`, `checksums` and `digest` are added.
          score: the score, higher is better; None if it was not measured, which ranks below every score.

        Raises:
          OSError: the previous write failed, or this one cannot start; the message names the folder.
        """
        if any(stored.step == position for stored in self._checkpointer.checkpoints):
            return
        arrays, score = to_arrays(state), NOT_MEASURED if score is None else score
        described = {**about, "format": FORMAT, "score": score, "checksums": checksums_of(arrays)}
        described["digest"] = digest_of(described)
        with _written_to(self._directory):
            self._wait()
            saving = self._checkpointer.save_checkpointables_async(
                position,
                {"state": arrays, "about": described},
                force=True,  # Orbax's default policy decides by time
                metrics={"score": score},
            )
            if saving is not None:
                self._saving = position, saving

    def best(self) -> int | None:
        """The position of the best complete checkpoint, after the current write has ended; None if there is none.

        Raises:
          OSError: the checkpoint could not be written; the message names the folder.
        """
        with _written_to(self._directory):
            self._wait()
        steps = complete_checkpoints(self._directory)
        return best_position(self._directory, steps) if steps else None

    def close(self) -> None:
        """Waits until the last checkpoint is complete, and closes Orbax's checkpointer.

        Raises:
          OSError: the checkpoint could not be written; the message names the folder.
        """
        with _written_to(self._directory), contextlib.closing(self._checkpointer):
            self._wait()

    def _wait(self) -> None:
        """Waits for the current write, if there is one, and raises its error; this also ends the thread of the write.

        Raises:
          FileNotFoundError: Orbax reported success, but process 0 finds no arrays in the checkpoint.
        """
        started, self._saving = self._saving, None
        if started is not None:
            position, saving = started
            saving.result()
            # Orbax reports success even if it finds no arrays to merge. A checkpoint may have been moved since.
            state = self._directory / str(position) / "state"
            if self._first and state.is_dir() and not (state / "manifest.ocdbt").is_file():
                raise FileNotFoundError(f"checkpoint {position} was written without its arrays")


def _context() -> ocp.Context:
    """Makes an Orbax context that stores the description `about` as JSON. By default Orbax stores a dict as arrays."""
    handlers = ocp.handlers.local_registry()
    handlers.add(ocp.handlers.JsonHandler, checkpointable_name="about")
    context = ocp.Context()
    context.checkpointables.registry = handlers
    return context


@contextlib.contextmanager
def _written_to(directory: pathlib.Path) -> Iterator[None]:
    """Context that replaces any exception inside the `with` block by an OSError that names the folder.

    Its errno is ENOSPC for a full disk, which is a ValueError of Orbax or tensorstore, and EIO for all else.
    """
    try:
        yield
    except Exception as error:
        full = "RESOURCE_EXHAUSTED" in str(error) or "No space left" in str(error)
        reason = "No space left on device" if full else reason_of(error)
        raise OSError(errno.ENOSPC if full else errno.EIO, reason, str(directory)) from error


def _write_lost_scores(directory: pathlib.Path) -> None:
    """Writes unreadable or absent score files again, by `stored_score`, because Orbax fails at the first bad one."""
    for position in complete_checkpoints(directory):
        file = score_file(directory, position)
        try:
            float(json.loads(file.read_text(encoding="utf-8"))["score"])
        except UNREADABLE:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({"score": stored_score(directory, position)}), encoding="utf-8")


@dataclasses.dataclass(frozen=True)
class _Best:
    """A preservation policy of Orbax that keeps the best checkpoint (`best_of`)."""

    since: int

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        del context
        scores = {stored.step: NOT_MEASURED if stored.metrics is None else _score(stored) for stored in checkpoints}
        best = best_of(scores, self.since) if scores else None
        return [stored.step == best for stored in checkpoints]


def _score(stored: Any) -> float:
    return float(stored.metrics["score"])


def to_arrays(state) -> dict[str, Any]:
    """Flattens a pytree into a dict of its leaves by path, such as `params/stem/kernel`."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}

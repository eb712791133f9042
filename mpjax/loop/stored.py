"""Reads stored checkpoints: chooses one, verifies it, and skips damaged ones."""

import contextlib
import json
import logging
import math
import pathlib
import shutil
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding
from orbax.checkpoint import v1 as ocp

from mpjax.errors import CheckpointWarning, UsageError, is_exhausted, reason_of
from mpjax.loop.best import NOT_MEASURED, best_of, best_since
from mpjax.loop.checksums import damaged, digest_of


def _is_news(record: logging.LogRecord) -> bool:
    """Filters log records: False, which drops a record, for what Orbax reports of a damaged checkpoint.

    mpjax verifies checksums, and reports damage in one line. Threads of Orbax log each error that passes through them,
    and asyncio logs the errors of all arrays after the first: also those of TensorStore that have not reached Orbax.
    """
    error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
    by_orbax = "orbax" in pathlib.PurePath(record.pathname).parts
    if error is None:
        return not (by_orbax and "Metadata file" in record.getMessage())
    return not (by_orbax or _is_of_orbax(error) or str(error).startswith("DATA_LOSS"))


def _is_of_orbax(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return any("orbax" in pathlib.PurePath(frame.filename).parts for frame in frames)


for _name in ("absl", "asyncio"):
    logging.getLogger(_name).addFilter(_is_news)

CHECKPOINTS = "checkpoints"
"""The folder of checkpoints inside a run's folder."""

FORMAT = 2
"""Version of the layout. Readers refuse later versions. Version 1 has no checksums."""


def complete_checkpoints(directory: pathlib.Path) -> list[int]:
    """Lists the positions (numbers of attempted steps) of the complete checkpoints in a folder, in ascending order.

    The list is empty if the folder does not exist.
    """
    if not directory.is_dir():
        return []
    return sorted(stored.step for stored in ocp.path.step.standard_name_format().find_all(directory))


_AT_ONCE = 4_000_000_000
"""Bytes that the host holds at once while it reads arrays to the devices; more if a single array is larger."""

Places = Callable[[str, tuple[int, ...]], Sharding]
"""A function from the path and the shape of an array to its sharding."""


def _alone(value: Any) -> list:
    return [value]


def read_checkpoint(
    directory: pathlib.Path,
    which: str = "latest",
    *,
    places: Places | None = None,
    gather: Callable[[Any], list] = _alone,
) -> tuple[int, dict[str, Any], dict]:
    """Reads a complete checkpoint and verifies its checksums.

    All processes call it together, and process 0 decides which checkpoints there are. Each process reads the shards of
    the arrays that belong on its devices.

    Args:
      directory: the run's `checkpoints` folder.
      which: "latest", "best" (`best_position`), or a position. If the latest is damaged, the latest undamaged
        checkpoint is read.
      places: `(path, shape) -> sharding`; None reads all arrays to the host. Arrays that JAX would narrow, such as
        float64 without x64, are always read to the host.
      gather: `(value) -> values` of all processes; by default of this process alone.

    Returns:
      The position, the arrays by path (in the stored dtypes), and the description.

    Warns:
      CheckpointWarning: a damaged checkpoint was skipped.

    Raises:
      UsageError: the checkpoint does not exist, or was written by a later version of mpjax; it is damaged (`Damaged`),
        or all are for "latest"; or memory or file descriptors ran out.
    """
    steps = gather(complete_checkpoints(directory))[0]
    if not steps:
        raise UsageError(f"no complete checkpoint in {directory}")
    if which != "latest":
        position = _choose(directory, steps, which)
        return position, *_read(directory, position, places, gather)
    faults = []
    for position in reversed(steps):
        try:
            checkpoint = position, *_read(directory, position, places, gather)
        except Damaged as fault:
            faults.append(fault)
            continue
        for fault in faults:
            warnings.warn(f"{fault}; using {directory / str(position)} instead", CheckpointWarning, stacklevel=2)
        return checkpoint
    raise faults[0]


def read_description(directory: pathlib.Path, which: str = "latest") -> dict[str, Any] | None:
    """Reads the description of a checkpoint without its arrays; None if it is damaged, or of a later version.

    Raises UsageError if there is no such checkpoint.
    """
    steps = complete_checkpoints(directory)
    if not steps:
        raise UsageError(f"no complete checkpoint in {directory}")
    position = steps[-1] if which == "latest" else _choose(directory, steps, which)
    with contextlib.suppress(*UNREADABLE):
        about = _description(directory / str(position))
        if int(about["format"]) <= FORMAT and not (_edited(about) or _mistyped(about)):
            return about
    return None


def set_aside(directory: pathlib.Path, after: int) -> None:
    """Renames the folders of complete checkpoints later than position `after` to `POSITION.damaged`.

    Their positions can then be written again. An earlier folder of that name is removed.
    """
    for position in complete_checkpoints(directory):
        if position > after:
            aside = directory / f"{position}.damaged"
            shutil.rmtree(aside, ignore_errors=True)
            (directory / str(position)).rename(aside)


class Damaged(UsageError):
    """The contents of a checkpoint differ from what was saved, or cannot be read."""


def _read(
    directory: pathlib.Path, position: int, places: Places | None, gather: Callable[[Any], list]
) -> tuple[dict[str, Any], dict]:
    """Reads and verifies the checkpoint in the folder `position`: returns its arrays by path and its description.

    `gather` collects a value of all processes. If one cannot read its part, all raise the same error.

    Raises:
      Damaged: the contents differ from what was saved, or a process cannot read them.
      UsageError: a later version of mpjax wrote the checkpoint, or memory or file descriptors ran out.
    """
    folder = directory.resolve() / str(position)
    cause = None
    try:
        about = _description(folder)
        version = int(about["format"])
        arrays, faults = {}, []
        if version <= FORMAT:
            faults = _edited(about) or _mistyped(about)
            arrays = _arrays(folder, places)
    except Exception as error:  # Orbax and tensorstore raise many types for a truncated file
        if is_exhausted(error):  # an earlier checkpoint would not fit either, and this one would be set aside
            raise UsageError(
                f"checkpoint {folder} cannot be read: memory or open files ran out ({reason_of(error)})"
            ) from error
        faults = [reason_of(error)]
        arrays, about, version, cause = {}, {}, FORMAT, error
    # If one process fails to read, all of them stop here, because the checksums below run on all devices.
    faults = next(filter(None, gather(faults)), [])
    if version > FORMAT:
        raise UsageError(f"{directory}/{position} has format {version}; this mpjax reads up to {FORMAT}")
    if not faults and "checksums" in about:
        faults = [f"{name} has changed since it was saved" for name in damaged(arrays, about["checksums"])]
    if faults:
        shown = ", ".join(faults[:3]) + (f" and {len(faults) - 3} more" if faults[3:] else "")
        raise Damaged(
            f"checkpoint {directory / str(position)} is damaged ({shown}); remove it to use another"
        ) from cause
    return arrays, about


def _arrays(folder: pathlib.Path, places: Places | None) -> dict[str, Any]:
    """Reads the arrays of a checkpoint by path: to the host if `places` is None, else to their shardings.

    Arrays of a dtype that JAX would narrow, such as float64 without x64, are always read to the host.
    """
    # A Checkpointer would read the scores of all checkpoints.
    shapes = ocp.metadata(str(folder), checkpointable_name="state").metadata

    def like(name: str, leaf):
        if places is None or jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
            return np.empty(leaf.shape, leaf.dtype)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=places(name, tuple(leaf.shape)))

    largest = max((math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in shapes.values()), default=0)
    context = ocp.Context()
    context.memory.read_concurrent_bytes = max(_AT_ONCE, largest)
    # Otherwise a process would wait for the others, even for a failed one.
    this = jax.process_index()
    context.multiprocessing.primary_host, context.multiprocessing.active_processes = this, {this}
    with context:
        abstract = {name: like(name, leaf) for name, leaf in shapes.items()}
        return ocp.load(str(folder), abstract, checkpointable_name="state")


def _description(folder: pathlib.Path) -> dict[str, Any]:
    """Reads a checkpoint's description from `about/data.json`, or else from `about/metadata`, as older Orbax writes it.

    Missing files and malformed JSON raise their own errors.
    """
    file = folder / "about" / "data.json"
    return json.loads((file if file.is_file() else file.with_name("metadata")).read_text(encoding="utf-8"))


def _edited(about: Mapping[str, Any]) -> list[str]:
    """Lists one fault if a description has changed since it was saved or lacks its digest; else an empty list.

    A description of version 1 has no digest, and no fault.
    """
    if "digest" not in about:
        return [] if about["format"] == 1 else ["its description has no digest"]
    return [] if digest_of(about) == about["digest"] else ["its description has changed since it was saved"]


BASE = "base"
"""The entry of a description with the file of the weights that the checkpoint leaves out, and their digests."""

ENCODING = "columns"
"""The entry of a description with the SHA-256, in hexadecimal, of the statistics by which the run reads its columns."""

DECODER = "decoder"
"""The entry of a description with the settings of the decoder that `--model.name hf:FOLDER` built."""

TOKENIZER = "tokenizer"
"""The entry of a description with the SHA-256, in hexadecimal, of each file of the tokenizer."""

FEATURES = "features"
"""The entry of a description with the settings by which sounds became features."""

FIELDS = "fields"
"""The entry of a description with the fields of the data (`described_fields`)."""

_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "policy": str,
    "loss_scale": str,
    "config": str,
    "seed": int,
    "seconds": (int, float),
    "compile_seconds": (int, float),
    "metrics_lines": int,
    "score": (int, float),
    "checksums": dict,
    BASE: dict,
    ENCODING: str,
    DECODER: dict,
    TOKENIZER: dict,
    FEATURES: dict,
    FIELDS: dict,
}
"""The types of the values in a description. A valid digest does not show who wrote it."""


def _mistyped(about: Mapping[str, Any]) -> list[str]:
    """Lists a fault for each entry of a description that has another type than in `_TYPES`."""
    return [
        f"its description has {name} {str(about[name])[:40]!r}"
        for name, kind in _TYPES.items()
        if name in about and not isinstance(about[name], kind)
    ]


def _choose(directory: pathlib.Path, steps: list[int], which: str) -> int:
    """The position, among `steps`, of the "best" checkpoint, or the position that `which` is; else a UsageError."""
    if which == "best":
        return best_position(directory, steps)
    if not which.isdecimal() or int(which) not in steps:
        raise UsageError(f"no checkpoint '{which}': wanted latest, best or one of {', '.join(map(str, steps))}")
    return int(which)


def best_position(directory: pathlib.Path, steps: Sequence[int]) -> int:
    """Chooses the best checkpoint by `best_of` among those at `steps`, in ascending order; at least one.

    Those count that were written since the search for the best last began, as the latest readable description says.
    """
    since = 0
    for position in reversed(steps):
        with contextlib.suppress(*UNREADABLE):
            since = best_since(_description(directory / str(position)).get("history"))
            break
    return best_of({position: stored_score(directory, position) for position in steps}, since)


UNREADABLE = OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError
"""Exceptions that reading a score from damaged JSON can raise."""


def stored_score(directory: pathlib.Path, position: int) -> float:
    """Reads the score of a checkpoint from its description, or from Orbax's file if the description is damaged.

    The score is `NOT_MEASURED` if both are unreadable, or if the checkpoint was not evaluated.
    """
    with contextlib.suppress(*UNREADABLE):
        about = _description(directory / str(position))
        if digest_of(about) == about["digest"]:
            return float(about["score"])
    with contextlib.suppress(*UNREADABLE):
        return float(json.loads(score_file(directory, position).read_text(encoding="utf-8"))["score"])
    return NOT_MEASURED


def score_file(directory: pathlib.Path, position: int) -> pathlib.Path:
    """The path of the JSON file in which Orbax looks for the score of a checkpoint. It need not exist."""
    return directory / str(position) / "metrics" / "metrics"

"""Compares the processes of a run before it starts: their program, their data and their initial values."""

import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from mpjax.commands.build import Run
from mpjax.errors import UsageError
from mpjax.loop.checksums import checksums_of
from mpjax.loop.company import Alone, Company
from mpjax.loop.join import by_value, numbers
from mpjax.training.state import TrainState


def require_agreement(
    company: Alone | Company, run: Run, lowered: Mapping[int, jax.stages.Lowered], state: TrainState
) -> None:
    """Raises UsageError in all processes if their programs, data or initial states differ; all of them must call it.

    Settings, versions and sources were compared when the processes joined. This check finds other differences: code
    that a user's module imports, data that differs from machine to machine, values passed in Python. Of each split, it
    compares the number of examples and the first, the middle and the last one; of the state, the fully replicated
    arrays. With one process it does nothing.

    Args:
      company: the processes of the run.
      run: the run, with its data.
      lowered: the lowered training call of each number of steps per call.
      state: the state before the first step.
    """
    if company.processes == 1:
        return
    mine = {
        "the program of the training step": _digest(*(program.as_text() for _, program in sorted(lowered.items()))),
        "the training data": _digest_of_split(run.source.train),
        "the test data": _digest_of_split(run.source.test),
        "the initial state": _digest_of_state(state),
    }
    digests = company.gather(mine)
    for name in mine:
        who_says = by_value({process: process_digests[name] for process, process_digests in enumerate(digests)})
        if len(who_says) > 1:
            groups = " and of ".join(map(numbers, who_says.values()))
            raise UsageError(
                f"{name} of processes {groups} differ: all processes have to train the same; look for code, files or "
                "environment variables that are not the same on all machines"
            )


def _digest(*contents: str | bytes) -> str:
    hasher = hashlib.sha256()
    for content in contents:
        hasher.update(content.encode() if isinstance(content, str) else content)
        hasher.update(b"\0")
    return hasher.hexdigest()[:12]


def _digest_of_split(split: Any) -> str:
    """Hashes the number of examples, and the first, the middle and the last example."""
    size = len(split)
    chosen = sorted({0, size // 2, size - 1}) if size else []
    return _digest(str(size), *(_bytes(split[index]) for index in chosen))


def _bytes(example: Any) -> bytes:
    if isinstance(example, Mapping):
        return b"\1".join(name.encode() + b"\1" + _bytes(example[name]) for name in sorted(example))
    if isinstance(example, bytes):
        return example
    array = np.asarray(example)
    values = repr(array.tolist()).encode() if array.dtype == object else array.tobytes()
    return f"{array.dtype}{array.shape}".encode() + values


def _digest_of_state(state: TrainState) -> str:
    """Hashes this process's copies of the fully replicated arrays of a state; sharded arrays are left out."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    copies = {jax.tree_util.keystr(path): leaf.addressable_data(0) for path, leaf in leaves if leaf.is_fully_replicated}
    return _digest(*(f"{name} {text}" for name, text in sorted(checksums_of(copies).items())))

"""Fingerprints a run's data, to store with its checkpoints, and tells how the data of two runs differ."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from mpjax.config.schema import Data
from mpjax.data.batches import training_split
from mpjax.data.example_reader import reader
from mpjax.data.examples import Source
from mpjax.data.read import Split, SplitOfOne
from mpjax.data.stacking import Arrays
from mpjax.data.stream import Batches, BatchesInMemory, EvalBatches


SAMPLE = 256
"""The largest number of examples read from a streamed split, evenly spaced from the first to the last."""

_AT_ONCE = 16  # examples per read, so that large images take little memory
_AGAIN = 8  # examples that are read twice, to find fields that change between reads

Fingerprint = dict[str, Any]
"""JSON values that describe the splits: the keys are `train` and `test`."""


def fingerprint_of(source: Source, config: Data, batches: Batches, tests: EvalBatches) -> Fingerprint:
    """Computes the fingerprint of both splits: hashes of the examples as read for the model, before augmentation.

    All examples of a split in memory are hashed, and up to `SAMPLE` examples of a streamed split, which are read here.
    The first eight of the sample are read a second time: a field whose values then differ, such as a random one, is
    left out. The fingerprint is the same in all processes.

    Args:
      source: the data set, or the first of a mixture.
      config: the settings for reading it.
      batches: the batches of the training split.
      tests: the batches of the test split.
    """
    arrays = batches.arrays if isinstance(batches, BatchesInMemory) else None
    test = SplitOfOne(source.test, reader(source, config, training=False))
    return {"train": _of_split(training_split(source, config), arrays), "test": _of_split(test, tests.arrays)}


def _of_split(split: Split, arrays: Arrays | None) -> Mapping[str, Any]:
    size = len(split)
    chosen = np.unique(np.linspace(0, size - 1, min(size, SAMPLE)).astype(int))
    hashes = _hashes([arrays] if arrays else _read(split, chosen))
    again = _hashes(_read(split, chosen[:_AGAIN]))
    places = chosen[:_AGAIN] if arrays else np.arange(len(chosen[:_AGAIN]))
    # A user's function may draw random numbers. Such fields do not identify the data, so they are left out.
    steady = [name for name in hashes if np.array_equal(again[name], hashes[name][places])]
    factors = _factors(len(steady))
    examples = sum((hashes[name] * factor for name, factor in zip(steady, factors, strict=True)), start=np.uint64(0))
    return {
        "examples": size,
        "looked_at": len(next(iter(hashes.values()))),
        "in_memory": arrays is not None,
        "types": {name: f"{values.dtype} {list(values.shape[1:])}" for name, values in split.first.items()},
        "values": {name: _digest(hashes[name]) for name in steady},
        "values_in_any_order": {name: _digest(np.sort(hashes[name])) for name in steady},
        "examples_in_any_order": _digest(np.sort(np.atleast_1d(examples))),
    }


def _read(split: Split, chosen: np.ndarray) -> Iterator[Arrays]:
    return (split.batch(chosen[at : at + _AT_ONCE]) for at in range(0, len(chosen), _AT_ONCE))


def _hashes(parts: Iterable[Arrays]) -> dict[str, np.ndarray]:
    """Hashes each example's value of each field, for all `parts` in order: uint64 [N] by the name of the field.

    A hash is the sum, modulo 2**64, of the 32-bit words of the value, each times a fixed pseudo-random factor. It takes
    a quarter of the time of a cryptographic hash. Two different values collide with a probability of 2^-33.
    """
    hashes_by_field: dict[str, list[np.ndarray]] = {}
    for arrays in parts:
        for name, values in arrays.items():
            hashes_by_field.setdefault(name, []).append(_of_rows(values))
    return {name: np.concatenate(hashes) for name, hashes in hashes_by_field.items()}


_CHUNK = 2**20  # words widened to uint64 at a time


def _of_rows(values: np.ndarray) -> np.ndarray:
    rows = np.ascontiguousarray(values).reshape(len(values), -1).view(np.uint8)
    words = -(-rows.shape[1] // 4)
    factors, hashes = _factors(words), np.empty(len(rows), np.uint64)
    step = max(1, _CHUNK // max(words, 1))
    for start in range(0, len(rows), step):
        chunk = rows[start : start + step]
        if rows.shape[1] % 4:
            chunk = np.pad(chunk, ((0, 0), (0, -rows.shape[1] % 4)))
        hashes[start : start + step] = chunk.view(np.uint32).astype(np.uint64) @ factors
    return hashes


def _factors(count: int) -> np.ndarray:
    """Generates pseudo-random odd numbers from a fixed seed, the same on every machine, uint64 [count]."""
    return np.random.Philox(key=2026).random_raw(count) | np.uint64(1)


def _digest(hashes: np.ndarray) -> str:
    return hashlib.blake2b(hashes.tobytes(), digest_size=16).hexdigest()


def differences(before: Fingerprint | None, now: Fingerprint) -> list[str]:
    """Describes in words how the data of two runs differ, one line for each difference of a split or field.

    The list is empty if the data agree. Settings that change the values of a split, such as `--data.image_size` or
    `--data.length`, also cause a difference. The values of a split are compared only if both runs have the same number
    of examples, dtypes and shapes, and both read it from memory or both stream it.

    Args:
      before: the fingerprint of a checkpoint. None: the checkpoint has none, and no difference is reported.
      now: the fingerprint of this run.
    """
    return [f"{name}: {line}" for name, split in (before or {}).items() for line in _of_splits(split, now[name])]


def _of_splits(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    if before["examples"] != now["examples"]:
        yield f"{now['examples']:,} examples, before {before['examples']:,}"
    if before["in_memory"] != now["in_memory"]:
        kept = {True: "in memory", False: "streamed"}
        yield f"{kept[now['in_memory']]}, before {kept[before['in_memory']]}, which has another order"
    for name in sorted(before["types"].keys() | now["types"].keys()):
        then, new = before["types"].get(name, "missing"), now["types"].get(name, "missing")
        if then != new:
            yield f"{name} is {new}, before {then}"
    same_kind = all(before[key] == now[key] for key in ("examples", "in_memory", "looked_at", "types"))
    both = before["values"].keys() & now["values"].keys()
    if not same_kind or not (changed := sorted(n for n in both if before["values"][n] != now["values"][n])):
        return
    all_known = both == now["types"].keys()
    if all_known and before["examples_in_any_order"] == now["examples_in_any_order"]:
        yield "the same examples in another order"
        return
    looked_at = "" if now["looked_at"] == now["examples"] else f" in {now['looked_at']} examples that were looked at"
    for name in changed:
        alike = before["values_in_any_order"][name] == now["values_in_any_order"][name]
        yield f"{name} has {'the same values at other examples' if alike else 'other values'}{looked_at}"

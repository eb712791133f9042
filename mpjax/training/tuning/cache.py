"""What tuning found, in a file of the cache: found again by what it depends on, which the file spells out."""

import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from mpjax import strict_json
from mpjax.training.tuning.choice import Timed
from mpjax.training.tuning.timing import Timing
from mpjax.training.tuning.tune import Tuning


def read_tuning(folder: pathlib.Path, key: Mapping[str, Any]) -> Tuning | None:
    """What was found for `key`; None if nothing was, or the file is damaged."""
    try:
        found = json.loads(tuning_file(folder, key).read_text())
        if found["key"] != _plain(key):
            return None
        timed = tuple(Timed(one["type"], tuple(one["modules"]), _timing(one)) for one in found["products"])
        step = found["step"]
        return Tuning(timed, {str(p): str(d) for p, d in found["rules"].items()}, step and _timing(step))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def write_tuning(folder: pathlib.Path, key: Mapping[str, Any], tuning: Tuning) -> pathlib.Path:
    """Keeps what was found for `key`; gives the file."""
    file = tuning_file(folder, key)
    file.parent.mkdir(parents=True, exist_ok=True)
    found = {
        "key": _plain(key),
        "products": [{"type": one.type, "modules": one.modules, **one.timing._asdict()} for one in tuning.timed],
        "rules": tuning.proposed,
        "step": tuning.step and tuning.step._asdict(),
    }
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(strict_json.encode(found, indent=2) + "\n")
    unfinished.replace(file)  # at once: another run may read it
    return file


def tuning_file(folder: pathlib.Path, key: Mapping[str, Any]) -> pathlib.Path:
    """Where it is: named for device and model, and by a digest of the whole key."""
    digest = hashlib.sha256(json.dumps(_plain(key), sort_keys=True).encode()).hexdigest()[:12]
    words = "-".join(str(key[name]) for name in ("device", "model") if name in key)
    return folder / ("".join(c if c.isalnum() else "_" for c in words) + f"-{digest}.json")


def _plain(key: Mapping[str, Any]):
    """The key as JSON gives it back."""
    return json.loads(json.dumps(key))


def _timing(found: Mapping[str, Any]) -> Timing:
    return Timing(tuple(map(float, found["half"])), tuple(map(float, found["full"])))

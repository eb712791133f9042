"""In which settings two runs differ, or one before and after."""

import tomllib
from collections.abc import Iterator
from typing import Any

from mpjax.config.save import to_toml
from mpjax.config.schema import Config


_ELSEWHERE = (
    "output_dir",
    "resume",
    "trust_code",
    "profile",
    "cache_dir",
    "steps",
    "data.data_dir",
    "loop.",
    "report.",
)
"""What a run may go on with without being another: where things are, how long, how often."""


def changes(before: str, now: str) -> Iterator[tuple[str, str, str]]:
    """Name, old and new value, in words, of each setting in which two texts of `to_toml` differ.

    What one of them lacks has its default.
    """
    defaults = dict(_flat(tomllib.loads(to_toml(Config()))))
    old, new = (defaults | dict(_flat(tomllib.loads(text))) for text in (before, now))
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name) and not name.startswith(_ELSEWHERE):
            yield name, _said(old.get(name)), _said(new.get(name))


def _flat(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _said(value: Any) -> str:
    return "not set" if value in (None, "", []) else str(value)

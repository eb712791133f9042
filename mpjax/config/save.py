"""Writes a `Config` as TOML with every field, and lists the settings in which two runs differ."""

import dataclasses
import pathlib
import tomllib
from collections.abc import Iterator
from typing import Any

import tomli_w

from mpjax.config.choices import AUTO
from mpjax.config.durations import Duration
from mpjax.config.removed import REMOVED
from mpjax.config.schema import Config
from mpjax.config.setting_types import OrAuto, PythonObject


def to_toml(config: Config) -> str:
    """Formats the settings as TOML; `from_toml` of a file with this text returns an equal `Config`.

    An object passed in Python is written as the text `python:NAME`, from which it cannot be restored. Every setting is
    written, defaults too.
    """
    return tomli_w.dumps(_tables(config))


def save_config(config: Config, file: pathlib.Path) -> None:
    """Writes `to_toml(config)` to a file in UTF-8; an existing file is overwritten."""
    file.write_text(to_toml(config), encoding="utf-8")


def _tables(section) -> dict:
    return {field.name: _value(getattr(section, field.name), field.type) for field in dataclasses.fields(section)}


def _value(value, kind: Any = None):
    if kind is OrAuto and value == AUTO:
        return "auto"
    if isinstance(value, Duration):
        return int(value.amount) if value.unit == "steps" else str(value)
    if isinstance(value, PythonObject):
        return str(value)
    if isinstance(value, tuple | list):
        return [_value(item) for item in value]
    return _tables(value) if dataclasses.is_dataclass(value) else value


OF_ONE_COMMAND = ("output_dir", "resume", "seeds", "trust_code", "other_data", "profile", "cache_dir", "distributed.")
"""Prefixes of settings that hold for one command only, and the folder and seeds of a run."""

_ELSEWHERE = (*OF_ONE_COMMAND, "steps", "data.data_dir", "loop.", "report.")
"""Prefixes of settings that may change between a run and its resumption: paths, length and frequencies."""


def changes(before: str, now: str, *, apart_from: tuple[str, ...] = _ELSEWHERE) -> Iterator[tuple[str, str, str]]:
    """Yields name, old value and new value, as text, of each setting in which two texts of `to_toml` differ, by name.

    An entry of a dict has its own name, such as `precision.rules.head`. A setting missing from one text, such as a
    removed one, has its default there. An empty value is shown as "not set".

    Args:
      before: the old settings as TOML.
      now: the new settings as TOML.
      apart_from: prefixes of the names of settings to leave out; by default those that may change on a resume.
    """
    removed = {name: setting.default for name, setting in REMOVED.items()}
    defaults = removed | dict(flat(tomllib.loads(to_toml(Config()))))
    old, new = (defaults | dict(flat(tomllib.loads(text))) for text in (before, now))
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name) and not name.startswith(apart_from):
            yield name, _said(old.get(name)), _said(new.get(name))


_OF_A_PROCESS = ("distributed.", "cache_dir", "data.data_dir", "trust_code")
"""Prefixes of settings in which the processes of one run may differ."""


def shared_settings(config: Config) -> dict[str, str]:
    """Maps the names of the settings that must be equal in all processes of a run to their values as text."""
    return {name: _said(value) for name, value in flat(_tables(config)) if not name.startswith(_OF_A_PROCESS)}


def flat(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields name and value of each entry of nested dicts, with names such as `optimizer.name` after `prefix`.

    An empty dict yields nothing.
    """
    for name, value in table.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _said(value: Any) -> str:
    return "not set" if value in (None, "", []) else str(value)

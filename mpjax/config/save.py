"""Config -> TOML: every field, resolved, so that the file alone reproduces the run."""

import dataclasses
import pathlib

import tomli_w

from mpjax.config.durations import Duration
from mpjax.config.schema import Config


def to_toml(config: Config) -> str:
    """The settings as a TOML document that `load` reads back to an equal `Config`."""
    return tomli_w.dumps(_tables(config))


def save(config: Config, file: pathlib.Path) -> None:
    """Writes `to_toml(config)`."""
    file.write_text(to_toml(config))


def _tables(section) -> dict:
    return {field.name: _value(getattr(section, field.name)) for field in dataclasses.fields(section)}


def _value(value):
    if isinstance(value, Duration):
        return int(value.amount) if value.unit == "steps" else str(value)
    return _tables(value) if dataclasses.is_dataclass(value) else value

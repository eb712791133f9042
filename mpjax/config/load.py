"""Files and command line -> Config: files are read as flags, so one strict parser checks them all."""

import contextlib
import dataclasses
import difflib
import io
import pathlib
import tomllib
from collections.abc import Iterator, Sequence
from typing import Any

import tyro

from mpjax.config.durations import Duration
from mpjax.config.paths import expanded
from mpjax.config.schema import Config
from mpjax.config.user_code import is_of_a_run, require_trust
from mpjax.errors import UsageError


DESCRIPTION = """Train an image classifier in mixed precision.

--config FILE (repeatable) reads settings from a TOML file; later files win over earlier ones, flags over files."""

CONFIG_FILE = "config.toml"
"""The resolved settings inside a run's folder."""


def load_config(argv: Sequence[str], *, prog: str = "train.py") -> Config:
    """The settings of a command line.

    Args:
      argv: the arguments, without the program's name: `--config FILE` (repeatable) and flags of `Config`.
      prog: the program's name, for messages.

    Returns:
      The parsed settings. With `--resume` those of the run's own config.toml come before all others.

    Raises:
      UsageError: a file that is missing, unreadable or wrong; the message names it.
      SystemExit: code 0 after `--help`, 2 after a wrong flag; the message is printed.
    """
    files, flags = split_config_files(argv)
    paths = [pathlib.Path(file) for file in files]
    from_files = [flag for path in paths for flag in _checked_flags(path, prog)]
    config = _parse([*from_files, *flags], prog)
    runs = [path for path in paths if is_of_a_run(path)]
    if config.resume:
        if not config.output_dir:
            raise UsageError("--resume needs --output_dir: the folder of the run to go on with")
        own = expanded(config.output_dir) / CONFIG_FILE
        if own.exists():
            config = _parse([*_checked_flags(own, prog), *from_files, *flags], prog)
            runs.append(own)
    if runs:
        written = [flag for path in paths if path not in runs for flag in _checked_flags(path, prog)]
        said = _parse([*written, *flags], prog)
        require_trust(config, runs[-1].parent, trusted=said.trust_code, said=said)
    return dataclasses.replace(config, trust_code=False)  # said once, for this command


def split_config_files(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """`--config` values, and the other arguments.

    Raises:
      UsageError: `--config` without a file.
    """
    files, flags = [], []
    rest = iter(argv)
    for argument in rest:
        if argument == "--config":
            file = next(rest, None)
            if file is None or file.startswith("--"):
                raise UsageError("--config needs a file, as in --config configs/digits.toml")
            files.append(file)
        elif argument.startswith("--config="):
            files.append(argument.removeprefix("--config="))
        else:
            flags.append(argument)
    return files, flags


def read_flags(file: pathlib.Path) -> list[str]:
    """The settings of a TOML file as flags.

    Raises:
      UsageError: no such file, it is not TOML, or a setting is of another kind; the message names the file.
    """
    try:
        content = file.read_bytes()
        if not content.strip():
            raise UsageError("it is empty; wanted settings, as the config.toml of a run has them")
        table = tomllib.loads(content.decode())
        unknown = list(_unknown(table, Config(), ""))
        if len(unknown) > _MOST_UNKNOWN:  # the parser looks for one that is meant, which takes time for each
            first = ", ".join(unknown[:3])
            raise UsageError(
                f"{first} and {len(unknown) - 3:,} more are no settings: train.py --help lists those there are"
            )
        return list(_flatten(table, Config(), ""))
    except FileNotFoundError:
        near = difflib.get_close_matches(file.name, [f.name for f in file.parent.glob("*.toml")], n=1, cutoff=0.4)
        hint = f"; did you mean {file.parent / near[0]}?" if near else ""
        raise UsageError(f"no config file {file}{hint}") from None
    except UsageError as error:
        raise UsageError(f"in {file}: {error}") from None
    except (ValueError, RecursionError) as error:  # a ValueError too: a number of thousands of digits, NUL in the path
        raise UsageError(f"{file} is not TOML: {str(error) or 'nested too deep'}") from None
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from None


def _checked_flags(file: pathlib.Path, prog: str) -> list[str]:
    """The flags of a file that is right by itself, so that a mistake in it is reported under its name."""
    flags = read_flags(file)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
            _parse(flags, prog)
    except SystemExit:
        raise UsageError(f"in {file}:\n{printed.getvalue().rstrip()}") from None
    return flags


_MOST_UNKNOWN = 20


def _unknown(table: dict[str, Any], section: Any, prefix: str) -> Iterator[str]:
    """The keys of a table that are no settings of a section; all of them where there is none, which is None."""
    names = {field.name for field in dataclasses.fields(section)} if section is not None else set()
    for key, value in table.items():
        inner = getattr(section, key) if key in names else None
        if isinstance(value, dict) and value and (key not in names or dataclasses.is_dataclass(inner)):
            yield from _unknown(value, inner, f"{prefix}{key}.")
        elif key not in names:
            yield f"{prefix}{key}"


def _flatten(table: dict[str, Any], section: object, prefix: str) -> Iterator[str]:
    """The flags of a table; `section` is the part of the default config that it is about, None if there is none."""
    for key, value in table.items():
        name = f"--{prefix}{key}"
        default = getattr(section, key, None)
        if "=" in key or key.replace("_", "-").startswith("tyro-"):
            # The parser would read another setting, or write a file: a file of settings may come from elsewhere.
            raise UsageError(f"{prefix}{key} is no setting: wanted a name that train.py --help lists")
        if flags := [word for word in _words(value) if word.startswith("--")]:
            raise UsageError(f"{prefix}{key} has {flags[0]!r}, which would be read as a flag: wanted a value")
        if "\0" in str(value):
            raise UsageError(f"{prefix}{key} is {value!r}: wanted a text without NUL")
        if wanted := _other_kind(value, default):
            raise UsageError(f"{prefix}{key} is {value!r}: wanted {wanted}")
        if isinstance(default, dict):
            yield from [name, *(str(word) for rule in value.items() for word in rule)] if value else []
        elif value == {} and default is None:
            yield name  # an empty table, misspelt: for the parser to report
        elif isinstance(value, dict):
            yield from _flatten(value, default, f"{prefix}{key}.")
        elif isinstance(value, list):
            yield from [name, *map(str, value)]
        elif isinstance(value, bool):
            yield name if value else f"--{prefix}no_{key}"
        else:
            yield f"{name}={value}"


def _words(value: object) -> list[str]:
    """What would stand by itself on a command line."""
    if isinstance(value, dict):
        return [str(word) for pair in value.items() for word in pair if not isinstance(word, dict | list)]
    return [str(word) for word in value] if isinstance(value, list) else []


def _other_kind(value: object, default: object) -> str | None:
    """What is wanted instead of `value`, where a flag would not show that it is of another kind than the default."""
    is_table = isinstance(default, dict) or (dataclasses.is_dataclass(default) and not isinstance(default, Duration))
    if default is None:
        return None  # no such setting, which the parser reports
    if is_table != isinstance(value, dict):
        return "a table" if is_table else "one value, not a table"
    if isinstance(default, bool) != isinstance(value, bool):
        return "true or false" if isinstance(default, bool) else "a number or a word, not true or false"
    return None


def _parse(flags: list[str], prog: str) -> Config:
    return tyro.cli(Config, args=flags, prog=prog, description=DESCRIPTION, use_underscores=True)


def from_toml(file: str | pathlib.Path) -> Config:
    """The settings of one TOML file, over the defaults.

    Raises:
      UsageError: as `load_config`.
    """
    return _parse(_checked_flags(pathlib.Path(file), "train.py"), "train.py")

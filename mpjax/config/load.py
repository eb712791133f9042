"""Reads files and the command line into a `Config`. Files become flags, so that one strict parser checks both."""

import dataclasses
import difflib
import pathlib
import tomllib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mpjax.config.arguments import parse, parse_with
from mpjax.config.durations import Duration
from mpjax.config.limits import require_valid
from mpjax.config.other_programs import DEVICES, corrections
from mpjax.config.paths import expanded, names, settings_file, tell_data
from mpjax.config.program import typed
from mpjax.config.removed import REMOVED
from mpjax.config.schema import Config
from mpjax.config.user_code import as_stored, is_stored, require_trust
from mpjax.errors import UsageError


DESCRIPTION = """Train a model in mixed precision.

--config FILE (repeatable) reads settings from a TOML file, or from one that comes with mpjax, as in --config digits.
Later files override earlier ones; flags override files."""

CONFIG_FILE = "config.toml"
"""The name of the file in a run's folder that has all its settings."""


def load_config(argv: Sequence[str], *, prog: str = "") -> Config:
    """Parses a command line of train.py into a `Config`; flags override files, and later files earlier ones.

    >>> load_config(["--steps", "100", "--model.name", "mlp"]).model.name
    'mlp'

    Args:
      argv: the arguments, without the program's name: `--config FILE` (repeatable) and flags of `Config`.
      prog: the program's name, for messages; empty: `typed("train")`.

    Returns:
      The settings, with `trust_code` False. With `--resume`, files and flags override the settings in the run's own
      config.toml, if there is one. If a file belongs to a run, the settings are made safe by `as_stored`, and a line on
      stderr lists the data that the run names.

    Raises:
      UsageError: a flag or a file is wrong (the message names it), `--resume` has no `--output_dir`, or a stored run
        names code that is not trusted. Values out of range are found later, by `check`.
      SystemExit: code 0 after `--help`; the help is printed.
    """
    prog = prog or typed("train")
    files, flags = split_config_files(argv)
    paths = [settings_file(file) for file in files]
    from_files = [flag for path in paths for flag in _checked_flags(path, prog)]
    config = _parse([*from_files, *flags], prog)
    runs = [path for path in paths if is_stored(path)]
    if config.resume:
        if not config.output_dir:
            raise UsageError("--resume needs --output_dir: the folder of the run to resume")
        stored_file = expanded(config.output_dir) / CONFIG_FILE
        if stored_file.exists():
            config = _parse([*_checked_flags(stored_file, prog), *from_files, *flags], prog)
            runs.append(stored_file)
    if runs:
        written = [flag for path in paths if path not in runs for flag in _checked_flags(path, prog)]
        user_config = _parse([*written, *flags], prog)
        require_trust(config, runs[-1].parent, trusted=user_config.trust_code, user_config=user_config)
        tell_data(config, runs[-1].parent, user_config)
        config = as_stored(config, user_config, trusted=user_config.trust_code)
    return dataclasses.replace(config, trust_code=False)  # trust is for this command only


def load_settings(kinds: Sequence[type], argv: Sequence[str], *, prog: str) -> tuple[Any, ...]:
    """Parses the command line of a command into its settings, and checks the command's own settings.

    Args:
      kinds: the dataclasses with its flags: `Config`, the command's own, or its own and `Config`.
      argv: the arguments, without the program's name.
      prog: the program's name, for help and messages.

    Returns:
      An instance of each kind, in their order.

    Raises:
      UsageError: a flag is unknown, missing or has a wrong value, or settings contradict each other. For a mistyped
        flag of the command's own, the message names the nearest flag.
      SystemExit: code 0 after `--help`; the help is printed.
    """
    kind, *run = kinds
    if kind is Config:
        return (load_config(argv, prog=prog),)
    settings = parse_with(kind, argv, _run_of(kind, prog), prog=prog) if run else (parse(kind, argv, prog=prog),)
    settings[0].check(*settings[1:])
    return settings


def _run_of(kind: Any, prog: str) -> Callable[[list[str]], Config]:
    """Builds the function that parses the arguments that are no flags of `kind` into a `Config`.

    It raises UsageError with a suggestion for an unknown flag without a dot that resembles a flag of `kind`.
    """
    flags = [field.name for field in dataclasses.fields(kind)]
    runs = {"config", "help", *(field.name for field in dataclasses.fields(Config))}

    def run(argv: list[str]) -> Config:
        for word in argv:
            name = word.partition("=")[0].removeprefix("--").replace("-", "_")
            if not word.startswith("--") or "." in name or name.removeprefix("no_") in runs:
                continue
            same = [flag for flag in flags if {flag, name} <= DEVICES]
            if near := same or difflib.get_close_matches(name, flags, n=1, cutoff=0.75):
                raise UsageError(f"unrecognized option {word}; did you mean --{near[0]}? ({prog} --help lists all)")
        return load_config(argv, prog=prog)

    return run


def split_config_files(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits a command line into the values of `--config` (or `--config=`) and the other arguments, both in order.

    Raises:
      UsageError: `--config` has no file.
    """
    files, flags = [], []
    rest = iter(argv)
    for argument in rest:
        if argument == "--config":
            file = next(rest, None)
            if file is None or file.startswith("--"):
                raise UsageError("--config needs a file or the name of a shipped one, as in --config digits")
            files.append(file)
        elif argument.startswith("--config="):
            files.append(argument.removeprefix("--config="))
        else:
            flags.append(argument)
    return files, flags


def read_flags(file: pathlib.Path) -> list[str]:
    """Converts the settings of a TOML file to flags of the command line. Up to 20 unknown names become flags too.

    The parser rejects the unknown ones with a suggestion. Removed settings with their default are left out.

    Raises:
      UsageError: the file is missing, empty, unreadable or not TOML, more than 20 of its names are not settings, a
        setting has a table or a bool in place of another type (or the reverse), or a value would be read as a flag. The
        message names the file.
    """
    try:
        content = file.read_bytes()
        if not content.strip():
            raise UsageError("the file is empty; wanted settings, as in the config.toml of a run")
        table = _without_removed(tomllib.loads(content.decode()))
        unknown = list(_unknown(table, Config(), ""))
        if len(unknown) > _MOST_UNKNOWN:  # the parser is slow: it looks for a similar name for each
            first = ", ".join(unknown[:3])
            raise UsageError(
                f"{first} and {len(unknown) - 3:,} more are not settings; {typed('train')} --help lists all settings"
            )
        return list(_flatten(table, Config(), ""))
    except FileNotFoundError:
        raise UsageError(f"no config file {file}{_other_files(file)}") from None
    except UsageError as error:
        raise UsageError(f"in {file}: {error}") from None
    except (ValueError, RecursionError) as error:  # ValueError: also for a number that is too long, or NUL in the path
        raise UsageError(f"{file} is not TOML: {str(error) or 'nested too deep'}") from None
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from None


def _other_files(missing: pathlib.Path) -> str:
    """Formats the end of the message for a missing file: a file with a similar name, and the settings of mpjax.

    A similar file beside the missing one comes first. The settings that come with mpjax are listed only if the missing
    file is in the working directory or in `configs`. Empty if there is nothing to suggest.
    """
    near = difflib.get_close_matches(missing.stem, [file.stem for file in missing.parent.glob("*.toml")], n=1)
    asks = f"; did you mean {missing.parent / near[0]}.toml?" if near else ""
    if missing.parent not in (pathlib.Path(), pathlib.Path("configs")):
        return asks
    known = names()
    near = [] if asks else difflib.get_close_matches(missing.stem, known, n=1)
    asks = f"; did you mean {near[0]}?" if near else asks
    return f"{asks}{'' if asks else ';'} mpjax has {', '.join(known)}" if known else asks


def _checked_flags(file: pathlib.Path, prog: str) -> list[str]:
    """Converts a settings file to flags like `read_flags`, and parses them alone, so that errors name the file."""
    flags = read_flags(file)
    try:
        _parse(flags, prog)
    except UsageError as error:
        raise UsageError(f"in {file}: {error}") from None
    return flags


def _without_removed(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Copies a TOML table without the settings of earlier versions (`REMOVED`) that have their defaults."""
    return {
        key: _without_removed(value, f"{prefix}{key}.") if isinstance(value, dict) else value
        for key, value in table.items()
        if not _is_removed(f"{prefix}{key}", value)
    }


def _is_removed(name: str, value: Any) -> bool:
    if name not in REMOVED:
        return False
    default = REMOVED[name].default
    return type(value) is type(default) and value == default


_MOST_UNKNOWN = 20


def _unknown(table: dict[str, Any], section: Any, prefix: str) -> Iterator[str]:
    """Yields the keys of a TOML table, after `prefix`, that are not settings of `section`, a section of `Config()`.

    Keys of nested tables are searched too. If `section` is None, all keys are unknown.
    """
    names = {field.name for field in dataclasses.fields(section)} if section is not None else set()
    for key, value in table.items():
        inner = getattr(section, key) if key in names else None
        if isinstance(value, dict) and value and (key not in names or dataclasses.is_dataclass(inner)):
            yield from _unknown(value, inner, f"{prefix}{key}.")
        elif key not in names:
            yield f"{prefix}{key}"


def _flatten(table: dict[str, Any], section: object, prefix: str) -> Iterator[str]:
    """Yields the words of a command line that set the same settings as a TOML table.

    `section` is the section of `Config()` that the table is for; None if it is unknown. `prefix` is its name with a
    dot.

    Raises:
      UsageError: a key has `=` or is an option of the parser, a value would be read as a flag, has NUL, or is of
        another kind than the setting (`_other_kind`).
    """
    for key, value in table.items():
        name = f"--{prefix}{key}"
        default = getattr(section, key, None)
        if "=" in key or key.replace("_", "-").startswith("tyro-"):
            # The parser would set another setting or write a file, and settings files may come from untrusted sources.
            raise UsageError(f"{prefix}{key} is not a setting; {typed('train')} --help lists all settings")
        if flags := [word for word in _words(value) if _is_flag(word)]:
            raise UsageError(f"{prefix}{key} has {flags[0]!r}, which would be read as a flag: wanted a value")
        if "\0" in str(value):
            raise UsageError(f"{prefix}{key} is {value!r}: wanted a text without NUL")
        if kind := _other_kind(value, default):
            raise UsageError(f"{prefix}{key} is {value!r}: wanted {kind}")
        if isinstance(default, dict):
            yield from [name, *(str(word) for rule in value.items() for word in rule)]
        elif value == {} and default is None:
            yield name  # an empty table with an unknown name: the parser reports it
        elif isinstance(value, dict):
            yield from _flatten(value, default, f"{prefix}{key}.")
        elif isinstance(value, list):
            yield from [name, *map(str, value)]
        elif isinstance(value, bool):
            yield name if value else f"--{prefix}no_{key}"
        else:
            yield f"{name}={value}"


def _is_flag(word: str) -> bool:
    """True for a word that the parser reads as a flag, such as `--name` or `-h`; False for a negative number."""
    if word.startswith("--") or not word.startswith("-"):
        return word.startswith("--")
    try:
        float(word)
    except ValueError:
        return True
    return False


def _words(value: object) -> list[str]:
    if isinstance(value, dict):
        return [str(word) for pair in value.items() for word in pair if not isinstance(word, dict | list)]
    return [str(word) for word in value] if isinstance(value, list) else []


def _other_kind(value: object, default: object) -> str | None:
    """The wanted type in words if a TOML value is of another kind than the default of its setting; else None.

    It finds only the mistakes that a flag would hide: a table or a bool in place of another type, or the reverse.
    """
    is_table = isinstance(default, dict) or (dataclasses.is_dataclass(default) and not isinstance(default, Duration))
    if default is None:
        return None  # an unknown setting: the parser reports it
    if is_table != isinstance(value, dict):
        return "a table" if is_table else "one value, not a table"
    if isinstance(default, bool) != isinstance(value, bool):
        return "true or false" if isinstance(default, bool) else "a number or a word, not true or false"
    return None


def _parse(flags: list[str], prog: str) -> Config:
    def parsed(argv: list[str]) -> Config:
        return parse(Config, argv, prog=prog, description=DESCRIPTION)

    try:
        return parsed(flags)
    except UsageError as error:
        if not (better := list(corrections(flags, lambda words: require_valid(parsed(words))))):
            raise
        unknown = [f"unrecognized options: {flag}; {advice} ({prog} --help lists all)" for flag, advice in better]
        others = [line for line in str(error).splitlines() if not line.startswith(("unrecognized", " "))]
        raise UsageError("\n".join([*unknown, *others])) from None


def from_toml(file: str | pathlib.Path) -> Config:
    """Reads the settings of one TOML file; a setting that is not in the file has its default.

    If the file belongs to a run (it is beside a run's other files), its settings are made safe by `as_stored`: the code
    that it names will not be loaded, and its `cache_dir` is dropped. `config_of_run` can trust the code.

    Raises:
      UsageError: the file is missing, unreadable or wrong; the message names it.
    """
    config = settings_in(pathlib.Path(file))
    return as_stored(config) if is_stored(pathlib.Path(file)) else config


def settings_in(file: pathlib.Path) -> Config:
    """Reads the settings of a TOML file like `from_toml`, but without `as_stored`: code of a stored run may be loaded.

    The caller decides whether to trust it.
    """
    return _parse(_checked_flags(file, typed("train")), typed("train"))

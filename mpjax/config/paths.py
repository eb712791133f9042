"""Finds files: expands paths that a user wrote, finds shipped settings, and lists the data that a stored run names."""

import os
import pathlib
import sys
from collections.abc import Iterator

from mpjax.config.choices import FILE_KINDS, NPZ, RANDOM
from mpjax.config.schema import Config
from mpjax.errors import UsageError, printable


def expanded(path: str | os.PathLike[str]) -> pathlib.Path:
    """Replaces `~` or `~USER` at the beginning of a path by the home folder; the path need not exist.

    Raises:
      UsageError: there is no such user, or the text cannot be a file name.
    """
    if "\0" in os.fspath(path):
        raise UsageError(f"{os.fspath(path)!r} is not a path: wanted text without NUL")
    try:
        os.fsencode(path)
        return pathlib.Path(path).expanduser()
    except RuntimeError:
        user = pathlib.Path(path).parts[0]
        raise UsageError(f"{path}: {user} has no home folder; write the folder itself, or ./{path}") from None
    except UnicodeEncodeError:
        raise UsageError(f"{os.fspath(path)!r} is not a path: wanted text without surrogates") from None


_PREFIX = "configs/"
_PACKAGE = pathlib.Path(__file__).parents[1]
# A wheel has the folder in the package, a checkout next to it.
FOLDER = next((folder for folder in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if folder.is_dir()), _PACKAGE)


def names() -> list[str]:
    """The names of the settings files that come with mpjax, for `--config`, sorted: `digits`, `precision/float16`, ...

    The list is empty if the installation has no such files.
    """
    files = FOLDER.rglob("*.toml") if FOLDER != _PACKAGE else ()
    return sorted(file.relative_to(FOLDER).with_suffix("").as_posix() for file in files)


def settings_file(text: str) -> pathlib.Path:
    """Finds the file that `text` names: the file at this path, or else the file that comes with mpjax under this name.

    If neither exists, the path is returned, with `~` expanded; so is an absolute path, or one with `..`. A folder does
    not count as a file. `digits`, `digits.toml` and `configs/digits.toml` are the same shipped file; `configs/pets.py`
    is another.
    """
    path = expanded(text)
    if path.is_absolute() or (path.exists() and not path.is_dir()) or ".." in path.parts:
        return path
    inside = pathlib.PurePath(text.removeprefix(_PREFIX))
    candidates = (FOLDER / inside, FOLDER / f"{inside}.toml")
    return next((file for file in candidates if file.is_file()), path)


def tell_data(stored: Config, where: pathlib.Path, user_config: Config | None = None) -> None:
    """Prints a line to stderr that lists the files and data sets that a stored run names, if there are any.

    Args:
      stored: the settings of the run.
      where: the folder of the run.
      user_config: the settings that the user wrote; data that they name are not listed. None: the user wrote none.
    """
    user_data = dict(_data_of(user_config)) if user_config else {}
    flags = [f"--{name} {value}" for name, value in _data_of(stored) if user_data.get(name) != value]
    if flags:
        print(printable(f"the run in {where} names what is read, as data alone: {', '.join(flags)}"), file=sys.stderr)


def _data_of(config: Config) -> Iterator[tuple[str, str]]:
    """Yields name and value of each setting that names files, folders or sets of the Hugging Face Hub."""
    if _is_elsewhere(name := str(config.data.name)):
        yield "data.name", name
    if mixed := [name for name in config.data.mix if _is_elsewhere(name)]:
        yield "data.mix", " ".join(mixed)
    if config.data.data_dir:
        yield "data.data_dir", config.data.data_dir
    if config.data.tokenizer not in ("bytes", "words", config.model.folder):
        yield "data.tokenizer", config.data.tokenizer
    if config.data.features not in ("auto", "whisper"):
        yield "data.features", config.data.features
    if config.model.folder:
        yield "model.name", str(config.model.name)
    if config.model.pretrained not in ("", RANDOM):
        yield "model.pretrained", config.model.pretrained


def _is_elsewhere(name: str) -> bool:
    return name.partition(":")[0] in FILE_KINDS or name.lower().endswith(NPZ)

"""Finds and creates the cache, data and run folders, and reads the settings that a run stored."""

import contextlib
import dataclasses
import datetime
import errno
import os
import pathlib
import re
import secrets
import sys
from collections.abc import Iterator

from mpjax.config.choices import GENERATED, HF
from mpjax.config.load import CONFIG_FILE, settings_in
from mpjax.config.paths import expanded, tell_data
from mpjax.config.program import command_line, typed
from mpjax.config.save import to_toml
from mpjax.config.schema import Config, Distributed
from mpjax.config.user_code import Stored, as_stored, code_of, is_of_a_run, is_passed_in_python, require_trust
from mpjax.errors import AbsentData, UsageError, printable
from mpjax.files import irregular_in, open_to_others


def cache_folder(config: Config) -> pathlib.Path:
    """Creates the folder for compiled programs and prepared data if absent, for this user alone, and returns it.

    It is `cache_dir` if set, else `default_cache_folder()`.

    Raises:
      UsageError: it cannot be created.
    """
    return made(expanded(config.cache_dir) if config.cache_dir else default_cache_folder(), mode=0o700)


def program_folder(config: Config) -> pathlib.Path | None:
    """Creates the folder `compiled` in the cache folder if absent, and returns it.

    If another user can write there, it prints a warning to stderr and returns None, because compiled programs are code.

    Raises:
      UsageError: it cannot be created.
    """
    folder = made(cache_folder(config) / "compiled", mode=0o700)
    instead = "another --cache_dir" if config.cache_dir else "another folder in $MPJAX_CACHE"
    if danger := open_to_others(folder, instead):
        print(printable(f"warning: compiled programs in {folder} are not used: {danger}"), file=sys.stderr)
        return None
    return folder


def default_cache_folder() -> pathlib.Path:
    """The path `$MPJAX_CACHE`, else `$XDG_CACHE_HOME/mpjax`, else `~/.cache/mpjax`, with `~` expanded; not created."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return expanded(os.environ.get("MPJAX_CACHE") or pathlib.Path(base, "mpjax"))


def data_folder(config: Config) -> pathlib.Path:
    """The folder of prepared data sets: `data_dir` if set, else `data` in the cache folder.

    A `data_dir` that comes from a stored run (`Stored`) is never written to. So if mpjax generates all data sets of
    such a run, the folder is `data` in the cache folder instead. The cache folder is created if it is used; `data` is
    not.
    """
    data_dir, names = config.data.data_dir, {config.data.name, *config.data.mix}
    if data_dir and not (isinstance(data_dir, Stored) and names <= set(GENERATED)):
        return expanded(data_dir)
    return cache_folder(config) / "data"


def run_folder(config: Config) -> pathlib.Path:
    """Creates the folder of a new run with its config.toml, and returns it; with `resume`, returns the existing folder.

    Raises:
      UsageError: as `check_run_folder`; the folder cannot be created or written; or another run has taken it meanwhile.
    """
    folder = check_run_folder(config)
    if config.resume:
        return folder
    try:
        folder = new_folder(config)
        _claim(folder / CONFIG_FILE, run_settings(config, folder))
    except FileExistsError:
        raise UsageError(_taken(folder)) from None
    except OSError as error:
        raise UsageError(f"cannot write into {folder}: {error.strerror}") from None
    return folder


_UNFINISHED = f".{CONFIG_FILE}."
"""The prefix of files that a killed run may leave behind before its folder holds a run."""


def _claim(file: pathlib.Path, text: str) -> None:
    """Writes a new file atomically, by a hard link where the file system has them; of two runs at once, one succeeds.

    Raises:
      FileExistsError: the file exists.
    """
    unfinished = file.with_name(f"{_UNFINISHED}{secrets.token_hex(8)}")
    try:
        with unfinished.open("x", encoding="utf-8") as opened:
            opened.write(text)
            opened.flush()
            os.fsync(opened.fileno())
        os.link(unfinished, file)
    except FileExistsError:
        raise
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
        with file.open("x", encoding="utf-8") as opened:  # the file system has no hard links
            opened.write(text)
    finally:
        unfinished.unlink(missing_ok=True)


def check_run_folder(config: Config) -> pathlib.Path:
    """Returns the path of the run's folder and checks that the run can use it; creates nothing.

    Without `output_dir`, a new run gets a path in `runs` with the current time.

    Raises:
      UsageError: the run is new and the folder is a file or not empty. Or the run is resumed, and the folder holds no
        run, `require_no_links` raises, or only one of the folder and `config` is for runs of several seeds. Or its path
        has a character that checkpoints cannot be written with (`*?[` or a backslash).
    """
    if not config.resume:
        folder = check_new_folder(config)
        _require_names(folder, "*?[\\", "write another --output_dir")
        return folder
    folder = expanded(config.output_dir)
    _require_names(folder, "*?[\\", "rename it, and write its new name as --output_dir")
    require_no_links(folder)
    if not (folder / CONFIG_FILE).exists():
        raise UsageError(f"--resume: no run in {folder} (no {CONFIG_FILE}); leave out --resume to start one")
    if config.seeds and is_of_a_run(folder / CONFIG_FILE):
        raise UsageError(f"--resume --seeds: {folder} holds one run; leave out --seeds, or write another --output_dir")
    if not config.seeds and (seeds := seeds_in(folder)):
        raise UsageError(
            f"--resume: {folder} holds runs of several seeds; write --seeds {' '.join(map(str, seeds))} to resume all, "
            f"or --output_dir {folder / seed_folder(seeds[0])} to resume one"
        )
    return folder


def _require_names(folder: pathlib.Path, wrong: str, instead: str) -> None:
    """Raises UsageError if a folder's absolute path has one of the characters `wrong`, or bytes that are not UTF-8.

    Where Orbax writes, it reads a path with `*`, `?` or `[` as a pattern, and finds the arrays of no checkpoint or of
    others. Tensorstore reads a backslash as a slash, and so writes and reads another folder. `instead` ends the
    message.
    """
    path = folder.resolve().as_posix()
    character = next((c for c in path if c in wrong or "\ud800" <= c <= "\udfff"), None)
    if character is not None:
        raise UsageError(f"{path!r}: no run can be in a folder with {character!r} in its name; {instead}")


_OTHERS = ("wandb",)
"""Folders inside a run's folder that other programs write, with their own links."""


def require_no_links(folder: pathlib.Path) -> None:
    """Raises UsageError if a run's folder holds a symbolic link, a pipe, a socket or a device, at any depth.

    Through a link, a file elsewhere may be read or written; a read of a pipe or device may never end. Inside the
    folders of other programs (`_OTHERS`), all are accepted.
    """
    for path in irregular_in(folder):
        first, *below = path.relative_to(folder).parts
        if not (below and first in _OTHERS):
            kind = f"a link to {os.readlink(path)}" if path.is_symlink() else "a pipe, a socket or a device"
            raise UsageError(f"{path} is {kind}: wanted the file itself, or a folder, in a run")


def resume_command(config: Config, folder: pathlib.Path) -> str:
    """Formats the shell command that resumes the run in a folder; "" if objects were passed to the run in Python.

    It has `--trust_code` if the run uses code outside mpjax.
    """
    code = [spec for specs in code_of(config).values() for spec in specs]
    if any(map(is_passed_in_python, code)):
        return ""
    flags = ["--resume", "--output_dir", str(folder)]
    flags += ["--seeds", *map(str, config.seeds)] if config.seeds else []
    flags += ["--cache_dir", config.cache_dir] if config.cache_dir else []  # a run does not store it
    return command_line("train", *flags, *(["--trust_code"] if code else []))


def seed_folder(seed: int) -> str:
    """The name of the folder of a seed's run, in the folder of a run of several seeds."""
    return f"seed_{seed}"


def seeds_in(folder: pathlib.Path) -> tuple[int, ...]:
    """The seeds, sorted, whose runs have started (`seed_N/config.toml`) in a folder; none in the folder of one run."""
    if is_of_a_run(folder / CONFIG_FILE):
        return ()
    names = [file.parent.name.removeprefix("seed_") for file in folder.glob(f"seed_*/{CONFIG_FILE}")]
    return tuple(sorted(int(name) for name in names if name.isdecimal()))


def check_new_folder(config: Config, *, prefix: str = "") -> pathlib.Path:
    """Returns the path of a folder to create: `output_dir`, or, if that is empty, a generated name in `runs`.

    The name has data, model, policy and the current time after `prefix`. Nothing is created.

    Raises:
      UsageError: the folder in the settings is a file or not empty, or its path is not UTF-8.
    """
    if not config.output_dir:
        return _default_name(config, prefix)
    folder = expanded(config.output_dir)
    _require_names(folder, "", "write another --output_dir")
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file: wanted a folder as --output_dir")
    if folder.exists() and any(not entry.name.startswith(_UNFINISHED) for entry in folder.iterdir()):
        raise UsageError(_taken(folder))
    return folder


def new_folder(config: Config, *, prefix: str = "") -> pathlib.Path:
    """Creates the folder that `check_new_folder` chooses, and returns its path.

    If the settings have no `output_dir`, and a folder of the generated name exists, as of a run that started in the
    same second, the name ends in `-2`, `-3` and so on.

    Raises:
      UsageError: as `check_new_folder`, or it cannot be created.
    """
    folder = check_new_folder(config, prefix=prefix)
    if config.output_dir:
        return made(folder)
    made(folder.parent)
    candidate, number = folder, 1
    while True:
        try:
            candidate.mkdir()
            return candidate
        except FileExistsError:
            number += 1
            candidate = folder.with_name(f"{folder.name}-{number}")
        except OSError as error:
            raise UsageError(f"cannot make folder {candidate}: {error.strerror}") from None


def _taken(folder: pathlib.Path) -> str:
    if (folder / CONFIG_FILE).exists():
        return f"{folder} exists: write --resume to resume the run in it, or another --output_dir to start a new run"
    return f"{folder} exists and holds no run to resume: write another --output_dir"


def run_settings(config: Config, folder: pathlib.Path) -> str:
    """Formats the content of a run's config.toml, with `folder` as `output_dir`.

    Settings of one command only have their defaults: `resume`, `other_data`, `profile`, `cache_dir` and `distributed`.
    With this file and another `output_dir`, a new run repeats this one.
    """
    once = {"resume": False, "other_data": False, "profile": False, "cache_dir": "", "distributed": Distributed()}
    return to_toml(dataclasses.replace(config, output_dir=str(folder), **once))


def _default_name(config: Config, prefix: str) -> pathlib.Path:
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    words = (config.data.name, config.model.name, config.precision.policy)
    name = "-".join("".join(c if c.isalnum() else "_" for c in word) for word in map(str, words))
    return pathlib.Path("runs", f"{prefix}{name}-{now}")


def made(folder: pathlib.Path, *, mode: int = 0o777) -> pathlib.Path:
    """Creates a folder and its parents where absent, with the permissions `mode` less the umask, and returns it.

    Folders that exist keep their permissions.

    Raises:
      UsageError: it cannot be created.
    """
    try:
        if not folder.is_dir():
            for parent in reversed(folder.parents):
                if not parent.exists():
                    parent.mkdir(mode, exist_ok=True)
            folder.mkdir(mode, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make folder {folder}: {error.strerror}") from None
    return folder


def config_of_run(folder: pathlib.Path, *, trust_code: bool = False) -> Config:
    """Reads the settings that a run stored in its folder, and makes them safe to use by `as_stored`.

    They lose `cache_dir`, and code is marked as `Stored`, so that it is never loaded, unless `trust_code` is set. If
    they name files or data sets, a line on stderr lists them.

    Args:
      folder: the folder of the run.
      trust_code: whether code that the run names may be executed.

    Raises:
      UsageError: the folder holds no run or runs of several seeds, its config.toml is wrong, its path has a character
        that checkpoints cannot be read with, `require_no_links` raises, the run names code outside mpjax and
        `trust_code` is False, or parts of the run were passed in Python.
    """
    if seeds := seeds_in(folder):
        flags = " or ".join(f"--run {folder / seed_folder(seed)}" for seed in seeds)
        raise UsageError(f"{folder} holds runs of several seeds: write {flags}")
    if not (folder / CONFIG_FILE).exists():
        is_model = (folder / "config.json").is_file()
        also = f", or {HF}{folder} for the Hugging Face files in it" if is_model else ""
        raise UsageError(
            f"no run in {folder} (no {CONFIG_FILE}); wanted the folder that {typed('train')} printed{also}"
        )
    _require_names(folder, "\\", "rename or copy it")
    require_no_links(folder)
    config = settings_in(folder / CONFIG_FILE)
    if config.seeds:
        raise UsageError(f"{folder} is for runs of several seeds, none of which has begun; wanted the folder of a run")
    require_trust(config, folder, trusted=trust_code)
    tell_data(config, folder)
    return as_stored(config, trusted=trust_code)


@contextlib.contextmanager
def data_of_run(folder: pathlib.Path) -> Iterator[None]:
    """Context for opening the data of a stored run, which adds to an error where the run has the settings of its data.

    The flags that a message names, such as `--data.image_size`, are for a new run: other commands do not have them.
    """
    file = folder / CONFIG_FILE
    try:
        yield
    except AbsentData as error:
        raise AbsentData(f"{error}\nIf the data of the run are elsewhere, change data.name in {file}") from error
    except UsageError as error:
        if not (names := dict.fromkeys(re.findall(r"--(data\.\w+)", str(error)))):
            raise
        raise UsageError(
            f"{error}\nFor the run, change or remove {', '.join(names)} in {file}", repair=error.repair
        ) from error


def with_policy(config: Config, policy: str, rules: dict[str, str] | None = None) -> Config:
    """Replaces the policy in the settings; settings that follow from a policy return to their defaults.

    These are `mode`, `loss_scale`, `master_weights` and `stochastic_rounding` of the `precision` section.

    Args:
      config: the settings.
      policy: the name of the new policy.
      rules: the new precision rules; None keeps those of `config`.
    """
    precision = dataclasses.replace(
        config.precision,
        policy=policy,
        rules=config.precision.rules if rules is None else rules,
        mode="auto",
        loss_scale="auto",
        master_weights="auto",
        stochastic_rounding=False,
    )
    return dataclasses.replace(config, precision=precision)

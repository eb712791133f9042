"""Where things are kept: the cache of a user, the folder of a run, and the settings in it."""

import dataclasses
import datetime
import errno
import os
import pathlib

from mpjax.config.load import CONFIG_FILE, from_toml
from mpjax.config.paths import expanded
from mpjax.config.save import to_toml
from mpjax.config.schema import Config
from mpjax.config.user_code import require_trust
from mpjax.errors import UsageError


def cache_folder(config: Config) -> pathlib.Path:
    """The folder for compiled programs and prepared data, made if absent.

    `cache_dir` if set, else `$MPJAX_CACHE`, else `$XDG_CACHE_HOME/mpjax`, else `~/.cache/mpjax`.
    """
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = config.cache_dir or os.environ.get("MPJAX_CACHE") or pathlib.Path(base, "mpjax")
    return _made(expanded(folder))


def data_folder(config: Config) -> pathlib.Path:
    """The folder of prepared data sets: `data_dir` if set, else `data` in the cache."""
    return expanded(config.data.data_dir) if config.data.data_dir else cache_folder(config) / "data"


def run_folder(config: Config) -> pathlib.Path:
    """The folder of the run: a new one, claimed by its config.toml, or with `resume` the one that is there.

    Raises:
      UsageError: as `check_run_folder`.
    """
    folder = check_run_folder(config)
    if config.resume:
        return folder
    try:
        _claim(_made(folder) / CONFIG_FILE, run_settings(config, folder))
    except FileExistsError:
        raise UsageError(_taken(folder)) from None
    except OSError as error:
        raise UsageError(f"cannot write into {folder}: {error.strerror}") from None
    return folder


def _claim(file: pathlib.Path, text: str) -> None:
    """Writes a file that is not there yet, whole or not at all: of two runs that start at once, one gets it.

    Raises:
      FileExistsError: it is there.
    """
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with unfinished.open("w") as opened:
            opened.write(text)
            opened.flush()
            os.fsync(opened.fileno())
        os.link(unfinished, file)
    except FileExistsError:
        raise
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
        with file.open("x") as opened:  # a file system without links
            opened.write(text)
    finally:
        unfinished.unlink(missing_ok=True)


def check_run_folder(config: Config) -> pathlib.Path:
    """Where the folder of the run is or can be; nothing is made yet.

    Raises:
      UsageError: it is there although the run is new, or it is not although the run is to go on.
    """
    if config.resume:
        folder = expanded(config.output_dir)
        if not (folder / CONFIG_FILE).exists():
            raise UsageError(f"--resume: no run in {folder} (no {CONFIG_FILE}); leave out --resume to start one")
        return folder
    folder = expanded(config.output_dir or _default_name(config))
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file: wanted a folder for the run as --output_dir")
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(_taken(folder))
    return folder


def _taken(folder: pathlib.Path) -> str:
    return f"{folder} exists: --resume goes on with the run in it, another --output_dir starts a new one"


def run_settings(config: Config, folder: pathlib.Path) -> str:
    """What the run's config.toml says: these settings, so that running them again elsewhere repeats the run.

    Not that it was traced: that was asked for once.
    """
    return to_toml(dataclasses.replace(config, output_dir=str(folder), resume=False, profile=False))


def _default_name(config: Config) -> pathlib.Path:
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    words = (config.data.name, config.model.name, config.precision.policy)
    name = "-".join("".join(c if c.isalnum() else "_" for c in word) for word in words)
    return pathlib.Path("runs", f"{name}-{now}")


def _made(folder: pathlib.Path) -> pathlib.Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make folder {folder}: {error.strerror}") from None
    return folder


def config_of_run(folder: pathlib.Path, *, trust_code: bool = False) -> Config:
    """The settings that a run left in its folder.

    Args:
      folder: of the run.
      trust_code: whether code that it names may be executed.

    Raises:
      UsageError: there is no run, or it names code outside mpjax that is not trusted.
    """
    if not (folder / CONFIG_FILE).exists():
        raise UsageError(f"no run in {folder} (no {CONFIG_FILE}); wanted the folder that train.py printed")
    config = from_toml(folder / CONFIG_FILE)
    require_trust(config, folder, trusted=trust_code)
    return config


def with_policy(config: Config, policy: str, rules: dict[str, str] | None = None) -> Config:
    """These settings under another policy; what went with the one they had is as the new one has it.

    Args:
      config: settings.
      policy: a policy's name.
      rules: exceptions; by default those that there are.
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

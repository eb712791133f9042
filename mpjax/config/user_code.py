"""Loads functions and classes that settings name, and refuses the code of a stored run unless the user trusts it."""

import dataclasses
import difflib
import fnmatch
import importlib
import inspect
import os
import pathlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from mpjax.config.choices import DATA_KINDS
from mpjax.config.paths import settings_file
from mpjax.config.schema import Config, with_settings
from mpjax.config.setting_types import IN_PYTHON, Code, PythonObject
from mpjax.errors import UsageError, failure


CODE = (
    "model.name",
    "data.name",
    "data.mix",
    "data.preprocess",
    "data.augment",
    "training.objective",
    "training.metrics",
    "optimizer.name",
    "optimizer.schedule",
    "loop.callbacks",
    "report.writers",
)
"""The settings that may name code outside mpjax."""


class Stored(str):
    """A setting of a stored run that names code, which is not executed, or a folder, which is not written to."""


def as_stored(config: Config, user_config: Config | None = None, *, trusted: bool = False) -> Config:
    """Returns settings of a stored run that are safe to use: without its `cache_dir`, code and `data_dir` as `Stored`.

    `load_function` refuses `Stored` code, and mpjax writes nothing to a `Stored` folder.

    Args:
      config: the settings.
      user_config: the settings that the user wrote, whose `cache_dir` is used; code and folders that are the same in
        them are not marked. None: the user wrote none.
      trusted: whether `--trust_code` was set, so that no code is marked as `Stored`; `data_dir` still is.
    """
    config = dataclasses.replace(
        config, cache_dir=user_config.cache_dir if user_config else ""
    )  # compiled programs are code
    if config.data.data_dir and not (user_config and user_config.data.data_dir == config.data.data_dir):
        config = with_settings(config, {"data.data_dir": Stored(config.data.data_dir)})
    for name in () if trusted else CODE:
        section, _, field = name.partition(".")
        value = getattr(getattr(config, section), field)
        if user_config and value == getattr(getattr(user_config, section), field):
            continue
        if isinstance(value, dict):
            new: Any = {_stored(spec): fraction for spec, fraction in value.items()}
        else:
            new = tuple(map(_stored, value)) if isinstance(value, tuple | list) else _stored(value)
        config = with_settings(config, {name: new})
    return config


def _stored(value: Code) -> Code:
    return Stored(value) if isinstance(value, str) else value


def code_of(config: Config) -> dict[str, tuple[str, ...]]:
    """Collects the code outside mpjax that settings name, as text by setting; settings without such code are left out.

    mpjax's own model classes and `hf:FOLDER` models do not count as code outside mpjax.
    """
    code = {}
    for name in CODE:
        if name == "model.name" and config.model.folder:
            continue
        section, _, field = name.partition(".")
        value = getattr(getattr(config, section), field)
        is_code = names_code if section == "data" and field in ("name", "mix") else may_name_code
        specs = map(str, value if isinstance(value, tuple | list | dict) else [value])
        if outside := tuple(spec for spec in specs if is_code(spec) and not _is_own(name, spec)):
            code[name] = outside
    return code


def may_name_code(spec: Code) -> bool:
    """True for code, `FILE.py:NAME` or an object passed in Python; False for a name that mpjax or optax knows.

    It is also True for the model name `hf:FOLDER` and for the names of data with a colon; see `names_code`.
    """
    return ":" in str(spec)


def files_of(config: Config) -> dict[str, pathlib.Path]:
    """Collects the files that settings name as `FILE.py:NAME`, by flag; modules, `package.module:NAME`, are left out.

    The second file of one setting has the key `--SETTING (2)`, and so on.
    """
    files = {}
    for setting, specs in code_of(config).items():
        for number, spec in enumerate(specs):
            where, _, _ = spec.rpartition(":")
            if where.endswith(".py"):
                files[f"--{setting}" + (f" ({number + 1})" if number else "")] = settings_file(where)
    return files


def names_code(spec: Code) -> bool:
    """True if the name of a data set is code, such as `FILE.py:NAME`; False for `hf:PATH` and other `DATA_KINDS`."""
    where, colon, _ = str(spec).partition(":")
    return bool(colon) and where not in DATA_KINDS


def require_trust(stored: Config, where: pathlib.Path, *, trusted: bool, user_config: Config | None = None) -> None:
    """Raises UsageError if a run names code (`code_of`) that the user neither trusts nor named in the same setting.

    A setting passes if `user_config` names the same code in it. In another setting, an object that was passed to the
    run in Python is an error even if trusted, because the settings do not hold it.

    Args:
      stored: the settings of the run; those of the user may be over them.
      where: the folder of the run, for the message.
      trusted: whether `--trust_code` was set.
      user_config: the settings of the user, without those of stored runs; None: the user named no code.
    """
    users_code = code_of(user_config) if user_config else {}
    code = {name: specs for name, specs in code_of(stored).items() if users_code.get(name) != specs}
    named = [(f"{name} {' '.join(specs)}", specs) for name, specs in code.items()]
    if in_python := [text for text, specs in named if any(map(is_passed_in_python, specs))]:
        raise UsageError(
            f"the run in {where} was given parts in Python, which its settings cannot hold: {', '.join(in_python)}; "
            "name them here as FILE.py:NAME, or call mpjax.run with them again"
        )
    if named and not trusted:
        raise UsageError(
            f"the run in {where} names code outside mpjax, which would be executed here: "
            f"{', '.join(text for text, _ in named)}; "
            "read it, and if you trust it write --trust_code"
        )


def is_passed_in_python(spec: str) -> bool:
    """True if a setting's value, as text, stands for an object that was passed in Python: `python:NAME`."""
    return spec.startswith(IN_PYTHON)


def _is_own(setting: str, spec: str) -> bool:
    # Only models: a stored run must not call any function of mpjax, such as one that starts a command or a download.
    package, _, module = spec.rpartition(":")[0].rpartition(".")
    return setting == "model.name" and package == "mpjax.models" and module not in ("pretrained", "py")


def is_of_a_run(file: pathlib.Path) -> bool:
    """True if the folder of a settings file also has checkpoints, environment.json or metrics.jsonl, as of one run."""
    return _is_beside(file, *_OF_ONE_RUN)


def is_stored(file: pathlib.Path) -> bool:
    """True if the folder of a settings file also has a file or folder that runs write, `seed_N` included."""
    others = "history.jsonl", "receipt.json", "summary.json", "tensorboard", "seed_[0-9]*"
    return _is_beside(file, *_OF_ONE_RUN, *others)


_OF_ONE_RUN = ("checkpoints", "environment.json", "metrics.jsonl")


def _is_beside(file: pathlib.Path, *patterns: str) -> bool:
    try:
        names = os.listdir(file.parent)  # links to nowhere count too
    except (FileNotFoundError, NotADirectoryError):
        return False
    return any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in patterns)


def load_function(spec: Code, *, flag: str) -> Callable:
    """Loads the function or class of `FILE.py:NAME` or `package.module:NAME`; returns the value of a `PythonObject`.

    The file or module is executed when it is first named, and a file again if its text has changed. The value of a
    `PythonObject` may be of any type.

    Args:
      spec: the file or module, and the name in it; or the object.
      flag: the name of the setting, for messages.

    Raises:
      UsageError: a stored run names the code, there is no such file, module, function or class, the imported code
        raises or calls `sys.exit`, or the name is not callable. For a missing name the message lists the functions and
        classes of the module.
    """
    if isinstance(spec, PythonObject):
        return spec.value
    if isinstance(spec, Stored) and not _is_own(flag.removeprefix("--"), spec):
        raise UsageError(
            f"{flag} {spec} is code that a stored run names; read it, and if you trust it write --trust_code"
        )
    if is_passed_in_python(spec):
        raise UsageError(f"{flag} {spec}: the run was given this in Python; name it as FILE.py:NAME")
    where, colon, name = spec.rpartition(":")
    if not (colon and where and name):
        raise UsageError(f"{flag} {spec}: wanted FILE.py:NAME or package.module:NAME")
    # A setting is often read inside a trace. The module's arrays outlive the trace, so they must not belong to it.
    from jax.core import eval_context  # local, because only code needs it

    with eval_context():
        module = _module(where, flag, spec)
    function = getattr(module, name, None)
    if function is not None and not callable(function):
        raise UsageError(f"{flag} {spec} is not callable: {described(function)}")
    if function is None:
        there = [n for n, value in vars(module).items() if _is_defined_in(module, value)]
        near = difflib.get_close_matches(name, there, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UsageError(f"{flag} {spec}: {where} has no {name}; {hint}it has {', '.join(there) or 'no functions'}")
    return function


def _is_defined_in(module: ModuleType, value: Any) -> bool:
    """True for a function or class that is defined in a module or its top-level package; False for any other value."""
    if not (inspect.isfunction(value) or inspect.isclass(value)):
        return False
    return value.__module__.partition(".")[0] == module.__name__.partition(".")[0]


def described(value: Any) -> str:
    """Describes, for a message, a value that is no function or class, and says what was wanted in its place."""
    if callable(getattr(value, "init", None)) and callable(getattr(value, "update", None)):
        return (
            "it is an optax transformation; wanted a function of the learning rate of each step, which mpjax gives it, "
            "as in `lambda learning_rate: optax.adam(learning_rate)`"
        )
    return f"it is a {type(value).__name__}; wanted a function or a class"


def _module(where: str, flag: str, spec: str) -> ModuleType:
    try:
        if not where.endswith(".py"):
            return importlib.import_module(where)
        path = settings_file(where)
        if not path.is_file():
            raise UsageError(f"{flag} {spec}: no file {path}")
        return _executed(path)
    except UsageError:
        raise
    except ImportError as error:
        raise UsageError(f"{flag} {spec}: cannot import {where}: {error}") from error
    except SystemExit as error:
        raise UsageError(
            f"{flag} {spec}: {failure(error)} when {where} was imported; put what only a program does under "
            "if __name__ == '__main__':"
        ) from error
    except SyntaxError as error:
        # The file and line of the error itself, which may be in an imported file.
        location = f"{error.filename or where}, line {error.lineno}"
        line = f": {error.text.strip()}" if error.text else ""
        raise UsageError(f"{flag} {spec}: {location}: {type(error).__name__}: {error.msg}{line}") from error
    except Exception as error:
        file = str(settings_file(where).absolute()) if where.endswith(".py") else ""
        raise UsageError(f"{flag} {spec}: {failure(error, file)} when {where} was imported") from error


_FILES: dict[str, tuple[bytes, ModuleType]] = {}
"""The text and the module of each executed file, by its path."""


def _executed(path: pathlib.Path) -> ModuleType:
    """Executes a file as a module and returns it; later calls return the same module, unless the text has changed.

    The module is in `sys.modules` under the path of the file.
    """
    name, text = str(path.resolve()), path.read_bytes()
    if name not in _FILES or _FILES[name][0] != text:
        # Dataclasses look their module up. No other module has a path as its name.
        sys.modules[name] = module = ModuleType(name)
        module.__file__, module.__package__ = str(path.absolute()), ""
        exec(compile(text, module.__file__, "exec", dont_inherit=True), vars(module))
        _FILES[name] = text, module
    return _FILES[name][1]


def forget_files() -> None:
    """Forgets the modules of executed files, so that each is executed again and no run sees the state of another."""
    _FILES.clear()

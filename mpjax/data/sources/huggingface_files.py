"""Loads the splits of a Hugging Face data set that `hf:...` names: a file, a folder, or a name in the cache or hub."""

import contextlib
import json
import pathlib
import shlex
from collections.abc import Iterator
from typing import Any

from mpjax.config.paths import expanded
from mpjax.errors import UsageError


NAME = "hf"
_KINDS = {
    ".csv": "csv",
    ".tsv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
}
_TEXTS = ("string", "large_string", "string_view")
# The texts that pandas reads as a missing number.
_MISSING = ("", "NA", "N/A", "n/a", "#NA", "#N/A", "#N/A N/A", "<NA>", "NULL", "null", "None", "NaN", "nan", "-NaN")
_MISSING += ("-nan", "1.#IND", "-1.#IND", "1.#QNAN", "-1.#QNAN")
_FORMATS = ("csv", "json", "parquet", "arrow", "imagefolder", "text")


def load_splits(what: str) -> dict[str, Any]:
    """Loads the splits of a data set as `datasets.Dataset`s by name; a single file is the split `train`.

    Args:
      what: `PATH` of a file or folder, `FORMAT:PATH`, or `NAME` or `NAME/CONFIG` on the hub.

    Raises:
      UsageError: the package `datasets` is missing, or the data set does not exist or cannot be read.
    """
    try:
        import datasets
        import datasets.exceptions
    except ImportError as error:
        raise UsageError(
            f"data set '{NAME}:{what}' needs the package datasets ({error}); write: pip install 'mpjax[hf]'"
        ) from error
    with _without_progress_bars(datasets):
        try:
            loaded: Any = _loaded(datasets, what)
        except UsageError:
            raise
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            raise _explained(what, error) from error
    return {str(k): v for k, v in loaded.items()} if isinstance(loaded, datasets.DatasetDict) else {"train": loaded}


def _loaded(datasets: Any, what: str) -> Any:
    kind, colon, rest = what.partition(":")
    if colon and kind in _FORMATS:
        return _local(datasets, expanded(rest), kind, what)
    path = expanded(what)
    if path.exists() or what.startswith(("/", "~", ".")) or path.suffix in _KINDS:
        return _local(datasets, path, "", what)
    name, _, config = what.rpartition("/")
    if what.count("/") > 1:
        return datasets.load_dataset(name, config)
    try:
        return datasets.load_dataset(what)
    except datasets.exceptions.DatasetNotFoundError:
        if not name:
            raise
        return datasets.load_dataset(name, config)  # a legacy name without an owner, such as glue/sst2


def _local(datasets: Any, path: pathlib.Path, kind: str, what: str) -> Any:
    if not path.exists():
        raise UsageError(f"data set '{NAME}:{what}': nothing at {path}; wanted a file or folder")
    if path.is_dir():
        if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            return datasets.load_from_disk(str(path))
        return _read(datasets, kind, data_dir=str(path)) if kind else _read(datasets, str(path))
    kind = kind or _KINDS.get(path.suffix, "")
    if not kind:
        raise UsageError(
            f"data set '{NAME}:{what}': {path.suffix or 'no extension'} is not a known format; wanted one of "
            f"{', '.join(_KINDS)}; or write {NAME}:FORMAT:{path} with FORMAT one of {', '.join(_FORMATS)}"
        )
    settings = {"sep": "\t"} if path.suffix == ".tsv" else {}
    return _read(datasets, kind, data_files={"train": str(path)}, **settings)


def _read(datasets: Any, what: str, **settings: Any) -> Any:
    """Loads files of a format; in csv, an empty text, NA or None in a text column stays a text, not a missing value."""
    loaded = datasets.load_dataset(what, **settings)
    first = next(iter(loaded.values()))
    if first.info.builder_name != "csv":
        return loaded
    for split in loaded.values():
        _require_names(split)
    texts = {name for name, feature in first.features.items() if getattr(feature, "dtype", "") in _TEXTS}
    if not any(split.data.column(name).null_count for split in loaded.values() for name in texts):
        return loaded
    # Load again now that the columns are known. Without _MISSING, a number column with gaps would become text.
    gaps = {name: list(_MISSING) for name in first.features if name not in texts}
    return datasets.load_dataset(what, keep_default_na=False, na_values=gaps, **settings)


def _require_names(split: Any) -> None:
    """Raises UsageError if the first line of a csv file looks like an example instead of the column names."""
    names = split.column_names
    numbers = [name for name in names if _is_number(name)]
    if numbers and {*names} not in ({*map(str, range(len(names)))}, {*map(str, range(1, len(names) + 1))}):
        reason = f"{numbers[0]!r} is a number"
    else:
        held = (name for name in names if split.data.column(name).slice(0, 10_000).to_pylist().count(name) > 1)
        name = next(held, None)
        if name is None:
            return
        reason = f"{name!r} is also a value in its column"
    raise UsageError(
        f"the first line of a csv file must give the names of its columns, but it is {','.join(names)}, which looks "
        f"like an example: {reason}; add a line of names before it, such as text,label"
    )


def _is_number(name: str) -> bool:
    try:
        float(name)
    except ValueError:
        return False
    return True


def _explained(what: str, error: Exception) -> UsageError:
    cause = f" ({error.__cause__})" if error.__cause__ else ""
    message = f"data set '{NAME}:{what}': {str(error).strip()}{cause}"
    if isinstance(error, ConnectionError):
        code = f'import datasets; datasets.load_dataset({_arguments(what)}).save_to_disk("DIR")'
        message += (
            "; there is no file or folder of that name, and the hub cannot be reached. On a machine with network, "
            "write\n"
            f"  {shlex.join(['python', '-c', code])}\n"
            f"then copy DIR here and write --data.name {NAME}:DIR"
        )
    elif isinstance(error, FileNotFoundError):
        message += f"; wanted {NAME}:PATH, {NAME}:OWNER/NAME or {NAME}:OWNER/NAME/CONFIG"
    elif "onfig name is missing" in str(error):
        message += f"\nwrite --data.name {NAME}:{what}/CONFIG"
    return UsageError(message)


def _arguments(what: str) -> str:
    name, config = what.rsplit("/", 1) if what.count("/") > 1 else (what, "")
    # JSON strings are valid Python; their double quotes need no escaping inside the shell's single quotes.
    return ", ".join(json.dumps(text) for text in (name, config) if text)


@contextlib.contextmanager
def _without_progress_bars(datasets: Any) -> Iterator[None]:
    hidden = datasets.utils.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not hidden:
            datasets.enable_progress_bars()

"""Loads the splits of a Hugging Face data set `hf:...`: a file, a folder, or a name in the cache or on the hub."""

import contextlib
import csv
import json
import pathlib
import shlex
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mpjax.config.paths import expanded
from mpjax.data.sources import arrow
from mpjax.data.sources.column_names import require_names
from mpjax.data.sources.formats import FORMATS, KINDS, kind_of, way_to_read
from mpjax.errors import AbsentData, DataWarning, UsageError


NAME = "hf"
_TEXTS = ("string", "large_string", "string_view")
# The texts that pandas reads as a missing number.
_MISSING = ("", "NA", "N/A", "n/a", "#NA", "#N/A", "#N/A N/A", "<NA>", "NULL", "null", "None", "NaN", "nan", "-NaN")
_MISSING += ("-nan", "1.#IND", "-1.#IND", "1.#QNAN", "-1.#QNAN")
_AT_ONCE = 10_000  # lines of a csv or tsv file whose types pandas infers together, in `datasets`
_TABLES: Mapping[str, tuple[str, Mapping[str, Any]]] = {"csv": ("csv", {}), "tsv": ("csv", {"sep": "\t"})}
"""The formats whose first line may hold column names, with the name and settings of their reader in `datasets`."""


def load_splits(what: str, header: Sequence[str] = ()) -> dict[str, Any]:
    """Loads the splits of a data set as `datasets.Dataset`s by name, with the package `datasets` of Hugging Face.

    A data set without splits, such as a single file, is the split `train`. A name on the hub is downloaded, unless the
    local cache has it. Progress bars are disabled meanwhile.

    Args:
      what: `PATH` of a file or folder, `FORMAT:PATH`, or `NAME`, `OWNER/NAME` or `OWNER/NAME/CONFIG` on the hub. If the
        hub lacks `OWNER/NAME`, it is tried as `NAME/CONFIG`.
      header: the column names of csv or tsv files whose first line is an example. Empty: the first line has the names.

    Raises:
      UsageError: the package `datasets` is missing, the data set does not exist or cannot be read, `header` is given
        for other files than csv and tsv, or the column names are wrong (`require_names`).
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
            loaded: Any = _loaded(datasets, what, header)
        except UsageError:
            raise
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            raise _explained(what, error) from error
    return {str(k): v for k, v in loaded.items()} if isinstance(loaded, datasets.DatasetDict) else {"train": loaded}


def _loaded(datasets: Any, what: str, header: Sequence[str]) -> Any:
    kind, colon, rest = what.partition(":")
    if colon and kind in FORMATS:
        return _local(datasets, expanded(rest), kind, what, header)
    path = expanded(what)
    if path.exists() or what.startswith(("/", "~", ".")) or kind_of(path):
        return _local(datasets, path, "", what, header)
    _require_no_header(what, header)
    name, _, config = what.rpartition("/")
    if what.count("/") > 1:
        return datasets.load_dataset(name, config)
    try:
        return datasets.load_dataset(what)
    except datasets.exceptions.DatasetNotFoundError:
        if not name:
            raise
        return datasets.load_dataset(name, config)  # a legacy name without an owner, such as glue/sst2


def _local(datasets: Any, path: pathlib.Path, kind: str, what: str, header: Sequence[str]) -> Any:
    if not path.exists():
        raise UsageError(f"data set '{NAME}:{what}': nothing at {path}; wanted a file or folder")
    if path.is_dir():
        if header and not kind:  # `datasets` ignores `header` if it infers the format itself
            kind = next((KINDS[file.suffix] for file in path.rglob("*") if KINDS.get(file.suffix) in _TABLES), "")
        if kind not in _TABLES:
            _require_no_header(what, header)
        if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            return datasets.load_from_disk(str(path))
        if not kind:
            return _read(datasets, str(path), {}, header)
        return _read(datasets, *_TABLES.get(kind, (kind, {})), header, data_dir=str(path))
    kind = kind or kind_of(path)
    if not kind:
        raise UsageError(
            f"data set '{NAME}:{what}': {path.suffix or 'no extension'} is not a known format; wanted one of "
            f"{', '.join(KINDS)}; or {way_to_read(path)}"
        )
    kind = "tsv" if kind_of(path) == "tsv" and kind == "csv" else kind
    if kind not in _TABLES:
        _require_no_header(what, header)
    return _read(datasets, *_TABLES.get(kind, (kind, {})), header, data_files={"train": str(path)})


def _require_no_header(what: str, header: Sequence[str]) -> None:
    if header:
        raise UsageError(
            f"--data.header {' '.join(header)} is for csv and tsv files, which '{NAME}:{what}' is not; leave it out"
        )


def _read(datasets: Any, what: str, reading: Mapping[str, Any], header: Sequence[str], **where: Any) -> Any:
    """Loads files with `datasets.load_dataset`, and gives the columns of csv and tsv files the names `header`, if any.

    In csv and tsv files, an empty text, NA, None or 007 in a column of text stays a text, and an empty text, NA or None
    is a missing value in a column of numbers; the files may be loaded twice for that.

    Args:
      datasets: the module.
      what: a reader of `datasets`, such as `csv`, or the path of a data set.
      reading: the settings of the reader.
      header: the column names. Empty: the first line has the names.
      **where: the files, as arguments of `load_dataset`.

    Raises:
      UsageError: the column names of a csv or tsv file are wrong (`require_names`).
    """
    settings = {**reading, **({"header": None} if header else {}), **where}
    if settings.get("sep") == "\t":
        settings |= _quoting(datasets, what, settings)
    loaded = datasets.load_dataset(what, **settings)
    first = next(iter(loaded.values()))
    if first.info.builder_name != "csv":
        return loaded
    for split in loaded.values():
        require_names(split, header)
    names = list(first.features)
    texts = {name for name, feature in first.features.items() if getattr(feature, "dtype", "") in _TEXTS}
    in_parts = any(len(split) > _AT_ONCE for split in loaded.values())
    if any(split.data.column(name).null_count for split in loaded.values() for name in texts) or (texts and in_parts):
        # Load again now that the columns are known. Without _MISSING, a number column with gaps would become text.
        # pandas numbers the columns if there is no line of names. A part of a column of text may have numbers alone:
        # without `converters`, 007 would be 7 there.
        keys = {at if header else name: name in texts for at, name in enumerate(names)}
        gaps = {key: list(_MISSING) for key, is_text in keys.items() if not is_text}
        as_written = {key: str for key, is_text in keys.items() if is_text}
        loaded = datasets.load_dataset(what, keep_default_na=False, na_values=gaps, converters=as_written, **settings)
    return loaded.rename_columns(dict(zip(names, header, strict=True))) if header else loaded


def _quoting(datasets: Any, what: str, settings: Mapping[str, Any]) -> dict[str, int]:
    """Finds the setting `quoting` for a tsv file, as a dict; empty if its quotes are read as quotes.

    If quotes would join lines, or one is not closed, they are read as characters, and a DataWarning tells of it. The
    file is loaded to find this.
    """
    try:
        loaded = datasets.load_dataset(what, **settings)
        if not any(_joins_lines(split.data.column(name)) for split in loaded.values() for name in split.column_names):
            return {}
    except datasets.exceptions.DatasetGenerationError as error:
        if "EOF inside string" not in str(error.__cause__):
            raise
    text = "quotes of the tsv file are read as characters: as quotes, they would join lines to one text"
    warnings.warn(text, DataWarning, stacklevel=2)
    return {"quoting": csv.QUOTE_NONE}


def _joins_lines(column: Any) -> bool:
    """True if a text of the column has both a line break and a tab, so that quotes joined several lines of the file.

    False for a column that is not text.
    """
    if str(column.type) not in _TEXTS:
        return False
    broken = arrow.pc.and_kleene(arrow.pc.match_substring(column, "\n"), arrow.pc.match_substring(column, "\t"))
    return bool(arrow.pc.any(broken).as_py())


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
    return (AbsentData if isinstance(error, ConnectionError | FileNotFoundError) else UsageError)(message)


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

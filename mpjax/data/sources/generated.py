"""Writes tensorflow-datasets sets that need no download to disk, once and without output."""

import contextlib
import errno
import io
import pathlib

import tensorflow_datasets as tfds
from tensorflow_datasets.core.utils import tqdm_utils

from mpjax.errors import UsageError


def prepare(kind: type[tfds.core.GeneratorBasedBuilder], data_dir: pathlib.Path, config: str = "") -> None:
    """Writes the set of the builder class `kind` below `data_dir` as array_record files, unless it exists.

    An existing set is not checked; its reader reports any damage. Several processes may call it at once
    (`write_once`).

    Args:
      kind: the builder class.
      data_dir: the folder of prepared data sets.
      config: the name of the builder's config, which is part of the path; empty if it has none.

    Raises:
      UsageError: the folder of the set exists without a dataset_info.json, a parent folder is a file, or the disk is
        full.
      OSError, RuntimeError: see `write_once`.
    """
    folder = data_dir / kind.name / config / str(kind.VERSION)
    if (folder / "dataset_info.json").exists():
        return
    if folder.exists():
        raise UsageError(f"{folder} has lost its dataset_info.json; delete {folder}, which is written again")
    if file := next((path for path in folder.parents if path.is_file()), None):
        raise UsageError(f"{file} is a file; wanted a folder, to write {folder}; move it, or write --data.data_dir DIR")
    write_once(kind(data_dir=data_dir, file_format="array_record"))


def write_once(builder: tfds.core.DatasetBuilder) -> None:
    """Writes the files of `builder` without printing anything, unless they exist.

    Several processes may call it at once, and it may be killed: it writes to a temporary folder, and renames the folder
    when it is complete. If another process is first, its files are kept.

    Raises:
      UsageError: the disk is full.
      OSError, RuntimeError: another error of tensorflow-datasets.
    """
    if _complete(builder):
        return
    try:
        with _quiet():
            builder.download_and_prepare(download_config=tfds.download.DownloadConfig(try_download_gcs=False))
    except (OSError, RuntimeError) as error:
        # Another process renamed its identical copy into place first.
        if _complete(builder):
            return
        if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error):
            raise UsageError(
                f"no space is left to write {builder.name} to {builder.data_path}: free some, or set the environment "
                "variable MPJAX_CACHE to another folder"
            ) from error
        raise


def _complete(builder: tfds.core.DatasetBuilder) -> bool:
    return (builder.data_path / "dataset_info.json").exists()


@contextlib.contextmanager
def _quiet():
    """Context manager that disables the progress bars of tfds, and drops what is printed to stdout."""
    shown = tqdm_utils._active
    tfds.disable_progress_bar()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        tfds.display_progress_bar(shown)

"""Opens a folder of images whose texts are in a file `metadata.csv` or `metadata.jsonl` beside them."""

import pathlib
from collections.abc import Sequence

import numpy as np

from mpjax.config.schema import Data
from mpjax.data.images.headers import stored_image
from mpjax.data.sources.files_by_class import IMAGES, spread
from mpjax.data.sources.folder_examples import FolderExamples, paths_of
from mpjax.data.sources.metadata import FILE_NAME, NAMES, metadata_in, read_metadata, told_without_row
from mpjax.data.sources.own import Joined
from mpjax.data.table import Column, Table, Text, advice_on_splits, base_names, parts_of
from mpjax.errors import UsageError


def open_captions(root: pathlib.Path, set_name: str, config: Data) -> Table:
    """Opens `PATH/SPLIT/metadata.csv` (or .jsonl) with the images that it names, as Hugging Face datasets do.

    Each row has a `file_name`, and texts in the other columns. Without split folders, `PATH/metadata.csv` is one split,
    `train`. The examples of a split are ordered by a hash of their file names.

    Raises:
      UsageError: there is no such file, it is damaged, a row lacks a column that the first row has, a value is no text,
        or an image is missing.
    """
    wanted = list(dict.fromkeys(base_names(config.train_split) + base_names(config.test_split)))
    if metadata_in(root):
        folders = {"train": root}
    else:
        there = sorted(folder.name for folder in root.iterdir() if folder.is_dir() and metadata_in(folder))
        if not there:
            raise UsageError(
                f"data set '{set_name}': there is no {NAMES[0]} and no {NAMES[1]} in {root}, nor in its folders: "
                f"wanted one with the columns {FILE_NAME} and text"
            )
        if missing := [name for name in wanted if name not in there and name != "all"]:
            advice, repair = advice_on_splits(missing[0], there)
            raise UsageError(
                f"data set '{set_name}' has no split '{missing[0]}'; there are {', '.join(there)}; {advice}",
                repair=repair,
            )
        folders = {name: root / name for name in (there if "all" in wanted else wanted)}
    notes: list[str] = []
    splits = {name: _examples(folder, name, notes) for name, folder in folders.items()}
    names = next(iter(splits.values())).numbers
    for name, examples in splits.items():
        if lacking := names.keys() - examples.numbers.keys():
            raise UsageError(f"data set '{set_name}': split '{name}' has no column {sorted(lacking)[0]}")
    sizes = {name: len(examples) for name, examples in splits.items()}
    train, test = (parts_of(expression, sizes, set_name) for expression in (config.train_split, config.test_split))
    of_train, of_test = (paths_of(splits, parts, "image") for parts in (train, test))
    paths = of_train + of_test
    columns: dict[str, Column] = {"image": stored_image(len(paths), paths.__getitem__, "image")}
    columns |= {name: Text() for name in names}

    def open_columns(chosen: Sequence[str]) -> tuple[Joined, Joined]:
        parts = {name: examples.only(chosen) for name, examples in splits.items()}
        return Joined(parts, train, chosen), Joined(parts, test, chosen)

    return Table(set_name, columns, open_columns, notes=tuple(notes), places=of_test)


def _examples(folder: pathlib.Path, split: str, notes: list[str]) -> FolderExamples:
    """Reads the table of a split; `notes` get a sentence if images have no row in it."""
    file = metadata_in(folder)
    assert file is not None, "folders without such a file are left out before"
    rows = read_metadata(file)
    for number, row in enumerate(rows, start=1):
        if row.keys() != rows[0].keys():
            raise UsageError(f"{file}: row {number} has other columns of texts than the first: wanted the same in each")
    rows.sort(key=lambda row: spread(row[FILE_NAME]))
    paths = [str(folder / row[FILE_NAME]) for row in rows]
    if absent := [path for path in paths if not pathlib.Path(path).is_file()]:
        raise UsageError(f"{file}: there is no {absent[0]} ({len(absent)} of {len(rows)} images are missing)")
    notes += told_without_row(file, len(paths), IMAGES, split)
    texts = {name: np.asarray([row[name] for row in rows], object) for name in rows[0] if name != FILE_NAME}
    return FolderExamples({"image": paths}, texts)

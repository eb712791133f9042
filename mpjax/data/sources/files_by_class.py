"""Lists the files of a folder by split and class: one folder for each."""

import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Collection, Mapping

from mpjax.data.table import advice_on_splits
from mpjax.errors import UsageError


_LITTER = {"thumbs.db", "desktop.ini"}
_WHOLE = "train"  # the only split of a folder without split folders


@dataclasses.dataclass(frozen=True)
class FileKind:
    """The kind of files that are wanted.

    Attributes:
      name: their name, in messages.
      one: that of one of them, with an article.
      endings: the ends of their names, in lower case.
      others: names of other files that may be among them, which are skipped.
    """

    name: str
    one: str
    endings: tuple[str, ...]
    others: Collection[str] = ()


IMAGES = FileKind(
    "images",
    "an image",
    (
        *(".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".bmp", ".gif", ".tif", ".tiff"),
        *(".ppm", ".pgm", ".pbm", ".pfm"),
    ),
)


def split_folders(
    root: pathlib.Path, wanted: list[str], set_name: str, *, of_files: bool = False
) -> dict[str, pathlib.Path]:
    """Maps each split of the names `wanted` to its folder; the split `all` stands for all folders in `root`.

    If no folder named like a split has folders in it, `root` itself is the split `train`; with `of_files`, folders of
    splits need not have any. Raises UsageError if some splits have a folder and others have none.
    """
    there = _folders(root)
    # A class may also be called train, but it holds files, not folders.
    if not any(name in there and (of_files or _folders(root / name)) for name in wanted):
        return {_WHOLE: root}
    if missing := [name for name in wanted if name not in there and name != "all"]:
        advice, repair = advice_on_splits(missing[0], there)
        raise UsageError(
            f"data set '{set_name}' has no split '{missing[0]}': there is no folder {root / missing[0]}; there are "
            f"{', '.join(there)}; {advice}",
            repair=repair,
        )
    return {name: root / name for name in (there if "all" in wanted else wanted)}


def class_folders(
    folders: Mapping[str, pathlib.Path], set_name: str, kind: FileKind
) -> tuple[dict[str, tuple[list[str], list[int]]], tuple[str, ...]]:
    """Lists the files of every split with the number of their class, and the names of the classes.

    Files are ordered by a hash of their names; classes are the sorted names of their folders.

    Raises:
      UsageError: a split has a class that the first split lacks, or has no class, or a class has no files.
    """
    files = {split: _files_by_class(folder, set_name, kind) for split, folder in folders.items()}
    names = sorted({name for classes in files.values() for name in classes})
    first, *others = files
    for split in others:
        if unknown := sorted(files[split].keys() - files[first].keys()):
            raise UsageError(
                f"data set '{set_name}': split '{split}' has the class '{unknown[0]}', but '{first}' does not: it has "
                f"{', '.join(sorted(files[first])[:20])}; wanted the same class names in all splits"
            )
    numbers = {name: number for number, name in enumerate(names)}
    examples = {}
    for split, classes in files.items():
        pairs = [(path, numbers[name]) for name, paths in classes.items() for path in paths]
        pairs.sort(key=lambda pair: spread(os.path.relpath(pair[0], folders[split])))
        examples[split] = [path for path, _ in pairs], [number for _, number in pairs]
    return examples, tuple(names)


def _files_by_class(folder: pathlib.Path, set_name: str, kind: FileKind) -> dict[str, list[str]]:
    classes = _folders(folder)
    if not classes:
        raise UsageError(
            f"data set '{set_name}': {folder} has no folders; wanted one for each class, with its {kind.name} in it"
        )
    if kind.name == "images" and set(classes) == {"images", "masks"}:
        raise UsageError(
            f"data set '{set_name}': {folder} has images and their masks; wanted a folder for each class; for masks "
            "write --task segmentation",
            repair={"task": "segmentation"},
        )
    files = {name: files_in(folder / name, kind) for name in classes}
    for name, paths in files.items():
        if not paths:
            inside = _folders(folder / name)
            contents = f"only folders ({', '.join(inside[:5])})" if inside else "nothing"
            raise UsageError(
                f"data set '{set_name}': class '{name}' has no {kind.name}: {folder / name} holds {contents}; "
                f"remove it, put {kind.name} into it, or, if it is a split, write --data.train_split {name}"
            )
    return files


def files_in(folder: pathlib.Path, kind: FileKind) -> list[str]:
    """Lists the paths of the files of a kind in a folder, in no order. Skips subfolders, hidden files and litter.

    Raises:
      UsageError: any other file does not have an extension of the kind. The content of files is not read.
    """
    with os.scandir(folder) as entries:
        listing = list(entries)
    paths = []
    for entry in listing:
        if entry.name.startswith(".") or entry.name.lower() in _LITTER or entry.name in kind.others or entry.is_dir():
            continue
        if not entry.name.lower().endswith(kind.endings):
            raise UsageError(
                f"{entry.path}: not {kind.one} by its extension; wanted only {kind.name} in this folder "
                f"({', '.join(kind.endings)}); move the file elsewhere"
            )
        paths.append(entry.path)
    return paths


def _folders(folder: pathlib.Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def spread(name: str) -> bytes:
    """Hashes a file name to a sort key of 8 bytes: the order looks random and is the same on every machine."""
    return hashlib.blake2b(name.replace(os.sep, "/").encode(errors="surrogateescape"), digest_size=8).digest()

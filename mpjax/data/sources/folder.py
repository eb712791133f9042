"""Opens a folder of images as a data set: with one folder per class, or with a folder of images and one of masks."""

import os
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from mpjax.config.choices import TASKS, TaskName
from mpjax.config.paths import expanded
from mpjax.config.schema import Data
from mpjax.data.fields import Image, Label
from mpjax.data.images.headers import stored_image
from mpjax.data.sources.folder_examples import FolderExamples, spread
from mpjax.data.sources.own import Joined
from mpjax.data.table import Column, Table, advice_on_splits, base_names, parts_of
from mpjax.errors import UsageError


NAME = "folder"
_ENDINGS = (
    *(".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".bmp", ".gif", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pfm"),
)
_LITTER = {"thumbs.db", "desktop.ini"}
_WHOLE = "train"  # the only split of a folder without split folders


def open_folder(path: str, task: TaskName, config: Data) -> Table:
    """Opens a folder of images as a data set.

    Images to classify are `PATH/SPLIT/CLASS/*.png`. For segmentation, images are `PATH/SPLIT/images/*.jpg` and their
    masks are `PATH/SPLIT/masks/*.png` with the same names. Without split folders, PATH is one split, `train`, and the
    settings select parts of it: `train[:90%]`, `train[90%:]`. For
    images and texts, see `open_captions`. The examples of a split are ordered by a hash of their
    file names, so that each part is a random sample of all classes. Classes are numbered by their sorted folder names.
    File names are listed now, and the headers of a sample of images are read; pixels are read later.

    Raises:
      UsageError: the folder or split does not exist, the task needs text, a class is empty, a file is not an image, a
        split has a class that the first split lacks, or a mask or its image is missing.
    """
    set_name = f"{NAME}:{path}"
    root = expanded(path)
    if not root.is_dir():
        raise UsageError(f"data set '{set_name}': there is no folder {root}; wanted one with a folder for each class")
    if TASKS[task].fields and "image" not in TASKS[task].fields:
        raise UsageError(
            f"data set '{set_name}' holds images, but {task} needs text; write --data.name hf:PATH or another text set"
        )
    if task == "image_text":
        from mpjax.data.sources.captions import open_captions  # late, as few runs need it

        return open_captions(root, set_name, config)
    split_names = dict.fromkeys(base_names(config.train_split) + base_names(config.test_split))
    folders = _split_folders(root, list(split_names), set_name)
    if task == "segmentation":
        splits = {name: _pairs(folder) for name, folder in folders.items()}
        kinds: dict[str, Column] = {}
    else:
        splits, classes = _classes(folders, set_name)
        kinds = {"label": Label(len(classes), names=classes)}
    sizes = {name: len(examples) for name, examples in splits.items()}
    train, test = (parts_of(expression, sizes, set_name) for expression in (config.train_split, config.test_split))
    paths = [path for part in (*train, *test) for path in splits[part.split].files["image"][part.start : part.stop]]
    image = stored_image(len(paths), paths.__getitem__, "image")
    columns: dict[str, Column] = {"image": image, **kinds}
    if task == "segmentation":
        columns["mask"] = Image((*image.shape[:2], 1))

    def open_columns(names: Sequence[str]) -> tuple[Joined, Joined]:
        chosen = {name: examples.only(names) for name, examples in splits.items()}
        return Joined(chosen, train, names), Joined(chosen, test, names)

    return Table(set_name, columns, open_columns)


def _split_folders(root: pathlib.Path, wanted: list[str], set_name: str) -> dict[str, pathlib.Path]:
    """Maps each split of the names `wanted` to its folder; the split `all` stands for all folders in `root`.

    If no folder named like a split has folders in it, `root` itself is the split `train`. Raises UsageError if some
    splits have a folder and others have none.
    """
    there = _folders(root)
    # A class may also be called train, but it holds files, not folders.
    if not any(name in there and _folders(root / name) for name in wanted):
        return {_WHOLE: root}
    if missing := [name for name in wanted if name not in there and name != "all"]:
        advice, repair = advice_on_splits(missing[0], there)
        raise UsageError(
            f"data set '{set_name}' has no split '{missing[0]}': there is no folder {root / missing[0]}; there are "
            f"{', '.join(there)}; {advice}",
            repair=repair,
        )
    return {name: root / name for name in (there if "all" in wanted else wanted)}


def _classes(folders: Mapping[str, pathlib.Path], set_name: str) -> tuple[dict[str, FolderExamples], tuple[str, ...]]:
    """Lists the examples of every split, and the names of the classes: the sorted names of their folders.

    Examples are ordered by a hash of their file names; their labels are int32 indices into the names.

    Raises:
      UsageError: a split has a class that the first split lacks, or has no class, or a class has no images.
    """
    files = {split: _files_by_class(folder, set_name) for split, folder in folders.items()}
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
        labels = np.asarray([number for _, number in pairs], np.int32)
        examples[split] = FolderExamples({"image": [path for path, _ in pairs]}, {"label": labels})
    return examples, tuple(names)


def _folders(folder: pathlib.Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def _files_by_class(folder: pathlib.Path, set_name: str) -> dict[str, list[str]]:
    classes = _folders(folder)
    if not classes:
        raise UsageError(
            f"data set '{set_name}': {folder} has no folders; wanted one for each class, with its images in it"
        )
    if set(classes) == {"images", "masks"}:
        raise UsageError(
            f"data set '{set_name}': {folder} has images and their masks; wanted a folder for each class; for masks "
            "write --task segmentation",
            repair={"task": "segmentation"},
        )
    files = {name: _images(folder / name) for name in classes}
    for name, paths in files.items():
        if not paths:
            inside = _folders(folder / name)
            contents = f"only folders ({', '.join(inside[:5])})" if inside else "nothing"
            raise UsageError(
                f"data set '{set_name}': class '{name}' has no images: {folder / name} holds {contents}; remove it, "
                f"put images into it, or, if it is a split, write --data.train_split {name}"
            )
    return files


def _pairs(folder: pathlib.Path) -> FolderExamples:
    """Pairs the files of `folder/images` and `folder/masks` by name, whatever their extensions.

    The names of all masks may have a common ending, such as `_mask`. Examples are ordered by a hash of their names.

    Raises:
      UsageError: a mask or an image has no partner, two files differ only in their extension, a file is not an image,
        or a folder is missing.
    """
    images, masks = (_by_stem(folder / kind) for kind in ("images", "masks"))
    masks = _without_ending(masks, images)
    for some, others, kind, other in ((images, masks, "image", "mask"), (masks, images, "mask", "image")):
        if alone := sorted(some.keys() - others.keys()):
            raise UsageError(
                f"{some[alone[0]]}: {kind} without {other}: wanted {folder / (other + 's') / alone[0]}.png or another "
                f"extension ({len(alone)} such files in {folder})"
            )
    stems = sorted(images, key=spread)
    return FolderExamples({"image": [images[stem] for stem in stems], "mask": [masks[stem] for stem in stems]}, {})


def _without_ending(masks: dict[str, str], images: Mapping[str, str]) -> dict[str, str]:
    """Removes the common ending of the names of all masks, such as `_mask`, if the rest are the names of the images.

    Otherwise `masks`, which maps names to paths, is returned unchanged.
    """
    some = min(masks, default="")
    for ending in (some[at:] for at in range(1, len(some))):
        short = {name.removesuffix(ending): path for name, path in masks.items() if name.endswith(ending)}
        if len(short) == len(masks) and short.keys() == images.keys():
            return short
    return masks


def _by_stem(folder: pathlib.Path) -> dict[str, str]:
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}; segmentation needs PATH/SPLIT/images and PATH/SPLIT/masks")
    files: dict[str, str] = {}
    for path in _images(folder):
        stem = pathlib.PurePath(path).stem
        if stem in files:
            raise UsageError(f"{files[stem]} and {path}: wanted one file of that name; remove or rename one of them")
        files[stem] = path
    return files


def _images(folder: pathlib.Path) -> list[str]:
    """Lists the paths of the images in a folder, in no order. Skips subfolders, hidden files and files in `_LITTER`.

    Raises:
      UsageError: any other file does not have the extension of an image. The content of files is not read.
    """
    with os.scandir(folder) as entries:
        listing = list(entries)
    paths = []
    for entry in listing:
        if entry.name.startswith(".") or entry.name.lower() in _LITTER or entry.is_dir():
            continue
        if not entry.name.lower().endswith(_ENDINGS):
            raise UsageError(
                f"{entry.path}: not an image by its extension; wanted only images in this folder "
                f"({', '.join(_ENDINGS)}); move the file elsewhere"
            )
        paths.append(entry.path)
    return paths

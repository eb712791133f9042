"""Opens a folder of images as a data set: with one folder per class, or with a folder of images and one of masks."""

import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from mpjax.config.paths import expanded
from mpjax.config.schema import Data
from mpjax.config.tasks import TASKS, TaskName
from mpjax.data.fields import Image, Label
from mpjax.data.images.headers import stored_image
from mpjax.data.sources.files_by_class import IMAGES, class_folders, files_in, split_folders, spread
from mpjax.data.sources.folder_examples import FolderExamples, paths_of
from mpjax.data.sources.own import Joined
from mpjax.data.table import Column, Table, base_names, parts_of
from mpjax.errors import AbsentData, UsageError


NAME = "folder"


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
        raise AbsentData(
            f"data set '{set_name}': there is no folder {root.absolute()}; wanted one with a folder for each class"
        )
    if TASKS[task].columns and "image" not in TASKS[task].columns:
        raise UsageError(
            f"data set '{set_name}' holds images, but {task} needs text; write --data.name hf:PATH or another text set"
        )
    if task == "image_text":
        from mpjax.data.sources.captions import open_captions  # late, as few runs need it

        return open_captions(root, set_name, config)
    split_names = dict.fromkeys(base_names(config.train_split) + base_names(config.test_split))
    folders = split_folders(root, list(split_names), set_name)
    if task == "segmentation":
        splits = {name: _pairs(folder) for name, folder in folders.items()}
        kinds: dict[str, Column] = {}
    else:
        found, classes = class_folders(folders, set_name, IMAGES)
        splits = {
            name: FolderExamples({"image": paths}, {"label": np.asarray(numbers, np.int32)})
            for name, (paths, numbers) in found.items()
        }
        kinds = {"label": Label(len(classes), names=classes)}
    sizes = {name: len(examples) for name, examples in splits.items()}
    train, test = (parts_of(expression, sizes, set_name) for expression in (config.train_split, config.test_split))
    of_train, of_test = (paths_of(splits, parts, "image") for parts in (train, test))
    paths = of_train + of_test
    image = stored_image(len(paths), paths.__getitem__, "image")
    columns: dict[str, Column] = {"image": image, **kinds}
    if task == "segmentation":
        columns["mask"] = Image((*image.shape[:2], 1))

    def open_columns(names: Sequence[str]) -> tuple[Joined, Joined]:
        chosen = {name: examples.only(names) for name, examples in splits.items()}
        return Joined(chosen, train, names), Joined(chosen, test, names)

    return Table(set_name, columns, open_columns, places=of_test)


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
        raise UsageError(
            f"there is no folder {folder.absolute()}; segmentation needs PATH/SPLIT/images and PATH/SPLIT/masks"
        )
    files: dict[str, str] = {}
    for path in files_in(folder, IMAGES):
        stem = pathlib.PurePath(path).stem
        if stem in files:
            raise UsageError(f"{files[stem]} and {path}: wanted one file of that name; remove or rename one of them")
        files[stem] = path
    return files

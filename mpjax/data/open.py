"""Opens a data set by name as the examples of a task."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpjax.config.choices import NPZ, TABULAR
from mpjax.config.paths import expanded
from mpjax.config.schema import Data
from mpjax.config.tasks import OF_NUMBERS, OF_ROWS, OF_SOUNDS, TASKS, TaskName
from mpjax.config.unread import require_read, written
from mpjax.config.user_code import names_code
from mpjax.data.examples import Example, MappedExamples, Portion, Source, renamed
from mpjax.data.fields import IGNORED_LABEL, Field, Fields, Image, Label, Mask, Tokens
from mpjax.data.image_range import in_range
from mpjax.data.images.masks import mask_values, unknown_classes, with_decoded_masks
from mpjax.data.mixture import mixed, named
from mpjax.data.own_task import all_columns
from mpjax.data.sources import synthetic
from mpjax.data.sources.own import open_own
from mpjax.data.table import Column, Other, Table, Text, choose_columns, could_be
from mpjax.data.user_function import PreprocessedExamples, load_preprocess, shape_after
from mpjax.errors import UsageError


if TYPE_CHECKING:  # only tables, regressions and several labels have one
    from mpjax.data.encoding import Encoding


def as_task(table: Table, task: TaskName, config: Data, encoding: "Encoding | None" = None) -> Source:
    """Opens a stored data set as the `Source` of a task, with the fields that the task needs.

    It chooses a column for each field, applies `config.preprocess` and numbers the classes; with a preprocess function,
    that function numbers them. For a text task, all texts are tokenized now, and the tokens are held in memory. For the
    task `own`, every column is a field (`all_columns`). For `instructions` and `preference`, conversations are
    tokenized (`conversations`, `preferences`), for `embedding` pairs of texts (`text_pairs`), for
    `text_to_text` sources and targets (`sources_and_targets`); for `image_text`, texts are tokenized when they are read
    (`images_and_texts`). For `diffusion`, images may have no label. A sample of the masks is read to find their values.
    The numbers of a regression are standardised by the statistics of the `encoding`, or else by those of the training
    split, whose numbers are all read now (`with_targets`).

    Raises:
      UsageError: the task learns from sounds, a field has no column, a column does not fit its field, or the data set
        needs a setting that is missing, such as the number of classes.
    """
    if task == "own":
        return all_columns(table, config)
    if task in OF_SOUNDS:
        raise UsageError(
            f"data set '{table.name}' with --task {task}: wanted a folder of wav or flac files, --data.name "
            "folder:PATH, or code that returns an mpjax.data.Source with a field `sound`"
        )
    if task == "instructions":
        from mpjax.data.text.instructions import conversations  # late, as in _table

        return conversations(table, config)
    if task == "preference":
        from mpjax.data.text.answer_pairs import preferences  # late, as in _table

        return preferences(table, config)
    if task == "embedding":
        from mpjax.data.text.pairs import text_pairs  # late, as in _table

        return text_pairs(table, config)
    if task == "text_to_text":
        from mpjax.data.text.target_texts import sources_and_targets  # late, as in _table

        return sources_and_targets(table, config)
    if config.text_template and ("text" in TASKS[task].columns or task in OF_NUMBERS):
        from mpjax.data.text.template import with_joined_text  # late, as in _table

        table = with_joined_text(table, config.text_template)
    if task in OF_NUMBERS:
        from mpjax.data.target_columns import with_targets  # late, as in _table

        return with_targets(table, task, config, encoding)
    if task == "image_text":
        from mpjax.data.image_texts import images_and_texts  # late, as in _table

        return images_and_texts(table, config)
    function = load_preprocess(config.preprocess) if config.preprocess else None
    columns = choose_columns(table, _fields_of(task, table, config), config)
    # A preprocess function receives the stored values and may number the classes itself.
    if "label" in columns and not function:
        _require_scalars(table, columns["label"])
    if "label" in columns and table.labelled and not function:
        table = table.labelled(columns["label"])
    chosen = {field: table.columns[column] for field, column in columns.items()}
    images, notes = in_range({name: chosen[name] for name in chosen if name == "image"}, config, table.name)
    chosen |= images
    rename = functools.partial(renamed, columns)
    train, test = (MappedExamples(split, rename) for split in table.open(tuple(dict.fromkeys(columns.values()))))
    stored = None if function else train
    if "mask" in chosen:
        decode = functools.partial(with_decoded_masks, ("mask",))
        train, test = (MappedExamples(split, decode) for split in (train, test))
    origins = {field: f"column '{column}'" if column != field else "" for field, column in columns.items()}
    if function:
        train, test = (PreprocessedExamples(split, function, str(config.preprocess), chosen) for split in (train, test))
        chosen = _after(train, chosen)
        origins = {field: f"column '{column}' after {config.preprocess}" for field, column in columns.items()}
    if config.ignore_index and "label" in chosen:
        train, test = (MappedExamples(split, with_ignored(config.ignore_index)) for split in (train, test))
    if "text" in chosen:
        from mpjax.data.text.blocks import tokenized  # late, as in _table

        predicted = ("label", _field("label", chosen, table.name, config, origins)) if "label" in chosen else None
        return tokenized(table.name, train, test, config, predicted=predicted, origin=origins["text"])
    if "mask" in chosen and not (config.stated_classes or getattr(chosen["mask"], "num_classes", 0)):
        raise unknown_classes(train, config, table.name, origins["mask"], stored)
    fields = {name: _field(name, chosen, table.name, config, origins) for name in chosen}
    if isinstance(mask := fields.get("mask"), Mask):
        values = mask_values(train, mask.num_classes, config, table.name, stored)
        train, test = (MappedExamples(split, values.with_class_numbers) for split in (train, test))
        fields["mask"] = dataclasses.replace(mask, values=values.classes)
    return Source(table.name, fields, train, test, notes=notes)


def _fields_of(task: TaskName, table: Table, config: Data) -> tuple[str, ...]:
    """The fields for which a task wants columns. A diffusion has a label if the set has a column that could be one."""
    labelled = task == "diffusion" and ("label" in config.columns or could_be("label", table))
    return (*TASKS[task].columns, "label") if labelled else TASKS[task].columns


def _require_scalars(table: Table, name: str) -> None:
    """Raises UsageError if the label column `name` holds more than a scalar per example: an image, a mask or a list."""
    column = table.columns[name]
    if isinstance(column, (Mask, Image)) or (isinstance(column, Other) and column.rank):
        alone = isinstance(column, Other) and column.described.endswith("[1]")  # whose argmax would always be 0
        advice = (
            f"store {name}[:, 0], whole numbers as integers"
            if alone
            else "for one-hot labels write --data.num_classes N --data.preprocess FILE.py:FUNCTION with\n"
            "  def FUNCTION(example): return {**example, 'label': np.argmax(example['label'])}"
        )
        raise UsageError(
            f"data set '{table.name}': label (column '{name}'): {column}; wanted one class number per example; {advice}"
        )


def _after(train: PreprocessedExamples, chosen: Mapping[str, Column]) -> dict[str, Column]:
    """Copies `chosen`, with the shape of the images after the preprocess function, which runs on some examples.

    The image column stays as it is if the function returns no images (`shape_after`).
    """
    shape = shape_after(train, "image") if "image" in chosen else None
    return {**chosen, "image": Image(shape)} if shape else dict(chosen)


def _field(name: str, chosen: Mapping[str, Column], set_name: str, config: Data, origins: Mapping[str, str]) -> Field:
    """Builds the field `name` (`image`, `label` or `mask`) of its column `chosen[name]`.

    The number of classes in `config` overrides the number that the column has. A label keeps the class names of its
    column, and further classes are called by their numbers, unless there are fewer classes or a preprocess function.

    Raises:
      UsageError: the image column holds no images, or the number of classes is not known.
    """
    column, origin = chosen[name], origins[name]
    if name == "image":
        if not isinstance(column, Image):
            raise UsageError(
                f"data set '{set_name}': image{f' ({origin})' if origin else ''}: {column}; wanted images [height, "
                "width, channels]; write --data.preprocess FILE.py:FUNCTION with a function that returns an image"
            )
        return Image(column.shape, depth=column.depth, origin=origin)
    known: Any = getattr(column, "num_classes", 0)
    num_classes = (config.stated_classes if name == "mask" else config.num_classes) or known
    if not num_classes:
        besides = _own_numbers(name, column, config)
        raise UsageError(
            f"data set '{set_name}' does not say how many classes its {name} has "
            f"({f'{origin}: ' if origin else ''}{column}); write --data.num_classes N{besides}"
        )
    if name == "mask":
        height, width, _ = image.shape if isinstance(image := chosen["image"], Image) else (None, None, 1)
        return Mask((height, width), num_classes, bool(config.ignore_index), origin=origin)
    # With --data.preprocess a number may mean another class than the stored one.
    names = () if config.preprocess or num_classes < known else getattr(column, "names", ())
    if names and num_classes > known:  # of the sets of a mixture, another may name the others
        names = () if config.mix else (*names, *map(str, range(known, num_classes)))
    return Label(num_classes, origin=origin, names=names, ignores=bool(config.ignore_index))


def _own_numbers(name: str, column: Column, config: Data) -> str:
    """Formats advice to number the classes in the preprocess function. Empty without one, or if `column` is no text."""
    if not (config.preprocess and isinstance(column, Text)):
        return ""
    return (
        f", and let {config.preprocess} return the class number itself, an integer from 0, as '{name}': it receives "
        "the text, because mpjax does not number classes when --data.preprocess is set"
    )


_NOT_OF_SOURCES = (
    "columns",
    "preprocess",
    "text_template",
    "range",
    "mask_values",
    "ignore_index",
)


def open_source(
    config: Data, data_dir: pathlib.Path, task: TaskName = "classification", encoding: "Encoding | None" = None
) -> Source:
    """Opens the data set `config.name`, mixed with the sets of `config.mix`, with the fields of the task.

    Only the first set supplies test examples; the sets of the mixture need no test split. Examples are read when they
    are needed, except texts, which are tokenized into memory.

    Args:
      config: `name` is `digits`, `digits_canvas` or `docstrings` (written below `data_dir` on first use),
        `synthetic:HxWxC:CLASSES` (generated), `folder:PATH` (images), `FILE.npz` (arrays), `hf:PATH` or `hf:NAME`
        (Hugging Face datasets), `webdataset:PATH` (tar files), `tabular:PATH` (rows of csv, tsv and parquet files),
        `FILE.py:NAME` or `package.module:NAME` (a function of the user's, which is called), or a tensorflow-datasets
        set prepared below `data_dir`: `name`, `name/config`, either with `/version`.
      data_dir: the folder of prepared data sets.
      task: the task, which determines the fields of an example.
      encoding: the `encoding` of the source of a stored run, by which rows and targets are read again; None: it is
        found from the training split.

    Raises:
      UsageError: the set, split, image or label does not exist, reading the set needs TensorFlow, or the sets to mix
        do not agree; the message lists what exists and explains how to prepare a missing set.
    """
    if not config.mix:
        return _opened(config, data_dir, task, encoding)
    with named(str(config.name), config):
        first = _opened(config, data_dir, task)
    # Only the first set is evaluated on, so the others need no test split.
    alone = dataclasses.replace(config, test_split=config.train_split, mix={})
    others = []
    for name, fraction in config.mix.items():
        with named(name, config):
            others.append(Portion(_opened(dataclasses.replace(alone, name=name), data_dir, task), fraction))
    return mixed(first, others, config)


def _opened(config: Data, data_dir: pathlib.Path, task: TaskName, encoding: "Encoding | None" = None) -> Source:
    source = _as_named(config, data_dir, task, encoding)
    require_read(config, _kinds(source.fields), str(config.name))
    if task != "diffusion":
        return source
    from mpjax.data.unit_images import with_unit_images  # late, as in _table

    return with_unit_images(source)


def _kinds(fields: Fields) -> set[str]:
    """The kinds of data, as `require_read` names them, that the fields of an example are made of."""
    of_types = {Image: {"images"}, Mask: {"images", "masks", "classes"}, Label: {"classes"}, Tokens: {"texts"}}
    kinds = {kind for x in fields.values() for of, names in of_types.items() if isinstance(x, of) for kind in names}
    return kinds | {"a field image"} if "image" in fields else kinds


def _as_named(config: Data, data_dir: pathlib.Path, task: TaskName, encoding: "Encoding | None") -> Source:
    if str(config.name).partition(":")[0] == synthetic.NAME:
        if task not in ("classification", "diffusion", "own"):
            raise UsageError(
                f"data set '{config.name}' has only images and labels: it supports classification and diffusion, not "
                f"{task}"
            )
        for flag in written(config, ("preprocess", "columns", "num_classes", "ignore_index", "range")):
            raise UsageError(f"data set '{config.name}': its name sets shapes and classes; leave out {flag}")
        # Two distinct batches are enough to try a configuration.
        return _of_two_splits(synthetic.parse_synthetic(str(config.name), size=2 * config.batch_size), config)
    if str(config.name).startswith(TABULAR):
        from mpjax.data.sources.tabular import open_tabular  # late, as in _table

        return open_tabular(str(config.name).removeprefix(TABULAR), task, config, encoding)
    if task in OF_SOUNDS and not names_code(config.name):
        from mpjax.data.audio.folders import open_sounds  # late, as in _table

        return open_sounds(config, task)
    table = open_own(config) if names_code(config.name) else _table(config, data_dir, task)
    if not isinstance(table, Source):
        source = as_task(table, task, config, encoding)
        return dataclasses.replace(source, notes=(*table.notes, *source.notes), places=table.places)
    for flag in written(config, _NOT_OF_SOURCES):
        raise UsageError(
            f"{flag}: --data.name {config.name} returns a Source, whose examples are final; leave it out, and do there "
            "what it says, or return arrays"
        )
    for name, field in table.fields.items():
        if config.num_classes not in (0, known := getattr(field, "num_classes", config.num_classes)):
            raise UsageError(
                f"--data.num_classes {config.num_classes}: --data.name {config.name} returns a Source, whose {name} "
                f"has {known} classes; write one number in both"
            )
    if isinstance(tokens := table.fields.get("tokens"), Tokens):
        length = tokens.length - ("length" not in table.fields)  # a row of a language model has one token more
        if config.length not in (Data().length, length):
            raise UsageError(
                f"--data.length {config.length}: --data.name {config.name} returns a Source, whose rows have {length} "
                "tokens; write one number in both"
            )
    if config.documents == "apart" and getattr(table.fields.get("tokens"), "document_end", None) is None:
        raise UsageError(
            f"--data.documents apart: --data.name {config.name} returns a Source, whose rows are final, and its field "
            "`tokens` does not say which token begins a document; write Tokens(..., document_end=NUMBER)"
        )
    return _of_two_splits(table, config)


def _of_two_splits(source: Source, config: Data) -> Source:
    """Chooses the test examples of a set whose splits are `train` and `test` alone.

    Raises:
      UsageError: the settings have another split.
    """
    if config.train_split != "train" or config.test_split not in ("train", "test"):
        (flag, *_) = written(config, ("train_split", "test_split"))
        raise UsageError(
            f"{flag}: data set '{config.name}' has the splits train and test alone; write --data.train_split train "
            "--data.test_split test"
        )
    return source if config.test_split == "test" else dataclasses.replace(source, test=source.train, places=())


def _table(config: Data, data_dir: pathlib.Path, task: TaskName) -> Table:
    # A new kind of data set gets a branch here. Imported late, because each library takes seconds to import.
    name = str(config.name)
    kind, _, where = name.partition(":")
    if kind == "folder":
        from mpjax.data.sources.folder import open_folder

        return open_folder(where, task, config)
    if kind == "hf":
        from mpjax.data.sources.huggingface import open_huggingface

        return open_huggingface(where, config)
    if kind == "webdataset":
        from mpjax.data.sources.webdataset import open_webdataset

        return open_webdataset(where, config)
    if name.lower().endswith(NPZ):
        from mpjax.data.sources.npz import open_npz

        return open_npz(name, task, config)
    if task in OF_ROWS and name.lower().endswith((".csv", ".tsv", ".parquet")) and expanded(name).exists():
        raise UsageError(
            f"data set '{name}' is not a name of tensorflow-datasets, but there is a file {name}; write --data.name "
            f"{TABULAR}{name}",
            repair={"data.name": f"{TABULAR}{name}"},
        )
    from mpjax.data.sources.tfds import open_prepared

    return open_prepared(dataclasses.replace(config, name=_written(name, data_dir)), data_dir)


def _written(name: str, data_dir: pathlib.Path) -> str:
    """Writes `digits`, `digits_canvas` or `docstrings` below `data_dir` if absent, and returns the name to open it by.

    The name of `docstrings` gets the version of Python as its config. Of any other set nothing is written, and its name
    is returned unchanged.
    """
    if name == "digits":
        from mpjax.data.sources.digits import prepare_digits

        prepare_digits(data_dir)
    elif name == "digits_canvas":
        from mpjax.data.sources.digits import prepare_digits_canvas

        prepare_digits_canvas(data_dir)
    elif name == "docstrings":
        from mpjax.data.sources.docstrings import prepare_docstrings

        return prepare_docstrings(data_dir)
    return name


def with_ignored(values: Sequence[int]) -> Callable[[Example], Example]:
    """Builds a function that replaces the `label` of an example by `IGNORED_LABEL` (-1) if it is one of `values`.

    Any other integer label is kept, as an int. A label of -1 that is not in `values` raises UsageError, because it
    would be taken for ignored. An example whose label is missing, not an integer or not a scalar is returned unchanged;
    a later check of the fields reports it.
    """

    def marked(example: Example) -> Example:
        label = example.get("label")
        if label is None or np.ndim(label) or np.asarray(label).dtype.kind not in "iu":
            return example  # the check of fields reports it
        if int(label) in values:
            return {**example, "label": IGNORED_LABEL}
        if int(label) == IGNORED_LABEL:
            raise UsageError(
                f"label: {IGNORED_LABEL} is outside the classes, and not among --data.ignore_index "
                f"{' '.join(map(str, values))}; add it there, or drop the example"
            )
        return {**example, "label": int(label)}  # an int like IGNORED_LABEL, for one dtype per batch

    return marked

"""Settings of the data that nothing would read: of images without images, of texts without texts, and so on.

A setting that does nothing is an error: the person who wrote it expects it to change the run.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from mpjax.config.choices import TABULAR
from mpjax.config.schema import Config, Data
from mpjax.config.setting_types import words
from mpjax.config.tasks import OF_NUMBERS, OF_SOUNDS, TASKS, WITH_CLASSES, WITHOUT_TEXTS
from mpjax.errors import UsageError


READ_BY: Mapping[str, tuple[str, ...]] = {
    "images": ("image_size", "range"),
    "a field image": (
        "mean",
        "std",
        "crop_padding",
        "crop_edges",
        "flip",
        "alternate_flips",
        "random_resized_crop",
        "randaugment_ops",
        "randaugment_magnitude",
        "random_erasing",
        "mixup",
        "cutmix",
    ),
    "texts": ("length",),
    "masks": ("mask_values",),
    "classes": ("num_classes",),
    "tables": ("drop", "categories", "missing", "decimal", "rows"),
}
"""The settings that only one kind of data reads."""

_NOT_OF_TABLES = ("columns", "ignore_index", "preprocess", "mix")


def unread_by_task(config: Config) -> Iterator[str]:
    """Yields a message for each setting of the data that the task, or a table, does not read.

    What the examples of `own`, `regression` and `multilabel` are made of is known only when the data are open:
    `require_read`.
    """
    data, task = config.data, config.task
    if tabular := str(data.name).startswith(TABULAR):
        kinds, without = {"tables"}, f"--data.name {data.name}"
    else:
        kinds, without = _kinds(config), f"--task {task}"
    for kind, flag in _unread(data, kinds):
        if kind == "tables":
            yield f"{flag} is for tables, as in --data.name {TABULAR}FILE.csv, not for {data.name}; leave it out"
        else:
            yield f"{flag} is for {kind}, which {without} does not have: leave it out"
    for flag in written(data, _NOT_OF_TABLES if tabular else ()):
        if flag.startswith("--data.columns"):
            yield f"{flag}: the columns of a table are inputs but for --data.targets and --data.drop; write these"
        else:
            yield f"{flag}: --data.name {data.name} is a table, which has no such setting; leave it out"
    if data.text_template and "text" not in TASKS[task].columns and (tabular or task not in OF_NUMBERS):
        yield f"--data.text_template joins texts, which --task {task} does not read: leave it out"
    if data.tokenizer != "bytes" and (task in WITHOUT_TEXTS or (tabular and data.tokenizer != config.model.folder)):
        yield f"--data.tokenizer {data.tokenizer} is for texts, which {without} does not have: leave it out"
    if data.documents != "joined" and task != "language_modeling":
        yield (
            f"--data.documents {data.documents} is for language_modeling, whose rows hold several documents, not for "
            f"--task {task}: leave it out"
        )
    if data.language and task != "transcription":
        yield f"--data.language {data.language} is for --task transcription: leave it out"
    if data.features != "auto" and task not in OF_SOUNDS:
        yield f"--data.features {data.features} is for {' and '.join(OF_SOUNDS)}: leave it out"
    if data.targets and not config.is_encoded:
        yield (
            f"--data.targets {words(data.targets)} is for tables, --task regression and --task multilabel; for the "
            f"label of another set write --data.columns label {data.targets[0]}"
        )


def _kinds(config: Config) -> set[str]:
    """The kinds of data, of `READ_BY`, that the examples of a task may have."""
    task = config.task
    if task == "own" or task in OF_NUMBERS:
        return READ_BY.keys() - {"tables"}
    kind = TASKS[task]
    fields = {*kind.inputs, *kind.targets}
    present = {
        "images": "image" in fields,
        "a field image": "image" in fields,
        "texts": task not in WITHOUT_TEXTS,
        "masks": "mask" in fields,
        "classes": task == "diffusion" or (task in WITH_CLASSES and task not in OF_SOUNDS),
    }
    return {name for name, there in present.items() if there}


def require_read(data: Data, kinds: Collection[str], name: str) -> None:
    """Raises UsageError if a setting is for images, texts, masks or classes, and the open data have none of them.

    Args:
      data: the settings.
      kinds: the kinds of data, of `READ_BY`, that the examples have.
      name: the data set, for the message.
    """
    unread = [*_unread(data, {*kinds, "tables"})]
    if "texts" not in kinds and data.tokenizer == "words":  # a folder may be that of the model, which no one wrote
        unread.append(("texts", "--data.tokenizer words"))
    for kind, flag in unread:
        raise UsageError(f"{flag} is for {kind}, which the examples of '{name}' do not have: leave it out")


def _unread(data: Data, kinds: Collection[str]) -> Iterator[tuple[str, str]]:
    for kind, names in READ_BY.items():
        if kind not in kinds:
            yield from ((kind, flag) for flag in written(data, names))


def written(data: Data, names: Iterable[str]) -> Iterator[str]:
    """Yields the settings of `names` that are not at their default, as flags with their values.

    >>> list(written(Data(mean=(0.5, 0.4), flip=True), ["mean", "std", "flip"]))
    ['--data.mean 0.5 0.4', '--data.flip']
    """
    usual = Data()
    for name in names:
        if (value := getattr(data, name)) != getattr(usual, name) and not (name == "crop_padding" and value == 0):
            yield f"--data.{name}" if value is True else f"--data.{name} {as_words(value)}"


def as_words(value: Any) -> str:
    """Formats a value as it is typed on a command line, without quotes.

    >>> as_words({"text": "title"})
    'text title'
    """
    if isinstance(value, Mapping):
        return words([word for pair in value.items() for word in pair])
    return words(value) if isinstance(value, tuple) else str(value)

"""Finds the fields of a batch (shapes, classes, vocabulary) without reading the data, if the data set is known."""

import dataclasses
import pathlib
from collections.abc import Mapping

from mpjax.config import schema
from mpjax.config.tasks import OF_NUMBERS, TASKS, TaskName
from mpjax.data.example_reader import batch_fields
from mpjax.data.examples import NO_EXAMPLES, Source
from mpjax.data.fields import Fields, Image, Label, Length, Mask, Tokens
from mpjax.data.open import open_source
from mpjax.data.text.plain_tokenizers import BytesTokenizer, WordsTokenizer
from mpjax.data.text.tokenizers import load_tokenizer
from mpjax.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Known:
    """A known data set.

    Attributes:
      classes: number of classes; 0 for unlabelled text.
      image: the shape of the images [H, W, C], where H and W are None if they vary; None for text.
    """

    classes: int
    image: tuple[int | None, int | None, int] | None = None


_VARY = (None, None, 3)

KNOWN: Mapping[str, Known] = {
    "digits": Known(10, (8, 8, 1)),
    "digits_canvas": Known(11, (32, 32, 1)),
    "docstrings": Known(10),
    "mnist": Known(10, (28, 28, 1)),
    "fashion_mnist": Known(10, (28, 28, 1)),
    "cifar10": Known(10, (32, 32, 3)),
    "cifar100": Known(100, (32, 32, 3)),
    "svhn_cropped": Known(10, (32, 32, 3)),
    "stl10": Known(10, (96, 96, 3)),
    "imagenet2012": Known(1000, _VARY),
    "imagenet_v2": Known(1000, _VARY),
    "imagenette": Known(10, _VARY),
    "food101": Known(101, _VARY),
    "oxford_flowers102": Known(102, _VARY),
    "oxford_iiit_pet": Known(37, _VARY),
    "stanford_dogs": Known(120, _VARY),
    "eurosat": Known(10, (64, 64, 3)),
    "glue/sst2": Known(2),
    "glue/cola": Known(2),
    "imdb_reviews": Known(2),
    "ag_news_subset": Known(4),
    "lm1b": Known(0),
    "wiki40b": Known(0),
    "hf:HuggingFaceFW/fineweb/sample-10BT": Known(0),
    "hf:HuggingFaceFW/fineweb-edu/sample-10BT": Known(0),
    "hf:Skylion007/openwebtext": Known(0),
}
"""Known data sets by their `--data.name`."""

VOCABULARIES: Mapping[str, int] = {
    "bytes": BytesTokenizer.vocabulary,
    "words": WordsTokenizer.vocabulary,
    "google-bert/bert-base-uncased": 30_522,
    "google-bert/bert-base-cased": 28_996,
    "FacebookAI/roberta-base": 50_265,
    "openai-community/gpt2": 50_257,
}
"""Vocabulary sizes of known tokenizers, by their name in `--data.tokenizer`."""


def planned_fields(task: TaskName, config: schema.Data, data_dir: pathlib.Path, *, vocabulary: int = 0) -> Fields:
    """Finds the fields of the batches of a run, from the table of known data sets or from the data set itself.

    The data set is opened if it is not in `KNOWN`, or if the task is "own". An unknown tokenizer is loaded.

    Args:
      task: the task of the run.
      config: the `data` section of its settings.
      data_dir: the folder of data sets, for a data set that is not known.
      vocabulary: the tokenizer's vocabulary size; 0 to use a known size or to load the tokenizer.

    Raises:
      UsageError: the data set is neither known nor available, it does not suit the task, or a size is missing. The
        message names the flag to set.
    """
    known = KNOWN.get(_base(str(config.name)))
    if known is None or not TASKS[task].columns:  # the task looks at the columns of the set
        return _of_the_set(task, config, data_dir)
    if task in OF_NUMBERS:
        raise UsageError(
            f"--data.name {config.name} has classes, but --task {task} needs numbers or labels; write --task "
            "classification, or the name of your data"
        )
    expected, has = TASKS[task].columns[0], "text" if known.image is None else "image"
    classes = config.num_classes or known.classes
    if expected != has:
        raise UsageError(f"--data.name {config.name} contains {has}s, but --task {task} needs {expected}s")
    if known.image is None:
        tokens = vocabulary or _vocabulary(config.tokenizer)
        length = config.length
        if task == "language_modeling":
            # Which token begins a document changes no shape and no cost.
            return {"tokens": Tokens(length + 1, tokens, document_end=0 if config.documents == "apart" else None)}
        return {"tokens": Tokens(length, tokens), "length": Length(length), "label": Label(classes)}
    fields: Fields = {"image": Image(known.image), "label": Label(classes)}
    if task == "diffusion" and _base(str(config.name)) == "digits_canvas":  # its classes are of pixels
        fields = {"image": Image(known.image)}
    if task == "segmentation":
        fields = {"image": Image(known.image), "mask": Mask(known.image[:2], classes)}
    return batch_fields(Source(str(config.name), fields, NO_EXAMPLES, NO_EXAMPLES), config)


def _base(name: str) -> str:
    """The name of a tensorflow-datasets data set without its version: `mnist/3.0.1` becomes `mnist`."""
    parts = name.split("/")
    return "/".join(part for part in parts if not part[:1].isdigit())


def _of_the_set(task: TaskName, config: schema.Data, data_dir: pathlib.Path) -> Fields:
    """Opens the data set and reads its fields; a UsageError lists the known data sets if it cannot be opened."""
    try:
        # The other sets of a mixture have the same fields.
        source = open_source(dataclasses.replace(config, mix={}), data_dir, task)
        return batch_fields(source, config)
    except UsageError as error:
        size = config.image_size or 224
        raise UsageError(
            f"{error}\nA plan needs only shapes, but the shapes of --data.name {config.name} are not known. "
            f"Known data sets: {', '.join(KNOWN)}. For other images and labels write --data.name "
            f"synthetic:{size}x{size}x3:{config.num_classes or 1000} (height x width x channels : classes)"
        ) from error


def _vocabulary(tokenizer: str) -> int:
    """The size of a tokenizer's vocabulary: from `VOCABULARIES`, or else of the tokenizer itself, which is loaded."""
    if tokenizer in VOCABULARIES:
        return VOCABULARIES[tokenizer]
    try:
        return load_tokenizer(tokenizer).vocabulary
    except UsageError as error:
        raise UsageError(f"{error}\nA plan needs only the vocabulary size: write --vocabulary N") from error

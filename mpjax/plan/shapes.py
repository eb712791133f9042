"""What a batch holds, known without its data set: from a table of well-known sets, or from the set if it is there."""

import dataclasses
import pathlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from mpjax import data
from mpjax.config import Config
from mpjax.config.choices import TASKS
from mpjax.config.folders import data_folder
from mpjax.data import Fields, Image, Label, Length, Mask, Source, Tokens
from mpjax.data.text.plain_tokenizers import BytesTokenizer, WordsTokenizer
from mpjax.data.text.tokenizers import load_tokenizer
from mpjax.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Known:
    """A well-known set.

    Attributes:
      classes: how many.
      image: [H, W, C], None where sizes vary; None as a whole: a set of texts.
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
}
"""By the name that tensorflow-datasets has for it."""

VOCABULARIES: Mapping[str, int] = {
    "bytes": BytesTokenizer.vocabulary,
    "words": WordsTokenizer.vocabulary,
    "google-bert/bert-base-uncased": 30_522,
    "google-bert/bert-base-cased": 28_996,
    "FacebookAI/roberta-base": 50_265,
    "openai-community/gpt2": 50_257,
}
"""Tokens of well-known tokenizers, by the names that `--data.tokenizer` takes."""


def planned_fields(config: Config, *, vocabulary: int = 0) -> Fields:
    """The fields of the batches of the run that `config` describes.

    Args:
      config: of the run.
      vocabulary: tokens of the tokenizer; 0: those of a well-known one, or of one that can be loaded.

    Raises:
      UsageError: the set is not well known and is not there, or a size is missing; the message says which flag to give.
    """
    known = KNOWN.get(_base(config.data.name))
    if known is None:
        return _of_the_set(config)
    wanted, has = TASKS[config.task].fields[0], "text" if known.image is None else "image"
    classes = config.data.num_classes or known.classes
    if wanted != has:
        raise UsageError(f"--data.name {config.data.name} is a set of {has}s: --task {config.task} wants {wanted}s")
    if known.image is None:
        tokens = vocabulary or _vocabulary(config.data.tokenizer)
        length = config.data.length
        if config.task == "language_modeling":
            return {"tokens": Tokens(length + 1, tokens)}
        return {"tokens": Tokens(length, tokens), "length": Length(length), "label": Label(classes)}
    fields: Fields = {"image": Image(known.image), "label": Label(classes)}
    if config.task == "segmentation":
        fields = {"image": Image(known.image), "mask": Mask(known.image[:2], classes)}
    return data.batch_fields(Source(config.data.name, fields, _NONE, _NONE), config.data)


def batch_shapes(fields: Fields, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """A batch of these fields without its values: images uint8 [B, H, W, C], everything else int32 [B, ...]."""

    def shape_of(field) -> tuple[int, ...]:
        if isinstance(field, Tokens):
            return (field.length,)
        return getattr(field, "shape", ())

    return {
        name: jax.ShapeDtypeStruct((batch_size, *shape_of(field)), jnp.uint8 if isinstance(field, Image) else jnp.int32)
        for name, field in fields.items()
    }


class _NoExamples:
    """A split that is not read."""

    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: int):
        raise IndexError(index)

    def __getitems__(self, indices):
        raise IndexError(indices)


_NONE = _NoExamples()


def _base(name: str) -> str:
    """The name of a set of tensorflow-datasets without its version."""
    parts = name.split("/")
    return "/".join(part for part in parts if not part[:1].isdigit())


def _of_the_set(config: Config) -> Fields:
    """What the set says itself.

    Raises:
      UsageError: it is not there.
    """
    try:
        source = data.open_source(config.data, pathlib.Path(data_folder(config)), config.task)
        return data.batch_fields(source, config.data)
    except UsageError as error:
        size = config.data.image_size or 224
        raise UsageError(
            f"{error}\nA plan needs shapes only, but those of --data.name {config.data.name} are not known; "
            f"well-known sets are {', '.join(KNOWN)}; for images and labels write --data.name "
            f"synthetic:{size}x{size}x3:{config.data.num_classes or 1000} (height x width x channels : classes)"
        ) from error


def _vocabulary(tokenizer: str) -> int:
    if tokenizer in VOCABULARIES:
        return VOCABULARIES[tokenizer]
    try:
        return load_tokenizer(tokenizer).vocabulary
    except UsageError as error:
        raise UsageError(f"{error}\nA plan needs the number of tokens only: write --vocabulary N") from error

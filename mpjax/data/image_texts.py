"""Opens a stored data set of images and their texts, which are tokenized when they are read."""

import functools
from collections.abc import Sequence
from typing import Any

from mpjax.config.schema import Data
from mpjax.data.examples import Example, MappedExamples, Source, renamed
from mpjax.data.fields import Image, Length, Tokens
from mpjax.data.image_range import in_range
from mpjax.data.table import Table, choose_columns
from mpjax.data.text.blocks import framed
from mpjax.data.text.padded_texts import padded
from mpjax.data.text.plain_tokenizers import Tokenizer
from mpjax.data.text.tokenizers import load_tokenizer
from mpjax.data.user_function import PreprocessedExamples, load_preprocess, shape_after
from mpjax.errors import UsageError


def images_and_texts(table: Table, config: Data) -> Source:
    """Opens images with the fields `tokens` and `length` of their texts, cut to `config.length` tokens.

    A preprocess function gets an example with `image` and `text`, and returns both.

    Raises:
      UsageError: the set has no such columns, the tokenizer cannot be used, or the length is below 2. An empty text is
        an error when it is read.
    """
    if config.length < 2:
        raise UsageError(f"--data.length {config.length}: wanted at least 2 tokens, as in --data.length 77")
    columns = choose_columns(table, ("image", "text"), config)
    chosen = {field: table.columns[column] for field, column in columns.items()}
    images, notes = in_range({"image": chosen["image"]}, config, table.name)
    chosen |= images
    rename = functools.partial(renamed, columns)
    train, test = (MappedExamples(split, rename) for split in table.open(tuple(dict.fromkeys(columns.values()))))
    if config.preprocess:
        function = load_preprocess(config.preprocess)
        train, test = (PreprocessedExamples(split, function, str(config.preprocess), chosen) for split in (train, test))
        if shape := shape_after(train, "image"):
            chosen["image"] = Image(shape)
    image: Any = chosen["image"]
    if not isinstance(image, Image):
        raise UsageError(
            f"data set '{table.name}': image (column '{columns['image']}'): {image}; wanted images [height, width, "
            "channels]; write --data.preprocess FILE.py:FUNCTION with a function that returns an image"
        )
    tokenizer = load_tokenizer(config.tokenizer)
    take = functools.partial(_tokenized, tokenizer, config.length, table.name)
    if not config.preprocess:
        splits = zip((config.train_split, config.test_split), table.open((columns["text"],)), strict=True)
        for split, examples in splits:
            looked_at = range(0, len(examples), len(examples) // _SAMPLE + 1)
            texts = [examples[number][columns["text"]] for number in looked_at]
            notes = (*notes, *_note_on_length(texts, tokenizer, config.length, split))
    fields = {
        "image": Image(image.shape, depth=image.depth),
        "tokens": Tokens(config.length, tokenizer.vocabulary),
        "length": Length(config.length),
    }
    return Source(table.name, fields, MappedExamples(train, take), MappedExamples(test, take), notes=notes)


_SAMPLE, _LONGEST = 500, 2**20


def _note_on_length(texts: Sequence[Any], tokenizer: Tokenizer, length: int, split: str) -> list[str]:
    """Says, in a list of at most one sentence, how many of a sample of texts are cut."""
    whole = framed([text for text in texts if isinstance(text, str)], tokenizer, _LONGEST)
    cut = int((whole.lengths > length).sum())
    told = f"{split}: {cut:,} of {len(texts):,} texts looked at have more than {length} tokens, and are cut"
    return [f"{told} (--data.length {length})"] if cut else []


def _tokenized(tokenizer: Tokenizer, length: int, name: str, example: Example) -> Example:
    text = example["text"]
    text = text.decode(errors="replace") if isinstance(text, bytes) else text
    if not isinstance(text, str) or not text.strip():
        raise UsageError(f"data set '{name}': the text of an image is {text!r:.60}: wanted a text that is not empty")
    tokens = framed([text], tokenizer, length).values
    return {"image": example["image"], **padded(tokens, ("tokens", "length"), length, tokenizer.padding)}

"""Opens a stored data set of images and their texts, which are tokenized when they are read."""

import functools
from typing import Any

from mpjax.config.schema import Data
from mpjax.data.examples import Example, MappedExamples, Source, renamed
from mpjax.data.fields import Image, Length, Tokens
from mpjax.data.image_range import in_range
from mpjax.data.table import Table, choose_columns
from mpjax.data.text.framing import framed, told_of_cut_texts
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
            name = f"split '{split}' of '{table.name}'"
            notes = (*notes, *told_of_cut_texts(examples, columns["text"], tokenizer, config.length, name))
    fields = {
        "image": Image(image.shape, depth=image.depth),
        "tokens": Tokens(config.length, tokenizer.vocabulary),
        "length": Length(config.length),
    }
    return Source(table.name, fields, MappedExamples(train, take), MappedExamples(test, take), notes=notes)


def _tokenized(tokenizer: Tokenizer, length: int, name: str, example: Example) -> Example:
    text = example["text"]
    text = text.decode(errors="replace") if isinstance(text, bytes) else text
    if not isinstance(text, str) or not text.strip():
        raise UsageError(f"data set '{name}': the text of an image is {text!r:.60}: wanted a text that is not empty")
    tokens = framed([text], tokenizer, length).values
    return {"image": example["image"], **padded(tokens, ("tokens", "length"), length, tokenizer.padding)}

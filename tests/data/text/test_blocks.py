import dataclasses

import numpy as np
import pytest

from mpjax.config import Data
from mpjax.data import Label, Length, Tokens, conform, eval_batches, train_batches
from mpjax.data.text import Blocks, tokenized
from mpjax.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Texts:
    """Examples of these texts; the label is the place."""

    texts: tuple

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return {"text": self.texts[index], "label": index}

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def source_of(*texts, test=("é", b"b"), task="text_classification", **settings):
    config = Data(**{"length": 5, **settings})
    predicted = ("label", Label(9)) if task == "text_classification" else None
    return tokenized("set", Texts(texts), Texts(test), config, predicted=predicted, origin="column 'body'")


def test_texts_are_padded_at_their_end():
    source = source_of("abc", "", "abcdef")
    assert source.fields == {"tokens": Tokens(5, 259), "length": Length(5), "label": Label(9)}
    examples = [conform(example, source.fields) for example in source.train]
    assert [example["tokens"].tolist() for example in examples] == [
        [2, 100, 101, 102, 1],
        [2, 1, 0, 0, 0],
        [2, 100, 101, 102, 1],
    ]
    assert [(int(example["length"]), int(example["label"])) for example in examples] == [(5, 0), (2, 1), (5, 2)]
    assert {value.dtype for value in examples[0].values()} == {np.dtype(np.int32)}


@pytest.mark.parametrize("task", ["text_classification", "language_modeling"])
def test_texts_of_a_split_that_is_both_are_tokenized_once(task):
    source = source_of("abcdef", task=task, train_split="train", test_split="train")
    assert source.train is source.test
    other = source_of("abcdef", task=task)
    assert other.train is not other.test


def test_str_and_utf8_are_the_same():
    assert source_of("é").train[0]["tokens"].tolist() == source_of("é".encode()).train[0]["tokens"].tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_streamed_and_in_memory_are_the_same(workers):
    source = source_of(*"abcdefgh")
    for megabytes in (0, 100):
        config = Data(batch_size=4, eval_batch_size=4, workers=workers, in_memory_mb=megabytes)
        batch = next(train_batches(source, config, 0).from_position(0))
        assert (batch["tokens"][:, 1] - 100 == batch["label"]).all()
        (evaluated,) = eval_batches(source, config)
        assert evaluated["length"].tolist() == [4, 3, 0, 0]


def test_blocks_predict_each_token_of_all_texts_once():
    source = source_of("abcd", "e", "fg", test=("hijklmno",), task="language_modeling", length=4)
    assert source.fields == {"tokens": Tokens(5, 259)}
    end, first = 1, ord("a") + 3
    blocks = [conform(example, source.fields)["tokens"].tolist() for example in source.train]
    text = [end, *range(first, first + 4), end, first + 4, end, first + 5, first + 6, end]
    assert blocks == [text[0:5], text[4:9]]
    predicted = [token for block in blocks for token in block[1:]]
    assert predicted == text[1:9]


def test_the_field_of_documents_apart_says_what_begins_one():
    (field,) = source_of("abcd", "ef", task="language_modeling", documents="apart").fields.values()
    assert field == Tokens(6, 259, document_end=1)
    assert field != Tokens(6, 259)


def test_what_does_not_fill_a_block_is_left_out():
    assert [len(Blocks(np.zeros(size, np.uint16), 4)) for size in (0, 1, 4, 5, 8, 9)] == [0, 0, 0, 1, 1, 2]


def test_a_split_too_short_for_one_block():
    with pytest.raises(UsageError, match=r"split 'test' of 'set' has 5 tokens; wanted at least 6.*--data.length 2"):
        source_of("abcdefg", test=("a", "b"), task="language_modeling")


def test_two_bytes_a_token():
    assert source_of("a").train.values.dtype == np.uint16


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"\xff", r"text \(column 'body'\) of 'set': not UTF-8"),
        (None, r"text \(column 'body'\) of 'set': got NoneType; wanted str or UTF-8 bytes"),
        (np.int64(3), "got int64; wanted str"),
    ],
)
def test_what_is_no_text(text, says):
    with pytest.raises(UsageError, match=says):
        source_of(text)


def test_no_length():
    with pytest.raises(UsageError, match="--data.length 0: wanted at least 1"):
        source_of("a", length=0)


@pytest.mark.extra
def test_a_text_without_tokens_still_has_one(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "</s>": 1}, "a"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    train = source_of("", "a a", " ", tokenizer=str(tmp_path)).train
    assert [example["tokens"][: example["length"]].tolist() for example in train] == [[1], [0, 0], [1]]

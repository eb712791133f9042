"""Pairs of answers as tokens: which are marked, what is cut, and what is left out."""

import numpy as np
import pytest

from mpjax.config import Data
from mpjax.data import conform
from mpjax.data.text import load_chat, preferences
from mpjax.errors import UsageError


pytestmark = pytest.mark.extra


@pytest.fixture
def source_of(table_of):
    def source_of(folder, *rows, test=None, **settings):
        config = Data(**{"tokenizer": str(folder), "length": 80, **settings})
        return preferences(table_of(*rows, test=test), config)

    return source_of


def talk(*contents):
    roles = ("user", "assistant") * len(contents)
    return [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]


def marked(folder, example):
    """The texts that are marked in the preferred and in the rejected conversation of an example."""
    decode = load_chat(str(folder)).tokenizer.tokenizer.decode
    pairs = ("tokens", "answers"), ("rejected", "rejected_answers")
    return [decode(example[t][example[a]].tolist(), skip_special_tokens=False) for t, a in pairs]


PAIR = {"prompt": "a", "chosen": "yes", "rejected": "no"}


@pytest.mark.parametrize(
    "row",
    [
        PAIR,
        {"prompt": talk("a"), "chosen": talk("a", "yes")[1:], "rejected": talk("a", "no")[1:]},
        {"chosen": talk("a", "yes"), "rejected": talk("a", "no")},
    ],
)
def test_all_forms_are_one_pair(source_of, chat_tokenizer, row):
    source = source_of(chat_tokenizer, row)
    example = conform(source.train[0], source.fields)
    assert marked(chat_tokenizer, example) == ["yes<|im_end|>\n", "no<|im_end|>\n"]
    whole = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nno<|im_end|>\n"
    tokens = load_chat(str(chat_tokenizer)).tokenizer.tokenizer.encode(whole).ids
    assert example["rejected"].tolist() == tokens + [256] * (81 - len(tokens))
    assert (example["tokens"].dtype, example["rejected_answers"].dtype) == (np.int32, bool)
    assert source.notes == ()


def test_answers_that_both_conversations_begin_with_are_not_marked(source_of, chat_tokenizer):
    row = {"chosen": talk("a", "b", "c", "yes"), "rejected": talk("a", "b", "c", "no")}
    source = source_of(chat_tokenizer, row)
    assert marked(chat_tokenizer, source.train[0]) == ["yes<|im_end|>\n", "no<|im_end|>\n"]
    row = {"chosen": talk("a", "b", "c", "yes"), "rejected": talk("a", "d", "c", "no")}
    source = source_of(chat_tokenizer, row)
    assert marked(chat_tokenizer, source.train[0]) == ["b<|im_end|>\nyes<|im_end|>\n", "d<|im_end|>\nno<|im_end|>\n"]


def test_what_is_too_long_is_cut_and_what_cannot_be_compared_is_left_out_with_a_line(source_of, chat_tokenizer):
    rows = (
        PAIR,
        {**PAIR, "rejected": "n" * 90},
        {**PAIR, "prompt": "a" * 90},
        {**PAIR, "rejected": "yes"},
        {"prompt": "a", "chosen": "n" * 90, "rejected": "n" * 91},
    )
    source = source_of(chat_tokenizer, *rows, length=60)
    assert len(source.train) == 2
    assert marked(chat_tokenizer, source.train[1]) == ["yes<|im_end|>\n", "n" * 41]
    assert source.notes == (
        "split 'train' of 'set': 3 of 5 pairs have more than 61 tokens and are cut to them (--data.length 60); 0 have "
        "no token of an answer in one of them, 3 are twice the same, and are left out",
    )
    with pytest.raises(UsageError, match="split 'test' of 'set': none of 1 pairs has two different answers within 81"):
        source_of(chat_tokenizer, PAIR, test=[{**PAIR, "rejected": "yes"}])


def test_pairs_of_two_prompts_are_told(source_of, chat_tokenizer):
    row = {"chosen": talk("a", "yes"), "rejected": talk("b", "no")}
    source = source_of(chat_tokenizer, row, {"chosen": talk("a", "yes"), "rejected": talk("a", "no")}, test=[row])
    assert len(source.train) == 2
    assert "split 'train' of 'set': 1 of 2 pairs begin with two different messages" in source.notes[0]


def test_a_pair_without_an_answer_is_left_out(source_of, chat_tokenizer):
    row = {"chosen": talk("a", "yes"), "rejected": talk("b")}
    source = source_of(
        chat_tokenizer,
        row,
        {"chosen": talk("a", "yes"), "rejected": talk("a", "no")},
        test=[{"chosen": talk("a", "yes"), "rejected": talk("a", "no")}],
    )
    assert len(source.train) == 1
    assert "1 have no token of an answer in one of them" in source.notes[0]


@pytest.mark.parametrize(
    ("row", "settings", "says"),
    [
        ({"text": "a"}, {}, "has no conversations; its columns are text; wanted chosen and rejected; write"),
        ({"prompt": "a", "chosen": "b"}, {}, "wanted prompt and chosen and rejected; write --data.columns prompt"),
        ({"chosen": "a", "rejected": "b"}, {}, "chosen is a text, and there is no `prompt` that it answers"),
        ({**PAIR, "rejected": 3}, {}, "example 0, rejected: message 1 is .*'content': 3"),
        (
            PAIR,
            {"columns": {"messages": "prompt"}},
            "--data.columns messages: conversations have the fields prompt, ch",
        ),
    ],
)
def test_what_is_no_pair_is_an_error(source_of, chat_tokenizer, row, settings, says):
    with pytest.raises(UsageError, match=says):
        source_of(chat_tokenizer, row, **settings)


def test_columns_are_chosen_by_name(source_of, chat_tokenizer):
    row = {"question": "a", "chosen": "yes", "bad": "no"}
    source = source_of(chat_tokenizer, row, columns={"prompt": "question", "rejected": "bad"})
    assert marked(chat_tokenizer, source.train[0]) == ["yes<|im_end|>\n", "no<|im_end|>\n"]

"""Conversations as tokens: which are answers, what is cut, and what is left out."""

import numpy as np
import pytest

from mpjax.config import Data
from mpjax.data import conform
from mpjax.data.text import conversations, load_chat, messages_of
from mpjax.errors import UsageError


pytestmark = pytest.mark.extra


@pytest.fixture
def source_of(table_of):
    def source_of(folder, *rows, test=None, **settings):
        config = Data(**{"tokenizer": str(folder), "length": 60, **settings})
        return conversations(table_of(*rows, test=test), config)

    return source_of


def talk(*contents):
    roles = ("user", "assistant") * len(contents)
    return {"messages": [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]}


def answer_of(folder, example):
    chat = load_chat(str(folder))
    return chat.tokenizer.tokenizer.decode(example["tokens"][example["answers"]].tolist(), skip_special_tokens=False)


def test_the_tokens_of_answers_are_marked_and_the_rest_is_padding(source_of, chat_tokenizer):
    source = source_of(chat_tokenizer, talk("Hé?", "Jö", "so", "ok"), length=80)
    example = conform(source.train[0], source.fields)
    assert answer_of(chat_tokenizer, example) == "Jö<|im_end|>\nok<|im_end|>\n"
    assert (example["tokens"].shape, example["tokens"].dtype, example["answers"].dtype) == ((81,), np.int32, bool)
    whole = "<|im_start|>user\nHé?<|im_end|>\n<|im_start|>assistant\nJö<|im_end|>\n"
    whole += "<|im_start|>user\nso<|im_end|>\n<|im_start|>assistant\nok<|im_end|>\n"
    tokens = load_chat(str(chat_tokenizer)).tokenizer.tokenizer.encode(whole).ids
    assert example["tokens"].tolist() == tokens + [256] * (81 - len(tokens))
    assert source.notes == ()


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a\n\nb", "completion": "c"},
        {"prompt": [{"role": "user", "content": "a\n\nb"}], "completion": [{"role": "assistant", "content": "c"}]},
        {"instruction": "a", "input": "b", "output": "c"},
        {"instruction": "a\n\nb", "input": "", "output": "c"},
        {"instruction": "a\n\nb", "output": "c"},
        {"messages": [{"role": "user", "content": "a\n\nb", "name": None}, {"role": "assistant", "content": "c"}]},
    ],
)
def test_all_forms_are_one_conversation(source_of, chat_tokenizer, row):
    expected = source_of(chat_tokenizer, talk("a\n\nb", "c")).train[0]
    example = source_of(chat_tokenizer, row).train[0]
    assert {name: value.tolist() for name, value in example.items()} == {
        name: value.tolist() for name, value in expected.items()
    }


def test_answers_in_a_prompt_do_not_count(source_of, chat_tokenizer):
    prompt, completion = talk("a", "b", "c")["messages"], [{"role": "assistant", "content": "d"}]
    source = source_of(chat_tokenizer, {"prompt": prompt, "completion": completion}, length=80)
    assert answer_of(chat_tokenizer, source.train[0]) == "d<|im_end|>\n"


def test_what_is_too_long_is_cut_and_what_has_no_answer_left_is_left_out_with_a_line(source_of, chat_tokenizer):
    rows = talk("a", "b"), talk("a", "b" * 90), talk("a" * 90, "b"), talk("only a question")
    source = source_of(chat_tokenizer, *rows)
    assert len(source.train) == 2
    assert answer_of(chat_tokenizer, source.train[1]) == "b" * 41
    assert source.notes == (
        "split 'train' of 'set': 2 of 4 conversations have more than 61 tokens and are cut to them (--data.length 60); "
        "2 have no token of an answer in them and are left out",
    )
    with pytest.raises(
        UsageError, match="split 'test' of 'set': none of 1 conversations has an answer within 61 tokens"
    ):
        source_of(chat_tokenizer, talk("a", "b"), test=[talk("a" * 90, "b")])


def test_spaces_at_an_end_of_an_answer_are_on_their_side_of_it_whatever_the_tokenizer_trims(source_of, chat_tokenizer):
    tokenizers = pytest.importorskip("tokenizers")
    file = chat_tokenizer / "tokenizer.json"
    trimming = tokenizers.Tokenizer.from_file(str(file))
    trimming.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    trimming.save(str(file))
    (chat_tokenizer / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content }}{% endgeneration %}<|im_end|>{% endfor %}"
    )
    source = source_of(chat_tokenizer, {"messages": [{"role": "assistant", "content": " a  "}]})
    assert answer_of(chat_tokenizer, source.train[0]) == " a  "


def test_the_text_of_a_special_token_in_a_message_is_told_of(source_of, chat_tokenizer):
    source = source_of(chat_tokenizer, talk("a<|im_end|>", "b"), talk("a|", "b"), test=[talk("a", "b")])
    assert source.notes == (
        "split 'train' of 'set': messages of 1 conversations have the text of a special token, such as an end of a "
        "turn, and are read as having the token there",
    )


def test_an_answer_ends_with_the_special_token_of_its_template(chat_tokenizer):
    assert load_chat(str(chat_tokenizer)).ends == {258}


@pytest.mark.parametrize(
    ("row", "settings", "says"),
    [
        ({"text": "a"}, {}, "has no conversations; its columns are text; wanted messages or prompt and completion or"),
        (
            {"prompt": "a", "completion": "b", "instruction": "c", "output": "d"},
            {},
            "has conversations in prompt/compl",
        ),
        ({"en": "a", "de": "b"}, {}, "write --data.columns prompt en completion de$"),
        ({"a": [1], "b": "c"}, {}, "write --data.columns messages COLUMN$"),
        ({"messages": "hello"}, {}, "example 0: messages are 'hello'; wanted a list of messages"),
        ({"messages": [{"from": "user", "value": "a"}]}, {}, "example 0: message 0 is .*wanted a dict with the texts"),
        ({"prompt": "a", "completion": 3}, {}, "example 0: message 1 is .*'content': 3"),
        ({"a": "b"}, {"columns": {"text": "a"}}, "--data.columns text: conversations have the fields messages, prompt"),
        ({"a": "b"}, {"columns": {"prompt": "c"}}, "--data.columns: 'set' has no c; it has a"),
    ],
)
def test_what_is_no_conversation_is_an_error(source_of, chat_tokenizer, row, settings, says):
    with pytest.raises(UsageError, match=says):
        source_of(chat_tokenizer, row, **settings)


def test_columns_choose_among_forms(source_of, chat_tokenizer):
    row = {"q": "a", "completion": "b", "instruction": "c", "output": "d"}
    source = source_of(chat_tokenizer, row, columns={"prompt": "q"})
    assert answer_of(chat_tokenizer, source.train[0]) == "b<|im_end|>\n"


def test_a_tokenizer_without_a_template_is_an_error(source_of, chat_tokenizer):
    with pytest.raises(UsageError, match="--data.tokenizer bytes has no chat template, which conversations need"):
        source_of("bytes", talk("a", "b"))
    (chat_tokenizer / "tokenizer_config.json").unlink()
    with pytest.raises(UsageError, match="has no chat template: .* put one there"):
        source_of(chat_tokenizer, talk("a", "b"))


def test_a_preprocess_function_may_make_the_messages(source_of, chat_tokenizer, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def made(example):\n"
        "    return {'messages': [{'role': 'user', 'content': example['q']}, {'role': 'assistant', 'content': 'x'}]}\n"
    )
    source = source_of(chat_tokenizer, {"q": "a"}, preprocess=f"{file}:made")
    assert answer_of(chat_tokenizer, source.train[0]) == "x<|im_end|>\n"


def test_tokens_and_marks_are_those_of_transformers(source_of, chat_tokenizer):
    transformers = pytest.importorskip("transformers")
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n"
        "{% endfor %}"
    )
    (chat_tokenizer / "chat_template.jinja").write_text(template)
    row = talk("Hé?", "Jö", "so", "ok")
    example = source_of(chat_tokenizer, row, length=80).train[0]
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(chat_tokenizer).apply_chat_template(
        messages_of(row, "row")[0], return_dict=True, return_assistant_tokens_mask=True
    )
    size = len(theirs["input_ids"])
    assert example["tokens"][:size].tolist() == theirs["input_ids"]
    assert example["answers"][:size].astype(int).tolist() == theirs["assistant_masks"]

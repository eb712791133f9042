"""The tokens with which the texts of a Whisper begin, and those that it never writes."""

import json

import pytest

from mpjax.data.audio import prompt_of, suppressed_in
from mpjax.data.text import BytesTokenizer, load_tokenizer
from mpjax.errors import UsageError


SPECIAL = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>"]
SPECIAL += ["<|notimestamps|>"]
SEVERAL = {"is_multilingual": True, "lang_to_id": {"<|en|>": 4, "<|de|>": 5}, "no_timestamps_token_id": 8}
SEVERAL |= {"task_to_id": {"transcribe": 7, "translate": 6}}


def folder_of(path, generation):
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"a": 0, "b": 1} | {text: number for number, text in enumerate(SPECIAL, 2)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
    made.add_special_tokens(SPECIAL)
    made.save(str(path / "tokenizer.json"))
    (path / "generation_config.json").write_text(json.dumps(generation))
    return str(path)


def prompt(path, generation, language=""):
    name = folder_of(path, generation)
    return prompt_of(name, load_tokenizer(name), language)


@pytest.mark.extra
def test_a_prompt_is_language_task_and_no_timestamps(tmp_path):
    assert prompt(tmp_path, SEVERAL, "de") == [5, 7, 8]
    assert prompt(tmp_path, SEVERAL, "<|en|>") == [4, 7, 8]
    assert prompt(tmp_path, SEVERAL | {"language": "<|de|>", "task": "translate"}) == [5, 6, 8]
    assert prompt(tmp_path, {"is_multilingual": False}) == [8]
    assert prompt(tmp_path, {}) == [8]  # of a vocabulary as small as those of English alone


@pytest.mark.extra
@pytest.mark.parametrize(
    ("generation", "language", "says"),
    [
        (SEVERAL, "", "the model has several languages; write --data.language with that of the texts: de, en"),
        (SEVERAL, "fr", "--data.language fr: there is no such language"),
        ({"is_multilingual": False}, "de", "--data.language de: the model of .* knows English alone"),
        (SEVERAL | {"lang_to_id": {"<|en|>": 9}}, "en", r"lang_to_id says 9 for <\|en\|>, and the tokenizer 4"),
        (SEVERAL | {"no_timestamps_token_id": 3}, "en", "no_timestamps_token_id says 3"),
        (SEVERAL | {"task": "sing"}, "en", r"has no token <\|sing\|>"),
    ],
)
def test_what_does_not_fit_is_an_error(tmp_path, generation, language, says):
    with pytest.raises(UsageError, match=says):
        prompt(tmp_path, generation, language)


def test_a_tokenizer_without_files_has_no_prompt():
    assert prompt_of("bytes", BytesTokenizer(), "") == []


def test_suppressed_tokens_are_those_of_the_generation_config_or_else_of_config(tmp_path):
    assert suppressed_in(tmp_path) == ((), ())
    (tmp_path / "config.json").write_text('{"begin_suppress_tokens": [2], "suppress_tokens": null}')
    assert suppressed_in(tmp_path) == ((), (2,))
    (tmp_path / "generation_config.json").write_text('{"suppress_tokens": [1, 3]}')
    assert suppressed_in(tmp_path) == ((1, 3), ())
    (tmp_path / "generation_config.json").write_text('{"suppress_tokens": [-1]}')
    with pytest.raises(UsageError, match=r"suppress_tokens is \[-1\]: wanted a list of tokens"):
        suppressed_in(tmp_path)

"""Tokens as text: whole characters as soon as they are whole, and nothing that is or may become a stop string."""

import pytest

from mpjax.data.text import BytesTokenizer, WordsTokenizer, Written
from mpjax.errors import UsageError


BYTES = BytesTokenizer()


def pieces(text, *, stop=(), prompt="x"):
    written = Written(BYTES, BYTES.whole([prompt]).values, stop)
    tokens = text if isinstance(text, list) else BYTES.whole([text]).values.tolist()
    return [written.add(token) for token in tokens], written.end(), written.stopped


def test_a_character_of_several_tokens_comes_when_it_is_whole():
    assert pieces("aé€😀b") == (["a", "", "é", "", "", "€", "", "", "", "😀", "b"], "", False)


def test_bytes_that_are_no_character_come_as_replacements():
    assert pieces([0xC3 + 3]) == ([""], "\ufffd", False)
    assert pieces([0xC3 + 3, 100]) == (["", "\ufffda"], "", False)


def test_special_tokens_have_no_text_and_unknown_ones_a_replacement():
    assert pieces([0, 1, 2, 100, 300, 100]) == (["", "", "", "a", "", "\ufffda"], "", False)


@pytest.mark.parametrize(
    ("stop", "given", "rest", "stopped"),
    [
        (("cd",), ["a", "b", "", ""], "", True),
        (("ce",), ["a", "b", "", "cd"], "", False),
        (("de",), ["a", "b", "c", ""], "d", False),
        (("bd", "c"), ["a", "", "b", ""], "", True),
    ],
)
def test_a_stop_string_ends_the_text_before_it_and_its_beginning_waits(stop, given, rest, stopped):
    assert pieces("abcd", stop=stop) == (given, rest, stopped)


def test_a_prompt_is_no_part_of_a_stop_string():
    assert pieces("b", stop=("ab",), prompt="a") == (["b"], "", False)


def test_hashed_words_have_no_text():
    with pytest.raises(UsageError, match="the tokenizer `words` has no text for a token"):
        WordsTokenizer().text_of([5])


@pytest.mark.extra
def test_words_keep_the_spaces_between_them():
    """As SentencePiece decodes: the space before the first word is none, and bytes stand for rare characters."""
    tokenizers = pytest.importorskip("tokenizers", reason="pip install -e '.[hf]'")
    from mpjax.data.text import HuggingFaceTokenizer

    vocabulary = {"<s>": 0, "\u2581a": 1, "\u2581b": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], byte_fallback=True))
    inner.add_special_tokens(["<s>"])
    decoders = tokenizers.decoders
    inner.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = HuggingFaceTokenizer("t", inner, {"padding": 0, "end": 0})
    written = Written(tokenizer, [0, 1])
    emoji = [3 + byte for byte in "😀😁".encode()]
    assert [written.add(token) for token in [2, *emoji, 1, 999, 1]] == [
        *(" b", "", "", "", "😀", "", "", "", "😁", " a", "", "\ufffda")
    ]
    assert Written(tokenizer, [0]).add(1) == "a"

import numpy as np
import pytest

from mpjax.data.text import BytesTokenizer, WordsTokenizer
from mpjax.errors import UsageError


WORDS = WordsTokenizer()


def texts_of(ragged):
    return [part.tolist() for part in np.split(ragged.values, np.cumsum(ragged.lengths)[:-1])]


def test_a_word_has_one_number_whatever_its_case_and_wherever_it_stands():
    first, second = texts_of(WORDS.whole(["Return the value.", "value the"]))
    assert second == [first[2], first[1]]
    assert len(first) == 4  # the point is one, too
    assert texts_of(WORDS.whole(["RETURN"])) == [first[:1]]


def test_numbers_are_checksums_and_the_same_on_every_machine():
    # crc32(b"mean") % 8189 + 3
    assert texts_of(WORDS.whole(["mean"])) == [[2055]]


def test_special_tokens_are_no_words():
    found = WORDS.whole([" ".join(map(str, range(5000)))]).values
    assert (found.min() >= 3, found.max() < 8192, found.dtype) == (True, True, np.int32)


def test_a_frame_is_cut_with_its_start_and_end():
    inside = texts_of(WORDS.whole(["a b c"]))[0]
    assert texts_of(WORDS.framed(["a b c", ""], 4)) == [[2, *inside[:2], 1], [2, 1]]
    with pytest.raises(UsageError, match="--data.length 2: wanted at least 3"):
        WORDS.framed(["a"], 2)


def test_half_a_surrogate_pair_is_a_question_mark():
    assert texts_of(WORDS.whole(["a \ud83d"])) == texts_of(WORDS.whole(["a ?"]))
    assert texts_of(BytesTokenizer().whole(["a\ud83d"])) == texts_of(BytesTokenizer().whole(["a?"]))

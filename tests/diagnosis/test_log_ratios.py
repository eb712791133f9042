"""Ratios of the probabilities of two passes: what counts, what is outside, and what is no number."""

import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax.errors import UsageError


TOKENS = np.asarray([[3, 1, 2, 0], [3, 2, 2, 2]])
LOG_2 = float(np.log(2.0))


def passed(changes):
    scores = np.full((2, 3), -1.0)
    for place, change in changes.items():
        scores[place] += change
    return scores


def test_a_ratio_is_the_first_probability_divided_by_the_second():
    result = mpjax.mismatch(passed({(0, 1): LOG_2, (1, 2): 0.0005}), passed({(1, 0): LOG_2}), TOKENS, worst=2)
    assert (result.tokens, result.not_finite, result.outside) == (6, 0, pytest.approx(2 / 6))
    assert (result.lowest, result.highest) == (pytest.approx(0.5), pytest.approx(2.0))
    assert result.mean == pytest.approx((0.5 + 2 + 3 + np.exp(0.0005)) / 6)
    assert [(row.text, row.position, row.token) for row in result.worst] == [(0, 2, 2), (1, 1, 2)]
    assert not result.agrees


@pytest.mark.parametrize(("change", "outside"), [(-0.0011, 1), (-0.0009, 0), (0.0019, 0), (0.0021, 1)])
def test_the_band_is_that_of_mlperf(change, outside):
    result = mpjax.mismatch(passed({(0, 0): change}), passed({}), TOKENS)
    assert result.outside == pytest.approx(outside / 6)
    assert result.agrees == (outside == 0)


def test_prompts_and_padding_are_not_compared():
    result = mpjax.mismatch(
        passed({(0, 0): LOG_2, (1, 2): LOG_2}), passed({}), TOKENS, prompt=[2, 1], lengths=np.asarray([4, 3])
    )
    assert (result.tokens, result.agrees) == (4, True)


@pytest.mark.parametrize("value", [-np.inf, np.nan])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_probability_of_zero_or_nan_is_told_and_in_no_mean(value, swapped):
    bad = passed({})
    bad[0, 1] = value
    result = mpjax.mismatch(*((passed({}), bad) if swapped else (bad, passed({}))), TOKENS, worst=1)
    assert (result.tokens, result.not_finite, result.outside) == (6, 1, pytest.approx(1 / 6))
    assert (result.mean, result.lowest, result.highest, result.agrees) == (1.0, 1.0, 1.0, False)
    assert (result.worst[0].text, result.worst[0].position) == (0, 2)
    assert "1 tokens have a ratio of 0, inf or nan; the numbers above are of the others" in str(result)


def test_two_probabilities_of_nothing_do_not_agree():
    nothing = np.full((2, 3), -np.inf)
    result = mpjax.mismatch(nothing, nothing, TOKENS)
    assert (result.not_finite, result.outside, result.agrees) == (6, 1.0, False)
    assert np.isnan(result.mean)


def test_a_pass_may_be_a_function_to_logits():
    """The logits of token 2 are larger by log 3 than three others of one size: its probability is 1/2."""

    def logits(tokens):
        return jnp.zeros((*tokens.shape, 4), jnp.bfloat16).at[..., 2].set(1.0986)

    result = mpjax.mismatch(logits, passed({}), TOKENS, worst=6)
    assert {row.token: round(float(np.exp(row.first)), 2) for row in result.worst} == {0: 0.17, 1: 0.17, 2: 0.5}


def test_the_table_names_the_worst_tokens_with_their_text():
    text = str(mpjax.mismatch(passed({(0, 1): LOG_2}), passed({}), TOKENS, worst=1, text_of=lambda t: "abcd"[t[0]]))
    assert text.splitlines() == [
        "6 tokens, 16.67% outside [0.999, 1.002]; ratio 1.166667 on average, 1.000000 to 2.000000",
        "text  position  token  first     second    ratio",
        "0     2         2 'c'  -0.30685  -1.00000  2.000000",
    ]


@pytest.mark.parametrize(
    ("first", "settings", "message"),
    [
        (passed({}), {"prompt": 4}, "there is no token to compare"),
        (passed({}), {"prompt": 0}, "prompt is 0: wanted 1 to 4"),
        (passed({}), {"lengths": np.asarray([5, 1])}, r"lengths is \[5, 1\]: wanted 0 to 4"),
        (passed({}), {"band": (1.1, 1.2)}, r"the band is \[1.1, 1.2\]: wanted a number up to 1"),
        (np.zeros((2, 4)), {}, r"the first pass has the shape \[2, 4\]: wanted log-probabilities \[2, 3\]"),
        (np.full((2, 3), 0.5), {}, "the first pass has values up to 0.5: wanted logarithms of probabilities"),
        (lambda t: jnp.zeros((2, 4)), {}, r"the first pass gives \[2, 4\]: wanted logits \[2, 4, V\]"),
        (lambda t: jnp.zeros((2, 4, 3)), {}, "the first pass knows 3 tokens, and the texts have 3"),
    ],
)
def test_what_cannot_be_compared_is_an_error(first, settings, message):
    with pytest.raises(UsageError, match=message):
        mpjax.mismatch(first, passed({}), TOKENS, **settings)

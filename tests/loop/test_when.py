"""What is due when."""

import itertools

import hypothesis
import hypothesis.strategies as st
import pytest

from mpjax.loop import When


@pytest.mark.parametrize(
    ("interval", "positions"), [(0, [10]), (1, [*range(1, 11)]), (3, [3, 6, 9, 10]), (5, [5, 10]), (20, [10])]
)
def test_every_interval_and_the_end(interval, positions):
    when = When(steps=10, log=1, evaluate=1, save=1)
    assert [position for position in range(1, 11) if when.due(interval, position)] == positions


def test_calls_end_where_the_state_is_looked_at():
    """Evaluated after step 7 and saved after step 10: what does not fill a call of three is taken one by one."""
    when = When(steps=12, log=1, evaluate=7, save=10, per_call=3)
    assert list(when.call_counts(0)) == [3, 3, 1, 3, 1, 1]
    assert when.kinds_of_calls(0) == {1, 3}


def test_calls_begin_at_a_step_whose_layers_are_looked_at():
    when = When(steps=9, log=0, evaluate=0, save=0, layers=4, per_call=3)
    assert list(when.call_counts(0)) == [3, 3, 1, 1, 1]


def test_a_call_too_many_is_never_made():
    assert list(When(steps=2, log=0, evaluate=0, save=0, per_call=50).call_counts(0)) == [1, 1]
    assert When(steps=100, log=1, evaluate=0, save=0, per_call=50).kinds_of_calls(0) == {50}
    assert When(steps=10**9, log=1, evaluate=0, save=0).kinds_of_calls(0) == {1}


def test_a_length_of_calls_that_none_has_is_told():
    never = When(steps=660, log=10, evaluate=110, save=250, per_call=200)
    assert never.advice(0) == (
        "--training.steps_per_call 200 does nothing: evaluations, checkpoints and statistics of layers are at most "
        "110 steps apart; write 110 or fewer, or lengthen these intervals"
    )
    assert When(steps=660, log=10, evaluate=110, save=250, per_call=110).advice(0) == ""
    assert When(steps=660, log=10, evaluate=110, save=250).advice(0) == ""
    assert never.advice(660) == ""  # nothing is left to train


@hypothesis.given(
    evaluate=st.integers(0, 9), save=st.integers(0, 9), layers=st.integers(0, 9), per_call=st.integers(1, 9)
)
def test_calls_of_a_resumed_run_are_those_of_an_undisturbed_one(evaluate, save, layers, per_call):
    when = When(30, log=1, evaluate=evaluate, save=save, layers=layers, per_call=per_call)
    whole = list(when.call_counts(0))
    assert sum(whole) == 30
    halts = {position for position in range(31) if when.due(evaluate, position) or when.due(save, position)}
    halts |= {position for position in range(30) if when.layers_due(position + 1)}
    ends = list(itertools.accumulate(whole, initial=0))
    assert halts <= set(ends)
    for index, end in enumerate(ends):
        assert list(when.call_counts(end)) == whole[index:]

"""Policies and rules as texts: any is a policy, or refused by one message."""

from hypothesis import given, settings
from hypothesis import strategies as st

from mpjax.errors import UsageError
from mpjax.precision import Policy, Rules, covers, get_policy, parse_rules, scope_lineage


PIECES = [
    "params",
    "compute=",
    "output",
    "=",
    ";",
    ",",
    "float16",
    "f32",
    "*",
    "[",
    "]",
    "!",
    "?",
    "type:",
    "norm",
    " ",
]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=10).map("".join)


@settings(max_examples=200)
@given(TEXTS)
def test_any_text_is_a_policy_or_refused(text):
    try:
        found = get_policy(text)
    except UsageError as error:
        found = str(error)
    assert isinstance(found, Policy) or found


@settings(max_examples=200)
@given(st.lists(TEXTS, max_size=3))
def test_any_texts_are_rules_or_refused(texts):
    try:
        found = parse_rules(texts)
    except UsageError as error:
        found = str(error)
    assert isinstance(found, Rules) or "rule" in found


@settings(max_examples=200)
@given(TEXTS, st.text(max_size=20))
def test_any_pattern_covers_a_scope_or_does_not(pattern, scope):
    assert isinstance(covers(pattern, scope_lineage(scope)), bool)

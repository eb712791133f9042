"""Rules: globs on paths and types, the first match wins, and no rule is idle in silence."""

import time

import pytest

from mpjax.errors import UsageError
from mpjax.precision import Rules, by_path, covers, decide, is_norm, scope_lineage


MODEL = ("", frozenset({"Net"}))
STEM = ("stem", frozenset({"Block"}))
CONV = ("stem/conv1", frozenset({"Conv"}))
BN = ("stem/bn", frozenset({"GhostNorm", "BatchNorm"}))
HEAD = ("head", frozenset({"Linear"}))
LINEAGES = ((MODEL,), (MODEL, STEM), (MODEL, STEM, CONV), (MODEL, STEM, BN), (MODEL, HEAD))


@pytest.mark.parametrize(
    ("pattern", "covered"),
    [
        ("stem/*", ["stem/conv1", "stem/bn"]),
        ("stem", ["stem", "stem/conv1", "stem/bn"]),
        ("*", ["", "stem", "stem/conv1", "stem/bn", "head"]),
        ("stem/conv?", ["stem/conv1"]),
        ("*/bn", ["stem/bn"]),
        ("[sh]*", ["stem", "stem/conv1", "stem/bn", "head"]),
        ("Stem", []),
        ("type:Block", ["stem", "stem/conv1", "stem/bn"]),
        ("type:BatchNorm", ["stem/bn"]),
        ("type:*Norm", ["stem/bn"]),
        ("type:norm", ["stem/bn"]),
        ("type:Norm", ["stem/bn"]),
        ("type:linear", []),
        ("type:Net", ["", "stem", "stem/conv1", "stem/bn", "head"]),
    ],
)
def test_what_a_pattern_covers(pattern, covered):
    assert [lineage[-1][0] for lineage in LINEAGES if covers(pattern, lineage)] == covered


def test_the_first_matching_rule_decides():
    rules = Rules({"stem/conv1": "float16", "stem/*": "float32", "type:Linear": "bfloat16"})
    assert decide(rules, LINEAGES) == {
        "": None,
        "stem": None,
        "stem/conv1": "stem/conv1",
        "stem/bn": "stem/*",
        "head": "type:Linear",
    }


def test_a_rule_that_matches_nothing_names_the_nearest_paths():
    with pytest.raises(UsageError, match=r"^rule 'stem/conv2' matches nothing; nearest: stem/conv1"):
        decide(Rules({"stem/conv2": "float32"}), LINEAGES)


def test_a_type_that_matches_nothing_names_the_nearest_types():
    with pytest.raises(UsageError, match=r"^rule 'type:linaer' matches nothing; nearest: type:Linear"):
        decide(Rules({"type:linaer": "float32"}), LINEAGES)


@pytest.mark.parametrize("pattern", ["type:Head", "type:First_Or_Last", "type:Small_Product", "TYPE:HEAD"])
def test_a_type_that_differs_from_a_tag_in_case_is_no_tag(pattern):
    with pytest.raises(UsageError, match=f"^rule '{pattern}' matches nothing"):
        decide(Rules({pattern: "float32"}), LINEAGES)
    assert decide(Rules({pattern.lower(): "float32"}), LINEAGES)["head"] is None  # no layer need have a tag


def test_no_more_than_three_are_named():
    lineages = [(MODEL, (f"conv{i}", frozenset({"Conv"}))) for i in range(5)]
    with pytest.raises(UsageError, match=r"^rule 'conv' matches nothing; nearest: conv4, conv3, conv2$"):
        decide(Rules({"conv": "float32"}), lineages)
    # Where none is near: the first three.
    with pytest.raises(UsageError, match=r"^rule 'xyz' matches nothing; nearest: conv0, conv1, conv2$"):
        decide(Rules({"xyz": "float32"}), lineages)


def test_all_idle_rules_are_named_at_once():
    with pytest.raises(UsageError) as caught:
        decide(Rules({"hade": "float32", "stme": "float32", "head": "float32"}), LINEAGES)
    assert [line.split("'")[1] for line in str(caught.value).splitlines()] == ["hade", "stme"]


def test_a_rule_shadowed_by_an_earlier_one_is_an_error_that_names_it():
    with pytest.raises(UsageError, match=r"'stem/bn' decides nothing: .* before it \('stem/\*'\) .*; put it first"):
        decide(Rules({"stem/*": "float32", "stem/bn": "float16"}), LINEAGES)


def test_a_rule_shadowed_by_several_names_that_of_the_first_module():
    rules = Rules({"stem": "float32", "head": "bfloat16", "[sh]*": "float16"})
    with pytest.raises(UsageError, match=r"'\[sh\]\*' decides nothing: rules before it \('stem'\) decide all its"):
        decide(rules, LINEAGES)


def test_a_model_without_submodules_says_so():
    with pytest.raises(UsageError, match="the model has no submodules"):
        decide(Rules({"stem": "float32"}), ((MODEL,),))


def test_only_the_norm_rule_may_match_nothing():
    assert decide(Rules({"type:norm": "float32"}), ((MODEL,), (MODEL, HEAD))) == {"": None, "head": None}
    for pattern in ("type:linear", "type:softmax"):
        with pytest.raises(UsageError, match=f"rule '{pattern}' matches nothing"):
            decide(Rules({pattern: "float32"}), ((MODEL,), (MODEL, HEAD)))


@pytest.mark.parametrize("pattern", ["", "  ", "a=b", "a;b", 3, None])
def test_a_bad_pattern_is_an_error(pattern):
    with pytest.raises(UsageError, match="bad rule pattern"):
        Rules([(pattern, "float32")])


def test_spaces_around_a_pattern_do_not_count():
    assert list(Rules({" stem/* ": "float32"})) == ["stem/*"]


def test_a_rule_given_twice_is_an_error():
    with pytest.raises(UsageError, match="rule given twice: stem"):
        Rules([("stem", "float32"), ("stem ", "float16")])


def test_rules_are_values_whose_order_counts():
    rules, same, other = Rules({"a": 1, "b": 2}), Rules([("a", 1), ("b", 2)]), Rules({"b": 2, "a": 1})
    assert rules == same
    assert hash(rules) == hash(same)
    assert rules != other
    assert other != rules
    assert (rules["b"], len(rules), list(other)) == (2, 2, ["b", "a"])


@pytest.mark.parametrize("name", ["BatchNorm", "LayerNorm", "GroupNorm", "RMSNorm", "InstanceNorm"])
def test_a_norm_is_known_by_any_class_it_inherits_from(name):
    assert is_norm(("MyNorm", name))
    assert not is_norm(("WeightNormalised", "Linear"))


# For named scopes


def test_a_scope_stands_in_those_around_it():
    assert [path for path, _ in scope_lineage("stem/conv1/0")] == ["", "stem", "stem/conv1", "stem/conv1/0"]
    assert [path for path, _ in scope_lineage("")] == [""]
    assert covers("stem/*", scope_lineage("stem/conv1/0"))
    assert not covers("type:Conv", scope_lineage("stem/conv1"))


@pytest.mark.parametrize(
    ("rules", "by"),
    [
        ({"stem/*": 32, "head": 16}, {"stem/*": 32, "head": 16}),
        ({"type:Conv": 32}, {"stem/conv1": 32}),
        ({"type:*Norm": 32, "type:Linear": 16}, {"stem/bn": 32, "head": 16}),
        ({"type:norm": 32}, {"stem/bn": 32}),
        # A path covers what the module holds: the outermost is enough, and the inner ones would be idle.
        ({"type:Block": 32}, {"stem": 32}),
        ({"type:Net": 32}, {"*": 32}),
        # What an earlier rule decides is not the later one's.
        ({"stem/*": 32, "type:*n*": 16}, {"stem/*": 32, "head": 16}),
        ({"stem/conv1": 16, "type:Block": 32}, {"stem/conv1": 16, "stem": 32}),
        ({"type:Block": 32, "*": 16}, {"stem": 32, "*": 16}),
    ],
)
def test_types_become_the_paths_that_they_decide_in_the_order_of_the_rules(rules, by):
    assert tuple(by_path(Rules(rules), LINEAGES).items()) == tuple(by.items())


@pytest.mark.parametrize(
    "rules",
    [
        {"type:Block": 32},
        {"type:Net": 32},
        {"stem/conv1": 16, "type:Block": 32},
        {"type:BatchNorm": 32, "stem/*": 16, "type:*": 64},
    ],
)
def test_by_path_every_module_gets_what_it_had_by_type_and_no_rule_is_idle(rules):
    by = by_path(Rules(rules), LINEAGES)
    decided, again = decide(Rules(rules), LINEAGES), decide(by, [scope_lineage(path[-1][0]) for path in LINEAGES])
    assert {path: by[p] if p else None for path, p in again.items()} == {
        path: rules[p] if p else None for path, p in decided.items()
    }


def test_a_path_with_brackets_is_taken_by_the_letter():
    lineage = (MODEL, ("blocks[0]", frozenset({"Block"})))
    (pattern,) = by_path(Rules({"type:Block": 32}), [(MODEL,), lineage])
    assert covers(pattern, scope_lineage("blocks[0]"))
    assert not covers(pattern, scope_lineage("blocks0"))


def test_the_time_for_rules_grows_as_their_number():
    lineages = [(MODEL, (f"blocks/{i}", frozenset({"Block"}))) for i in range(100)]

    def seconds(count: int) -> float:
        began = time.process_time()
        with pytest.raises(UsageError) as raised:
            decide(Rules({f"block{i}": 32 for i in range(count)}), lineages)
        assert len(str(raised.value).splitlines()) == 21
        assert str(raised.value).endswith(f"and {count - 20} more rules")
        return time.process_time() - began

    # With the square of the number it would be 100.
    assert seconds(10_000) / seconds(1_000) < 30

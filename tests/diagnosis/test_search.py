"""The search for a smallest set, and which modules a path belongs to."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from mpjax.diagnosis import innermost, is_in, minimal, narrow


def _monotone(needed: list[frozenset]):
    """Repairs as soon as all of any one of `needed` is kept; counts nothing else."""
    return lambda kept: any(group <= set(kept) for group in needed)


@given(
    st.integers(1, 40).flatmap(
        lambda size: st.tuples(
            st.just(size),
            st.lists(st.frozensets(st.integers(0, size - 1), min_size=1, max_size=5), min_size=1, max_size=4),
        )
    )
)
def test_no_proper_subset_of_the_minimum_repairs(case):
    size, needed = case
    items = [str(i) for i in range(size)]
    repairs = _monotone([frozenset(map(str, group)) for group in needed])
    found = minimal(items, repairs)
    assert repairs(found)
    assert set(found) <= set(items)
    assert len(found) == len(set(found))
    for count in range(len(found)):
        assert not any(repairs(part) for part in itertools.combinations(found, count))


def test_keeps_the_order_and_asks_little():
    asked = []

    def repairs(kept):
        asked.append(kept)
        return {"a17", "a63"} <= set(kept)

    assert minimal([f"a{i}" for i in range(64)], repairs) == ["a17", "a63"]
    assert len(asked) < 80


def test_many_needed_items_take_few_questions():
    asked, needed = [], {f"a{7 * i}" for i in range(14)}

    def repairs(kept):
        asked.append(kept)
        return needed <= set(kept)

    assert set(minimal([f"a{i}" for i in range(100)], repairs)) == needed
    assert len(asked) <= 14 * 8


@given(st.lists(st.frozensets(st.integers(0, 7)), max_size=40))
def test_what_is_left_repairs_and_no_item_of_it_is_needless_whatever_the_predicate_says(sets):
    """More modules in float32 may repair less: a cast between them may overflow."""
    items = [str(i) for i in range(8)]
    true = {frozenset(map(str, group)) for group in sets} | {frozenset(items)}
    left = minimal(items, lambda kept: frozenset(kept) in true)
    assert frozenset(left) in true
    assert not any(frozenset(left) - {item} in true for item in left if len(left) > 1)


def test_one_item_is_minimal_without_a_question():
    assert minimal(["a"], lambda kept: bool(1 / 0)) == ["a"]


def test_a_path_is_in_its_module_and_in_those_around_it():
    assert is_in("blocks/1/conv", "blocks/1")
    assert is_in("blocks/1", "blocks/1")
    assert not is_in("blocks/10", "blocks/1")
    assert is_in("blocks", "")


def test_a_module_is_left_for_one_in_it_that_does_as_well():
    suspects = ["net", "net/a", "net/b", "net/b/x", "head"]

    def repairs(kept):
        return any(is_in("net/b/x", module) for module in kept)

    assert narrow(["net"], suspects, (), repairs) == ["net/b/x"]
    assert narrow(["net/b"], suspects, (), repairs) == ["net/b/x"]


def test_a_module_whose_own_operations_are_to_blame_stays():
    def repairs(kept):
        return "net" in kept

    assert narrow(["net"], ["net", "net/a", "net/b"], (), repairs) == ["net"]


def test_a_module_to_blame_itself_is_not_left_for_all_that_it_holds():
    def repairs(kept):
        return bool(kept)

    assert narrow(["net"], ["net", "net/a", "net/b"], {"net"}, repairs) == ["net"]
    assert narrow(["net"], ["net", "net/a", "net/b"], (), repairs) == ["net/a"]


def test_what_a_scope_inside_a_module_does_counts_as_the_modules():
    modules = ("blocks/1", "blocks/1/attention", "blocks/1/attention/query", "blocks/11")
    assert innermost("blocks/1/attention/btnh,bsnh->bnts", modules) == "blocks/1/attention"
    assert innermost("blocks/1/attention", modules) == "blocks/1/attention"
    assert innermost("loss", modules) == ""

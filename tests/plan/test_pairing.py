"""Which instruction does the work of which product."""

import dataclasses

from mpjax.plan import (
    AMONG,
    CONSTANT,
    INSIDE,
    MERGED,
    NOWHERE,
    SHARED,
    UNCLEAR,
    CompiledProduct,
    Module,
    TracedProduct,
    paired,
)


F16, F32 = ("float16", "float16"), ("float32", "float32")


def ask(path, size=8, *, backward=False, **known):
    known = {"elements": 4, "same": object(), **known}
    return TracedProduct("product", Module(path, backward), True, F16, "float16", size, **known)


def run(path, size=8, operands=F16, *, named=True, backward=False, by="Triton", elements=4):
    return CompiledProduct("product", Module(path, backward), named, operands, "float32", "float16", by, size, elements)


def pairs(traced, runs, loops=(), partitions=1):
    paired_products = paired(traced, runs, lambda: loops, partitions=partitions)
    return [
        (pair.traced and pair.traced.module.path, pair.compiled and pair.compiled.operands, pair.note)
        for pair in paired_products
    ]


def test_by_name_and_size():
    assert pairs([ask("a"), ask("a", 16)], [run("a", 16), run("a", operands=F32)]) == [("a", F32, ""), ("a", F16, "")]


def test_of_equal_size_those_with_the_dtypes_asked_for_belong_together():
    exact = dataclasses.replace(ask("a"), operands=F32)
    assert pairs([ask("a"), exact], [run("a", operands=F32), run("a")]) == [("a", F16, ""), ("a", F32, "")]


def test_what_a_kernel_computes_inside_is_unknown():
    assert pairs([dataclasses.replace(ask("a"), kind="kernel")], []) == [("a", None, INSIDE)]


def test_three_of_one_size_in_one_product():
    traced = [ask("b/query"), ask("b/key"), ask("b/value"), ask("c/key")]
    assert pairs(traced, [run("b/query", 24), run("c/key")]) == [
        ("b/query", F16, ""),
        ("b/key", F16, f"{MERGED} b/query"),
        ("b/value", F16, f"{MERGED} b/query"),
        ("c/key", F16, ""),
    ]


def test_three_in_one_product_whose_sums_are_split_and_padded():
    """Sums of 34 terms, for 4 results each, are 4 sums of 10 terms for each of 12 results."""
    traced = [ask(f"b/{name}", 4 * 34, elements=4) for name in ("query", "key", "value")]
    assert [pair[1:] for pair in pairs(traced, [run("b/value", 4 * 12 * 10, elements=4 * 12)])] == [
        (F16, f"{MERGED} b/value"),
        (F16, f"{MERGED} b/value"),
        (F16, ""),
    ]


def test_three_in_one_product_whose_sums_are_split_into_a_power_of_two():
    """Sums of 400 terms, for 4 results each, are 8 sums of 64 terms, though 7 would do."""
    traced = [ask(f"b/{name}", 4 * 400, elements=4) for name in ("query", "key", "value")]
    found = pairs(traced, [run("b/value", 3 * 4 * 8 * 64, elements=3 * 4 * 8)])
    assert [pair[1:] for pair in found] == [(F16, f"{MERGED} b/value"), (F16, f"{MERGED} b/value"), (F16, "")]


def test_different_sizes_in_one_product():
    traced = [ask("b/query", 32), ask("b/key", 8), ask("b/value", 8)]
    assert [pair[1] for pair in pairs(traced, [run("b/query", 48)])] == [F16, F16, F16]
    assert [pair[2] for pair in pairs(traced, [run("b/query", 47)])] == ["", NOWHERE, NOWHERE]


def test_a_product_of_the_size_of_two_that_share_an_operand_is_not_taken_for_them():
    """Adapters of two layers read one input, and their inner products together are as large as an outer one."""
    shared = {"values": ("x",)}
    traced = [ask("a/lora", 8, **shared), ask("a/lora", 16), ask("b/lora", 8, **shared), ask("b/lora", 12)]
    wide = dataclasses.replace(run("a/lora", 16), result="float32")
    runs = [run("a/lora", 8), wide, run("b/lora", 8), run("b/lora", 12)]
    assert [pair[1:] for pair in pairs(traced, runs)] == [(F16, "")] * 4


def test_products_in_one_share_an_operand_and_not_only_a_size():
    """The keys and values of grouped attention together are as large as its output projection."""
    out, query, key, value = (
        ask(f"b/{name}", size, values=(operand, name))
        for name, size, operand in (("out", 8, "y"), ("query", 8, "x"), ("key", 4, "x"), ("value", 4, "x"))
    )
    assert pairs([out, query, key, value], [run("b/query", 16), run("b/out")]) == [
        ("b/out", F16, ""),
        ("b/query", F16, ""),
        ("b/key", F16, f"{MERGED} b/query"),
        ("b/value", F16, f"{MERGED} b/query"),
    ]
    assert [pair[2] for pair in pairs([out, query, key, value], [run("b/query", 16)])][1:] == [
        "",
        f"{MERGED} b/query",
        f"{MERGED} b/query",
    ]


def test_of_both_gradients_of_a_square_layer_the_one_is_joined_that_shares_an_operand():
    of_kernel, of_input, key, value = (
        ask(f"b/{name}", size, backward=True, values=values)
        for name, size, values in (
            ("query", 8, (("x", 0), ("dq", 0))),
            ("query", 8, (("dq", 2), ("kernel", 1))),
            ("key", 4, (("x", 0), ("dk", 0))),
            ("value", 4, (("x", 0), ("dv", 0))),
        )
    )
    runs = [run("b/query", backward=True), run("b/query", 16, backward=True)]
    paired_products = paired([of_kernel, of_input, key, value], runs, list)
    assert [pair.compiled and pair.compiled.size for pair in paired_products] == [16, 8, 16, 16]


def test_a_product_that_is_whole_takes_no_more_parts():
    traced = [ask("b/query"), ask("b/key"), ask("b/value"), ask("b/out", 16)]
    paired_products = pairs(traced, [run("b/query", 24)])
    assert [pair[2] for pair in paired_products] == ["", f"{MERGED} b/query", f"{MERGED} b/query", NOWHERE]


def test_a_run_that_is_smaller_than_its_product_is_not_of_others():
    traced = [ask("b/query", 32), ask("b/key"), ask("b/value")]
    assert [pair[2] for pair in pairs(traced, [run("b/query", 16)])] == ["", NOWHERE, NOWHERE]


def test_a_product_divided_over_devices():
    assert pairs([ask("a", 16)], [run("a", 4)], partitions=8) == [("a", F16, "")]


def test_one_without_a_name_is_known_by_its_size_unless_candidates_differ():
    nameless = [run("", named=False), run("", named=False, by="cuBLAS")]
    paired_products = paired([ask("a"), ask("b")], nameless, list)
    assert [pair.compiled and pair.compiled.by for pair in paired_products] == ["Triton or cuBLAS"] * 2
    differing = [run("", named=False), run("", operands=F32, named=False)]
    exact = [dataclasses.replace(ask(path), operands=F32) for path in "ab"]
    assert pairs(exact, differing)[:2] == [("a", None, UNCLEAR), ("b", None, UNCLEAR)]


def test_as_many_without_a_name_as_are_left_belong_together_if_they_run_alike():
    nameless = [run("", 5, named=False), run("", 7, named=False)]
    assert pairs([ask("a"), ask("b")], nameless) == [("a", F16, ""), ("b", F16, "")]
    assert [pair[2] for pair in pairs([ask("a")], nameless)] == [UNCLEAR, "", ""]
    differing = [run("", 5, named=False), run("", 7, F32, named=False)]
    assert [pair[2] for pair in pairs([ask("a"), ask("b")], differing)] == [UNCLEAR, UNCLEAR, "", ""]


def test_equal_products_and_recomputed_ones_are_computed_once():
    first = ask("a")
    again = dataclasses.replace(first, module=Module("b", False))
    recomputed = ask("a", backward=True, recomputed=True)
    assert pairs([first, again, recomputed], [run("a")]) == [("a", F16, ""), ("b", F16, SHARED), ("a", F16, SHARED)]


def test_multiplications_of_the_same_module_count_if_there_is_no_product():
    assert pairs([ask("a")], [], [run("a", 0, F32, by="XLA loop")]) == [("a", F32, "")]
    assert pairs([ask("a")], [], [run("b", 0, F32, by="XLA loop")]) == [("a", None, NOWHERE)]


def test_what_is_left_is_missing_constant_or_unknown():
    assert pairs([ask("a")], []) == [("a", None, NOWHERE)]
    assert pairs([ask("a", constant=True)], []) == [("a", None, CONSTANT)]
    assert pairs([ask("a")], [run("b", 99)]) == [("a", None, UNCLEAR), (None, F16, "")]


def test_a_second_computation_counts_only_in_other_dtypes():
    assert pairs([ask("a")], [run("a"), run("a")]) == [("a", F16, "")]
    assert pairs([ask("a")], [run("a"), run("", named=False)]) == [("a", F16, "")]
    assert pairs([ask("a")], [run("a"), run("", operands=F32, named=False)]) == [("a", F16, ""), (None, F32, "")]
    assert pairs([ask("a")], [run("a"), run("a", operands=F32)]) == [("a", F16, ""), ("a", F32, "")]


def test_as_many_without_names_are_counted_by_dtype_and_the_note_says_that_which_is_a_guess():
    """Two that ask for a float32 result, and one of float16, are computed by one in float32 and two in float16."""
    wide = [dataclasses.replace(ask(path), result="float32") for path in "ab"]
    lost = {"named": False, "by": "YNNPACK"}
    runs = [run("", **lost), dataclasses.replace(run("", **lost), result="float32"), run("", operands=F32, **lost)]
    runs[2] = dataclasses.replace(runs[2], result="float32")
    note = AMONG.format(count=3)
    assert pairs([ask("c"), *wide], runs) == [("c", F16, note), ("a", F16, note), ("b", F32, note)]
    results = {pair.traced.module.path: pair.compiled.result for pair in paired([ask("c"), *wide], runs, lambda: ())}
    assert results == {"c": "float16", "a": "float32", "b": "float32"}
    assert [pair[1] for pair in pairs([ask("c"), *wide, ask("d")], runs)] == [None] * 4 + [F16, F16, F32]


def test_loops_of_other_dtypes_are_counted_if_they_are_as_many_and_none_is_narrower():
    wide, half, narrow = (run("a", operands=operands, by="XLA loop") for operands in (F32, F16, ("float8_e4m3fn",) * 2))
    note = AMONG.format(count=2)
    assert pairs([ask("a"), ask("a")], [], loops=[wide, half]) == [("a", F32, note), ("a", F16, note)]
    assert pairs([ask("a"), ask("a")], [], loops=[wide, half, half]) == [("a", None, UNCLEAR)] * 2
    assert pairs([ask("a"), ask("a")], [], loops=[narrow, half]) == [("a", None, UNCLEAR)] * 2

"""The dtypes that devices add up in, and that many terms are added up in on one device."""

import pytest

from mpjax.plan import Module, Sum, parse, rows_of_accumulations, rows_of_sums, sums_of


TEXT = """HloModule m, num_partitions=2

%add (p: f32[], q: f32[]) -> f32[] {
  %p = f32[] parameter(0)
  %q = f32[] parameter(1)
  ROOT %s = f32[] add(%p, %q)
}

%most (p: f32[], q: f32[]) -> f32[] {
  %p = f32[] parameter(0)
  %q = f32[] parameter(1)
  ROOT %s = f32[] maximum(%p, %q)
}

ENTRY %main (g: f32[4], h: bf16[2,4]) -> f32[4] {
  %g = f32[4]{0} parameter(0)
  %h = bf16[2,4]{1,0} parameter(1)
  %total = f32[4]{0} all-reduce(%g), replica_groups={{0,1}}, to_apply=%add, metadata={op_name="jit(f)/shard_map/psum"}
  %added = bf16[2,4]{1,0} all-reduce-start(%h), to_apply=%add, metadata={op_name="transpose(jvp(up))/dot_general"}
  ROOT %largest = f32[4]{0} all-reduce(%g), to_apply=%most
}
"""


def test_sums_have_the_dtype_and_dimensions_of_what_is_added():
    asked, added = sums_of(parse(TEXT))
    assert (asked.by, asked.arrays) == ("all-reduce", (("float32", (4,)),))
    assert (asked.named, asked.written) == (True, True)
    assert (added.arrays, added.written) == ((("bfloat16", (2, 4)),), False)
    assert added.module == Module("up", True)


OUTSIDE = Module("", False)


def added(dtype, *, named=True, written=True, dims=(4, 2), module=OUTSIDE):
    return Sum("all-reduce", module, named, written, ((dtype, dims),))


def sums(asked, found, least="float32", like=()):
    rows = rows_of_sums(asked, found, least=least, parameters=like)
    return [(row.asked, row.operands, row.verdict) for row in rows]


def test_sums_over_devices_are_compared_with_the_function_and_the_policy():
    assert sums(["float32"], [added("float32")]) == [("float32", "float32", "as asked")]
    assert sums(["float32"], [added("float16")]) == [("float32", "float16", "narrower")]
    assert sums(["bfloat16"], [added("bfloat16")]) == [("float32", "bfloat16", "narrower")]
    assert sums(["bfloat16"], [added("bfloat16")], least="bfloat16") == [("bfloat16", "bfloat16", "as asked")]
    assert sums(["float32"], []) == [("float32", "", "missing")]


def test_a_sum_that_the_compiler_added_is_judged_as_a_gradient_if_it_has_a_parameters_shape():
    backward = Module("up", True)
    own = added("float16", written=False, module=backward)
    assert sums([], [own], like=[(2, 4)]) == [("float32", "float16", "narrower")]
    assert sums([], [own], like=[(3, 4)]) == [("float16", "float16", "as asked")]


def test_a_sum_without_a_name_is_the_functions_if_it_asks_for_one_in_that_dtype_else_the_compilers():
    nameless = added("float16", named=False, written=False)
    assert sums(["float32"], [added("float32", named=False, written=False)]) == [("float32", "float32", "as asked")]
    assert sums([], [nameless], like=[(2, 4)]) == [("float32", "float16", "narrower")]
    assert sums(["float32"], [added("float32"), nameless], like=[(2, 4)])[1] == ("float32", "float16", "narrower")


def test_gradients_that_xla_joined_in_one_array_are_found_by_their_number_or_unknown():
    joined = added("bfloat16", named=False, written=False, dims=(14,))
    assert sums([], [joined], like=[(2, 4), (3, 2)]) == [("float32", "bfloat16", "narrower")]
    assert sums([], [joined], like=[(2, 4), (3, 3)]) == [("bfloat16", "bfloat16", "unknown")]
    wide = added("float32", named=False, written=False, dims=(14,))
    assert sums([], [wide]) == [("float32", "float32", "as asked")]


def test_a_sum_in_a_dtype_that_the_function_does_not_ask_for_is_unknown_and_without_a_trace_the_policys():
    assert sums(["float32"], [added("float32"), added("float16")])[1] == ("float32", "float16", "unknown")
    assert sums([], [added("float32")]) == [("float32", "float32", "as asked")]
    assert sums([], [added("float16")]) == [("float32", "float16", "narrower")]
    assert sums([], [added("float16")], least=None) == [("", "float16", "unknown")]


HALF_SUM = """HloModule jit_step

%add (a: {half}[], b: {half}[]) -> {half}[] {{
  %a = {half}[] parameter(0)
  %b = {half}[] parameter(1)
  ROOT %sum = {half}[] add(%a, %b)
}}

ENTRY %main (x: {half}[64,64], i: s32[{rows},1], u: {half}[{rows},64]) -> {half}[64,64] {{
  %x = {half}[64,64]{{1,0}} parameter(0)
  %i = s32[{rows},1]{{1,0}} parameter(1)
  %u = {half}[{rows},64]{{1,0}} parameter(2)
  %zero = {half}[] constant(0)
  ROOT %r = {line}, to_apply=%add, metadata={{op_name="jit(step)/transpose(jvp(graph))/sum"}}
}}
"""

BY = {
    "scatter": "{half}[64,64]{{1,0}} scatter(%x, %i, %u), update_window_dims={{1}}, index_vector_dim=1",
    "reduce": "{half}[64]{{0}} reduce(%u, %zero), dimensions={{0}}",
    "reduce-window": "{half}[64,64]{{1,0}} reduce-window(%x, %zero), window={{size={rows}x1 pad=0_0x0_0}}",
}


def half_sums(by, half, terms):
    line = BY[by].format(half=half, rows=terms)
    return rows_of_accumulations(parse(HALF_SUM.format(half=half, rows=terms, line=line)))


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize(("half", "dtype"), [("f16", "float16"), ("bf16", "bfloat16")])
def test_a_sum_of_eight_terms_is_told_and_of_fewer_is_not(by, half, dtype):
    (row,) = half_sums(by, half, 8)
    assert (row.path, row.direction, row.kind, row.by) == ("graph", "backward", "accumulation", by)
    assert (row.asked, row.accumulation, row.verdict) == ("float32", dtype, "narrower")
    if by != "scatter":
        assert half_sums(by, half, 7) == []


@pytest.mark.parametrize("by", BY)
def test_sums_in_float32_have_no_row(by):
    assert half_sums(by, "f32", 4096) == []

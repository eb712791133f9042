"""Sums of many terms that a compiled program adds up in half precision are told, and others are not."""

import pytest

from mpjax.plan.hlo import parse
from mpjax.plan.verdicts import rows_of_accumulations


TEXT = """HloModule jit_step

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

LINES = {
    "scatter": "{half}[64,64]{{1,0}} scatter(%x, %i, %u), update_window_dims={{1}}, index_vector_dim=1",
    "reduce": "{half}[64]{{0}} reduce(%u, %zero), dimensions={{0}}",
    "reduce-window": "{half}[64,64]{{1,0}} reduce-window(%x, %zero), window={{size={rows}x1 pad=0_0x0_0}}",
}


def rows(by, half, terms):
    line = LINES[by].format(half=half, rows=terms)
    return rows_of_accumulations(parse(TEXT.format(half=half, rows=terms, line=line)))


@pytest.mark.parametrize("by", LINES)
@pytest.mark.parametrize(("half", "dtype"), [("f16", "float16"), ("bf16", "bfloat16")])
def test_a_sum_of_eight_terms_is_told_and_of_fewer_is_not(by, half, dtype):
    (row,) = rows(by, half, 8)
    assert (row.path, row.direction, row.kind, row.by) == ("graph", "backward", "accumulation", by)
    assert (row.asked, row.accumulation, row.verdict) == ("float32", dtype, "narrower")
    if by != "scatter":
        assert rows(by, half, 7) == []


@pytest.mark.parametrize("by", LINES)
def test_sums_in_float32_have_no_row(by):
    assert rows(by, "f32", 4096) == []

"""What programs move, by hand: each text has its bytes counted beside it."""

import pytest

from mpjax.plan import parse, traffic_of


def program(entry: str, others: str = ""):
    return parse(f"HloModule m\n\n{others}\n\nENTRY %main (a: f32[]) -> f32[] {{\n{entry}\n}}\n")


def test_a_kernel_reads_its_operands_and_writes_its_result():
    """A fusion of 400 + 400 -> 200 bytes and a product of 200 + 100 -> 40; names, tuples and constants are free."""
    found = traffic_of(
        program(
            """\
  %a = f32[100]{0} parameter(0)
  %b = f32[100]{0} parameter(1)
  %c = bf16[5,10]{1,0} constant({...})
  %fusion = bf16[100]{0} fusion(%a, %b), kind=kLoop, calls=%f
  %bitcast = bf16[10,10]{1,0} bitcast(%fusion)
  %dot = f32[10]{0} dot(%bitcast, %c), lhs_contracting_dims={1}
  ROOT %t = (f32[10]{0}) tuple(%dot)""",
            """\
%f (p0: f32[100], p1: f32[100]) -> bf16[100] {
  %p0 = f32[100]{0} parameter(0)
  %p1 = f32[100]{0} parameter(1)
  %add = f32[100]{0} add(%p0, %p1)
  ROOT %convert = bf16[100]{0} convert(%add)
}""",
        )
    )
    assert (found.bytes, found.kernels, found.copies) == (400 + 400 + 200 + 200 + 100 + 40, 2, 0)


def test_a_loop_counts_as_often_as_it_runs():
    """Seven rounds of a kernel that reads 400 bytes and writes 400."""
    body = """\
%body (s: (s32[], f32[100])) -> (s32[], f32[100]) {
  %s = (s32[], f32[100]{0}) parameter(0)
  %x = f32[100]{0} get-tuple-element(%s), index=1
  %i = s32[] get-tuple-element(%s), index=0
  %negate = f32[100]{0} negate(%x)
  ROOT %t = (s32[], f32[100]{0}) tuple(%i, %negate)
}"""
    found = traffic_of(
        program(
            """\
  %a = (s32[], f32[100]{0}) parameter(0)
  ROOT %w = (s32[], f32[100]{0}) while(%a), condition=%cond, body=%body, """
            """backend_config={"known_trip_count":{"n":"7"}}""",
            body,
        )
    )
    assert (found.bytes, found.kernels) == (7 * 800, 7)


def test_of_a_table_only_the_rows_that_are_taken_are_read():
    """A fusion gathers 4 rows of 40 bytes from 1000 by 4 numbers of 4 bytes, and writes them."""
    found = traffic_of(
        program(
            """\
  %table = f32[1000,10]{1,0} parameter(0)
  %rows = s32[4]{0} parameter(1)
  ROOT %fusion = f32[4,10]{1,0} fusion(%table, %rows), kind=kLoop, calls=%f""",
            """\
%f (p0: f32[1000,10], p1: s32[4]) -> f32[4,10] {
  %p0 = f32[1000,10]{1,0} parameter(0)
  %p1 = s32[4]{0} parameter(1)
  %b = f32[1000,10]{1,0} bitcast(%p0)
  ROOT %gather = f32[4,10]{1,0} gather(%b, %p1), offset_dims={1}
}""",
        )
    )
    assert found.bytes == 160 + 16 + 160


def test_of_an_array_that_is_updated_in_place_only_the_update_is_written():
    """A fusion writes 10 new values of 4 bytes into 1000, at a place of 4 bytes."""
    found = traffic_of(
        program(
            """\
  %all = f32[1000]{0} parameter(0)
  %new = f32[10]{0} parameter(1)
  %at = s32[] parameter(2)
  ROOT %fusion = f32[1000]{0} fusion(%all, %new, %at), kind=kLoop, calls=%f""",
            """\
%f (p0: f32[1000], p1: f32[10], p2: s32[]) -> f32[1000] {
  %p0 = f32[1000]{0} parameter(0)
  %p1 = f32[10]{0} parameter(1)
  %p2 = s32[] parameter(2)
  ROOT %update = f32[1000]{0} dynamic-update-slice(%p0, %p1, %p2)
}""",
        )
    )
    assert found.bytes == 40 + 4 + 40


def test_copies_are_told_apart_and_workspaces_are_no_traffic():
    found = traffic_of(
        program(
            """\
  %a = f32[10,10]{1,0} parameter(0)
  %copy = f32[10,10]{0,1} copy(%a)
  %fusion = f32[10,10]{1,0} fusion(%copy), kind=kInput, calls=%f
  ROOT %conv = (f32[10]{0}, u8[1000]{0}) custom-call(%fusion), custom_call_target="__cudnn$convForward\"""",
            """\
%f (p0: f32[10,10]) -> f32[10,10] {
  %p0 = f32[10,10]{1,0} parameter(0)
  ROOT %transpose = f32[10,10]{1,0} transpose(%p0), dimensions={1,0}
}""",
        )
    )
    assert (found.copies, found.bytes, found.kernels) == (800 + 800, 800 + 800 + 400 + 40, 3)
    assert found.calls == {"__cudnn$convForward": 1}


def test_collectives_are_counted_whole_by_kind_and_dtype():
    """Four devices sum 200 bytes of bf16 and gather 4 x 80 bytes of f32; the second is asynchronous."""
    found = traffic_of(
        program(
            """\
  %a = bf16[100]{0} parameter(0)
  %b = f32[20]{0} parameter(1)
  %sum = bf16[100]{0} all-reduce(%a), replica_groups={{0,1,2,3}}, to_apply=%add
  %start = (f32[20]{0}, f32[80]{0}) all-gather-start(%b), dimensions={0}
  ROOT %done = f32[80]{0} all-gather-done(%start)"""
        )
    )
    assert found.collectives == {"all-gather": {"f32": 320}, "all-reduce": {"bf16": 200}}
    assert (found.bytes, found.kernels) == (200 + 200 + 80 + 320, 2)


@pytest.mark.parametrize(("first", "second", "wanted"), [(100, 10, 800), (10, 100, 800)])
def test_of_branches_the_one_that_moves_most_counts(first, second, wanted):
    def branch(name: str, size: int) -> str:
        return f"""\
%{name} (p: f32[{size}]) -> f32[{size}] {{
  %p = f32[{size}]{{0}} parameter(0)
  ROOT %negate = f32[{size}]{{0}} negate(%p)
}}
"""

    found = traffic_of(
        program(
            """\
  %which = pred[] parameter(0)
  ROOT %c = f32[] conditional(%which), branch_computations={%one, %two}""",
            branch("one", first) + "\n" + branch("two", second),
        )
    )
    assert (found.bytes, found.kernels) == (wanted, 1)

"""The bytes of one kernel or collective."""

import pytest

from mpjax.plan import moved, only_copies, parse, payload


TEXT = """HloModule m

%taken (p0: f32[80], p1: s32[]) -> f32[4] {
  %p0 = f32[80]{0} parameter(0)
  %p1 = s32[] parameter(1)
  ROOT %row = f32[4]{0} dynamic-slice(%p0, %p1), dynamic_slice_sizes={4}
}

ENTRY %main (a: f32[80], b: f32[20]) -> f32[80] {
  %a = f32[80]{0} parameter(0)
  %b = f32[20]{0} parameter(1)
  %sum = f32[80]{0} all-reduce-start(%a), to_apply=%add
  %paired = ((f32[80]{0}), f32[80]{0}) all-reduce-start(%a), to_apply=%add
  %gather = (f32[20]{0}, f32[80]{0}) all-gather-start(%b), dimensions={0}
  %scatter = ((f32[80]{0}), f32[20]{0}) reduce-scatter-start(%a), dimensions={0}, to_apply=%add
  %both = ((f32[80]{0}, bf16[40]{0}), (f32[20]{0}, bf16[10]{0})) reduce-scatter-start(%a, %c), dimensions={0}
  %c = bf16[40]{0} constant({...})
  %swap = f32[80]{0} all-to-all(%a), dimensions={0}
  %i = s32[] constant(3)
  %take = ((f32[80]{0}, s32[]), f32[4]{0}, u32[]) fusion-start(%a, %i), kind=kLoop, calls=%taken
  %took = f32[4]{0} fusion-done(%take)
  ROOT %copy = f32[80]{0} copy(%a)
}
"""
PROGRAM = parse(TEXT)
ENTRY = PROGRAM.computations["main"]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("sum", 320 + 320),
        ("paired", 320 + 320),
        ("gather", 80 + 320),
        ("scatter", 320 + 80),
        ("both", 400 + 100),
        ("swap", 640),
        ("copy", 640),
        ("take", 16 + 4 + 16),
    ],
)
def test_what_is_read_and_written_counts_once(name, wanted):
    """The type of a started collective holds its operands too, but for an all-reduce's before jaxlib 0.12."""
    assert moved(PROGRAM, ENTRY, ENTRY.instructions[name]) == wanted


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("sum", [("f32", 320)]),
        ("paired", [("f32", 320)]),
        ("gather", [("f32", 320)]),
        ("scatter", [("f32", 320)]),
        ("both", [("f32", 320), ("bf16", 80)]),
        ("swap", [("f32", 320)]),
    ],
)
def test_a_collective_exchanges_whole_arrays(name, wanted):
    assert payload(ENTRY, ENTRY.instructions[name]) == wanted


def test_a_copy_is_told_from_work():
    assert [only_copies(PROGRAM, ENTRY.instructions[name]) for name in ("copy", "swap")] == [True, False]

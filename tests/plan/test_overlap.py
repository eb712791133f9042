"""Which communication can run while kernels compute."""

from mpjax.plan.hlo import parse
from mpjax.plan.overlap import overlap_of


TEXT = """HloModule step

ENTRY %main (a: f32[100], b: f32[25]) -> f32[100] {
  %a = f32[100]{0} parameter(0)
  %b = f32[25]{0} parameter(1)
  %sum = f32[100]{0} all-reduce-start(%a), to_apply=%add
  %work = f32[25]{0} fusion(%b), kind=kLoop, calls=%fused
  %summed = f32[100]{0} all-reduce-done(%sum)
  %whole = (f32[25]{0}, f32[100]{0}) all-gather-start(%work), dimensions={0}
  %name = f32[25]{0} bitcast(%work)
  %gathered = f32[100]{0} all-gather-done(%whole)
  ROOT %part = f32[25]{0} reduce-scatter(%gathered), dimensions={0}, to_apply=%add
}
"""


def test_a_collective_is_hidden_if_a_kernel_stands_between_its_start_and_its_end():
    """A bitcast is no kernel, and a collective without a start makes the device wait."""
    found = overlap_of(parse(TEXT))
    assert found.bytes == {"all-reduce": 400, "all-gather": 400, "reduce-scatter": 400}
    assert found.hidden == {"all-reduce": 400, "all-gather": 0}
    assert found.share == 1 / 3


def test_a_program_of_one_device_has_nothing_to_hide():
    assert overlap_of(parse("ENTRY %main (a: f32[1]) -> f32[1] {\n  ROOT %a = f32[1]{0} parameter(0)\n}\n")).share == 1

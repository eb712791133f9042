"""Which communication can run while kernels compute."""

from mpjax.plan.events import events_of
from mpjax.plan.hlo import parse
from mpjax.plan.timeline import overlap_of


TEXT = """HloModule step

ENTRY %main (a: f32[100], b: f32[25]) -> f32[100] {
  %a = f32[100]{0} parameter(0)
  %b = f32[25]{0} parameter(1)
  %sum = f32[100]{0} all-reduce-start(%a), to_apply=%add
  %work = f32[25]{0} negate(%b)
  %summed = f32[100]{0} all-reduce-done(%sum)
  %whole = (f32[25]{0}, f32[100]{0}) all-gather-start(%work), dimensions={0}
  %name = f32[25]{0} bitcast(%work)
  %gathered = f32[100]{0} all-gather-done(%whole)
  ROOT %part = f32[25]{0} reduce-scatter(%gathered), dimensions={0}, to_apply=%add
}
"""


def test_a_collective_is_hidden_if_a_kernel_stands_between_its_start_and_its_end():
    """A bitcast is no kernel, and a collective without a start makes the device wait."""
    found = overlap_of(events_of(parse(TEXT)))
    assert found.bytes == {"all-reduce": 400, "all-gather": 400, "reduce-scatter": 400}
    assert found.hidden == {"all-reduce": 400, "all-gather": 0, "reduce-scatter": 0}
    assert found.share == 1 / 3


def test_a_program_of_one_device_has_nothing_to_hide():
    assert overlap_of([]).share == 1


LOOP = """HloModule step

%body (s: (s32[], f32[100])) -> (s32[], f32[100]) {
  %s = (s32[], f32[100]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[100]{0} get-tuple-element(%s), index=1
  %sum = f32[100]{0} all-reduce-start(%x), to_apply=%add
  %work = f32[100]{0} negate(%x)
  %summed = f32[100]{0} all-reduce-done(%sum)
  %next = f32[100]{0} all-reduce(%summed), to_apply=%add
  ROOT %t = (s32[], f32[100]{0}) tuple(%i, %next)
}

ENTRY %main (a: (s32[], f32[100])) -> (s32[], f32[100]) {
  %a = (s32[], f32[100]{0}) parameter(0)
  ROOT %w = (s32[], f32[100]{0}) while(%a), body=%body, backend_config={"known_trip_count":{"n":"3"}}
}
"""


def test_collectives_of_a_loop_count_as_often_as_it_runs():
    found = overlap_of(events_of(parse(LOOP)))
    assert (found.bytes, found.hidden) == ({"all-reduce": 2400}, {"all-reduce": 1200})

"""The events of a step on one device, and their time and overlap."""

from mpjax.plan import (
    Instruction,
    Start,
    StepTime,
    Wait,
    Work,
    events_of,
    exposed_in_any_case,
    overlap_of,
    parse,
    simulate,
)


def loop(body: str) -> str:
    return f"""HloModule m

%body (s: (s32[], f32[100])) -> (s32[], f32[100]) {{
  %s = (s32[], f32[100]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[100]{{0}} get-tuple-element(%s), index=1
{body}
  ROOT %t = (s32[], f32[100]{{0}}) tuple(%i, %y)
}}

ENTRY %main (a: (s32[], f32[100]), b: f32[100]) -> f32[100] {{
  %a = (s32[], f32[100]{{0}}) parameter(0)
  %b = f32[100]{{0}} parameter(1)
  %first = f32[100]{{0}} negate(%b)
  %w = (s32[], f32[100]{{0}}) while(%a), body=%body, backend_config={{"known_trip_count":{{"n":"3"}}}}
  ROOT %last = f32[100]{{0}} negate(%first)
}}
"""


def short(events):
    return [each.moved if isinstance(each, Work) else (type(each), each.name) for each in events]


def test_a_loop_that_exchanges_arrays_is_repeated():
    text = loop(
        """\
  %sum = f32[100]{0} all-reduce-start(%x), replica_groups={{0,1}}, to_apply=%add
  %one = f32[100]{0} negate(%x)
  %two = f32[100]{0} negate(%one)
  %y = f32[100]{0} all-reduce-done(%sum)"""
    )
    once = [(Start, "sum"), 1600, (Wait, "sum")]
    events = events_of(parse(text))
    assert short(events) == [800, *once, *once, *once, 800]
    assert isinstance(events[1], Start)
    assert (events[1].kind, events[1].arrays, events[1].bytes, events[1].moved) == (
        "all-reduce",
        (("f32", 400),),
        400,
        800,
    )


def test_a_loop_of_kernels_alone_is_one_piece_of_work():
    assert short(events_of(parse(loop("  %y = f32[100]{0} negate(%x)")))) == [800 + 3 * 800 + 800]


def test_a_collective_without_a_start_is_waited_for_at_once():
    text = loop("  %y = f32[100]{0} all-reduce(%x), to_apply=%add").replace('"3"', '"1"')
    assert short(events_of(parse(text))) == [800, (Start, "y"), (Wait, "y"), 800]


def start(name: str, seconds: int, *, moved: int = 0) -> Start:
    """A collective of one byte per second."""
    instruction = Instruction(name, f"u8[{seconds}]", "all-reduce-start", (), "")
    return Start(name, "all-reduce", (("u8", seconds),), moved, instruction)


def timed(*events) -> StepTime:
    return simulate(events, 1.0, lambda each: float(each.bytes))


def test_a_collective_that_ends_before_it_is_needed_costs_nothing():
    assert timed(Work(2), start("a", 3), Work(4), Wait("a"), Work(1)) == StepTime(3, 0, 7)


def test_what_is_left_of_a_collective_when_it_is_needed_is_exposed():
    """It runs from 2 to 7; the kernels are done at 6."""
    assert timed(Work(2), start("a", 5), Work(4), Wait("a"), Work(1)) == StepTime(5, 1, 8)


def test_collectives_run_one_after_the_other():
    """The first runs from 1 to 5, the second starts at 2 and runs from 5 to 8; kernels are done at 4."""
    events = [Work(1), start("a", 4), Work(1), start("b", 3), Work(2), Wait("a"), Wait("b"), Work(1)]
    assert timed(*events) == StepTime(7, 4, 9)


def test_a_collective_takes_memory_bandwidth_from_the_kernels():
    """It runs from 0 to 3; of the kernels' 4 seconds it reads and writes for 2."""
    assert timed(start("a", 3, moved=2), Work(2), Wait("a")) == StepTime(3, 0, 4)


def test_a_collective_among_no_others_is_left_out():
    assert timed(Work(1), start("a", 0, moved=5), Wait("a")) == StepTime(0, 0, 1)


def test_a_loop_starts_the_same_collective_again():
    once = [start("a", 3), Work(1), Wait("a")]
    assert timed(*once, *once) == StepTime(6, 4, 6)


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
    assert overlap_of(events_of(parse(TEXT))) == 1 / 3  # of three collectives of 400 bytes


def test_what_has_no_kernel_beside_it_is_waited_for_in_any_case():
    """The first has a kernel beside it. The second, of 4 seconds, reads and writes for one, which counts as kernels."""
    events = [start("a", 9), Work(1), Wait("a"), start("b", 4, moved=1), Wait("b"), start("c", 1, moved=2), Wait("c")]
    assert exposed_in_any_case(events, 1.0, lambda each: float(each.bytes)) == 3


def test_a_program_of_one_device_has_nothing_to_hide():
    assert overlap_of([]) == 1


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
    events = events_of(parse(LOOP))
    assert sum(event.bytes for event in events if isinstance(event, Start)) == 2400
    assert overlap_of(events) == 1 / 2

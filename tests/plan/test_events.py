"""A step as work, starts and waits."""

from mpjax.plan.events import Start, Wait, Work, events_of
from mpjax.plan.hlo import parse


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

"""What a device launches, in order."""

from mpjax.plan import WhileLoop, counted, order_of, parse


TEXT = """HloModule m

%body (s: (s32[], f32[9])) -> (s32[], f32[9]) {
  %s = (s32[], f32[9]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[9]{0} get-tuple-element(%s), index=1
  %inside = f32[9]{0} negate(%x)
  ROOT %t = (s32[], f32[9]{0}) tuple(%i, %inside)
}

%twice (s.2: (s32[], f32[9])) -> (s32[], f32[9]) {
  %s.2 = (s32[], f32[9]{0}) parameter(0)
  ROOT %inner = (s32[], f32[9]{0}) while(%s.2), body=%body, backend_config={"known_trip_count":{"n":"5"}}
}

%short (p: f32[9]) -> f32[9] {
  %p = f32[9]{0} parameter(0)
  ROOT %one = f32[9]{0} negate(%p)
}

%long (p.2: f32[9]) -> f32[9] {
  %p.2 = f32[9]{0} parameter(0)
  %two = f32[9]{0} negate(%p.2)
  ROOT %three = f32[9]{0} negate(%two)
}

ENTRY %main (a: (s32[], f32[9]), b: f32[9]) -> f32[9] {
  %a = (s32[], f32[9]{0}) parameter(0)
  %b = f32[9]{0} parameter(1)
  %sum = f32[9]{0} all-reduce-start(%b), to_apply=%add
  %outer = (s32[], f32[9]{0}) while(%a), body=%twice, backend_config={"known_trip_count":{"n":"2"}}
  %called = f32[9]{0} call(%b), to_apply=%short
  %summed = f32[9]{0} all-reduce-done(%sum)
  ROOT %either = f32[9]{0} conditional(%b, %b, %b), branch_computations={%short, %long}
}
"""


def test_called_computations_stand_in_their_place_and_loops_stay_loops():
    order = order_of(parse(TEXT))
    loop = order[1]
    assert isinstance(loop, WhileLoop)
    assert (loop.trips, loop.body[0].trips) == (2, 5)
    names = [(launch.instruction.name, times) for launch, times in counted(order)]
    assert names == [("sum", 1), ("inside", 10), ("one", 1), ("summed", 1), ("two", 1), ("three", 1)]

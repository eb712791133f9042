"""The kernels that move the most, by kind, module and source line."""

from mpjax.plan import Cost, costliest, parse


def metadata(stack):
    return f'metadata={{op_name="jit(f)/{stack}"}}'


TEXT = f"""HloModule m

ENTRY %main (a: f32[100]) -> f32[100] {{
  %a = f32[100]{{0}} parameter(0)
  %b = f32[1000]{{0}} parameter(1)
  %negate.1 = f32[100]{{0}} negate(%a), {metadata("jvp(blocks/0)/neg")}
  %negate.2 = f32[100]{{0}} negate(%negate.1), {metadata("jvp(blocks/1)/neg")}
  %negate.3 = f32[100]{{0}} negate(%negate.2), {metadata("transpose(jvp(blocks/1))/neg")}
  %big = f32[1000]{{0}} negate(%b), {metadata("neg")}
  ROOT %call.7 = f32[100]{{0}} custom-call(%negate.3), custom_call_target="__cublas$gemm", {metadata("head/dot")}
}}
"""


def test_kernels_of_all_blocks_are_one_kind():
    assert costliest(TEXT, parse(TEXT)) == [
        Cost(8000, 1, "big", "", False, ""),
        Cost(1600, 2, "negate", "blocks/*", False, ""),
        Cost(800, 1, "negate", "blocks/*", True, ""),
        Cost(800, 1, "__cublas$gemm", "head", False, ""),
    ]


def test_as_many_are_listed_as_are_asked_for():
    assert [cost.bytes for cost in costliest(TEXT, parse(TEXT), 2)] == [8000, 1600]
    assert costliest(TEXT, parse(TEXT), 0) == []

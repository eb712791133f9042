"""Reading the text of a compiled program."""

import pytest

from mpjax.plan import Module, bytes_of, module_named, parse, shapes_of


TEXT = """\
HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }

FileNames
1 "/tmp/step.py"

%fused (param_0: f32[8,3]) -> bf16[8,3] {
  %param_0 = f32[8,3]{1,0} parameter(0)
  ROOT %convert.1 = bf16[8,3]{1,0} convert(%param_0), metadata={op_name="jit(step)/convert(x) = {y}"}
}

ENTRY %main.7 (state.1: f32[8,3], batch: f32[3,5]) -> (f32[8,3], bf16[8,5]) {
  %state.1 = f32[8,3]{1,0} parameter(0), metadata={op_name="state[\\'a\\']"}
  %batch = f32[3,5]{1,0} parameter(1)
  %fusion = bf16[8,3]{1,0} fusion(%state.1), kind=kLoop, calls=%fused, backend_config={"x":{"kind":"y"}}
  %call.2 = (bf16[8,5]{1,0}, /*index=1*/s8[64]{0}) custom-call(%fusion, %batch), custom_call_target="__cublas$gemm"
  %while.3 = (s32[], f32[8,3]{1,0:S(5)}) while(%t), condition=%c, body=%b, config={"known_trip_count":{"n":"12"}}
  %get-tuple-element.1 = bf16[8,5]{1,0} get-tuple-element(%call.2), index=0
  ROOT %tuple = (f32[8,3]{1,0}, bf16[8,5]{1,0}) tuple(%state.1, %get-tuple-element.1)
}
"""


def test_computations_and_instructions_are_read():
    program = parse(TEXT)
    assert (list(program.computations), program.entry) == (["fused", "main.7"], "main.7")
    entry = program.computations["main.7"]
    kinds = ["parameter", "parameter", "fusion", "custom-call", "while", "get-tuple-element", "tuple"]
    assert [each.opcode for each in entry] == kinds
    fusion, call, loop = entry.instructions["fusion"], entry.instructions["call.2"], entry.instructions["while.3"]
    assert (fusion.operands, fusion.called("calls"), fusion.bytes) == (("state.1",), ["fused"], 48)
    assert (call.target, call.operands, entry.operand_bytes(call)) == ("__cublas$gemm", ("fusion", "batch"), [48, 60])
    assert (loop.called("body"), loop.trips, fusion.trips) == (["b"], 12, 1)
    assert entry.root.name == "tuple"


def test_parameters_go_by_number_and_values_know_their_users():
    entry = parse(TEXT).computations["main.7"]
    assert {number: each.name for number, each in entry.parameters.items()} == {0: "state.1", 1: "batch"}
    assert [(user.name, index) for user, index in entry.users["state.1"]] == [("fusion", 0), ("tuple", 0)]


@pytest.mark.parametrize(
    ("type", "size"),
    [
        ("f32[8,3]{1,0}", 96),
        ("bf16[]", 2),
        ("pred[7]{0}", 7),
        ("s4[3]{0}", 2),
        ("f8e4m3fn[10]{0}", 10),
        ("f4e2m1fn[10]{0}", 5),
        ("(f32[2]{0:S(5)}, (s64[3]{0}, token[]), u8[0]{0})", 32),
    ],
)
def test_bytes_of_a_type(type, size):
    assert bytes_of(type) == size


def test_arrays_of_a_type():
    assert shapes_of("(bf16[8,3]{1,0}, u8[0]{0})") == [("bf16", (8, 3)), ("u8", (0,))]


def test_a_text_without_an_entry_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation in an HLO text that begins 'HloModule x'"):
        parse("HloModule x")


@pytest.mark.parametrize(
    ("stack", "module"),
    [
        ("jit(train_step)/jvp(blocks/0)/attention/out/dot_general", Module("blocks/0/attention/out", False)),
        ("jit(train_step)/transpose(jvp(blocks/0))/norm2/reduce_sum", Module("blocks/0/norm2", True)),
        ("jit(train_step)/while/body/closed_call/jvp(stem)/conv/conv_general_dilated", Module("stem/conv", False)),
        ("jit(train_step)/jvp()/jit(_where)/select_n", Module("", False)),
        ("jit(f)/transpose(jvp(mlp))/checkpoint/rematted_computation/mlp/mul", Module("mlp", True)),
        ("jit(f)/jvp(blocks)/while/body/eval_jaxpr/all/mlp/up/dot_general", Module("blocks/all/mlp/up", False)),
        (
            "jit(f)/transpose(jvp(blocks/1))/mlp/jvp(blocks/1)/mlp/checkpoint/rematted_computation/up/add",
            Module("blocks/1/mlp/up", True),
        ),
        ("jit(f)/jvp(layers/0)/layers/0/add", Module("layers/0/layers/0", False)),
        (
            "jit(f)/(transpose(jvp(blocks/0/up))/transpose:transpose(jvp(blocks/0/down))/transpose)",
            Module("blocks/0", True),
        ),
        ("jit(f)/jvp(up)/(add:(mul:sub))", Module("up", False)),
        ("(jit(f)/jvp(up)/add:jit(f)/jvp(down)/add)", Module("", False)),
        ("jit(f)/transpose(jvp(jit(mpjax_full_precision)))/dot_general", Module("", True)),
        ("jit(train_step)/add", Module("", False)),
        ("", Module("", False)),
    ],
)
def test_a_name_stack_says_which_module_and_which_pass(stack, module):
    assert module_named(stack) == module

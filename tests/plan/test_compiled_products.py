"""What a product runs in, from the text of a program."""

import pytest

from mpjax.plan import Module, Target, compiled_products_of, dtype_of, loops_of, parse


GPU = Target("NVIDIA H200", "gpu", tensorfloat32=True)
CPU = Target("this CPU", "cpu")

TRITON = """HloModule m

%gemm (a: f16[64,32], b: f16[32,16]) -> f16[64,16] {
  %a = f16[64,32]{1,0} parameter(0)
  %b = f16[32,16]{1,0} parameter(1)
  ROOT %dot.1 = f16[64,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}, METADATA
}

ENTRY %main (x: f16[64,32], w: f16[32,16]) -> f16[64,16] {
  %x = f16[64,32]{1,0} parameter(0)
  %w = f16[32,16]{1,0} parameter(1)
  ROOT %fusion = f16[64,16]{1,0} fusion(%x, %w), kind=kCustom, calls=%gemm, BACKEND
}
"""
TRITON = TRITON.replace("METADATA", 'metadata={op_name="jit(f)/transpose(jvp(blocks/0))/up/transpose"}')
TRITON = TRITON.replace("BACKEND", 'backend_config={"fusion_backend_config":{"kind":"__triton_nested_gemm_fusion"}}')


def test_a_product_in_a_fusion_is_its_librarys_with_the_dtypes_and_size_of_the_product():
    (run,) = compiled_products_of(parse(TRITON), GPU)
    assert (run.kind, run.module, run.by) == ("product", Module("blocks/0/up", True), "Triton")
    assert (run.operands, run.accumulation, run.result) == (("float16", "float16"), "float32", "float16")
    assert run.size == 64 * 32 * 16


def program(line, parameters="f32[64,32]", result="f32[64,16]"):
    return parse(
        f"HloModule m\n\nENTRY %main (x: {parameters}, w: f32[32,16]) -> {result} {{\n"
        f"  %x = {parameters}{{1,0}} parameter(0)\n  %w = {parameters.replace('64,32', '32,16')}{{1,0}} parameter(1)\n"
        f"  {line}\n}}\n"
    )


DOT = "ROOT %d = f32[64,16]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}"


@pytest.mark.parametrize(
    ("words", "operands"),
    [
        ("", "tensorfloat32"),
        (", operand_precision={highest,highest}", "float32"),
        (", operand_precision={high,high}", "tensorfloat32"),
        (", operand_precision={highest,default}", "tensorfloat32"),
        (", algorithm=dot_tf32_tf32_f32", "tensorfloat32"),
        (", algorithm=dot_bf16_bf16_f32", "bfloat16"),
        (", algorithm=dot_f32_f32_f32", "float32"),
    ],
)
def test_float32_operands_of_a_gpu_are_rounded_unless_the_program_says_otherwise(words, operands):
    (run,) = compiled_products_of(program(DOT + words), GPU)
    assert run.operands == (operands, operands)


def test_a_cpu_keeps_float32_operands():
    (run,) = compiled_products_of(program(DOT), CPU)
    assert (run.operands, run.by, run.named) == (("float32", "float32"), "XLA:CPU", False)


@pytest.mark.parametrize(
    ("target", "by", "kind"),
    [
        ("__cublas$gemm", "cuBLAS", "product"),
        ("__cublas$lt$matmul", "cuBLASLt", "product"),
        ("__cublas$lt$matmul$f8", "cuBLASLt float8", "product"),
        ("__cudnn$convForward", "cuDNN", "convolution"),
        ("__cudnn$fmhaSoftmaxBackward", "cuDNN", "attention"),
    ],
)
def test_a_library_call_is_known_by_its_target(target, by, kind):
    call = f'ROOT %c = (bf16[64,16]{{1,0}}, s8[99]{{0}}) custom-call(%x, %w), custom_call_target="{target}"'
    (run,) = compiled_products_of(program(call, "bf16[64,32]"), GPU)
    assert (run.by, run.kind, run.operands) == (by, kind, ("bfloat16", "bfloat16"))
    assert (run.accumulation, run.result) == ("float32", "bfloat16")
    assert run.size == (64 * 32 * 16 if kind == "product" else 0)


def test_integer_products_and_other_calls_are_left_out():
    assert compiled_products_of(program(DOT.replace("f32", "s32"), "s32[64,32]"), GPU) == []
    assert (
        compiled_products_of(program('ROOT %c = f32[64,16]{1,0} custom-call(%x, %w), custom_call_target="qr"'), GPU)
        == []
    )


def test_a_product_written_as_multiplications_has_the_dtypes_of_these():
    text = """HloModule m

%add (p: f32[], q: f32[]) -> f32[] {
  %p = f32[] parameter(0)
  %q = f32[] parameter(1)
  ROOT %s = f32[] add(%p, %q)
}

%fused (a: f16[64], b: f16[64]) -> f32[] {
  %a = f16[64]{0} parameter(0)
  %b = f16[64]{0} parameter(1)
  %m = f16[64]{0} multiply(%a, %b), metadata={op_name="jit(f)/jvp(head)/dot_general"}
  %c = f32[64]{0} convert(%m)
  %z = f32[] constant(0)
  ROOT %r = f32[] reduce(%c, %z), dimensions={0}, to_apply=%add
}

ENTRY %main (x: f16[64], w: f16[64]) -> f32[] {
  %x = f16[64]{0} parameter(0)
  %w = f16[64]{0} parameter(1)
  ROOT %fusion = f32[] fusion(%x, %w), kind=kInput, calls=%fused
}
"""
    assert compiled_products_of(parse(text), GPU) == []
    (run,) = loops_of(parse(text))
    assert (run.module.path, run.by, run.operands) == ("head", "XLA loop", ("float16", "float16"))
    assert (run.accumulation, run.result) == ("float32", "float32")


def test_names_of_dtypes():
    assert [dtype_of(f"{name}[2]") for name in ("f16", "f8e4m3fn", "f8e5m2", "s8")] == [
        "float16",
        "float8_e4m3fn",
        "float8_e5m2",
        "",
    ]

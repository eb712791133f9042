"""Products in float8 in programs for GPUs: all that the rules leave in it, and where they pay."""

import concurrent.futures
import functools

import jax
import jax.numpy as jnp
import pytest

from mpjax.commands import fields_of, planned_step
from mpjax.config import load_config
from mpjax.errors import UsageError
from mpjax.plan import GPUS, layers_of, parse, receipt_of, start, target_of_gpu
from mpjax.precision import BFLOAT16, FLOAT32


# GPT-2 small and ViT-B/16, two blocks of each.
STEPS = {
    "gpt2": "--task language_modeling --data.name docstrings --data.length 256 --data.batch_size 4 --model.name gpt2",
    "vit": "--data.name synthetic:64x64x3:10 --data.crop_padding 0 --data.batch_size 32 --model.name vit_b16",
}
LIBRARIES = {"mixed_mxfp8": {"cuDNN block-scaled"}}
GRADIENTS = {"mixed_mxfp8": "float8_e4m3fn"}


@functools.cache
def step(name, policy):
    config = load_config(f"{STEPS[name]} --model.depth 2 --precision.policy {policy}".split())
    return planned_step(config, fields_of(config))


@functools.cache
def program(name, policy, gpu):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return start(pool, step(name, policy), gpu).result()


@functools.cache
def receipt(name, policy, gpu):
    compiled, planned = program(name, policy, gpu), step(name, policy)
    modules = {"": planned.task.abstract}
    return receipt_of(
        compiled.executable, compiled.jaxpr, planned.plan.policy, target=target_of_gpu(GPUS[gpu]), modules=modules
    )


@pytest.mark.parametrize(
    ("name", "policy", "gpu"),
    [
        ("gpt2", "mixed_float8", "b200"),
        ("vit", "mixed_float8", "h200"),
        ("gpt2", "mixed_float8_rowwise", "h200"),
        ("gpt2", "mixed_float8_delayed", "h200"),
        ("vit", "mixed_mxfp8", "b200"),
    ],
)
def test_every_product_that_the_rules_leave_in_float8_is_in_float8_forward_and_both_gradients(
    plugin, name, policy, gpu
):
    found = receipt(name, policy, gpu)
    found.require()
    products = [row for row in found if row.operands.startswith("float8")]
    counts = {way: sum(row.count for row in products if row.direction == way) for way in ("forward", "backward")}
    # Of six layers in each of two blocks; by one scale for an operand, query, key and value have one gradient.
    assert counts == {"forward": 12, "backward": 16 if policy == "mixed_float8" else 24}
    assert {row.by for row in products} <= LIBRARIES.get(policy, {"Triton", "cuBLASLt float8"})
    gradients = GRADIENTS.get(policy, "float8_e4m3fn x float8_e5m2")
    assert {row.operands for row in products if row.direction == "backward"} == {gradients}
    assert {row.accumulation for row in products} == {"float32"}
    assert all("/attention/" in row.path or "/mlp/" in row.path for row in products)
    others = [row for row in found if row.kind in ("product", "convolution", "attention") and row not in products]
    assert {row.operands for row in others} == {"bfloat16"}  # the head, the patches, and attention


@pytest.mark.parametrize(
    ("policy", "gpu", "instead"),
    [
        ("mixed_float8", "a100", "mixed_bfloat16"),
        pytest.param("mixed_mxfp8", "a100", "mixed_bfloat16", marks=pytest.mark.slow),
        ("mixed_mxfp8", "h200", "mixed_float8"),
    ],
)
def test_a_gpu_without_units_is_refused(policy, gpu, instead):
    says = rf"--gpu {gpu}: NVIDIA .* has no units for .*: write --precision.policy {instead}$"
    with concurrent.futures.ThreadPoolExecutor(1) as pool, pytest.raises(UsageError, match=says):
        start(pool, step("vit", policy), gpu)


def test_what_float8_saves_and_costs_is_told_layer_by_layer(plugin):
    compiled = program("vit", "mixed_float8", "h200")
    hlo = parse(compiled.executable.as_text())
    layers = {each.module: each for each in layers_of(compiled.jaxpr, hlo, GPUS["h200"], BFLOAT16)}
    names = ("attention/query", "attention/key", "attention/value", "attention/out", "mlp/up", "mlp/down")
    assert set(layers) == {f"blocks/*/{name}" for name in names}
    up, out = layers["blocks/*/mlp/up"], layers["blocks/*/attention/out"]
    assert up.saved == pytest.approx(4 * out.saved)  # which has a quarter of its weights
    # Two blocks, three products of 512 x 768 x 3072, at 989.5 and 1979 TFLOP/s, of which products reach 790 of 990.
    assert up.saved == pytest.approx(2 * 3 * 2 * 512 * 768 * 3072 * (1 / 989.5e12 - 1 / 1979e12) * 990 / 790)
    assert all(each.spent > 0 and each.kernels >= 1 for each in layers.values())


@pytest.mark.parametrize(("compute_dtype", "rate"), [(BFLOAT16, 989.5e12), (FLOAT32, 494.5e12)])
def test_a_product_in_float8_saves_time_of_the_policy_s_compute_dtype(compute_dtype, rate):
    jaxpr = jax.make_jaxpr(jnp.dot)(*[jnp.ones((16, 16), jnp.float8_e4m3fn)] * 2)
    nothing = parse("HloModule m\n\nENTRY %main () -> f32[] {\n  ROOT %out = f32[] constant(0)\n}\n")
    (layer,) = layers_of(jaxpr, nothing, GPUS["h200"], compute_dtype)
    assert layer.saved == pytest.approx(2 * 16**3 * (1 / rate - 1 / 1979e12) * 990 / 790)


@pytest.mark.parametrize(
    ("launched", "kernels"),
    [
        ("reduce(%x, %zero), dimensions={0}, to_apply=%largest", 1),
        ("reduce(%x, %zero), dimensions={0}, to_apply=%total", 0),
        ("fusion(%x, %zero), kind=kInput, calls=%fused", 1),
        ("negate(%zero)", 0),
    ],
)
def test_a_kernel_that_finds_the_largest_value_is_counted_fused_or_alone(launched, kernels):
    text = f"""HloModule m

%largest (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] maximum(%a, %b)
}}

%total (d: f32[], e: f32[]) -> f32[] {{
  %d = f32[] parameter(0)
  %e = f32[] parameter(1)
  ROOT %f = f32[] add(%d, %e)
}}

%fused (g: f32[16], h: f32[]) -> f32[] {{
  %g = f32[16]{{0}} parameter(0)
  %h = f32[] parameter(1)
  ROOT %i = f32[] reduce(%g, %h), dimensions={{0}}, to_apply=%largest
}}

ENTRY %main (x: f32[16], zero: f32[]) -> f32[] {{
  %x = f32[16]{{0}} parameter(0)
  %zero = f32[] parameter(1)
  ROOT %out = f32[] {launched}, metadata={{op_name="jit(step)/layer/reduce_max"}}
}}
"""

    def product(x):
        with jax.named_scope("layer"):
            return jax.lax.dot(x, x, preferred_element_type=jnp.float32)

    jaxpr = jax.make_jaxpr(product)(jnp.ones((16, 16), jnp.float8_e4m3fn))
    (layer,) = layers_of(jaxpr, parse(text), GPUS["h200"], BFLOAT16)
    assert (layer.module, layer.kernels) == ("layer", kernels)

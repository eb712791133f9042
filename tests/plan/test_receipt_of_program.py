"""What a training step runs in on an H200: as asked, in every product, sum and update."""

import concurrent.futures
import functools

import jax
import jax.numpy as jnp
import pytest

from mpjax.commands.plan import fields_of, planned_step
from mpjax.config import load_config
from mpjax.plan.compiled import start
from mpjax.plan.devices import GPUS
from mpjax.plan.receipt_of_program import parameters_of, receipt_of
from mpjax.plan.target import target_of_gpu


X = jax.ShapeDtypeStruct((64, 32), jnp.float32)


def test_parameters_are_outputs_with_the_path_shape_and_dtype_of_an_input():
    given = {"params": {"w": X, "b": X}, "count": X}
    result = ({"params": {"w": X, "b": jax.ShapeDtypeStruct((1,), jnp.float32)}, "count": X}, X)
    assert {path: known.output for path, known in parameters_of(given, result).items()} == {"w": 2}


def test_a_history_of_scales_is_no_parameter():
    given = {"blocks/1": {"kernel": X, "amax_history": X}}
    assert parameters_of(given, given).keys() == {"blocks/1/kernel"}


def small(flags):
    return f"--data.name synthetic:32x32x3:10 --data.batch_size 16 --data.crop_padding 0 {flags}"


STEPS = {
    "resnet": (small("--model.name resnet50 --model.width 8"), 2),
    "vit": (small("--model.name vit_b16 --model.width 64 --model.heads 4 --model.depth 2"), 1),
    "gpt2": (
        "--task language_modeling --data.name docstrings --data.length 64 --data.batch_size 8 --model.name gpt2 "
        "--model.depth 2 --model.width 64 --model.heads 4",
        2,
    ),
}


@functools.cache
def on_h200(name, policy):
    flags, devices = STEPS[name]
    config = load_config(f"{flags} --precision.policy {policy}".split())
    planned = planned_step(config, fields_of(config))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        program = start(pool, planned, "h200", devices=devices).result()
    target, modules = target_of_gpu(GPUS["h200"]), {"": planned.task.abstract}
    return receipt_of(program.executable, program.jaxpr, target, planned.plan.policy, modules=modules)


@pytest.mark.parametrize(
    ("name", "policy"), [("resnet", "mixed_bfloat16"), ("vit", "mixed_float16"), ("gpt2", "mixed_float16")]
)
def test_on_an_h200_every_product_sum_and_update_is_as_asked(plugin, name, policy):
    receipt = on_h200(name, policy)
    receipt.require()
    half = policy.removeprefix("mixed_")
    products = [row for row in receipt if row.kind in ("product", "convolution", "attention")]
    assert {(row.operands, row.accumulation) for row in products} == {(half, "float32")}
    count = sum(row.count for row in products)
    assert count == {"resnet": 161, "vit": 37, "gpt2": 35}[name]
    assert receipt.line == f"{half} as asked in {count} of {count} products"
    assert {row.direction for row in products} == {"forward", "backward"}
    sums = [row for row in receipt if row.kind == "reduction"]
    assert bool(sums) == (STEPS[name][1] > 1)
    assert {row.operands for row in sums} <= {"float32"}
    assert {row.operands for row in receipt if row.kind == "update"} == {"float32"}


def test_on_an_h200_products_of_one_input_run_as_one_and_attention_is_cudnns(plugin):
    receipt = on_h200("vit", "mixed_float16")
    by = {(row.path, row.direction): row for row in receipt}
    assert by["blocks/0/attention/key", "forward"].note == "in one product with blocks/0/attention/query"
    assert {row.by for row in receipt if row.kind == "attention"} == {"cuDNN"}

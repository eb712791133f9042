"""What eight H200 send each other: every gradient once, in the dtype of the policy, while they compute."""

import concurrent.futures
import functools
import math

import pytest

from mpjax.commands import fields_of, planned_step
from mpjax.config import load_config
from mpjax.plan import GPUS, Communication, Compiled, communication_of, events_of, overlap_of, parse, start, traffic_of


pytestmark = pytest.mark.usefixtures("plugin")

RESNET50 = "--data.name synthetic:64x64x3:10 --data.batch_size 64 --model.name resnet50"
VIT = "--data.name synthetic:64x64x3:10 --data.batch_size 64 --model.name vit_b16 --model.depth 2"
GPT2 = "--task language_modeling --data.name docstrings --data.length 128 --data.batch_size 16 --model.name gpt2"
UNET = "--task segmentation --data.name digits_canvas --data.batch_size 16 --model.name unet"


def on_gpus(flags: str, devices: int = 8) -> tuple[Compiled, int, int]:
    """The program of a step on some GPUs, and the bytes of its parameters and of its statistics in float32."""
    return _on_gpus(flags, devices)


@functools.cache
def _on_gpus(flags: str, devices: int) -> tuple[Compiled, int, int]:
    config = load_config(f"{flags} --data.crop_padding 0 --optimizer.clip_norm 1".split())
    step = planned_step(config, fields_of(config))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        program = start(pool, step, "h200", devices=devices).result()
    return program, *(
        4 * sum(math.prod(x.shape) for x in part.values()) for part in (step.state.params, step.state.stats)
    )


@pytest.fixture(scope="module", autouse=True)
def _forget():
    yield
    _on_gpus.cache_clear()


def sent(flags: str) -> dict:
    return dict(traffic_of(parse(on_gpus(flags)[0].executable.as_text())).collectives)


REPLICAS = [
    pytest.param(f"{RESNET50} --precision.policy mixed_bfloat16", id="resnet50-bfloat16"),
    pytest.param(f"{VIT} --precision.policy mixed_float16", id="vit-float16"),
    pytest.param(f"{GPT2} --model.depth 2 --precision.policy O1", id="gpt2-autocast"),
    pytest.param(f"{UNET} --model.width 8 --precision.policy mixed_float16", id="unet-float16"),
]


@pytest.mark.parametrize("flags", REPLICAS)
def test_gradients_are_added_in_float32_and_each_once(flags):
    """Besides them only statistics are exchanged, once for all batch norms, and a few scalars."""
    _, parameters, statistics = on_gpus(flags)
    collectives = sent(flags)
    assert set(collectives) == {"all-reduce"}
    assert set(collectives["all-reduce"]) == {"f32"}
    assert 0 <= collectives["all-reduce"]["f32"] - parameters - statistics < 2048


@pytest.mark.parametrize("flags", REPLICAS[:3])  # the gradients of so small a U-Net are one sum
def test_four_fifths_of_the_sums_run_while_kernels_do(flags):
    program = on_gpus(flags)[0]
    assert overlap_of(events_of(parse(program.executable.as_text()))) >= 0.8


def test_a_policy_may_ask_for_sums_in_bfloat16():
    policy = "params=float32,compute=bfloat16,output=float32,reduce=bfloat16"
    flags = f"{GPT2} --model.depth 1 --model.width 64 --model.heads 4 --precision.policy {policy}"
    parameters = on_gpus(flags)[1]
    assert sent(flags)["all-reduce"]["bf16"] == parameters / 2
    assert sent(flags)["all-reduce"]["f32"] < 256  # the loss and its weight


def test_fsdp_gathers_in_half_and_scatters_in_float32():
    """Large parameters are gathered for the forward and for the backward pass; blocks are 12 width^2 each."""
    flags = f"{GPT2} --model.depth 2 --precision.policy mixed_bfloat16 --mesh.data 2 --mesh.fsdp 4"
    program, parameters, _ = on_gpus(flags)
    collectives = sent(flags)
    assert set(collectives["all-gather"]) == {"bf16"}
    assert collectives["all-gather"]["bf16"] > 2 * (2 * 2 * 12 * 768**2)
    assert set(collectives["reduce-scatter"]) == {"f32"}
    assert set(collectives["all-reduce"]) <= {"f32", "pred"}
    assert collectives["reduce-scatter"]["f32"] == pytest.approx(parameters, rel=0.01)
    assert program.memory.parameters == pytest.approx(parameters / 4, rel=0.01)


def test_eight_devices_hold_an_eighth_each_of_a_model_as_wide_as_gpt2_xl():
    flags = f"{GPT2} --model.depth 2 --model.width 1600 --model.heads 25 --data.batch_size 8 --training.remat full"
    flags += " --optimizer.name adamw --precision.policy mixed_bfloat16"
    one, eight = (on_gpus(f"{flags} --mesh.fsdp {n} --mesh.data 1", n)[0].memory for n in (1, 8))
    assert eight.parameters + eight.optimizer == pytest.approx((one.parameters + one.optimizer) / 8, rel=0.01)


def communication(flags: str, devices: int = 8, **mesh: int) -> Communication:
    """At the pace of an H200's memory."""
    events = events_of(parse(on_gpus(flags, devices)[0].executable.as_text()))
    return communication_of(events, GPUS["h200"], 1 / 4.8e12, mesh=mesh, devices=devices)


def test_collectives_are_told_apart_by_the_axes_of_the_mesh():
    """Parts of 4 are added between the 2 replicas; among the 4 they are gathered and scattered."""
    flags = f"{GPT2} --model.depth 2 --precision.policy mixed_bfloat16 --mesh.data 2 --mesh.fsdp 4"
    parameters = on_gpus(flags)[1]
    found = communication(flags, data=2, fsdp=4, tensor=1)
    assert list(found.bytes["all-gather"]["bf16"]) == list(found.bytes["reduce-scatter"]["f32"]) == ["fsdp"]
    assert found.bytes["all-reduce"]["f32"]["data"] == pytest.approx(parameters / 4, rel=0.01)
    assert set(found.bytes["all-reduce"]["f32"]) <= {"data", "fsdp", "data+fsdp"}
    assert found.timing is not None
    # All-gathers and reduce-scatters at 450 GB/s among 4, and the all-reduce between 2.
    gathered, scattered = found.bytes["all-gather"]["bf16"]["fsdp"], found.bytes["reduce-scatter"]["f32"]["fsdp"]
    seconds = ((gathered + scattered) * 3 / 4 + found.bytes["all-reduce"]["f32"]["data"]) / 450e9
    assert found.timing.communication == pytest.approx(seconds, rel=0.01)
    assert 0 < found.timing.exposed < found.timing.communication


def test_a_program_compiled_for_64_gpus_is_what_the_one_for_8_predicts():
    flags = f"{GPT2} --model.depth 1 --model.width 64 --model.heads 4 --mesh.fsdp 2"
    small = communication(flags, data=-1, fsdp=2, tensor=1)
    large = communication(flags.replace("batch_size 16", "batch_size 128"), 64, data=-1, fsdp=2, tensor=1)
    assert small.bytes == large.bytes
    assert large.timing is not None
    (predicted,) = [scale.timing for scale in small.scaling if scale.devices == 64]
    assert predicted.communication == pytest.approx(large.timing.communication, rel=1e-6)
    assert predicted.step == pytest.approx(large.timing.step, rel=0.03)

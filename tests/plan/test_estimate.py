"""Plans of a run under several policies, for several GPUs."""

import pytest

from mpjax.commands import fields_of, planned_step
from mpjax.config import load_config
from mpjax.errors import UsageError
from mpjax.plan import estimates, require_attention


SMALL = "--data.name synthetic:32x32x3:10 --data.batch_size 64 --model.name mlp --model.width 256 --steps 100"
VIT = (
    "--data.name synthetic:32x32x3:10 --data.batch_size 64 --model.name vit_ti16 --model.patch 4 --model.depth 1 "
    "--model.heads 2 --model.width 32 --steps 100"
)


def steps_of(flags: str, *policies: str):
    configs = [load_config([*flags.split(), "--precision.policy", policy]) for policy in policies]
    fields = fields_of(configs[0])
    return [planned_step(config, fields) for config in configs]


@pytest.fixture(scope="module")
def plans(plugin):
    steps = steps_of(SMALL, "float32", "mixed_bfloat16")
    return estimates(["h200", "a100"], steps, memory_fraction=0.5, receipts=True)


def test_the_policies_of_a_gpu_come_after_one_another(plans):
    assert [(plan.gpu, plan.policy) for plan in plans] == [
        ("h200", "float32"),
        ("h200", "mixed_bfloat16"),
        ("a100", "float32"),
        ("a100", "mixed_bfloat16"),
    ]
    assert {(plan.batch, plan.devices, plan.attention) for plan in plans} == {(64, 1, "")}


def test_time_follows_from_operations_and_bytes(plans):
    for plan in plans:
        rate = {"h200": 4.8e12, "a100": 2.039e12}[plan.gpu]
        assert plan.roofline.traffic == pytest.approx(plan.traffic.bytes / rate)
        assert plan.items_per_second == pytest.approx(64 / max(plan.roofline.compute, plan.roofline.traffic))
        assert plan.traffic.kernels > 5


def test_each_plan_has_the_receipt_of_its_policy_and_gpu(plans):
    assert [plan.receipt.device for plan in plans] == ["NVIDIA H200"] * 2 + ["NVIDIA A100-SXM4-80GB"] * 2
    exact, half = plans[0].receipt, plans[1].receipt
    assert half.line.startswith("bfloat16 as asked in ")
    assert half
    assert {row.operands for row in exact if row.kind == "product"} == {"tensorfloat32"}


def test_a_run_may_use_the_share_of_memory_that_it_is_given(plans):
    assert [plan.limit for plan in plans] == [75_055_005_696] * 2 + [42_550_034_432] * 2
    assert all(plan.fits for plan in plans)


@pytest.mark.slow
def test_the_largest_batch_is_found_and_fits(plugin):
    (step,) = steps_of(SMALL, "float32")
    share = 0.0002
    (plan,) = estimates(["h200"], [step], memory_fraction=share, verify=True)
    assert plan.fit is not None
    assert plan.fit.compiled
    assert plan.fit.batch > 64
    (full,) = estimates(["h200"], [step.of(plan.fit.batch)], memory_fraction=share, fit=False)
    assert 0.5 * plan.limit < full.memory.total <= plan.limit
    assert full.fit is None


@pytest.fixture(scope="module")
def transformers(plugin):
    """As a run would take attention on each GPU, and without the fused kernel."""
    steps = steps_of(VIT, "mixed_bfloat16")
    return [
        *estimates(["h200", "v100"], steps, fit=False),
        *estimates(["h200"], steps, attention="xla", fit=False),
    ]


@pytest.mark.slow
def test_attention_is_what_a_run_there_would_take_and_said_plainly(transformers):
    assert [plan.attention for plan in transformers] == ["cudnn", "xla", "xla"]


@pytest.mark.slow
def test_fused_attention_keeps_no_scores(transformers):
    """64 images of 64 patches and 2 heads: scores of 64 x 2 x 64 x 64 x 4 bytes are 2.1 MB, forward alone."""
    fused, _, plain = transformers
    assert plain.memory.temporary - fused.memory.temporary > 2_000_000
    assert plain.traffic.bytes - fused.traffic.bytes > 8_000_000


@pytest.mark.parametrize(
    ("asked", "used"), [("auto", "xla"), ("auto", "cudnn"), ("xla", "xla"), ("cudnn", "cudnn"), ("cudnn", "")]
)
def test_an_attention_that_the_step_uses_is_accepted(asked, used):
    require_attention(asked, used, gpu="h200", policy="mixed_float16")


def test_an_attention_that_the_step_does_not_use_is_refused():
    message = "--attention cudnn: the step of policy float32 on h200 uses XLA's attention.*write --attention auto"
    with pytest.raises(UsageError, match=message):
        require_attention("cudnn", "xla", gpu="h200", policy="float32")

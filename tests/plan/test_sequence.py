"""What devices keep and exchange where positions are divided over `tensor`, compiled for GPUs."""

import pytest

from mpjax.commands import fields_of, planned_step
from mpjax.config import load_config
from mpjax.plan import estimates


B, T, D = 16, 256, 64
GPT2 = (
    f"--task language_modeling --data.name docstrings --data.length {T} --data.batch_size {B} --model.name gpt2 "
    f"--model.width {D} --model.depth 3 --model.heads 4 --model.scan_blocks --training.remat full "
    "--training.chunked_loss 256 --precision.policy mixed_bfloat16 --steps 9 --mesh.data 2 --mesh.tensor 4"
)


def step_of(flags: str):
    config = load_config(flags.split())
    return planned_step(config, fields_of(config))


@pytest.fixture(scope="module")
def plans(plugin):
    """GPT-2 with three blocks on two groups of four H200, each with all positions, and with a quarter."""
    steps = [step_of(GPT2), step_of(f"{GPT2} --mesh.sequence")]
    return estimates(["h200"], steps, devices=8, fit=False, most=20)


def test_sums_of_activations_become_sums_of_shares_and_gathers(plans):
    """Of three blocks: the two sums of a block in the forward pass are one in its recomputation, whose last result is
    not needed, and two in the backward pass. Positions are gathered as often, and before what is not divided.
    """
    whole, shares = (plan.communication.bytes for plan in plans)
    features = B // 2 * T * D * 2
    assert whole["all-reduce"]["bf16"] == {"tensor": 3 * 5 * features}
    assert "bf16" not in shares["all-reduce"]
    assert shares["reduce-scatter"]["bf16"] == {"tensor": 3 * 5 * features}
    assert shares["all-gather"]["bf16"] == {"tensor": (3 * (2 + 2 + 2) + 2) * features}
    assert shares.keys() == {"all-reduce", "reduce-scatter", "all-gather"}


def test_gradients_of_weights_are_not_added_over_tensor(plans):
    """But those of norms, in float32: two norms of three blocks with a scale and an offset."""
    whole, shares = (plan.communication.bytes["all-reduce"]["f32"] for plan in plans)
    assert shares["tensor"] - whole.get("tensor", 0) == 3 * 2 * 2 * D * 4


def test_shares_take_less_memory(plans):
    whole, shares = (plan.memory.temporary for plan in plans)
    assert shares < whole


def test_a_plan_says_whether_positions_are_divided(plans):
    assert [plan.sequence for plan in plans] == [False, True]


def test_kernels_of_layers_are_told_by_the_lines_of_the_model(plans):
    lines = [cost.line for cost in plans[1].costliest if cost.module.startswith("blocks/")]
    assert lines
    assert not [line for line in lines if "/training/sequence.py" in line]

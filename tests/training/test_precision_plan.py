"""The precision decision of a run: presets, contradictions, advice."""

import types

import pytest

from mpjax.config import Precision
from mpjax.errors import UsageError
from mpjax.training import advice, floor_of, plan_precision


CPU = types.SimpleNamespace(platform="cpu", device_kind="cpu")
H200 = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")
P100 = types.SimpleNamespace(platform="gpu", device_kind="Tesla P100", compute_capability="6.0")


@pytest.mark.parametrize(
    ("policy", "dtypes", "loss_scale", "masters"),
    [
        ("float32", ("float32", "float32", "float32"), "none", False),
        ("mixed_bfloat16", ("float32", "bfloat16", "float32"), "none", False),
        ("mixed_float16", ("float32", "float16", "float32"), "dynamic", False),
        ("16-mixed", ("float32", "float16", "float32"), "dynamic", False),
        ("O2", ("float32", "float16", "float32"), "dynamic", False),
        ("bfloat16", ("bfloat16", "bfloat16", "float32"), "none", True),
        ("float16", ("float16", "float16", "float32"), "dynamic", True),
        ("O3", ("float16", "float16", "float16"), 1.0, False),
        ("p=f32,c=f16,o=f32", ("float32", "float16", "float32"), "dynamic", False),
        ("p=f32,c=bf16,o=f32", ("float32", "bfloat16", "float32"), "none", False),
    ],
)
def test_a_policy_brings_its_scaling_and_masters(policy, dtypes, loss_scale, masters):
    plan = plan_precision(Precision(policy=policy))
    assert (plan.policy.param_dtype, plan.policy.compute_dtype, plan.policy.output_dtype) == dtypes
    assert (plan.loss_scale, plan.master_weights) == (loss_scale, masters)


@pytest.mark.parametrize(("word", "loss_scale"), [("none", "none"), ("Dynamic", "dynamic"), ("1024", 1024.0)])
def test_settings_win_over_the_preset(word, loss_scale):
    plan = plan_precision(Precision(policy="float16", loss_scale=word, master_weights="off"))
    assert (plan.loss_scale, plan.master_weights) == (loss_scale, False)


@pytest.mark.parametrize(
    ("settings", "mode"),
    [
        ({}, "module"),
        ({"policy": "O1"}, "autocast"),
        ({"policy": "O2"}, "module"),
        ({"policy": "O1", "mode": "autocast"}, "autocast"),
        ({"policy": "mixed_bfloat16", "mode": "autocast"}, "autocast"),
        ({"policy": "O2", "mode": "module"}, "module"),
        ({"policy": "O1;type:norm=float32"}, "autocast"),
    ],
)
def test_the_mode_is_the_presets_unless_given(settings, mode):
    assert plan_precision(Precision(**settings)).mode == mode


def test_autocast_has_the_scaling_of_its_dtypes():
    assert plan_precision(Precision(policy="O1")).loss_scale == "dynamic"
    assert plan_precision(Precision(policy="mixed_bfloat16", mode="autocast")).loss_scale == "none"


@pytest.mark.parametrize("weights", ["stochastic", "kahan"])
def test_small_updates_are_kept_without_copies(weights):
    plan = plan_precision(Precision(policy="bfloat16", master_weights=weights))
    assert (plan.weights, plan.master_weights, plan.least_update) == (weights, False, "float32")
    with pytest.raises(UsageError, match=f"master_weights {weights} contradicts .*policy mixed_bfloat16"):
        plan_precision(Precision(policy="mixed_bfloat16", master_weights=weights))
    with pytest.raises(UsageError, match="stochastic_rounding rounds parameters from their float32 master weights"):
        plan_precision(Precision(policy="bfloat16", master_weights=weights, stochastic_rounding=True))


@pytest.mark.parametrize("master_weights", ["auto", "on"])
def test_stochastic_rounding_goes_with_master_weights(master_weights):
    assert plan_precision(
        Precision(policy="bfloat16", stochastic_rounding=True, master_weights=master_weights)
    ).master_weights


def test_rules_of_the_settings_come_before_those_of_the_policy():
    plan = plan_precision(Precision(policy="float32;stem/*=float16;head=float32", rules={"head": "bfloat16"}))
    assert [(pattern, str(dtype)) for pattern, dtype in plan.policy.rules.items()] == [
        ("head", "bfloat16"),
        ("stem/*", "float16"),
    ]


def test_float16_by_a_rule_alone_is_scaled():
    assert plan_precision(Precision(policy="p=f32;head=float16")).loss_scale == "dynamic"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"policy": "mixed_flot16"}, "unknown precision policy 'mixed_flot16'; did you mean 'mixed_float16'"),
        ({"policy": "O1", "mode": "module"}, "--precision.mode module contradicts --precision.policy O1.*write O2"),
        ({"policy": "O3", "mode": "autocast"}, "--precision.mode autocast contradicts --precision.policy O3.*norms"),
        (
            {"policy": "O1", "rules": {"type:norm": "float16"}},
            "autocast computes norms in float32, and rule 'type:norm'",
        ),
        (
            {"mode": "autocast", "rules": {"type:Norm": "p=f32,c=bf16,o=bf16"}},
            "--precision.mode autocast contradicts .* and rule 'type:norm' asks for bfloat16; leave out one of the two",
        ),
        ({"policy": "O3", "stochastic_rounding": True}, "write float16 or bfloat16 as the policy, and master_weights"),
        (
            {"policy": "float16", "stochastic_rounding": True, "master_weights": "off"},
            "this run has none: write float16 or bfloat16 as the policy, and master_weights auto or on",
        ),
        (
            {"loss_scale": "none", "tolerance": 0.5, "hysteresis": 2},
            "--precision.loss_scale none contradicts --precision.hysteresis 2, --precision.tolerance 0.5, which only a",
        ),
        ({"loss_scale": "1024", "growth_interval": 5}, "--precision.loss_scale 1024 contradicts .*growth_interval 5"),
        ({"stochastic_rounding": True}, "--precision.stochastic_rounding rounds parameters from their float32 master"),
        (
            {"policy": "mixed_float16", "master_weights": "on"},
            "--precision.master_weights on contradicts --precision.policy mixed_float16: its parameters are float32 "
            "already; write float16 or bfloat16 as the policy, or leave master_weights at auto",
        ),
        ({"loss_scale": "big"}, "--precision.loss_scale big: wanted auto, dynamic, none, or a power of two such as"),
        (
            {"policy": "params=float32,compute=bfloat16,reduce=float64"},
            "reduce=float64 contradicts params=float32: .* write reduce=float32 or params=float64",
        ),
        ({"rules": {"stem": "flot32"}}, "unknown dtype 'flot32'.*did you mean 'float32'"),
    ],
)
def test_contradictions_say_what_to_write(settings, says):
    with pytest.raises(UsageError, match=says):
        plan_precision(Precision(**settings))


@pytest.mark.parametrize(
    ("settings", "device", "says"),
    [
        ({"policy": "mixed_bfloat16", "loss_scale": "dynamic"}, H200, ["--precision.loss_scale none saves the check"]),
        ({"policy": "float32", "loss_scale": "1024"}, H200, ["--precision.loss_scale none saves the check"]),
        ({"policy": "mixed_float16", "loss_scale": "none"}, H200, ["--precision.loss_scale dynamic keeps them"]),
        ({"policy": "mixed_float16"}, CPU, ["a CPU has no fast float16"]),
        ({"policy": "mixed_bfloat16"}, CPU, ["a CPU has no fast bfloat16"]),
        ({"policy": "bfloat16", "master_weights": "off"}, H200, ["--precision.master_weights on keeps them"]),
        ({"policy": "float32;head=float16", "loss_scale": "none"}, H200, ["--precision.loss_scale dynamic keeps them"]),
        (
            {"policy": "mixed_bfloat16", "growth_interval": 500, "hysteresis": 2},
            H200,
            [
                "--precision.growth_interval 500, --precision.hysteresis 2 without effect: the loss scale of "
                "--precision.policy mixed_bfloat16 is none; leave out what"
            ],
        ),
        ({"policy": "mixed_float16", "growth_interval": 500}, H200, []),
        ({"policy": "float32"}, CPU, []),
        ({"policy": "mixed_bfloat16"}, H200, []),
        ({"policy": "mixed_float16"}, H200, []),
        ({"policy": "float16"}, H200, []),
        ({"policy": "float32;head=float16", "loss_scale": "auto"}, H200, []),
    ],
)
def test_advice(settings, device, says):
    config = Precision(**settings)
    notes = advice(plan_precision(config), config, device)
    assert len(notes) == len(says)
    assert all(part in note for part, note in zip(says, notes, strict=True))


@pytest.mark.parametrize(("device", "offered"), [(CPU, True), (P100, False)])
def test_a_cpu_is_offered_float32(device, offered):
    config = Precision(policy="mixed_float16")
    (note,) = advice(plan_precision(config), config, device)
    assert ("--precision.policy float32 is seldom slower" in note) is offered


@pytest.mark.parametrize(
    ("settings", "floor"),
    [({"policy": "float32"}, None), ({"loss_scale": "1024"}, 1024.0), ({"min_scale": 4.0}, 4.0), ({}, 1.0)],
)
def test_the_smallest_scale(settings, floor):
    config = Precision(**settings)
    assert floor_of(plan_precision(config), config) == floor

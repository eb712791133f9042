"""What is said of a plan with products in float8 beside the same one without."""

import dataclasses

import pytest

from mpjax.plan.float8 import LayerSavings
from mpjax.plan.float8_report import comparisons
from mpjax.plan.roofline import Roofline


@pytest.mark.parametrize(
    ("seconds", "verdict"),
    [(0.001, "wins: its step is expected to take 0.86"), (0.003, "loses")],
    ids=["wins", "loses"],
)
def test_a_plan_says_what_float8_is_to_the_same_without(plan_of, seconds, verdict):
    other = dataclasses.replace(plan_of("mixed_bfloat16"), roofline=Roofline(compute=0.002, traffic=0.004))
    layers = (LayerSavings("blocks/*/up", 3e-4, 1e-4, 18), LayerSavings("blocks/*/out", 1e-4, 2e-4, 18))
    plan = dataclasses.replace(other, policy="mixed_float8", roofline=Roofline(seconds, 0.004), float8=layers)
    first, second, *rest = comparisons([other, plan])
    assert first.startswith(f"mixed_float8 {verdict}")
    assert "launches +0.00 ms. Temporary memory +0.00 GB." in first
    assert second == (
        'float8 may not pay in 1 of 2 kinds of layers; without it there: --precision.rules "blocks/*/out" bfloat16'
    )
    assert rest == [
        '  "blocks/*/out": products save 100 us, 18 kernels of conversion take at most 200 us',
    ]


@pytest.mark.parametrize(
    ("policy", "others", "flags"),
    [
        ("mixed_float8", [], "mixed_bfloat16 mixed_float8"),
        ("mixed_mxfp8;head=float32", ["float32"], "mixed_bfloat16 'mixed_mxfp8;head=float32'"),
        ("compute=float32,products=float8", ["mixed_bfloat16"], "float32 compute=float32,products=float8"),
    ],
)
def test_a_plan_without_one_to_compare_it_with_says_what_to_write(plan_of, policy, others, flags):
    other = dataclasses.replace(plan_of("mixed_bfloat16"), roofline=Roofline(compute=0.002, traffic=0.004))
    plan = dataclasses.replace(other, policy=policy, float8=(LayerSavings("blocks/*/up", 3e-4, 1e-4, 18),))
    lines = comparisons([*(dataclasses.replace(other, policy=each) for each in others), plan])
    assert lines == [f"to see what float8 saves in {policy}: --policies {flags}"]


def test_plans_without_float8_are_not_compared(plan_of):
    assert comparisons([plan_of("mixed_bfloat16"), plan_of("float32")]) == []

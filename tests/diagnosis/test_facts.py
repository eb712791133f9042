"""The fields of a diagnosis: its headline, its worst rows, and text to paste of a loss scale beside rules."""

import shlex
import tomllib

import numpy as np
import pytest

from mpjax.config import load_config
from mpjax.diagnosis import Facts, TraceRow


MIXED = "params=float32,compute=float16,output=float32"


def row(path, **fields):
    given = dict.fromkeys(("largest", "mean", "overflow", "underflow", "subnormal", "error"), 0.0)
    return TraceRow(
        path, "forward", np.dtype("float16"), **{**given, "own_error": 0.0, "histogram": (0,) * 88, **fields}
    )


def facts(**fields):
    given = {
        "verdict": "overflow",
        "path": "head",
        "direction": "forward",
        "operation": "add",
        "source": None,
        "evidence": "",
        "rules": {"head": "float32"},
        "better_scale": None,
        "verified": True,
        "float32_flops": 0.5,
        "advice": (),
        "table": (),
        "policy": MIXED,
        "loss_scale": 1.0,
        "loss": (1.0, 1.0),
        "flushed": {},
    }
    return Facts(**{**given, **fields})


@pytest.mark.parametrize(
    ("path", "headline"),
    [
        ("head", "verdict: overflow in head (forward, add)"),
        ("", "verdict: overflow in no module (forward, add)"),
        (None, "verdict: overflow"),
    ],
)
def test_a_fault_outside_of_all_modules_is_told_from_one_without_a_place(path, headline):
    assert facts(path=path).headline == headline


def test_a_scale_and_rules_are_pasted_together():
    found = facts(better_scale=1024.0)
    assert tomllib.loads(found.toml) == {"precision": {"loss_scale": "1024", "rules": {"head": "float32"}}}
    read = load_config(shlex.split(found.flags)).precision
    assert (read.loss_scale, read.rules) == ("1024", {"head": "float32"})


@pytest.mark.parametrize(("scale", "text"), [(2.0**33, "8589934592"), (0.5, "0.5"), (1.0, "1")])
def test_a_scale_is_pasted_with_all_of_its_digits(scale, text):
    found = facts(better_scale=scale, rules={})
    assert found.toml == f'[precision]\nloss_scale = "{text}"'
    assert found.flags == f"--precision.loss_scale {text}"


def test_a_rule_for_all_of_the_model_leaves_of_the_policy_s_own_those_for_types():
    found = facts(rules={"*": "float32"}, policy=f"{MIXED};head=float16;type:norm=float32;*/1=bfloat16")
    assert found.repaired_policy == f"{MIXED};*=float32;type:norm=float32"


def test_the_repaired_policy_says_nothing_of_a_scale():
    assert facts(rules={}, better_scale=1024.0).repaired_policy == ""


def test_rows_that_are_equally_harmful_stay_in_program_order():
    rows = (row("a"), row("b", overflow=0.5), row("c"), row("d", overflow=0.5))
    assert [r.path for r in facts(table=rows).worst] == ["b", "d", "a", "c"]

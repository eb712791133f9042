"""What a diagnosis says as text, at a terminal, as lines to paste and as JSON."""

import dataclasses
import io
import json
import shlex
import tomllib
import types

import numpy as np
import pytest
from rich.console import Console

from mpjax.config import load_config
from mpjax.diagnosis import EXPONENTS, Diagnosis, TraceRow
from mpjax.diagnosis.render import percent, row_texts
from mpjax.precision import get_policy


FLOAT16 = np.dtype("float16")


def row(path="a", direction="forward", **fields):
    exponents = fields.pop("exponents", (-3, 2))
    histogram = tuple(int(e in exponents) for e in EXPONENTS)
    given = {
        "dtype": FLOAT16,
        "largest": 4.0,
        "mean": 1.0,
        "overflow": 0.0,
        "underflow": 0.0,
        "subnormal": 0.0,
        "error": 1e-4,
        "own_error": 5e-5,
        "histogram": histogram,
    }
    return TraceRow(path=path, direction=direction, **{**given, **fields})


def diagnosis(**fields):
    given = {
        "verdict": "overflow",
        "path": "layers/1",
        "direction": "forward",
        "operation": "dot_general",
        "source": "model.py:7",
        "evidence": "3 of 4 values overflow in float16.",
        "rules": {"layers/1": "float32"},
        "better_scale": None,
        "verified": True,
        "float32_flops": 0.25,
        "advice": ("Keep layers/1 in float32.",),
        "table": (
            row("layers/0"),
            row("layers/1", overflow=0.75, exponents=(3, 19), largest=60000.0),
            row("layers/1", "backward", underflow=0.02, own_error=None),
        ),
        "policy": "params=float32,compute=float16,output=float32",
        "loss_scale": 1024.0,
        "loss": (float("inf"), 2.5),
        "flushed": {"layers/1/kernel": 0.5, "layers/0/kernel": 0.0},
    }
    return Diagnosis(**{**given, **fields})


def printed(value, width):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(value)
    return console.file.getvalue()


def test_the_text_is_verdict_place_evidence_advice_and_the_worst_rows_first():
    assert str(diagnosis()).splitlines() == [
        "verdict: overflow in layers/1 (forward, dot_general)",
        "at model.py:7",
        "3 of 4 values overflow in float16.",
        "Keep layers/1 in float32.",
        "path      direction  dtype    log2 range  overflow %  underflow %  subnormal %    error  own error",
        "layers/1  forward    float16       3..19        75.0            0            0  1.0e-04    5.0e-05",
        "layers/1  backward   float16       -3..2           0         2.00            0  1.0e-04          -",
        "layers/0  forward    float16       -3..2           0            0            0  1.0e-04    5.0e-05",
    ]


def test_the_text_stays_short_and_does_without_a_place_or_a_table():
    assert len(str(diagnosis(table=tuple(row(f"{n}") for n in range(99)))).splitlines()) == 4 + 1 + 5
    healthy = {"path": None, "direction": None, "operation": None, "source": None, "advice": (), "table": ()}
    assert str(diagnosis(verdict="healthy", evidence="All is well.", **healthy)) == "verdict: healthy\nAll is well."


def test_a_notebook_shows_it_too():
    assert "verdict: overflow in layers/1 (forward, dot_general)" in diagnosis()._repr_html_()
    written = []
    diagnosis()._repr_pretty_(types.SimpleNamespace(text=written.append), False)
    assert written == [str(diagnosis())]


def test_overflow_ranks_before_underflow_and_that_before_error():
    rows = (
        row("error", own_error=0.3),
        row("carried", error=9.0, own_error=0.0),
        row("flushed", underflow=0.5),
        row("inf", overflow=1e-6),
    )
    assert [r.path for r in diagnosis(table=rows).worst] == ["inf", "flushed", "error", "carried"]


def test_a_range_spans_the_sample_and_the_largest_value():
    assert row(exponents=(-30, -3), largest=4.0).exponents == (-30, 2)
    assert row(exponents=(), largest=0.0).exponents is None
    assert row_texts(row("", exponents=(), largest=0.0))[:4] == ("(no module)", "forward", "float16", "all zero")


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.0, "0"),
        (1e-7, "<0.01"),
        (0.0123, "1.23"),
        (0.5, "50.0"),
        (0.99, "99.0"),
        (0.99995, ">99.9"),
        (1.0, "100"),
    ],
)
def test_a_percentage_is_0_or_100_only_where_it_is_exactly_that(share, text):
    assert percent(share) == text


def test_an_error_of_what_is_not_finite_is_infinite():
    assert row_texts(row(error=0.0, non_finite=0.01))[-2:] == ("inf", "5.0e-05")


@pytest.mark.parametrize("path", ["layers/1", "*", 'a"b', "a\\b", "a$b", "ü"])
def test_pasted_lines_and_flags_set_the_rules(path):
    found = diagnosis(rules={path: "float32", "b": "float32"})
    assert tomllib.loads(found.toml) == {"precision": {"rules": {path: "float32", "b": "float32"}}}
    assert load_config(shlex.split(found.flags)).precision.rules == {path: "float32", "b": "float32"}
    assert diagnosis().flags == '--precision.rules "layers/1" float32'


def test_the_repaired_policy_has_the_rules_before_its_own():
    policy = "params=float32,compute=float16,output=float32"
    assert diagnosis(rules={}).repaired_policy == ""
    assert diagnosis(policy=policy).repaired_policy == f"{policy};layers/1=float32"
    own = diagnosis(policy=f"{policy};layers/*=bfloat16;layers/1=float16")
    assert own.repaired_policy == f"{policy};layers/1=float32;layers/*=bfloat16"
    assert get_policy(own.repaired_policy).rules == {"layers/1": "float32", "layers/*": "bfloat16"}


def test_pasted_lines_and_flags_set_the_scale():
    found = diagnosis(rules={}, better_scale=2.0**24)
    assert found.toml == '[precision]\nloss_scale = "16777216"'
    assert load_config(found.flags.split()).precision.loss_scale == "16777216"


def test_nothing_is_pasted_where_nothing_helps():
    assert (diagnosis(rules={}).toml, diagnosis(rules={}).flags) == ("", "")


@pytest.mark.parametrize("width", [80, 140])
def test_rich_shows_rules_and_the_ranked_table_and_cuts_no_name(width):
    name = "encoder/" * 4 + "[bold]"
    found = diagnosis(table=(*diagnosis().table, row(name, overflow=0.9)))
    out = printed(found, width)
    assert "[precision.rules]" in out
    assert '"layers/1" = "float32"' in out
    assert '--precision.rules "layers/1" float32' in out
    assert "…" not in out
    assert "backward  float16 -3..2      0   2.00        0 1.0e-04       -" in out
    if width == 140:
        assert out.index(name) < out.index("\nlayers/1 ")


def test_rich_shows_the_worst_twenty_and_says_so():
    out = printed(diagnosis(table=tuple(row(f"layer{n}", overflow=n / 100) for n in range(30))), 140)
    assert "the worst 20 of 30 rows" in out
    assert "layer29" in out
    assert "layer9 " not in out


def test_json_has_all_of_it_and_spells_what_is_not_finite():
    read = json.loads(diagnosis().to_json())
    assert {field.name for field in dataclasses.fields(Diagnosis)} <= set(read)
    assert read["loss"] == ["Infinity", 2.5]
    assert read["table"][0]["dtype"] == "float16"
    assert read["exponents"] == [-48, 40]


def test_a_rule_inside_of_a_new_one_is_left_out_of_the_repaired_policy():
    policy = "params=float32,compute=float16,output=float32;net/a=float32;type:norm=float32;head=float16"
    found = diagnosis(policy=policy, rules={"net": "float32"}, better_scale=None)
    kept = "net=float32;type:norm=float32;head=float16"
    assert found.repaired_policy == f"params=float32,compute=float16,output=float32;{kept}"

"""Metrics and titles as text."""

import math

import pytest

from mpjax.config import PythonObject, load_config
from mpjax.report import (
    count,
    duration,
    evaluation_fields,
    number,
    rate,
    short_name,
    subject_of,
    title_of,
    training_fields,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.8123, "0.8123"),
        (0.0, "0.0000"),
        (-2.5, "-2.5000"),
        (0.00012345, "1.234e-04"),
        (3e7, "3.000e+07"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
    ],
)
def test_a_number_keeps_digits_that_say_something(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (12.4, "0:12"), (59.6, "1:00"), (3723, "1:02:03"), (90000, "25:00:00"), (None, "-:--")],
)
def test_a_duration_reads_as_a_clock(seconds, text):
    assert duration(seconds) == text


def test_an_unknowable_duration_is_no_crash():
    assert duration(math.inf) == duration(math.nan) == "-:--"


def test_rates_and_counts():
    assert [rate(5210.4), rate(7.258), rate(math.inf)] == ["5210", "7.26", "inf"]
    assert [count(2.0**24), count(0.5), count(3), count(math.nan)] == ["16777216", "0.5", "3", "nan"]


def test_a_person_sees_the_metrics_that_matter_in_one_order():
    metrics = {"train/skipped": 1.0, "train/grad_norm": 3.0, "train/loss": 0.5, "train/loss_scale": 32768.0}
    assert training_fields(metrics) == [("loss", "0.5000"), ("loss_scale", "32768"), ("skipped", "1")]


def test_averaged_parameters_are_told_apart_from_the_plain_ones():
    metrics = {"test/loss": 0.5, "ema/loss": 0.25, "train/loss": 1.0}
    assert evaluation_fields(metrics) == [("loss", "0.5000"), ("ema_loss", "0.2500")]


def test_a_run_is_named_by_model_data_policy_and_rules():
    config = load_config(["--model.name", "mlp", "--precision.policy", "bfloat16"])
    assert subject_of(config) == "mlp on digits"
    assert title_of(config) == "mlp on digits, bfloat16"
    ruled = load_config(["--model.name", "mlp", "--precision.rules", "hidden/0", "float32", "logits", "float32"])
    assert title_of(ruled) == "mlp on digits, mixed_float16 with 2 rules"


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("/home/me/nets/mine.py:Net", "Net"),
        ("my.package:Net", "Net"),
        ("folder:/data/flowers/", "flowers"),
        ("hf:uoft-cs/cifar100", "cifar100"),
        ("hf:csv:/data/reviews.csv", "reviews.csv"),
        ("synthetic:8x8x1:10", "synthetic:8x8x1:10"),
        ("resnet18", "resnet18"),
    ],
)
def test_a_name_is_without_the_folders_that_it_is_in(spec, name):
    assert short_name(spec) == name


def test_what_was_given_in_python_has_its_own_name():
    class Net:
        pass

    assert short_name(PythonObject(Net)) == "Net"

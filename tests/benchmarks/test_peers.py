"""The comparison with other frameworks: what it judges, times and prints, without the frameworks that may be absent."""

import pathlib
import sys

import numpy as np
import pytest


sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))

from peers import tasks
from peers.promises import with_linen, with_mpjax
from peers.promises.judge import judge
from peers.promises.loop import NotOffered
from peers.report import tables
from peers.speed import measure_one


@pytest.mark.parametrize(
    ("sentence", "evidence"),
    [
        pytest.param("A1", "scale 1024 -> 512", marks=pytest.mark.slow),
        ("A2", "scales 1024, 1024, 2048, 2048, 1024, 1024, 1024, 2048; all gradients true"),
        ("A7", "overflow in 2nd: scales 1024, 1024, 1024, 512, no update"),
        ("A10", "losses 2.25, 2.23047, 4024, 2.21094, 2.19141, float32; programs: 1"),
        pytest.param(
            "A11", "1e-3 / 65536 becomes 1.526e-08; ten values of 300 have norm 948.7", marks=pytest.mark.slow
        ),
        ("A20", "scale 1.0004 kept"),
        pytest.param("A3", "first bad layer: head (backward)", marks=pytest.mark.slow),
    ],
)
def test_mpjax_keeps_the_sentences(sentence, evidence):
    found = judge(with_mpjax, sentence)
    assert found["verdict"] == "passes", found
    assert evidence in found["evidence"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sentence", "evidence"),
    [
        ("A1", "batch_stats/BatchNorm_0/mean 2.813 -> inf"),
        ("A2", "scales 1024, 1024, 1024, 2048"),
        ("A10", "the first step is lost"),
    ],
)
def test_what_does_not_hold_is_found(sentence, evidence):
    found = judge(with_linen, sentence)
    assert found["verdict"] == "fails"
    assert evidence in found["evidence"]


def test_what_a_framework_has_not_is_no_failure():
    class Without:
        def start(self, *arguments, **settings):
            raise NotOffered("no loss scaling")

    assert judge(Without(), "A2") == {"verdict": "not offered", "evidence": "no loss scaling"}


class Fixed:
    """A worker whose answers are known."""

    def __init__(self, name, seconds, loss=2.0):
        self.name, self.seconds, self.loss, self.asked = name, list(seconds), loss, []

    def ask(self, command, *arguments):
        self.asked.append((command, *arguments))
        if command == "prepare":
            first = {"loss": self.loss, "accuracy": 0.1, "grad_norm": 1.0}
            return {"first_call_seconds": 9.0, "step_seconds": 0.1, "metrics": [first]}
        seconds = self.seconds.pop(0)
        return seconds, 2 * seconds


class Broken:
    """A worker that cannot do it."""

    name = "Broken"

    def ask(self, command, *arguments):
        raise RuntimeError("Traceback\n  no such dtype")


def timed(*workers, float32=None, dtype="float32"):
    return measure_one(workers, "vit", dtype, float32, repeats=3, seconds=0.35)


def test_ratios_are_of_medians_and_quartiles_of_one_turn():
    own, other = Fixed("mpjax", [1.0, 3.0, 2.0]), Fixed("other", [4.0, 4.0, 8.0])
    found = timed(own, other)
    assert found["ratios"] == {"other": {"of_medians": 0.5, "lower": 0.25, "upper": 0.75}}
    assert found["core_ratios"] == found["ratios"]
    assert found["step_seconds"] == {"mpjax": 2.0, "other": 4.0}
    assert own.asked == [("prepare", "vit", "float32"), *[("time", 4)] * 3]  # 0.35 s of steps of 0.1 s


def test_a_first_step_that_is_another_is_refused():
    with pytest.raises(AssertionError, match=r"other float32: loss of the first step is off by 0\.001"):
        timed(Fixed("mpjax", [1.0] * 3), Fixed("other", [1.0] * 3, loss=2.002))


def test_half_precision_is_compared_with_the_same_framework_in_float32():
    float32 = {"first_step": {"mpjax": {"loss": 2.0, "grad_norm": 1.0}}}
    found = timed(Fixed("mpjax", [1.0] * 3, loss=2.01), float32=float32, dtype="bfloat16")
    assert found["relative_errors"]["mpjax"]["loss"] == pytest.approx(0.005)
    with pytest.raises(AssertionError, match="mpjax float16"):
        timed(Fixed("mpjax", [1.0] * 3, loss=2.01), float32=float32, dtype="float16")


def test_what_fails_is_left_out_with_its_reason():
    found = timed(Fixed("mpjax", [2.0] * 3), Fixed("other", [4.0] * 3), Broken())
    assert found["failed"] == {"Broken": "no such dtype"}
    text = tables({"speed": {"vit": {"float32": found}}, "not_installed": ["Keras"]})
    assert "| other | 0.50 (0.50 to 0.50) |" in text
    assert "| mpjax | 2000.0, 9.0 s |" in text
    assert "Broken, float32: no such dtype" in text
    assert "Not installed: Keras." in text


def test_weights_are_the_same_for_everybody():
    one, two = tasks.weights_of("vit"), tasks.weights_of("vit")
    assert all(np.array_equal(one[name], two[name]) for name in one)
    assert one["positions"].shape == (64, 128)
    assert tasks.weights_of("resnet18")["head/kernel"].shape == (256, 10)

"""Steps whose positions are divided, between layers or throughout, are those with whole texts on each device."""

import json
import os
import pathlib
import subprocess
import sys

import pytest


PROGRAM = pathlib.Path(__file__).with_name("on_positions.py")

SEQUENCE = "mesh.sequence=true"

MODELS = ("gpt2", "gpt2 in a loop", "vit", "bert", "decoder")
"""Models in float32, with and without dropout, rematerialisation, accumulation, `fsdp` and a chunked loss."""


def trained(model: str, *divided: str) -> dict:
    """Runs `on_positions.py`, and returns what came of the steps with whole positions and with divided ones."""
    environment = dict(os.environ)
    kept = [word for word in environment["XLA_FLAGS"].split() if "device_count" not in word]
    environment["XLA_FLAGS"] = " ".join([*kept, "--xla_force_host_platform_device_count=4"])
    # Without XLA's optimizations, or with as many threads as devices, they can wait for each other for ever.
    environment.pop("JAX_DISABLE_MOST_OPTIMIZATIONS", None)
    environment["NPROC"] = "32"
    done = subprocess.run(
        [sys.executable, str(PROGRAM), model, *divided], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def values(steps: list[dict], name: str) -> list[float]:
    return [step[name] for step in steps]


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_losses_gradient_norms_and_parameters_are_the_same(model):
    assert_same(trained(model, SEQUENCE))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "divided"),
    [
        ("gpt2 of parts", ("mesh.data=2", "mesh.context=2")),
        ("gpt2 of parts in a loop", ("mesh.data=1", "mesh.context=2")),
        ("decoder of parts", ("mesh.data=1", "mesh.context=4")),
        ("decoder of parts", ("mesh.data=1", "mesh.context=2", "mesh.tensor=2")),
        ("decoder of parts in a loop", ("mesh.data=1", "mesh.context=2", "mesh.fsdp=2")),
    ],
)
def test_texts_in_parts_give_the_losses_gradient_norms_and_parameters_of_whole_ones(model, divided):
    """With `fsdp`, `tensor` and documents, and a key head that several devices read."""
    assert_same(trained(model, *divided))


def assert_same(found: dict) -> None:
    assert len(found["whole"]) == 5
    for name in ("loss", "grad_norm", "accuracy"):
        assert values(found["shares"], name) == pytest.approx(values(found["whole"], name), rel=1e-5), name
    assert found["difference"] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "divided"),
    [("gpt2 in float16", [SEQUENCE]), ("gpt2 of parts in float16", ["mesh.data=2", "mesh.context=2"])],
)
def test_in_float16_they_differ_by_its_rounding_and_the_loss_is_scaled_alike(model, divided):
    found = trained(model, *divided)
    assert values(found["shares"], "loss") == pytest.approx(values(found["whole"], "loss"), rel=1e-5)
    assert values(found["shares"], "grad_norm") == pytest.approx(values(found["whole"], "grad_norm"), rel=1e-3)
    assert values(found["shares"], "loss_scale") == values(found["whole"], "loss_scale") == [2.0**15] * 5
    assert values(found["shares"], "finite") == [1.0] * 5

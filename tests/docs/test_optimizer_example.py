"""docs/examples/parts/optimizer.py: a rule and a schedule of one's own, in the trainer."""

import importlib.util
import pathlib

import jax.numpy as jnp
import pytest


FILE = pathlib.Path(__file__).parents[2] / "docs" / "examples" / "parts" / "optimizer.py"


@pytest.fixture(scope="module")
def module():
    spec = importlib.util.spec_from_file_location("own_optimizer", FILE)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.mark.slow
def test_it_trains_in_mixed_precision(module):
    summary = module.main(150)
    assert summary["policy"] == "params=float32,compute=float16,output=float32"
    assert summary["test/accuracy"] > 0.5


def test_its_schedule_falls_over_the_last_fifth(module):
    rate = module.flat_then_down(0.5, 100)
    assert [float(rate(jnp.int32(step))) for step in (0, 80, 90, 100)] == pytest.approx([0.5, 0.5, 0.25, 0])


def test_it_is_short():
    assert len(FILE.read_text().splitlines()) < 40

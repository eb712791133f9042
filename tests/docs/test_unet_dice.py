"""The U-Net of docs/examples: from NaN to a verdict to a run that learns by what was printed, as the page tells it."""

import importlib.util
import linecache
import math
import pathlib

import pytest


ROOT = pathlib.Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "unet_dice.py"

pytestmark = pytest.mark.optimized


@pytest.fixture(scope="module")
def told():
    """Both runs, the diagnosis, and float32's run."""
    spec = importlib.util.spec_from_file_location("unet_dice", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main()


def test_in_float16_every_loss_is_nan_and_every_step_is_skipped(told):
    broken = told[0]
    assert len(broken.losses) == 30
    assert all(map(math.isnan, broken.losses))
    assert (broken.skipped, broken.scale) == (30, 1.0)


def test_the_verdict_is_overflow_in_the_line_that_sums(told):
    found = told[1]
    assert (found.verdict, found.path, found.direction) == ("overflow", "loss", "forward")
    file, line = found.source.rsplit(":", 1)
    assert pathlib.Path(file) == EXAMPLE
    assert linecache.getline(file, int(line)).strip() == "overlap = jnp.sum(p * masks)"
    assert math.isnan(found.loss[0])
    assert 0.9 < found.loss[1] < 1.1


def test_it_proposes_float32_for_the_loss_alone_and_has_verified_it(told):
    found = told[1]
    assert found.rules == {"loss": "float32"}
    assert found.verified
    assert found.float32_flops == 0.0
    assert found.repaired_policy == "params=float32,compute=float16,output=float32;loss=float32"


def test_with_the_rules_it_learns_as_in_float32(told):
    _, _, repaired, exact = told
    assert (repaired.skipped, repaired.scale) == (0, 32768.0)
    assert 0.9 < repaired.losses[0] < 1.1
    assert repaired.losses[-1] < 0.2
    assert repaired.dice > 0.9
    assert abs(repaired.dice - exact.dice) < 0.01
    assert max(abs(a - b) / b for a, b in zip(repaired.losses, exact.losses, strict=True)) < 0.1


def test_the_page_shows_what_it_prints(told):
    page = (ROOT / "docs" / "diagnosis.md").read_text()
    printed = str(told[1]).replace(f"{EXAMPLE.parent}/", "").splitlines()
    for line in printed[:5]:  # verdict, place, evidence, advice, and the head of the table
        assert line in page

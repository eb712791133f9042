"""Programs of peers compiled for a GPU that is not there, at tiny sizes."""

import pathlib
import sys

import pytest


sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))

from gpu.cases import SMALL
from programs_of_peers import measure, table


pytestmark = pytest.mark.extra


@pytest.mark.parametrize("peer", ["mpjax", "Flax linen"])
def test_a_small_vit_is_compiled_for_an_h200(plugin, peer):
    row = measure(peer, SMALL[2], "mixed_bfloat16")
    assert 50 <= row["kernels"] <= 120
    assert 0 < row["expected ms"] < 1


def test_the_table_has_the_ratio_of_mpjax_to_each_peer():
    numbers = {"temporary GB": 1.0, "kernels": 10}
    rows = {
        "mpjax": {"GB moved": 90.0, "expected ms": 30.0, **numbers},
        "Keras": {"GB moved": 120.0, "expected ms": 40.0, **numbers},
    }
    assert table({"ViT": rows}).splitlines()[-1] == "| ViT | Keras | 120.0 | 1.0 | 10 | 40.0 | 0.75 | 0.75 |"

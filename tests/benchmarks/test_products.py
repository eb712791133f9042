"""The convolutions and matrix products of a step alone."""

import pathlib
import sys

import pytest


sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))

pytest.importorskip("torch", reason="pip install -e '.[parity]'")

from products import Product, by_torch, by_xla, measure, products_of


pytestmark = pytest.mark.extra


def test_a_resnet18_has_twenty_convolutions():
    found = list(products_of("resnet18"))
    assert len(found) == 20
    assert found[0] == Product(batch=32, side=32, window=3, stride=1, channels=3, out=32)
    assert found[-1] == Product(batch=32, side=4, window=3, stride=1, channels=256, out=256)
    # 32 images of 4x4 values of 256, each from 3x3x256 multiplications and additions.
    assert found[-1].operations == 32 * 4 * 4 * 256 * 2 * 3 * 3 * 256


def test_a_transformer_has_six_products_in_each_of_four_blocks():
    found = list(products_of("vit"))
    assert len(found) == 24
    assert sum(product.operations for product in found) == 4 * 2 * 2048 * (4 * 128 * 128 + 2 * 128 * 512)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("product", [Product(2, 4, 3, 2, 3, 5), Product(6, 1, 1, 1, 3, 5)])
def test_both_libraries_run_each_product_forwards_and_for_both_gradients(product, dtype):
    for make in (by_xla, by_torch):
        runs = make(product, dtype)
        assert len(runs) == 3
        for run in runs:
            run()


def test_times_of_equal_products_count_as_often_as_they_are_there(monkeypatch):
    small = Product(6, 1, 1, 1, 3, 5)
    monkeypatch.setattr("products.products_of", lambda task: iter([small] * 1000))
    found = measure("vit", "float32", repeats=3)
    for one in found.values():
        assert set(one["milliseconds"]) == {"forward", "input gradient", "kernel gradient"}
        assert one["milliseconds_of_all"] == pytest.approx(sum(one["milliseconds"].values()))
        seconds = one["milliseconds"]["forward"] / 1e3
        assert one["gflops_per_second"]["forward"] == pytest.approx(1000 * 2 * 6 * 3 * 5 / seconds / 1e9)

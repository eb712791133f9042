"""What fits on the devices that are here."""

import types

import pytest

from mpjax.plan import batch_that_fits, memory_limit, micro_batches_that_fit


def linear(fixed, each):
    tried = []

    def bytes_of(size):
        tried.append(size)
        return fixed + each * size

    return tried, bytes_of


@pytest.mark.parametrize(
    ("limit", "batch"), [(100 + 64 * 10, 64), (100 + 64 * 10 - 1, 32), (100 + 8 * 10, 8), (130, 2)]
)
def test_the_batch_is_the_largest_power_of_two_that_fits(limit, batch):
    tried, bytes_of = linear(100, 10)
    assert batch_that_fits(10**6, limit, bytes_of, step=1) == batch
    assert len(tried) <= 6
    assert len(set(tried)) == len(tried)  # nothing is compiled twice


def test_it_is_a_multiple_of_the_devices_and_no_larger_than_the_data_set():
    tried, bytes_of = linear(100, 10)
    assert batch_that_fits(10**6, 100 + 10 * 50, bytes_of, step=6) == 48
    tried.clear()
    assert batch_that_fits(70, 10**9, bytes_of, step=1) == 64
    assert max(tried) == 64
    assert batch_that_fits(5, 10**9, bytes_of, step=6) == 0
    assert batch_that_fits(10**6, 105, bytes_of, step=1) == 0


def test_memory_that_does_not_grow_with_small_batches_is_no_line():
    assert batch_that_fits(10**6, 2000, lambda size: max(1000, 10 * size), step=1) == 128
    assert batch_that_fits(64, 2000, lambda size: 1000, step=1) == 64


def test_an_estimate_that_is_too_large_is_halved():
    """Memory that grows faster than a line."""
    assert batch_that_fits(10**6, 10_000, lambda size: size**2, step=1) == 64


@pytest.mark.parametrize(("limit", "count"), [(100, 1), (99, 2), (26, 4), (24, 0)])
def test_as_few_micro_batches_as_fit(limit, count):
    assert micro_batches_that_fit(8, limit, lambda count: 100 // count, devices=2) == count


def test_a_device_that_reports_its_memory_is_believed():
    stats = {"bytes_limit": 2000, "bytes_in_use": 1000}
    gpu = types.SimpleNamespace(platform="gpu", memory_stats=lambda: stats)
    assert memory_limit([gpu, gpu]) == 850


def test_cpu_devices_and_processes_of_a_machine_share_its_free_memory(monkeypatch):
    monkeypatch.setattr("mpjax.plan.here.free_memory", lambda: 8000)
    cpus = [types.SimpleNamespace(platform="cpu", memory_stats=lambda: None) for _ in range(2)]
    assert memory_limit(cpus) == 2000
    assert memory_limit(cpus, processes=4) == 500

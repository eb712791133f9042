"""The time to expect of a step by hand, on H100s: 450 GB/s within a host, 50 between."""

import pytest

from mpjax.plan import GPUS, Instruction, Reach, Start, Wait, Work, expected_of


ACROSS = Reach(16, 1)
LATENCY = 1e-6 * (8.4 + 15 * 14)


def gather(name: str, size: int, *, moved: int = 0) -> Start:
    instruction = Instruction(name, "f32[]", "all-gather-start", (), "")
    return Start(name, "all-gather", (("f32", size),), moved, instruction)


def expected(*events, reach: Reach = ACROSS, gpu=GPUS["h100"], labels=None):
    """A byte of kernels takes a microsecond."""
    names = [event.name for event in events if isinstance(event, Start)]
    return expected_of(events, gpu, 1e-6, dict.fromkeys(names, reach), labels or dict.fromkeys(names, "fsdp"))


def test_the_estimate_lies_between_nothing_hidden_and_all_hidden():
    """Two gathers of a millisecond: the first is half hidden by 500 us of kernels, the second has none beside it."""
    size = 50_000_000 * 16 // 15
    found = expected(Work(100), gather("a", size), Work(500), Wait("a"), gather("b", size), Wait("b"))
    assert found is not None
    each = 1e-3 + LATENCY
    assert found.communication == pytest.approx(2 * each)
    assert found.step == pytest.approx(100e-6 + 2 * each)
    assert found.exposed == pytest.approx(2 * each - 500e-6)
    assert found.none_hidden == pytest.approx(600e-6 + 2 * each)
    # Were the first all hidden, the exchanges would still take longer than the kernels.
    assert found.all_hidden == pytest.approx(2 * each)


def test_what_no_kernel_hides_is_in_every_estimate():
    found = expected(Work(9000), gather("a", 50_000_000 * 16 // 15, moved=20), Wait("a"))
    assert found is not None
    assert found.step == found.all_hidden == pytest.approx(9000e-6 + 1e-3 + LATENCY)


def test_efficiency_is_against_groups_within_a_host():
    """An eighth of 16 parts: 8 on a host gather 7/8 of 450 MB over NVLink in 7/8 of a millisecond."""
    found = expected(Work(1000), gather("a", 450_000_000), Wait("a"), reach=Reach(16, 8))
    assert found is not None
    one_host = 1e-3 + 7 / 8 * 1e-3 + 1e-6 * (8.4 + 7 * 3.4)
    network = 1e-3 + 15 / 16 * 450e6 / 400e9 + 1e-6 * (8.4 + 14 * 3.4 + 14)
    assert (found.one_host, found.step) == pytest.approx((one_host, network))
    assert found.efficiency == pytest.approx(one_host / network)


def test_within_a_host_nothing_is_lost():
    found = expected(Work(1000), gather("a", 450_000_000), Wait("a"), reach=Reach(8, 8))
    assert found is not None
    assert found.efficiency == 1


def test_exchanges_are_told_apart_by_the_axes_of_the_mesh():
    size = 50_000_000 * 16 // 15
    found = expected(gather("a", size), Wait("a"), gather("b", 0), Wait("b"), labels={"a": "fsdp", "b": "data"})
    assert found is not None
    assert found.by_axes == pytest.approx({"fsdp": 1e-3 + LATENCY, "data": LATENCY})


def test_without_a_known_network_there_is_nothing_to_expect():
    assert expected(gather("a", 64), Wait("a"), gpu=GPUS["l4"]) is None


def test_one_device_takes_the_time_of_its_kernels():
    found = expected(Work(1000))
    assert found is not None
    assert (found.step, found.none_hidden, found.all_hidden, found.efficiency) == (1e-3, 1e-3, 1e-3, 1.0)

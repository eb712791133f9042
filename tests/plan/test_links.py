"""How long collectives take on the links of a GPU."""

import pytest

from mpjax.plan import GPUS, Reach, along, duration_of, reach_of


HOST = Reach(8, 8)


@pytest.mark.parametrize(
    ("kind", "size", "reach", "milliseconds"),
    [
        # 450 GB/s within a host of H100s: 450 MB take a millisecond.
        ("all-reduce", 450_000_000, HOST, 2 * 7 / 8),
        ("all-reduce", 450_000_000, Reach(2, 2), 1),
        ("all-gather", 450_000_000, HOST, 7 / 8),
        ("reduce-scatter", 450_000_000, HOST, 7 / 8),
        ("all-to-all", 450_000_000, HOST, 7 / 8),
        ("collective-permute", 450_000_000, HOST, 1),
        ("collective-broadcast", 450_000_000, HOST, 1),
        # 50 GB/s per GPU between hosts: a ring has as many adapters as members on a host.
        ("all-reduce", 400_000_000, Reach(16, 8), 2 * 15 / 16),
        ("all-reduce", 50_000_000, Reach(16, 1), 2 * 15 / 16),
        ("all-gather", 100_000_000, Reach(4, 2), 3 / 4),
        ("all-to-all", 50_000_000, Reach(16, 8), 8 / 16),
        ("collective-permute", 50_000_000, Reach(16, 8), 1),
        ("all-reduce", 450_000_000, Reach(1, 1), 0),
    ],
)
def test_what_each_device_sends_over_its_bandwidth(kind, size, reach, milliseconds):
    assert duration_of(kind, size, reach, GPUS["h100"]) == pytest.approx(milliseconds / 1000)


def test_a_ring_is_never_faster_between_hosts_than_within():
    """Eight L4-like links of 32 GB/s: their adapters would be faster."""
    slow = GPUS["h100"].__class__(**{**vars(GPUS["h100"]), "link": 32e9})
    assert duration_of("all-gather", 32_000_000, Reach(16, 8), slow) == pytest.approx(15 / 16 / 1000)


def test_without_a_known_network_there_is_no_time_between_hosts():
    assert duration_of("all-reduce", 64, Reach(16, 8), GPUS["l4"]) is None
    assert duration_of("all-gather", 32_000_000, HOST, GPUS["l4"]) == pytest.approx(7 / 8 / 1000)


@pytest.mark.parametrize(
    ("axes", "sizes", "reach"),
    [
        (["data"], {"data": 8, "fsdp": 1}, Reach(8, 8)),
        (["data"], {"data": 16, "fsdp": 1}, Reach(16, 8)),
        (["data"], {"data": 4, "fsdp": 8}, Reach(4, 1)),
        (["fsdp"], {"data": 4, "fsdp": 8}, Reach(8, 8)),
        (["fsdp"], {"data": 2, "fsdp": 6}, Reach(6, 2)),
        (["data", "fsdp"], {"data": 4, "fsdp": 8}, Reach(32, 8)),
    ],
)
def test_neighbours_share_a_host(axes, sizes, reach):
    """Of two groups of 6 the second has 2 devices on the first host and 4 on the second."""
    assert reach_of(along(axes, sizes)) == reach


def test_groups_of_unequal_size_within_a_host_stay_there():
    assert reach_of(((0, 1, 2, 3), (4,))) == Reach(4, 4)

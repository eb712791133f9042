"""How long collectives take on the links of a GPU."""

import pytest

from mpjax.plan import GPUS, Reach, Sent, along, duration_of, latency_of, reach_of, sent_of


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


@pytest.mark.parametrize(
    ("kind", "size", "reach", "within", "between"),
    [
        ("all-reduce", 800, HOST, 1400, 0),
        ("all-gather", 800, HOST, 700, 0),
        ("reduce-scatter", 3200, Reach(16, 8), 2625, 375),  # 3000: seven eighths within, an eighth between
        ("all-reduce", 1600, Reach(16, 1), 0, 3000),
        ("all-to-all", 1600, Reach(16, 8), 700, 800),
        ("collective-permute", 100, HOST, 100, 0),
        ("collective-permute", 100, Reach(16, 8), 0, 100),
        ("all-reduce", 800, Reach(1, 1), 0, 0),
    ],
)
def test_bytes_that_each_gpu_sends_by_link(kind, size, reach, within, between):
    assert sent_of(kind, size, reach) == Sent(within, between)


@pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"])
@pytest.mark.parametrize("reach", [Reach(16, 8), Reach(16, 1), Reach(128, 4)])
def test_the_network_takes_as_long_as_the_bytes_that_are_sent_over_it(kind, reach):
    """50 GB/s per GPU."""
    sent = sent_of(kind, 10**9, reach)
    assert duration_of(kind, 10**9, reach, GPUS["h100"]) == pytest.approx(sent.between / 50e9, rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "reach", "microseconds"),
    [
        ("all-gather", HOST, 8.4 + 7 * 3.4),
        ("all-reduce", HOST, 8.4 + 14 * 3.4),
        ("all-gather", Reach(16, 8), 8.4 + 14 * 3.4 + 14),
        ("reduce-scatter", Reach(128, 8), 8.4 + 112 * 3.4 + 15 * 14),
        ("all-gather", Reach(16, 1), 8.4 + 15 * 14),
        # A ring of 1,024 GPUs would take 10.5 ms, so NCCL takes a tree of 128 hosts: 7 levels, up and down.
        ("all-reduce", Reach(1024, 8), 8.4 + 2 * (7 * 4 + 7 * 14)),
        ("collective-permute", HOST, 8.4 + 3.4),
        ("all-to-all", Reach(16, 8), 8.4 + 14),
        ("all-gather", Reach(1, 1), 0),
    ],
)
def test_latency_of_rings_and_trees(kind, reach, microseconds):
    assert 1e6 * latency_of(kind, reach) == pytest.approx(microseconds)


@pytest.mark.parametrize(("megabytes", "measured"), [(16.777216, 123.8), (67.108864, 324.7), (268.435456, 1112.5)])
def test_it_agrees_with_what_nvidia_measured_on_a_host_of_h100(megabytes, measured):
    """All-reduce of nccl-tests on 8 H100, microseconds: NVIDIA/dgxc-benchmarking, nccl/README.md."""
    seconds = duration_of("all-reduce", round(1e6 * megabytes), HOST, GPUS["h100"])
    assert seconds is not None
    assert 1e6 * (seconds + latency_of("all-reduce", HOST)) == pytest.approx(measured, rel=0.03)

"""The communication of a step by hand: an H100 that moves 50 kB in a microsecond between hosts, 450 within."""

import pytest

from mpjax.plan import GPUS, Instruction, Sent, Start, Wait, Work, communication_of


H100 = GPUS["h100"]
SQUARE = {"data": -1, "fsdp": 4, "tensor": 1}


def start(name: str, groups: str, size: int, *, kind: str = "all-reduce", dtype: str = "f32") -> Start:
    instruction = Instruction(name, "f32[]", f"{kind}-start", (), f", replica_groups={groups}")
    return Start(name, kind, ((dtype, size),), 0, instruction)


def step(*starts: Start) -> list:
    """A millisecond of kernels, then collectives that nothing hides."""
    return [Work(1000), *(event for each in starts for event in (each, Wait(each.name)))]


def plan(events, mesh, devices, gpu=H100):
    return communication_of(events, gpu, 1e-6, mesh=mesh, devices=devices)


def test_bytes_are_counted_by_collective_dtype_and_axes():
    found = plan(
        step(
            start("a", "[4,2]<=[2,4]T(1,0)", 100),
            start("b", "[4,2]<=[2,4]T(1,0)", 20),
            start("c", "[1,8]<=[8]", 3),
            start("d", "[2,4]<=[8]", 500, kind="all-gather", dtype="bf16"),
            start("e", "{{0,5},{1,4},{2,7},{3,6}}", 7),
        ),
        SQUARE,
        8,
    )
    assert found.bytes == {
        "all-reduce": {"f32": {"data": 120, "data+fsdp": 3, "other groups": 7}},
        "all-gather": {"bf16": {"fsdp": 500}},
    }


def test_a_group_that_spans_hosts_is_as_fast_as_its_network():
    """450 MB in a millisecond within a host; 8 x 50 MB between two."""
    found = plan(step(start("a", "[1,8]<=[8]", 400_000_000)), {"data": -1, "fsdp": 1, "tensor": 1}, 8)
    assert [scale.devices for scale in found.scaling] == [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
    times = [2 * 7 / 8 * 400 / 450] + [2 * (n - 1) / n for n in (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)]
    assert [1e3 * scale.timing.exposed for scale in found.scaling] == pytest.approx([0, *times])
    assert [scale.efficiency for scale in found.scaling] == pytest.approx([1, *(1 / (1 + each) for each in times)])
    assert found.timing == found.scaling[1].timing


def test_only_the_axis_that_is_left_open_grows():
    """Four parts each on a host of 8: their groups stay there, and there are two members of a replica's group."""
    found = plan(step(start("a", "[2,4]<=[8]", 450_000_000), start("b", "[4,2]<=[2,4]T(1,0)", 1)), SQUARE, 8)
    assert found.grows == "data"
    assert [scale.devices for scale in found.scaling] == [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
    assert [1e3 * scale.timing.step for scale in found.scaling] == pytest.approx([1 + 2 * 3 / 4] * 10)


def test_where_no_axis_is_left_open_data_grows():
    mesh = {"data": 2, "fsdp": 4, "tensor": 1}
    assert plan(step(), mesh, 8).grows == "data"
    assert plan(step(), {"data": 2, "fsdp": -1, "tensor": 1}, 8).grows == "fsdp"


def test_an_axis_of_one_device_has_no_collectives_to_scale():
    found = plan(step(start("a", "[1,8]<=[8]", 450_000_000)), {"data": -1, "fsdp": 8, "tensor": 1}, 8)
    assert found.scaling == []
    assert found.timing is not None
    assert found.timing.step == pytest.approx(1e-3 * (1 + 2 * 7 / 8))


def test_the_planned_number_of_gpus_has_a_row():
    found = plan(step(), {"data": -1, "fsdp": 1, "tensor": 1}, 4)
    assert [scale.devices for scale in found.scaling] == [1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]


def test_other_groups_stay_as_they_are():
    """Pairs across one host, on 1 device and on 16."""
    events = step(start("a", "{{0,5},{1,4},{2,7},{3,6}}", 450_000_000))
    found = plan(events, {"data": -1, "fsdp": 1, "tensor": 1}, 8)
    assert [1e3 * scale.timing.communication for scale in found.scaling][:3] == pytest.approx([0, 1, 1])


def test_without_a_known_network_a_plan_ends_at_one_host():
    mesh = {"data": -1, "fsdp": 1, "tensor": 1}
    assert [s.devices for s in plan(step(start("a", "{}", 8)), mesh, 8, GPUS["l4"]).scaling] == [1, 8]
    assert plan(step(start("a", "{}", 8)), mesh, 16, GPUS["l4"]).timing is None


def test_one_device_has_nothing_to_exchange():
    found = plan([Work(1000)], {"data": -1, "fsdp": 1, "tensor": 1}, 1)
    assert (found.bytes, found.scaling) == ({}, [])


def test_bytes_are_counted_by_link():
    """All-gathers of 80 MB among 16 on two hosts: each GPU sends 15/16 of it, an eighth of that to the other host."""
    found = plan(step(start("a", "[1,16]<=[16]", 80_000_000, kind="all-gather")), {"data": 1, "fsdp": 16}, 16)
    assert found.sent == Sent(within=65_625_000, between=9_375_000)
    within = plan(step(start("a", "[2,8]<=[16]", 80_000_000, kind="all-gather")), {"data": 2, "fsdp": 8}, 16)
    assert within.sent == Sent(within=70_000_000, between=0)


def test_the_time_to_expect_is_not_asked_for_by_default():
    assert plan(step(), {"data": -1, "fsdp": 1}, 8).expected is None

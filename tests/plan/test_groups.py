"""Who exchanges with whom, in each form that XLA writes."""

import pytest

from mpjax.plan import Instruction, along, axes_of, groups_of


CUBE = {"data": 2, "fsdp": 2, "tensor": 2}
GLOBAL = ", use_global_device_ids=true, to_apply=%add"
LOW, HIGH = (0, 1, 2, 3), (4, 5, 6, 7)
NEAR, FAR = ((0, 1), (2, 3), (4, 5), (6, 7)), ((0, 4), (1, 5), (2, 6), (3, 7))
MIDDLE = ((0, 2), (1, 3), (4, 6), (5, 7))


def collective(attributes: str, opcode: str = "all-reduce-start") -> Instruction:
    return Instruction("x", "f32[1]{0}", opcode, ("a",), attributes)


@pytest.mark.parametrize(
    ("attributes", "groups", "axes"),
    [
        (", replica_groups={{0,1},{2,3},{4,5},{6,7}}" + GLOBAL, NEAR, ("tensor",)),
        (", channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}" + GLOBAL, (LOW, HIGH), ("fsdp", "tensor")),
        (", replica_groups=[2,4]<=[8]" + GLOBAL, (LOW, HIGH), ("fsdp", "tensor")),
        (", replica_groups=[4,2]<=[8]" + GLOBAL, NEAR, ("tensor",)),
        (", replica_groups=[4,2]<=[2,4]T(1,0)" + GLOBAL, FAR, ("data",)),
        (", replica_groups=[4,2]<=[2,2,2]T(0,2,1)" + GLOBAL, MIDDLE, ("fsdp",)),
        (", replica_groups=[2,4]<=[4,2]T(1,0)" + GLOBAL, ((0, 2, 4, 6), (1, 3, 5, 7)), ("data", "fsdp")),
        (", replica_groups=mesh['a'=2,'b'=4] {'a'}" + GLOBAL, FAR, ("data",)),
        (", replica_groups=mesh['a'=2,'b'=4] {'b'}" + GLOBAL, (LOW, HIGH), ("fsdp", "tensor")),
        (", replica_groups=mesh['a'=2,'b'=4] {'b':(1)2}" + GLOBAL, MIDDLE, ("fsdp",)),
        (", replica_groups=mesh['a'=2,'b'=4] {'b':(2)2}" + GLOBAL, NEAR, ("tensor",)),
        (
            ", replica_groups=mesh['a'=2,'b'=1,'c'=4], device_ids=([2,2,2]T(1,0,2)) {'a'}" + GLOBAL,
            MIDDLE,
            ("fsdp",),
        ),
        (", replica_groups=mesh['a'=2,'b'=4], device_ids=(0,2,4,6,1,3,5,7) {'a'}" + GLOBAL, NEAR, ("tensor",)),
        (", replica_groups={}" + GLOBAL, (LOW + HIGH,), ("data", "fsdp", "tensor")),
        (", to_apply=%add", (LOW + HIGH,), ("data", "fsdp", "tensor")),
        (", channel_id=1, replica_groups={{0}}, to_apply=%add", (LOW + HIGH,), ("data", "fsdp", "tensor")),
        (", replica_groups=[8,1]<=[8]" + GLOBAL, tuple((id,) for id in range(8)), ()),
        (", replica_groups={{0,3},{1,2},{4,7},{5,6}}" + GLOBAL, ((0, 3), (1, 2), (4, 7), (5, 6)), None),
    ],
)
def test_groups_and_their_axes(attributes, groups, axes):
    each = collective(attributes)
    assert groups_of(each, 8) == groups
    assert axes_of(each, CUBE) == axes


def test_an_axis_of_one_device_is_not_named():
    assert axes_of(collective(", replica_groups={{0,1,2,3}}"), {"data": 1, "fsdp": 4, "tensor": 1}) == ("fsdp",)


@pytest.mark.parametrize(
    ("pairs", "axes"),
    [
        ("{0,4},{4,0}", ("data",)),
        ("{0,1},{1,0},{2,3}", ("tensor",)),
        ("{0,3},{1,0}", ("fsdp", "tensor")),
        ("{5,5}", ()),
    ],
)
def test_a_permutation_goes_along_the_axes_on_which_its_pairs_differ(pairs, axes):
    each = collective(f", channel_id=2, source_target_pairs={{{pairs}}}", "collective-permute-start")
    assert axes_of(each, CUBE) == axes


def test_groups_along_axes():
    assert along([], {"data": 3}) == ((0,), (1,), (2,))
    assert along(["tensor", "data"], CUBE) == ((0, 1, 4, 5), (2, 3, 6, 7))


def test_another_form_is_refused():
    with pytest.raises(ValueError, match="unknown form of replica groups in ', replica_groups=all"):
        groups_of(collective(", replica_groups=all"), 8)

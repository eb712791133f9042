"""The state whole on both devices, the batch cut across them."""

import math
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpjax.data import Share
from mpjax.errors import UsageError
from mpjax.training import Layout, compiler_options, make_mesh, own_rows, resolve_sizes


def rows_per_device(sharding, size=8):
    return [shard.data.shape[0] for shard in jax.device_put(jnp.zeros((size, 3)), sharding).addressable_shards]


def test_batches_are_divided_and_states_are_not():
    mesh = make_mesh()
    assert mesh.size == 2
    assert rows_per_device(Layout(mesh).batch(size=8)) == [4, 4]
    assert rows_per_device(Layout(mesh).replicated) == [8, 8]


def test_evaluation_batches_are_divided_where_that_is_even():
    assert rows_per_device(Layout(make_mesh()).evaluation(8)) == [4, 4]
    assert rows_per_device(Layout(make_mesh()).evaluation(7), size=7) == [7, 7]


@pytest.mark.parametrize(("size", "accumulate", "instead"), [(63, 1, 62), (64, 5, 60), (1, 1, 2), (3, 4, 8)])
def test_a_batch_that_does_not_divide_is_refused_with_one_that_does(size, accumulate, instead):
    with pytest.raises(UsageError) as raised:
        Layout(make_mesh()).batch(size=size, accumulate=accumulate)
    assert str(raised.value) == (
        f"a batch of {size} examples does not divide among 2 devices x {accumulate} micro-batches: "
        f"take a multiple of {2 * accumulate}, such as {instead}"
    )


NAMES = ("data", "fsdp", "context", "tensor")


def sizes_of(text):
    """The sizes in flags such as `--mesh.data 2 --mesh.fsdp 1 --mesh.context 1 --mesh.tensor 1`."""
    return {name: int(size) for name, size in re.findall(r"--mesh\.([a-z]+) (-?\d+)", text)}


@settings(max_examples=200)
@given(sizes=st.tuples(*[st.integers(-2, 9)] * 4), devices=st.integers(1, 16))
def test_sizes_have_the_right_product_or_the_message_names_some_that_have(sizes, devices):
    asked = dict(zip(NAMES, sizes, strict=True))
    try:
        settled = resolve_sizes(asked, devices)
    except UsageError as error:
        shown, near = str(error).split("; nearest: ")
        assert sizes_of(shown) == asked
        assert resolve_sizes(sizes_of(near), devices) == sizes_of(near)
    else:
        assert math.prod(settled.values()) == devices
        assert all(size in (-1, settled[name]) for name, size in asked.items())
        assert min(settled.values()) > 0


@pytest.mark.parametrize(
    ("sizes", "near"),
    [
        ((3, 1, 1, 1), (4, 1, 1, 1)),
        ((-1, 3, 1, 1), (2, 4, 1, 1)),
        ((2, 8, 1, 1), (1, 8, 1, 1)),
        ((2, 1, 8, 1), (1, 1, 8, 1)),
        ((-2, -2, 1, 2), (1, 4, 1, 2)),
    ],
)
def test_the_message_names_the_nearest_sizes(sizes, near):
    with pytest.raises(UsageError) as raised:
        resolve_sizes(dict(zip(NAMES, sizes, strict=True)), 8 if sizes[0] != 3 else 4)
    assert tuple(sizes_of(str(raised.value).split("; nearest: ")[1]).values()) == near


def test_neighbouring_devices_are_along_the_last_axis():
    mesh = make_mesh(np.arange(8), data=2, fsdp=-1, tensor=2)
    assert mesh.axis_names == NAMES
    assert mesh.devices.tolist() == [[[[0, 1]], [[2, 3]]], [[[4, 5]], [[6, 7]]]]


def test_two_sizes_to_fill_in_are_an_error_also_where_they_can_only_be_one():
    with pytest.raises(UsageError, match="-1 for at most one; nearest: --mesh.data 1 --mesh.fsdp 1 --mesh.tensor 4$"):
        resolve_sizes({"data": -1, "fsdp": -1, "tensor": 4}, 4)


def held(*rows):
    """Stands for a sharding of which this process has these rows of a batch of 8."""
    return types.SimpleNamespace(
        addressable_devices_indices_map=lambda shape: {number: (slice(*pair),) for number, pair in enumerate(rows)}
    )


@pytest.mark.parametrize(
    ("rows", "share"),
    [
        ([(0, 4), (4, 8)], Share(0, 1)),
        ([(4, 6), (6, 8)], Share(1, 2)),
        ([(4, 6), (4, 6)], Share(2, 4)),  # a model divided over tensor by both
        ([(None, None)], Share(0, 1)),  # replicated
    ],
)
def test_a_process_reads_the_rows_that_its_devices_hold(rows, share):
    assert own_rows(held(*rows), 8) == share


@pytest.mark.parametrize("rows", [[(0, 2), (4, 6)], [(2, 4), (4, 6)]])
def test_rows_that_are_no_part_of_an_even_division_are_an_error(rows):
    with pytest.raises(UsageError, match="not one block of it: write --mesh.data and --mesh.fsdp as multiples"):
        own_rows(held(*rows), 8)


def test_one_process_reads_all_rows():
    layout = Layout(make_mesh())
    assert own_rows(layout.batch(size=8), 8) == own_rows(layout.evaluation(7), 7) == Share(0, 1)


def test_gpus_keep_casts_as_written_and_several_compute_while_they_communicate(plugin):
    from mpjax.plan import mesh_of

    assert compiler_options(make_mesh()) == {}
    assert compiler_options(mesh_of("h200", 1)) == {"xla_allow_excess_precision": False}
    several = compiler_options(mesh_of("h200", 8))
    assert several["xla_allow_excess_precision"] is False
    assert several["xla_gpu_enable_latency_hiding_scheduler"] is True
    assert compiler_options(mesh_of("h200", 8), overlap=False) == {"xla_allow_excess_precision": False}

"""Gradients averaged over devices: in which dtype, and what is an error."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from mpjax.errors import UsageError
from mpjax.precision import reduce_gradients, reduction, scatter_sum, sum_across, sum_in_buckets


def mesh(*names):
    return jax.make_mesh((2, *[1] * (len(names) - 1)), names, axis_types=(AxisType.Auto,) * len(names))


def average(grads, policy="mixed_float16"):
    return jax.vmap(lambda g: reduce_gradients(g, policy, "data"), axis_name="data")(grads)


def loss(params, x):
    return jnp.mean(x @ params["kernel"].astype(jnp.float16)).astype(jnp.float32)


PARAMS = {"kernel": jnp.ones((2, 1), jnp.float16)}
X = jnp.float16([[9000, 1], [9000, 3]])


def mapped(gradients, *, axes=("data",), **settings):
    """The gradients of each device's own row, averaged."""
    over = P(axes if len(axes) > 1 else axes[0])
    return jax.shard_map(gradients, mesh=mesh(*axes), in_specs=(P(), over), out_specs=P(), **settings)


def unchecked(params, x):
    return reduce_gradients(jax.grad(loss)(params, x), "mixed_float16", "data")


def cast_to_varying(params, x):
    params = jax.lax.pcast(params, "data", to="varying")
    return unchecked(params, x)


def test_eight_devices_with_9000_sum_to_inf_only_in_float16():
    grads = jnp.full((8, 1), 9000, jnp.float16)
    assert average(grads).tolist() == [[9000.0]] * 8
    half = average(grads, "params=float32,compute=float16,reduce=float16")
    assert (half.tolist(), half.dtype) == ([[np.inf]] * 8, jnp.float16)


@pytest.mark.parametrize(
    ("own", "reduce", "added", "result"),
    [
        ("float16", "float32", "f32", "float32"),
        ("float32", "float32", "f32", "float32"),
        ("float32", "bfloat16", "bf16", "float32"),
        ("bfloat16", "bfloat16", "bf16", "bfloat16"),
        ("complex64", "float32", "c64", "complex64"),
        ("complex64", "bfloat16", "c64", "complex64"),
    ],
)
def test_gradients_are_added_in_reduce_dtype(own, reduce, added, result):
    policy = f"params=float32,compute=float16,reduce={reduce}"
    program = jax.make_jaxpr(lambda g: reduce_gradients(g, policy, "data"), axis_env=[("data", 2)])
    jaxpr = program(jax.ShapeDtypeStruct((3,), own)).jaxpr
    assert [f"{eqn.outvars[0].aval.dtype}" for eqn in jaxpr.eqns if eqn.primitive.name.startswith("psum")] == [
        {"f32": "float32", "bf16": "bfloat16", "c64": "complex64"}[added]
    ]
    assert [f"{out.aval.dtype}" for out in jaxpr.outvars] == [result]


def test_complex_gradients_are_averaged():
    found = average(jnp.asarray([1 + 2j, 3 - 6j], jnp.complex64))
    assert found.tolist() == [2 - 2j, 2 - 2j]


def test_integers_and_gradients_of_integers_stay_as_they_are():
    def gradient(x):
        return reduce_gradients(jax.grad(lambda n: x * 2.0, allow_int=True)(3), "float32", "data")

    assert jax.vmap(gradient, axis_name="data")(jnp.ones(2)).dtype == jax.dtypes.float0
    counts = jnp.asarray([3, 5], jnp.int32)
    assert average({"count": counts})["count"].tolist() == [3, 5]


@pytest.mark.slow
@pytest.mark.parametrize(
    "gradients",
    [
        functools.partial(mapped(unchecked, check_vma=False)),
        functools.partial(mapped(cast_to_varying)),
        lambda params, x: jax.tree.map(
            lambda g: g[0], jax.pmap(unchecked, axis_name="data", in_axes=(None, 0))(params, x[:, None])
        ),
        lambda params, x: jax.tree.map(
            lambda g: g[0], jax.vmap(unchecked, axis_name="data", in_axes=(None, 0))(params, x[:, None])
        ),
    ],
    ids=["check_vma=False", "pcast", "pmap", "vmap"],
)
def test_each_way_of_mapping_gives_the_gradient_of_the_mean_of_the_whole_batch(gradients):
    found = gradients(PARAMS, X)["kernel"]
    assert (found.tolist(), found.dtype) == ([[9000.0], [2.0]], jnp.float32)


def test_gradients_that_jax_has_summed_in_float16_are_an_error_that_names_both_ways_out():
    with pytest.raises(UsageError) as raised:
        mapped(unchecked)(PARAMS, X)
    assert str(raised.value) == (
        "reduce_gradients: the gradient kernel has been summed over 'data' already, in the dtype of each operation: "
        "parameters are replicated. Differentiate jax.lax.pcast(params, 'data', to='varying') instead, or write "
        "jax.shard_map(..., check_vma=False)"
    )


@pytest.mark.slow
def test_gradients_summed_over_one_of_two_axes_are_an_error_that_names_it():
    def gradients(params, x):
        params = jax.lax.pcast(params, "data", to="varying")
        return reduce_gradients(jax.grad(loss)(params, x), "float32", ("data", "more"))

    with pytest.raises(UsageError, match=r"summed over 'more' already"):
        mapped(gradients, axes=("data", "more"))(PARAMS, X)


def test_counters_that_are_the_same_on_every_device_are_no_error():
    def gradients(params, x):
        params = jax.lax.pcast(params, "data", to="varying")
        grads = jax.grad(loss)(params, x) | {"count": jnp.int32(4)}
        return reduce_gradients(grads, "float32", "data")["count"]

    assert int(mapped(gradients)(PARAMS, X)) == 4


def test_the_sum_is_not_averaged_and_a_scattered_one_is_its_part():
    def both(x):
        total = sum_across(x[0], jnp.dtype("float32"), "data")
        return total, scatter_sum(x[0], jnp.dtype("float32"), "data", axis=1)

    x = jnp.float16([[[9000, 1, 2, 3]], [[9000, 10, 20, 30]]]) * jnp.float16(4)
    run = jax.shard_map(both, mesh=mesh("data"), in_specs=P("data"), out_specs=(P(), P(None, "data")))
    total, scattered = run(x)
    assert (total.tolist(), total.dtype) == ([[72000.0, 44.0, 88.0, 132.0]], jnp.float32)
    assert (scattered.tolist(), scattered.dtype) == (total.tolist(), jnp.float32)
    assert [shard.data.shape for shard in scattered.addressable_shards] == [(1, 2), (1, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_buckets_hold_neighbours_of_one_dtype_and_give_back_every_array(dtype, monkeypatch):
    monkeypatch.setattr(reduction, "BUCKET", 40)
    other = "float32" if dtype == "float64" else "float64"
    with jax.enable_x64(True):
        shapes = {"a": (2,), "b": (), "c": (1, 2), "d": (30,), "e": (3,)}
        given = {name: jnp.ones((2, *shape), other if name == "c" else dtype) for name, shape in shapes.items()}
        settings = {"mesh": mesh("data"), "in_specs": P("data"), "out_specs": P(), "check_vma": False}
        sums = jax.shard_map(lambda arrays: sum_in_buckets(arrays, np.dtype("float32"), "data"), **settings)
        found = sums(given)
        counted = str(jax.make_jaxpr(sums)(given)).count(" = psum")
    assert {name: array.shape[1:] for name, array in found.items()} == shapes
    assert all((np.asarray(array) == 2).all() for array in found.values())
    assert counted == 4  # a and b together, c, d, e


@pytest.mark.parametrize(
    ("axis", "says"),
    [("modell", "no axis 'modell' is mapped here"), ((), "axis_name is empty"), ("", "axis_name is empty")],
)
def test_an_axis_that_is_not_there_is_an_error(axis, says):
    def reduced(gradient):
        return reduce_gradients(gradient, "mixed_float16", axis)

    with pytest.raises(UsageError, match=says):
        jax.vmap(reduced, axis_name="data")(jnp.ones(2, jnp.float16))
    with pytest.raises(UsageError, match=says):
        reduced(jnp.ones(2, jnp.float16))


def test_a_gradient_that_is_a_number_of_python_is_averaged_too():
    def reduced(x):
        return reduce_gradients({"a": 2.0, "b": x}, "float32", "data")

    assert jax.vmap(reduced, axis_name="data")(jnp.arange(2.0))["a"].tolist() == [2.0, 2.0]

"""Which arrays are divided, and along which axis."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from mpjax.precision import compensated_weights, dynamic_loss_scaling, master_weights, stochastic_weights
from mpjax.precision.float8 import float8_moments
from mpjax.training import Layout, create_state, divide, make_mesh


def shapes(**found):
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in found.items()}


def many(**sizes):
    """The sizes of a mesh that this machine lacks the devices for."""
    return type("Mesh", (), {"shape": {"data": 1, "fsdp": 1, "context": 1, "tensor": 1} | sizes})()


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((128, 256), P(None, "fsdp")),
        ((256, 128), P("fsdp", None)),
        ((128, 255), P("fsdp", None)),  # 255 does not divide by 4
        ((3, 3, 64, 64), P(None, None, "fsdp", None)),
        ((16384,), P("fsdp")),
        ((16380,), None),  # small
        ((127, 255), None),  # nothing divides
        ((), None),
    ],
)
def test_a_parameter_is_divided_along_its_longest_axis_that_divides(shape, spec):
    assert divide(shapes(w=shape), many(fsdp=4)).get("w") == spec


def test_a_mesh_that_divides_positions_divides_parameters_over_fsdp_and_context_together():
    large = shapes(w=(128, 256))
    assert divide(large, many(context=4)) == {"w": P(None, "context")}
    assert divide(large, many(fsdp=2, context=2)) == {"w": P(None, ("fsdp", "context"))}
    assert divide(shapes(w=(128, 258)), many(fsdp=2, context=2)) == {"w": P(("fsdp", "context"), None)}
    layout = Layout(many(fsdp=2, context=2), divided={"w": P(None, ("fsdp", "context")), "v": P("fsdp", "tensor")})
    assert (layout.fsdp_axis("w"), layout.gathered_over("w")) == (1, ("fsdp", "context"))
    assert (layout.fsdp_axis("v"), layout.gathered_over("v")) == (0, ("fsdp",))
    assert (layout.fsdp_axis("u"), layout.gathered_over("u")) == (None, ())
    assert (layout.shares, layout.terms) == (2, 4)


def test_nothing_is_divided_over_one_part():
    assert divide(shapes(w=(128, 256)), many(data=4)) == {}


def test_examples_are_divided_over_data_and_fsdp():
    assert Layout(make_mesh(data=2)).shares == Layout(make_mesh(fsdp=2, data=1)).shares == 2
    assert Layout(make_mesh(fsdp=2, data=1)).batch(size=8).spec == P(("data", "fsdp"))


def test_moments_masters_and_averages_are_divided_as_their_parameter_and_the_rest_is_not():
    params = {"small": jnp.ones(4, jnp.bfloat16), "large": jnp.ones((4, 2), jnp.bfloat16)}
    tx = dynamic_loss_scaling(master_weights(optax.adam(0.1)))
    layout = Layout(make_mesh(data=1, fsdp=2), divided={"large": P("fsdp", None)})
    state = create_state(params, {"mean": jnp.ones(4)}, tx, ema=True)
    state = jax.device_put(state, layout.state(state))
    assert {
        jax.tree_util.keystr(path): leaf.addressable_shards[0].data.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        if leaf.addressable_shards[0].data.shape != leaf.shape
    } == dict.fromkeys(
        [
            ".params['large']",
            ".opt_state.inner_state.masters['large']",
            ".opt_state.inner_state.inner_state[0].mu['large']",
            ".opt_state.inner_state.inner_state[0].nu['large']",
            ".ema['large']",
        ],
        (2, 2),
    )


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "scales"), [(P("fsdp", None), (32, 2)), (P(None, "fsdp"), (64, 1))])
def test_a_float8_moment_and_its_scales_are_divided_as_their_parameter(spec, scales):
    params = {"large": jnp.ones((64, 256))}
    layout = Layout(make_mesh(data=1, fsdp=2), divided={"large": spec})
    state = create_state(params, {}, dynamic_loss_scaling(float8_moments(optax.adam(0.1))))
    moment = jax.device_put(state, layout.state(state)).opt_state.inner_state.inner_state[0].mu["large"]
    values = (scales[0], 256 // 2 * scales[1])
    assert [x.addressable_shards[0].data.shape for x in moment] == [values, scales, scales]


@pytest.mark.slow
def test_scales_that_do_not_divide_are_on_every_device():
    params = {"large": jnp.ones((64, 300))}
    layout = Layout(make_mesh(data=1, fsdp=2), divided={"large": P(None, "fsdp")})
    state = create_state(params, {}, dynamic_loss_scaling(float8_moments(optax.adam(0.1))))
    shardings = layout.state(state).opt_state.inner_state.inner_state[0].mu["large"]
    assert [each.spec for each in shardings] == [P(None, "fsdp"), P(), P()]


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [stochastic_weights, compensated_weights])
def test_an_update_of_divided_half_precision_state_is_that_of_one_device(wrap):
    tx = dynamic_loss_scaling(wrap(float8_moments(optax.adamw(1e-2))))
    draws = np.random.default_rng(0).normal(size=(2, 64, 256))
    params, grads = ({"large": jnp.asarray(each, jnp.bfloat16)} for each in draws)

    def two_updates(params, state):
        for _ in range(2):
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    layout = Layout(make_mesh(data=1, fsdp=2), divided={"large": P(None, "fsdp")})
    state = create_state(params, {}, tx)
    divided = jax.device_put(state, layout.state(state))
    with jax.numpy_dtype_promotion("standard"):
        alone = jax.jit(two_updates)(state.params, state.opt_state)
        apart = jax.jit(two_updates)(divided.params, divided.opt_state)
    for one, other in zip(jax.tree.leaves(alone), jax.tree.leaves(apart), strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


def test_a_layout_is_told_what_it_holds_by_name():
    with pytest.raises(TypeError):
        Layout(make_mesh(), {}, {}, np.dtype("float16"))  # type: ignore[misc]

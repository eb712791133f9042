"""What a state is born with."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mpjax.errors import DtypeError
from mpjax.precision import dynamic_loss_scaling, master_weights, no_loss_scaling
from mpjax.training import TrainState, create_state, step_key, without_shared_buffers


PARAMS = {"head/kernel": jnp.array([[1.0, 2.0]], jnp.bfloat16)}
STATS = {"norm/mean": jnp.zeros(2)}


def make(params=PARAMS, stats=STATS, **settings):
    return create_state(params, stats, dynamic_loss_scaling(master_weights(optax.adam(0.1))), **settings)


def test_a_new_state_has_taken_no_step():
    state = make()
    assert (int(state.step), int(state.attempts), state.ema) == (0, 0, {})
    assert state.step.dtype == state.attempts.dtype == jnp.int32
    assert not state.step.weak_type
    assert state.params["head/kernel"].dtype == jnp.bfloat16


def test_the_moving_average_starts_at_the_parameters_in_float32():
    average = make(ema=True).ema["head/kernel"]
    assert average.dtype == jnp.float32
    assert average.tolist() == [[1, 2]]


def keeps_parameters():
    """An optimizer whose state is the parameters themselves, twice, and a random key twice."""
    key = jax.random.key(3)
    return optax.GradientTransformation(lambda params: (params, params, key, key), lambda g, state, params: (g, state))


def test_no_two_arrays_share_a_buffer():
    """The state is donated, and a buffer can be given away only once."""
    float32 = jax.tree.map(lambda p: p.astype(jnp.float32), PARAMS)
    state = create_state(float32, STATS, no_loss_scaling(keeps_parameters()), ema=True)
    leaves = [jax.random.key_data(x) if x.dtype == jax.random.key(3).dtype else x for x in jax.tree.leaves(state)]
    buffers = [leaf.unsafe_buffer_pointer() for leaf in leaves if leaf.size > 1]
    assert len(buffers) == 7
    assert len(set(buffers)) == len(buffers)


@pytest.mark.parametrize("spec", [PartitionSpec(), PartitionSpec("d")], ids=["whole", "divided"])
def test_parts_on_several_devices_share_no_buffer(spec):
    sharding = NamedSharding(jax.make_mesh((2,), ("d",)), spec)
    array = jax.device_put(jnp.arange(8.0), sharding)
    alias = jax.device_put(array, sharding)
    state = without_shared_buffers(TrainState(jnp.int32(0), {"a": array}, {"b": alias}, (), {"c": jnp.zeros(0)}))
    assert state.params["a"] is array
    assert state.stats["b"].sharding.is_equivalent_to(sharding, 1)
    assert state.stats["b"].tolist() == array.tolist()
    parts = [
        shard.data.unsafe_buffer_pointer()
        for x in (state.params["a"], state.stats["b"])
        for shard in x.addressable_shards
    ]
    assert len(set(parts)) == 4


def test_statistics_in_half_precision_are_refused_by_path():
    with pytest.raises(DtypeError, match=r"batch statistics: 1 leaf is not float32:\n  norm/mean: float16"):
        make(stats={"norm/mean": jnp.zeros(2, jnp.float16), "norm/var": jnp.zeros(2)})


def test_attempts_are_the_applied_and_the_skipped():
    state = make()
    opt_state = state.opt_state._replace(skipped=jnp.int32(3))
    assert int(TrainState(jnp.int32(4), state.params, state.stats, opt_state, {}).attempts) == 7


def test_the_key_of_a_step_is_none_that_initial_values_are_drawn_from():
    """`nnx.Rngs(key(0))` draws initial values from fold_in(key(0), 0), fold_in(key(0), 1), ..."""
    drawn = {np.asarray(jax.random.key_data(jax.random.fold_in(jax.random.key(0), i))).tobytes() for i in range(20)}
    assert np.asarray(jax.random.key_data(step_key(0, make()))).tobytes() not in drawn


def test_the_state_can_be_made_abstract():
    shapes = jax.eval_shape(lambda: make(ema=True))
    assert shapes.ema["head/kernel"].shape == (1, 2)

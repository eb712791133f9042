"""The state of loss scaling: found in any optax state, and what it selects after a skipped step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mpjax.errors import DtypeError, UsageError
from mpjax.precision import dynamic_loss_scaling, loss_scale_state, where_finite


INF, NAN = float("inf"), float("nan")
GOOD, BAD = {"w": jnp.array([1.0, -2.0], jnp.float32)}, {"w": jnp.array([INF, 1.0], jnp.float32)}


def test_where_finite_takes_the_new_tree_after_a_good_step_and_the_old_after_a_bad_one():
    tx = dynamic_loss_scaling(optax.sgd(1.0))
    new = {"mean": jnp.array([NAN, 1.0], jnp.float32), "count": jnp.array(3), "key": jax.random.key(1), "none": None}
    old = {"mean": jnp.array([0.5, 1.0], jnp.float32), "count": jnp.array(2), "key": jax.random.key(0), "none": None}
    for grads, wanted in ((GOOD, new), (BAD, old)):
        state = tx.update(grads, tx.init(GOOD))[1]
        picked = where_finite((optax.EmptyState(), state), new, old)
        assert picked["count"] == wanted["count"]
        assert picked["none"] is None
        np.testing.assert_array_equal(picked["mean"], wanted["mean"])
        np.testing.assert_array_equal(jax.random.key_data(picked["key"]), jax.random.key_data(wanted["key"]))


def test_where_finite_refuses_leaves_that_would_be_broadcast():
    state = dynamic_loss_scaling(optax.sgd(0.1)).init(jnp.zeros(3))
    with pytest.raises(UsageError, match=r"b/0 has shape \(3, 1\) in new and \(3,\) in old: wanted equal shapes"):
        where_finite(state, {"a": jnp.ones(2), "b": [jnp.ones((3, 1))]}, {"a": jnp.ones(2), "b": [jnp.ones(3)]})


def test_where_finite_refuses_trees_of_different_dtypes():
    state = dynamic_loss_scaling(optax.sgd(1.0)).init(GOOD)
    new, old = {"w": jnp.ones(2, jnp.float16), "b": jnp.ones(2)}, {"w": jnp.ones(2), "b": jnp.ones(2)}
    with pytest.raises(DtypeError, match="cast one of the two:\n  w: new float16, old float32$"):
        where_finite(state, new, old)


def test_the_state_is_found_in_any_tree():
    tx = optax.chain(optax.identity(), dynamic_loss_scaling(optax.adam(0.1)), optax.scale(1.0))
    assert loss_scale_state({"a": (tx.init(GOOD), None)}).scale == 2.0**15


@pytest.mark.parametrize("count", [0, 2])
def test_no_state_or_two_is_an_error(count):
    state = dynamic_loss_scaling(optax.sgd(1.0)).init(GOOD)
    with pytest.raises(UsageError, match=f"wanted one LossScaleState .* found {count}: wrap the optimizer once"):
        loss_scale_state([state] * count)

"""Several steps in one call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.training import compile_calls, make_train_call


def step(state, batch):
    return state * 2 + jnp.sum(batch["x"]), {"loss": state}


def test_a_call_is_its_steps_one_after_the_other():
    call = make_train_call(step, lambda fed, index: jax.tree.map(lambda x: x[index], fed))
    state, metrics = call(jnp.float32(1), {"x": jnp.array([[1.0], [2.0], [3.0]])}, 3)
    assert float(state) == 19  # ((1 * 2 + 1) * 2 + 2) * 2 + 3
    np.testing.assert_array_equal(metrics["loss"], [1, 3, 8])


def test_a_call_of_one_step_gives_its_metrics_as_they_are():
    call = make_train_call(step, lambda fed, index: fed)
    state, metrics = call(jnp.float32(1), {"x": jnp.array([5.0])}, 1)
    assert float(state) == 7
    assert metrics["loss"].shape == ()


def test_the_state_is_given_away():
    call = make_train_call(step, lambda fed, index: fed)
    state = jnp.float32(1)
    call(state, {"x": jnp.array([5.0])}, 1)
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(state)


@pytest.mark.parametrize(("count", "loops"), [(1, 0), (3, 1)])
def test_the_compiler_knows_the_number_of_steps(count, loops):
    """A loop without a known end would ask the host after every step."""
    call = make_train_call(step, lambda fed, index: jax.tree.map(lambda x: x[index], fed))
    text = call.lower(jnp.float32(1), {"x": jnp.ones((count, 1))}, count).compile().as_text()
    assert text.count('known_trip_count":{"n":"3"}') == loops
    assert text.count(" while(") == loops


def test_calls_are_compiled_ahead_for_the_counts_that_are_fed_and_for_no_other():
    traced = []

    def counting(state, batch):
        traced.append(1)
        return step(state, batch)

    call = make_train_call(counting, lambda fed, index: jax.tree.map(lambda x: x[index], fed))
    fed = {"x": jnp.array([[1.0], [2.0], [3.0]])}
    seen = {}
    compiled = compile_calls(call, jnp.float32(1), {1: fed, 3: fed}, see=seen.__setitem__)
    assert {count: len(program.jaxpr.eqns) > 0 for count, program in seen.items()} == {1: True, 3: True}
    assert "ENTRY" in seen[3].compiled.as_text()
    assert "stablehlo" in seen[3].lowered.as_text()
    assert len(traced) == 2
    assert float(compiled(jnp.float32(1), fed, 3)[0]) == 19
    assert float(compiled(jnp.float32(1), fed, 1)[0]) == 3
    assert len(traced) == 2
    with pytest.raises(KeyError):
        compiled(jnp.float32(1), fed, 2)

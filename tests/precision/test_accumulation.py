"""Accumulation windows: where one opens and closes, and what is left of one that is discarded."""

import itertools

import jax
import jax.numpy as jnp
import optax
import pytest

from mpjax.errors import UsageError
from mpjax.precision import closes_window, countable, discard_window, opens_window


PARAMS = {"w": jnp.zeros(2, jnp.float32)}
GRADS = {"w": jnp.ones(2, jnp.float32)}


@pytest.fixture(autouse=True)
def _promotion():
    """Optax itself, called without mpjax around it."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def states(tx, count):
    found = [tx.init(PARAMS)]
    for _ in range(count):
        found.append(tx.update(GRADS, found[-1], PARAMS)[1])
    return found


def test_without_an_accumulator_every_step_is_a_window_known_while_tracing():
    old, new = states(optax.adam(0.1), 1)
    assert opens_window(old) is not None
    assert bool(opens_window(old)) is bool(closes_window(old, new)) is True
    assert discard_window(old, new) is old


def test_a_window_of_three_opens_at_its_first_and_closes_at_its_last_micro_batch():
    found = states(optax.chain(optax.MultiSteps(optax.adam(0.1), 3).gradient_transformation(), optax.scale(1.0)), 6)
    assert [bool(opens_window(state)) for state in found[:-1]] == [True, False, False] * 2
    assert [bool(closes_window(old, new)) for old, new in itertools.pairwise(found)] == [False, False, True] * 2


def test_windows_may_grow_by_a_schedule():
    found = states(optax.MultiSteps(optax.sgd(0.1), lambda step: jnp.where(step < 1, 1, 2)), 5)
    assert [bool(closes_window(old, new)) for old, new in itertools.pairwise(found)] == [True, False, True, False, True]


def test_a_discarded_window_keeps_its_place_and_forgets_its_sum():
    found = states(optax.MultiSteps(optax.adam(0.1), 3), 2)
    kept = discard_window(found[1], found[2])
    assert (kept.mini_step, kept.gradient_step) == (2, 0)
    assert kept.acc_grads["w"].tolist() == [0.0, 0.0]
    assert kept.inner_opt_state is found[1].inner_opt_state


def test_a_window_discarded_at_its_end_starts_anew_and_the_optimizer_has_not_stepped():
    found = states(optax.MultiSteps(optax.adam(0.1), 2), 2)
    kept = discard_window(found[1], found[2])
    assert (kept.mini_step, kept.gradient_step, kept.inner_opt_state[0].count) == (0, 0, 0)


def test_a_micro_batch_that_the_accumulator_skips_by_itself_closes_no_window():
    tx = optax.MultiSteps(optax.sgd(0.1), 2, should_skip_update_fn=optax.skip_not_finite)
    old = tx.init(PARAMS)
    assert not closes_window(old, tx.update({"w": jnp.full(2, jnp.nan)}, old, PARAMS)[1])


def test_bad_gradients_count_as_zeros_in_a_window_and_good_ones_and_single_steps_as_they_are():
    bad, no = {"w": jnp.full(2, jnp.inf, jnp.float32)}, jnp.asarray(False)
    window, single = optax.MultiSteps(optax.sgd(0.1), 2).init(PARAMS), optax.sgd(0.1).init(PARAMS)
    assert countable(bad, no, window)["w"].tolist() == [0.0, 0.0]
    assert countable(GRADS, ~no, window)["w"].tolist() == [1.0, 1.0]
    assert countable(bad, no, single) is bad


@pytest.mark.parametrize("ask", [opens_window, lambda state: closes_window(state, state)])
def test_two_accumulators_are_an_error(ask):
    state = optax.MultiSteps(optax.sgd(1.0), 2).init(PARAMS)
    with pytest.raises(UsageError, match="found several: keep only the outermost"):
        ask((state, state))

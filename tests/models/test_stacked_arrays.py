"""Arrays of a stack and of single blocks: one form turns into the other and back, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.models import apart, apart_in, in_form_of, names_apart, replaced, stack_of


STACKS = {"blocks": 2}
STACKED = {"blocks/all/up/bias": np.array([[1.0, 2.0], [3.0, 4.0]]), "norm/scale": np.array([5.0])}
SINGLE = {"blocks/0/up/bias": [1.0, 2.0], "blocks/1/up/bias": [3.0, 4.0], "norm/scale": [5.0]}


def as_lists(arrays):
    return {name: np.asarray(array).tolist() for name, array in arrays.items()}


def test_a_row_has_the_path_of_its_block():
    assert names_apart("blocks/all/up/bias", STACKS) == ["blocks/0/up/bias", "blocks/1/up/bias"]
    assert names_apart("blocks/all", STACKS) == ["blocks/all"]
    assert names_apart("head/all/bias", STACKS) == ["head/all/bias"]
    assert stack_of("blocks/all/up/bias", STACKS) == "blocks"
    assert stack_of("other/blocks/all/up/bias", STACKS) is None
    assert as_lists(apart(STACKED, STACKS)) == SINGLE


def test_all_dicts_of_a_state_come_apart_and_the_rest_stays():
    state = (jnp.int32(3), {"mu": STACKED}, [STACKED])
    count, inside, (last,) = apart_in(state, STACKS)
    assert int(count) == 3
    assert as_lists(last) == SINGLE
    assert as_lists(inside["mu"]) == SINGLE


def test_given_blocks_replace_rows():
    given = {"blocks/1/up/bias": np.array([7.0, 8.0]), "norm/scale": np.array([9.0])}
    found = replaced(STACKED, given, STACKS)
    assert as_lists(found) == {"blocks/all/up/bias": [[1.0, 2.0], [7.0, 8.0]], "norm/scale": [9.0]}
    assert replaced(STACKED, {}, STACKS) == STACKED


def checkpoint(arrays):
    places = ("params/", "ema/", "opt_state/inner_state/0/mu/", "opt_state/inner_state/masters/")
    return {"step": np.int32(4)} | {f"{place}{name}": np.asarray(x) for place in places for name, x in arrays.items()}


def test_a_checkpoint_takes_the_form_of_the_model_with_all_that_follows_its_parameters():
    single, stacked = checkpoint(SINGLE), checkpoint(STACKED)
    assert as_lists(in_form_of(single, [f"params/{name}" for name in STACKED])) == as_lists(stacked)
    assert as_lists(in_form_of(stacked, [f"params/{name}" for name in SINGLE])) == as_lists(single)


def test_a_checkpoint_in_the_form_of_the_model_stays_as_it_is():
    for arrays in (checkpoint(SINGLE), checkpoint(STACKED)):
        found = in_form_of(arrays, [name for name in arrays if name.startswith("params/")])
        assert found == arrays
        assert all(found[name] is array for name, array in arrays.items())


def test_more_than_nine_blocks_keep_their_order():
    single = {f"params/blocks/{number}/x": np.array([number]) for number in range(11)}
    found = in_form_of(single, ["params/blocks/all/x"])
    assert found["params/blocks/all/x"][:, 0].tolist() == list(range(11))


def test_arrays_of_a_users_own_name_all_are_no_stack():
    arrays = {"params/head/all/bias": np.zeros(2), "params/layers/0/bias": np.zeros(3)}
    assert in_form_of(arrays, arrays) == arrays


def test_arrays_on_a_device_stay_there():
    single = {f"params/blocks/{number}/x": jnp.full(2, number) for number in range(2)}
    found = in_form_of(single, ["params/blocks/all/x"])
    assert isinstance(found["params/blocks/all/x"], jax.Array)

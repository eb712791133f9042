"""From settings to the parts of a step."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

from mpjax.config import Config
from mpjax.config.schema import Model, Precision
from mpjax.errors import UsageError
from mpjax.precision import dynamic_loss_scaling
from mpjax.training.mesh import data_mesh, replicated
from mpjax.training.precision import plan_precision
from mpjax.training.setup import initial_state, make_task


CONFIG = dataclasses.replace(Config(), model=Model(name="mlp", width=4))


def task_of(**precision):
    plan = plan_precision(Precision(**precision))
    return make_task(CONFIG, plan, image_shape=(2, 2, 1), num_classes=3)


def state_of(task, seed=0, ema=False):
    tx = dynamic_loss_scaling(optax.adam(0.1))
    return initial_state(task, tx, seed=seed, ema=ema, sharding=replicated(data_mesh()))


def test_the_state_is_born_on_every_device_in_the_policys_dtypes():
    state = state_of(task_of(policy="float16"), ema=True)
    for leaf in jax.tree.leaves(state):
        assert len(leaf.addressable_shards) == 2
        assert leaf.is_fully_replicated
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.params)} == {"float16"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.ema)} == {"float32"}


def test_initial_values_follow_the_seed_and_not_the_policy():
    full, mixed = (state_of(task_of(policy=policy)).params for policy in ("float32", "mixed_float16"))
    other = state_of(task_of(policy="float32"), seed=1).params
    for name, value in full.items():
        np.testing.assert_array_equal(value, mixed[name])
    assert not np.array_equal(full["head/kernel"], other["head/kernel"])


def test_every_submodule_has_its_row_in_the_report():
    rows = {row.path: row for row in task_of(policy="mixed_float16", rules={"head": "float32"}).precision}
    assert str(rows["layers/0"].compute_dtype) == "float16"
    assert (str(rows["head"].compute_dtype), rows["head"].rule) == ("float32", "head")


def test_a27_a_rule_that_matches_nothing_is_refused_with_the_nearest():
    with pytest.raises(UsageError, match="rule 'layer/0' matches nothing; nearest: layers/0"):
        task_of(policy="mixed_float16", rules={"layer/0": "float32"})


def test_the_structure_of_a_task_fits_its_state():
    task = task_of(policy="float32")
    state = state_of(task)
    assert set(task.structure.params.names) == set(state.params)
    model = task.structure.assemble(state.params, state.stats)
    assert model(np.zeros((5, 2, 2, 1), np.float32)).shape == (5, 3)

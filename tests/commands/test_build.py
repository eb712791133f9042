"""What a run is made of follows from its settings."""

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from mpjax.commands import build_run, fresh_state
from mpjax.config import load_config
from mpjax.errors import UsageError
from mpjax.precision import get_policy


pytestmark = pytest.mark.slow  # each runs whole commands; what they are made of has tests of its own


FLAGS = "--model.name mlp --model.width 8 --data.name synthetic:8x8x1:10 --data.batch_size 100 --steps 10"


def config_of(flags=""):
    return load_config(f"{FLAGS} --optimizer.warmup 1 {flags}".split())


def test_every_duration_is_counted_in_steps_of_this_data_set():
    """It has 200 examples: an epoch is two steps."""
    flags = "--steps 3epochs --loop.log_every 500examples --loop.eval_every 1epochs --loop.save_every 2epochs"
    when = build_run(config_of(f"{flags} --diagnosis.every 1.5epochs")).when
    assert (when.steps, when.log, when.evaluate, when.save, when.layers) == (6, 5, 2, 4, 3)


def test_a_setting_out_of_range_is_told_before_data_is_looked_for():
    with pytest.raises(UsageError, match="--precision.patience is 0") as raised:
        build_run(config_of("--data.name no_such_set --precision.patience 0"))
    assert "no_such_set" not in str(raised.value)


@pytest.fixture(scope="module")
def state():
    config = config_of("--training.ema 0.9")
    return fresh_state(build_run(config), {"head/bias": np.full(10, 0.25, np.float32)})


def test_a_fresh_state_lies_whole_on_every_device(state):
    assert {leaf.sharding.spec for leaf in jax.tree.leaves(state)} == {PartitionSpec()}
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(state)} == {2}


def test_an_average_begins_at_the_pretrained_arrays_as_the_parameters_do(state):
    assert np.asarray(state.params["head/bias"]).tolist() == [0.25] * 10
    assert np.asarray(state.ema["head/bias"]).tolist() == [0.25] * 10


def test_no_average_is_kept_that_was_not_asked_for():
    config = config_of()
    assert not fresh_state(build_run(config)).ema


def test_the_task_under_another_policy_stores_what_that_says_and_leaves_the_runs_own():
    built = build_run(config_of("--precision.policy mixed_float16"))
    other = built.task_under(get_policy("bfloat16"))
    dtypes = [
        {str(x.dtype) for x in jax.tree.leaves(nnx.state(task.abstract, nnx.Param))} for task in (built.task, other)
    ]
    assert dtypes == [{"float32"}, {"bfloat16"}]


@pytest.mark.parametrize("policy", ["O1", "mixed_float16"])
def test_a_step_on_parts_is_that_on_two_whole_copies(policy, monkeypatch):
    monkeypatch.setattr("mpjax.training.layout.SMALL", 1)
    results = []
    for mesh in ("--mesh.data 2", "--mesh.data 1 --mesh.fsdp 2"):
        config = config_of(f"{mesh} --precision.policy {policy} --optimizer.name sgd --optimizer.learning_rate 1")
        built = build_run(config)
        state = fresh_state(built)
        rows = {"image": np.arange(100 * 64, dtype=np.uint8).reshape(100, 8, 8, 1), "label": np.arange(100) % 10}
        batch = jax.device_put({**rows, "label": rows["label"].astype(np.int32)}, built.batch_sharding)
        state = built.packing.pack(state)
        for _ in range(3):
            state, metrics = built.train_step(state, batch)
        state = built.packing.unpack(state)
        results.append((jax.device_get(state.params), dict(jax.device_get(metrics))))
    (whole, metrics), (divided, of_parts) = results
    for name, param in whole.items():
        np.testing.assert_allclose(
            param.astype(np.float32), divided[name].astype(np.float32), rtol=1e-5, atol=1e-6, err_msg=name
        )
    assert of_parts["loss"] == pytest.approx(metrics["loss"], rel=1e-6)

"""The step of a plan is that of the run."""

import jax
import jax.numpy as jnp
import pytest

from mpjax.commands import build_run, fields_of, fresh_state, planned_step
from mpjax.config import load_config
from mpjax.errors import UsageError
from mpjax.training import make_mesh


FLAGS = "--data.name synthetic:8x8x1:10 --data.batch_size 24 --model.width 8 --steps 100 --optimizer.warmup 10"


def step_of(flags: str):
    config = load_config(flags.split())
    return planned_step(config, fields_of(config))


@pytest.mark.parametrize(
    "more",
    [
        "--model.name mlp --precision.policy bfloat16 --optimizer.name lamb --training.ema 0.9 --training.accumulate 3",
        pytest.param("--model.name mlp", marks=pytest.mark.slow),
        pytest.param(
            "--model.name mlp --precision.policy O1 --optimizer.clip_norm 1 --data.mixup 0.2", marks=pytest.mark.slow
        ),
    ],
)
def test_it_lowers_to_the_text_of_the_run_s_own_step(more):
    config = load_config(f"{FLAGS} {more}".split())
    built = build_run(config)
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), fresh_state(built))
    step = planned_step(config, fields_of(config))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), step.state) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    planned = step.build_on(built.layout.mesh).train_step
    state = jax.eval_shape(built.packing.pack, state)
    assert built.train_step.lower(state, step.batch).as_text() == planned.lower(state, step.batch).as_text()


def test_state_and_batch_lie_as_in_a_run():
    _, (state, batch) = step_of(f"{FLAGS} --model.name mlp").on(make_mesh())
    assert {x.sharding.spec for x in jax.tree.leaves(state)} == {jax.sharding.PartitionSpec()}
    assert {x.sharding.spec for x in jax.tree.leaves(batch)} == {jax.sharding.PartitionSpec(("data", "fsdp"))}


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(UsageError, match="a batch of 25 examples does not divide among 2 devices"):
        step_of(f"{FLAGS} --model.name mlp").of(25).on(make_mesh())


def test_another_batch_is_the_same_step():
    step = step_of(f"{FLAGS} --model.name mlp")
    other = step.of(48)
    assert (other.batch_size, other.batch["image"].shape, other.batch["label"].shape) == (48, (48, 8, 8, 1), (48,))
    assert other.build_on == step.build_on


def test_a_float64_policy_is_planned_in_float64():
    step = step_of(f"{FLAGS} --model.name mlp --precision.policy float64")
    assert {x.dtype for x in step.state.params.values()} == {jnp.dtype("float64")}
    assert not jax.config.jax_enable_x64


def test_it_knows_whether_its_model_has_attention():
    vit = "--model.name vit_ti16 --model.patch 4 --model.depth 1 --model.heads 2"
    assert [step_of(f"{FLAGS} {model}").attention for model in (vit, "--model.name mlp")] == [True, False]


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(UsageError, match="--training.accumulate: wanted auto or a whole number"):
        step_of(f"{FLAGS} --model.name mlp --training.accumulate 0")

"""From settings to the parts of a step."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mpjax.commands import make_task, with_parts
from mpjax.config import Config, Model, Precision, Training
from mpjax.data import labelled_images
from mpjax.errors import UsageError
from mpjax.models import BasicBlock, ResNet, SmallStem
from mpjax.precision import check_dtypes, dynamic_loss_scaling
from mpjax.precision.casting import equations
from mpjax.training import (
    Layout,
    initial_state,
    make_eval_step,
    make_mesh,
    make_train_step,
    plan_precision,
    pretrained_arrays,
    state_shapes,
    take_apart,
)


CONFIG = dataclasses.replace(Config(), model=Model(name="mlp", width=4))


def task_of(**precision):
    plan = plan_precision(Precision(**precision))
    return make_task(CONFIG, plan, labelled_images(3, (2, 2, 1)))


def state_of(task, seed=0, ema=False):
    tx = dynamic_loss_scaling(optax.adam(0.1))
    return initial_state(task, tx, seed=seed, ema=ema, layout=Layout(make_mesh()))


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


def test_a_rule_that_matches_nothing_is_refused_with_the_nearest():
    with pytest.raises(UsageError, match="rule 'layer/0' matches nothing; nearest: layers/0"):
        task_of(policy="mixed_float16", rules={"layer/0": "float32"})


def test_the_structure_of_a_task_fits_its_state():
    task = task_of(policy="float32")
    state = state_of(task)
    assert set(task.structure.params.names) == set(state.params)
    model = task.structure.assemble(state.params, state.stats)
    assert model(np.zeros((5, 2, 2, 1), np.float32)).shape == (5, 3)


# Autocast


def three_blocks(fields, *, rngs):
    """A ResNet-18 of three blocks, of which the last two have a shortcut."""
    del fields
    return ResNet((1, 1, 1), BasicBlock, SmallStem, channels=1, width=4, num_classes=3, rngs=rngs)


RESNET = with_parts(Config(), model=three_blocks)
PRODUCTS = ("conv_general_dilated", "dot_general")
BATCH = {
    "image": jax.ShapeDtypeStruct((2, 8, 8, 1), jnp.uint8),
    "label": jax.ShapeDtypeStruct((2,), jnp.int32),
}
TX = dynamic_loss_scaling(optax.adam(0.1))


@functools.cache
def resnet(step="eval", **precision):
    """The operations of a ResNet's training or evaluation step: scope, primitive, dtype of the result."""
    rules = precision.pop("rules", "")
    rules = dict(rule.split("=", 1) for rule in rules.split(";") if rule)
    plan = plan_precision(Precision(rules=rules, **precision))
    task = make_task(RESNET, plan, labelled_images(3, (8, 8, 1)))
    state = state_shapes(task, TX, ema=False, layout=Layout(make_mesh()))
    check_dtypes(state, "float32", name="state")
    if step == "train":
        train_step = make_train_step(task.structure, TX, task.objective.loss, cast=task.cast)
        jaxpr = jax.make_jaxpr(train_step)(state, BATCH)
    else:
        eval_step = make_eval_step(task.structure, task.objective.measure, cast=task.cast)
        jaxpr = jax.make_jaxpr(eval_step)(state.params, state.stats, BATCH)
    return [(scope, eqn.primitive.name, str(eqn.outvars[0].aval.dtype)) for scope, eqn in equations(jaxpr)]


def products(*args, **precision):
    return {(scope, dtype) for scope, name, dtype in resnet(*args, **precision) if name in PRODUCTS}


def test_a_training_step_under_autocast_has_products_in_half_and_norms_in_float32():
    step = resnet("train", policy="O1")
    found = [(scope, dtype) for scope, name, dtype in step if name in PRODUCTS]
    # 7 convolutions, 2 shortcuts and the head, forward and for both gradients; the images need none.
    assert len(found) == 3 * 10 - 1
    assert {dtype for _, dtype in found} == {"float16"}
    assert {scope for scope, _ in found} >= {"stem/conv", "blocks/0/conv1", "blocks/1/shortcut/conv", "head"}
    norms = {(name, dtype) for scope, name, dtype in step if "norm" in scope and dtype.startswith(("float", "bfloat"))}
    assert {name for name, _ in norms} >= {"rsqrt", "mul", "reduce_sum"}
    # Besides the casts, only the sum of what flows back into a norm's half input may be half.
    assert {name for name, dtype in norms if dtype != "float32"} <= {"convert_element_type", "add_any"}


def test_evaluation_under_autocast_is_in_half_too():
    assert {dtype for _, dtype in products("eval", policy="O1")} == {"float16"}
    assert {dtype for scope, name, dtype in resnet("eval", policy="O1") if name == "rsqrt"} == {"float32"}


@pytest.mark.parametrize(("policy", "half"), [("mixed_float16", "float16"), ("mixed_bfloat16", "bfloat16")])
def test_the_mode_makes_any_policy_autocast(policy, half):
    if half == "float16":
        assert resnet("eval", policy=policy, mode="autocast") == resnet("eval", policy="O1")
    assert {dtype for _, dtype in products("eval", policy=policy, mode="autocast")} == {half}


@pytest.mark.parametrize(
    ("rules", "float32"),
    [
        (
            "stem/*=float32;type:Linear=float32;type:Shortcut=float32",
            [*(f"blocks/{i}/shortcut/conv" for i in (1, 2)), "head", "stem/conv"],
        ),
        ("blocks/0=float32;type:SmallStem=float32", ["blocks/0/conv1", "blocks/0/conv2", "stem/conv"]),
        (
            "blocks/[0-1]=float16;type:BasicBlock=float32",
            ["blocks/2/conv1", "blocks/2/conv2", "blocks/2/shortcut/conv"],
        ),
    ],
)
def test_rules_by_path_and_by_type_hold_under_autocast(rules, float32):
    dtypes = dict(products("eval", policy="O1", rules=rules))
    assert sorted(scope for scope, dtype in dtypes.items() if dtype == "float32") == float32
    assert set(dtypes.values()) == {"float16", "float32"}


def test_a_half_rule_under_autocast():
    dtypes = dict(products("eval", policy="O1", rules="stem/*=float32;type:Conv=bfloat16"))
    assert (dtypes.pop("stem/conv"), dtypes.pop("head")) == ("float32", "float16")
    assert set(dtypes.values()) == {"bfloat16"}


def test_under_autocast_too_a_rule_that_matches_nothing_is_refused_with_the_nearest():
    with pytest.raises(UsageError, match="rule 'layer/0' matches nothing; nearest: layers/0"):
        task_of(policy="O1", rules={"layer/0": "float32"})


def test_under_autocast_parameters_are_stored_as_the_policy_says_and_the_report_shows_what_modules_hold():
    task = task_of(policy="bfloat16", mode="autocast", rules={"head": "float32"})
    rows = {row.path: row for row in task.precision}
    assert (str(rows["layers/0"].param_dtype), str(rows["head"].param_dtype)) == ("bfloat16", "float32")
    params = state_of(task).params
    assert (params["layers/0/kernel"].dtype, params["head/kernel"].dtype) == (jnp.bfloat16, jnp.float32)


# Biases


@pytest.mark.parametrize("remat", ["none", "full"])
def test_the_gradients_of_biases_are_summed_in_float32_and_in_the_scope_of_their_layer(remat):
    """Named scopes are around the layers, and must not hide from the policy which layers they are."""
    config = dataclasses.replace(CONFIG, training=Training(remat=remat))
    task = make_task(config, plan_precision(Precision(policy="mixed_float16")), labelled_images(3, (2, 2, 1)))
    _, params, stats = take_apart(task.abstract)
    batch = {"image": jax.ShapeDtypeStruct((5, 2, 2, 1), jnp.uint8), "label": jax.ShapeDtypeStruct((5,), jnp.int32)}

    def loss(params, stats, batch):
        return task.objective.loss(task.structure.assemble(params, stats), batch, jax.random.key(0))[0].value

    jaxpr = jax.make_jaxpr(jax.grad(loss))(params, stats, batch)
    sums = {
        scope: str(eqn.outvars[0].aval.dtype)
        for scope, eqn in equations(jaxpr)
        if eqn.primitive.name == "reduce_sum" and scope
    }
    assert sums == {"layers/0": "float32", "layers/1": "float32", "head": "float32"}


def test_weights_are_not_skipped_where_there_are_none():
    model = Model(name="mlp", pretrained="none", pretrained_skip=("head/*",))
    with pytest.raises(UsageError, match=r"--model.pretrained_skip head/\*: all weights are random, .* is none; leave"):
        pretrained_arrays(task_of(), model)

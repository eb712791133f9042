"""What the backward pass computes again: less is kept, and nothing else changes."""

import collections
import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.commands import make_task, run
from mpjax.config import Config, Model, Precision, Training, load_config
from mpjax.data import Image, Label, Length, Mask, Tokens, labelled_images
from mpjax.errors import UsageError
from mpjax.loop import read_checkpoint
from mpjax.models import apply_remat, blocks_of
from mpjax.models import products as kept_by_dots
from mpjax.precision import apply_policy
from mpjax.precision.casting import equations
from mpjax.precision.float8 import RECIPES, product
from mpjax.training import plan_precision, take_apart


class Block(nnx.Module):
    """A layer, a norm with statistics, dropout: all that a block can carry from call to call."""

    def __init__(self, width, rngs):
        self.layer = nnx.Linear(width, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, gain=None, *, negate=False):
        x = self.dropout(jnp.tanh(self.norm(self.layer(x))))
        x = x if gain is None else x * gain.astype(x.dtype)
        return -x if negate else x


class Net(nnx.Module):
    def __init__(self, rngs, depth=3):
        self.blocks = nnx.List([Block(8, rngs) for _ in range(depth)])
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            change = block(x, jnp.full((1, 8), 0.5), negate=True)
            x = x.astype(change.dtype) + change
        return self.head(x)


X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)


def step_of(remat, policy="float32", net=Net):
    """Loss, gradients, and what the model carries on, after one call in training."""
    model = net(nnx.Rngs(0))
    apply_policy(model, policy)
    apply_remat(model, remat)
    model.train()
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss_of(params, rest, x):
        model = nnx.merge(graph, params, rest, copy=True)
        loss = jnp.mean(jnp.square(model(x)))
        return loss, nnx.split(model, nnx.Param, ...)[2]

    return jax.value_and_grad(loss_of, has_aux=True), (params, rest, X)


def plain(tree):
    """Arrays only, random keys as their numbers."""
    return [
        np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
        for x in jax.tree.leaves(tree)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["dots", "full"])
def test_loss_gradients_statistics_and_random_streams_are_the_same_bit_for_bit_operation_by_operation(remat):
    results = []
    for each in ("none", remat):
        step, inputs = step_of(each)
        with jax.disable_jit():
            results.append(plain(step(*inputs)))
    assert len(results[0]) == len(results[1]) > 20
    for one, other in zip(*results, strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("remat", ["dots", "full"])
def test_compiled_they_are_the_same_but_for_rounding(remat, policy):
    one, other = (plain(jax.jit(step)(*inputs)) for step, inputs in (step_of("none", policy), step_of(remat, policy)))
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5 if policy == "float32" else 0.05, atol=1e-6)


def products(remat, policy="float32"):
    step, inputs = step_of(remat, policy)
    found = collections.Counter(eqn.primitive.name for _, eqn in equations(jax.make_jaxpr(step)(*inputs)))
    return found["dot_general"], found["tanh"]


def test_full_computes_a_block_again_and_dots_all_but_its_products():
    """Three blocks and a head: forward, and for the gradients of weights and of all inputs but the first."""
    assert products("none") == (11, 3)
    assert products("dots") == (11, 6)
    assert products("full") == (14, 6)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_dots_keeps_products_in_float8(recipe):
    """One product forward and two for the gradients, and with "full" the first once more."""
    x, w = jnp.ones((32, 64)), jnp.ones((64, 64))

    def loss(x, w):
        return jnp.sum(jnp.sin(product(jnp.sin(x), w, recipe, np.dtype("float32"))))

    def count(policy):
        jaxpr = jax.make_jaxpr(jax.grad(jax.checkpoint(loss, policy=policy), (0, 1)))(x, w)
        return collections.Counter(eqn.primitive.name for _, eqn in equations(jaxpr))["dot_general"]

    assert count(kept_by_dots) == 3
    assert count(None) == 4


# The models

IMAGES = {"image": Image((16, 16, 3)), "label": Label(5)}
FIELDS = {
    "unet": {"image": Image((16, 16, 3)), "mask": Mask((16, 16), 2)},
    "bert": {"tokens": Tokens(8, 50), "length": Length(8), "label": Label(2)},
    "gpt2": {"tokens": Tokens(9, 50)},
}
TASKS = {"unet": "segmentation", "bert": "text_classification", "gpt2": "language_modeling"}
TASKS |= {"dit_s2": "diffusion", "unet_ddpm": "diffusion"}
SMALL = {
    "mlp": ({}, 2),
    "resnet18": ({"width": 4}, 8),
    "xception": ({"width": 4, "depth": 1}, 5),
    "convnext_t": ({"width": 4, "patch": 1}, 21),
    "efficientnet_b0": ({"width": 8}, 16),
    "mobilenetv3_small": ({"width": 8}, 11),
    "regnety_004": ({"width": 8}, 16),
    "densenet121": ({"width": 4}, 61),
    "vit_ti16": ({"patch": 4, "width": 8, "depth": 2, "heads": 2, "dropout": 0.1}, 2),
    "unet": ({"width": 4, "depth": 2}, 5),
    "bert": ({"width": 8, "depth": 2, "heads": 2, "dropout": 0.1}, 2),
    "gpt2": ({"width": 8, "depth": 2, "heads": 2}, 2),
    "dit_s2": ({"width": 8, "depth": 2, "heads": 2}, 2),
    "unet_ddpm": ({"width": 4, "depth": 1}, 14),
}
"""Model: settings, number of blocks."""
QUICK = ("mlp", "resnet18", "gpt2", "unet")
MODELS = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SMALL]


def task_of(name, remat, policy="mixed_bfloat16", fields=None, **settings):
    config = dataclasses.replace(
        Config(),
        task=TASKS.get(name, "classification"),
        model=Model(name=name, **(settings or SMALL[name][0])),
        training=Training(remat=remat),
    )
    return make_task(config, plan_precision(Precision(policy=policy)), fields or FIELDS.get(name, IMAGES))


def loss_of(task, fields, size=2):
    """The loss as a function of parameters and more, casts included, and its abstract arguments."""
    _, params, stats = take_apart(task.abstract)

    @task.cast
    def loss(params, stats, key, batch):
        model = task.structure.assemble(params, stats, key)
        model.train()
        return task.objective.loss(model, batch, key)[0].value

    dtypes = {name: jnp.uint8 if name == "image" else jnp.int32 for name in fields}
    batch = {name: jax.ShapeDtypeStruct((size, *_shape(field)), dtypes[name]) for name, field in fields.items()}
    return loss, (params, stats, jax.random.key(0), batch)


def _shape(field):
    return field.shape if isinstance(field, Image | Mask) else (field.length,) if isinstance(field, Tokens) else ()


def counts(task, fields):
    """Convolutions and products without batch dimensions, forward and backward."""
    loss, inputs = loss_of(task, fields)
    found = [
        eqn
        for _, eqn in equations(jax.make_jaxpr(jax.grad(loss))(*inputs))
        if eqn.primitive.name == "conv_general_dilated"
        or (eqn.primitive.name == "dot_general" and not eqn.params["dimension_numbers"][1][0])
    ]
    return len(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_blocks_which_full_computes_again_and_dots_but_for_its_products(name):
    fields = FIELDS.get(name, IMAGES)
    tasks = {remat: task_of(name, remat) for remat in ("none", "dots", "full")}
    assert len(blocks_of(tasks["none"].abstract)) == SMALL[name][1]
    found = {remat: counts(task, fields) for remat, task in tasks.items()}
    again = found["full"] - found["none"]
    assert found["dots"] == found["none"]
    assert again == 0 if name == "mlp" else again > 0  # a layer's own product is not read by its backward pass


def kept(task, fields):
    """Bytes that the forward pass keeps for the backward pass, parameters aside."""
    loss, (params, *others) = loss_of(task, fields, size=8)

    def keep(params, *others):
        return jax.vjp(lambda params: loss(params, *others), params)[1]

    leaves = jax.tree.leaves(jax.eval_shape(keep, params, *others))
    params = {(leaf.shape, leaf.dtype) for leaf in params.values()}
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves if (leaf.shape, leaf.dtype) not in params)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings", "dots", "full"),
    [
        ("resnet50", {"stem": "imagenet"}, 0.33, 0.17),
        ("vit_s16", {"patch": 16, "depth": 4}, 0.35, 0.10),
    ],
)
def test_less_is_kept_for_the_backward_pass(name, settings, dots, full):
    fields = labelled_images(10, (64, 64, 3))
    none, some, least = (kept(task_of(name, r, fields=fields, **settings), fields) for r in ("none", "dots", "full"))
    assert some < dots * none
    assert least < full * none


def test_casts_rows_and_rules_of_the_policy_are_as_without():
    one, other = (task_of("resnet18", remat, "mixed_float16") for remat in ("none", "full"))
    assert one.precision == other.precision
    assert one.structure.params.names == other.structure.params.names


@pytest.mark.slow
def test_under_autocast_what_is_computed_again_is_in_half_too():
    loss, inputs = loss_of(task_of("resnet18", "full", "O1"), IMAGES)
    jaxpr = jax.make_jaxpr(jax.grad(loss))(*inputs)
    found = [(scope, str(eqn.outvars[0].aval.dtype)) for scope, eqn in equations(jaxpr)
             if eqn.primitive.name == "conv_general_dilated"]  # fmt: skip
    assert {dtype for _, dtype in found} == {"float16"}
    # Forward, again, and two gradients.
    assert collections.Counter(scope for scope, _ in found)["blocks/3/conv1"] == 4


# Blocks


class Nested(nnx.Module):
    def __init__(self, rngs):
        self.stages = nnx.List([nnx.List([Net(rngs)]), nnx.List([])])
        self.tail = nnx.Sequential(nnx.Linear(3, 3, rngs=rngs), nnx.relu)


def test_blocks_are_the_outermost_items_of_lists_that_can_be_called():
    assert list(blocks_of(Nested(nnx.Rngs(0)))) == ["stages/0/0", "tail/layers/0"]


def test_a_model_without_blocks_is_told_how_to_get_some():
    with pytest.raises(UsageError) as raised:
        apply_remat(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), "dots")
    assert str(raised.value) == (
        "--training.remat dots: Linear has no blocks (modules in a list); put its repeated parts in a list, as in "
        "self.blocks = nnx.List([...]), or write --training.remat none"
    )


def test_none_leaves_the_model_alone():
    model = Net(nnx.Rngs(0))
    before = nnx.graphdef(model)
    apply_remat(model, "none")
    assert nnx.graphdef(model) == before


def test_equal_models_stay_equal_so_that_a_step_compiles_once():
    one, other = (task_of("mlp", "full").structure for _ in range(2))
    assert one.graph == other.graph


# Runs


@pytest.mark.slow
def test_a_run_trains_and_goes_on_bit_for_bit(tmp_path):
    flags = [
        *("--model.name", "vit_ti16", "--model.patch", "4", "--model.width", "8", "--model.depth", "2"),
        *("--model.heads", "2", "--model.dropout", "0.1", "--data.name", "synthetic:8x8x1:10"),
        *("--data.batch_size", "8", "--data.eval_batch_size", "6", "--loop.log_every", "1"),
        *["--optimizer.name", "adamw", "--optimizer.moments", "bfloat16", "--optimizer.schedule", "constant"],
        *("--optimizer.warmup", "0"),
        *("--training.remat", "full", "--report.no_tensorboard", "--report.no_plot"),
    ]
    flags += ["--steps", "6", "--loop.save_every", "3", "--loop.keep", "9"]
    run(load_config([*flags, "--output_dir", str(tmp_path / "whole")]))
    shutil.copytree(tmp_path / "whole", tmp_path / "half")
    shutil.rmtree(tmp_path / "half" / "checkpoints" / "6")
    run(load_config(["--resume", "--output_dir", str(tmp_path / "half")]))
    (_, whole, _), (_, half, _) = (read_checkpoint(tmp_path / name / "checkpoints") for name in ("whole", "half"))
    assert whole.keys() == half.keys()
    for name, value in whole.items():
        assert value.tobytes() == half[name].tobytes(), name

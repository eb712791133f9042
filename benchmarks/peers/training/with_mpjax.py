"""mpjax: its models, policies, loss scaling and training step."""

from collections.abc import Callable

import jax.numpy as jnp
import optax
from flax import nnx

import mpjax
from mpjax.models import SmallStem, ViT, resnet18
from mpjax.training import RunObjective, classification, create_state, take_apart
from peers import tasks
from peers.tasks import Dtype, TaskName
from peers.training.stepping import stepping


PACKAGES = ("mpjax", "flax", "jax")

POLICIES = {"float32": "float32", "bfloat16": "mixed_bfloat16", "float16": "mixed_float16"}


def start(task: TaskName, dtype: Dtype) -> Callable[[int], dict]:
    policy = mpjax.get_policy(POLICIES[dtype])

    def make() -> nnx.Module:
        model = network(task)
        mpjax.apply_policy(model, policy)
        return model

    structure, params, stats = take_apart(nnx.eval_shape(make))
    weights = tasks.weights_of(task)
    assert set(weights) == set(params)
    params = {name: jnp.asarray(weights[name]) for name in params}
    stats = {n: (jnp.ones if n.endswith("var") else jnp.zeros)(s.shape, s.dtype) for n, s in stats.items()}
    wrap = mpjax.dynamic_loss_scaling if dtype == "float16" else mpjax.no_loss_scaling
    tx = wrap(optax.sgd(**tasks.SGD, nesterov=True) if task == "resnet18" else optax.adam(**tasks.ADAM))
    objective = RunObjective(classification(policy), prepare)
    train_step = mpjax.make_train_step(structure, tx, objective.loss)
    return stepping(train_step, create_state(params, stats, tx))


def network(task: TaskName) -> nnx.Module:
    rngs = nnx.Rngs(0)
    if task == "resnet18":
        return resnet18(
            SmallStem, channels=tasks.CHANNELS, width=tasks.RESNET_WIDTH, num_classes=tasks.CLASSES, rngs=rngs
        )
    return ViT(
        image_shape=(tasks.SIDE, tasks.SIDE, tasks.CHANNELS),
        num_classes=tasks.CLASSES,
        patch=tasks.PATCH,
        width=tasks.WIDTH,
        depth=tasks.DEPTH,
        heads=tasks.HEADS,
        rngs=rngs,
    )


def prepare(batch, key):
    return {**batch, "image": batch["image"].astype(jnp.float32) / 255}

"""mpjax's training step of each case."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import mpjax
from gpu.cases import LEARNING_RATE, MOMENTUM, WEIGHT_DECAY, Case, Row
from gpu.stepping import Written
from mpjax.models import GPT2, BasicBlock, Bottleneck, ImageNetStem, ResNet, SmallStem, UNet, ViT
from mpjax.precision import Policy, name_scopes
from mpjax.training import (
    Layout,
    PackedElementwise,
    Packing,
    RunObjective,
    classification,
    cross_entropy_over,
    language_modeling,
    make_mesh,
)


def written(case: Case, row: Row, *, pieces: int = 1) -> Written:
    """The step of `case` under the policy of `row`, in micro-batches, and how its state and batch are made."""
    policy = mpjax.get_policy(row.policy)

    def make_model(key: jax.Array) -> nnx.Module:
        model = network(case, nnx.Rngs(key))
        name_scopes(model)
        mpjax.apply_policy(model, policy)
        return model

    scaled = mpjax.dynamic_loss_scaling if row.dynamic else mpjax.no_loss_scaling
    tx = scaled(optimizer(case))
    abstract: Any = nnx.eval_shape(make_model, jax.random.key(0))
    layout = Layout(make_mesh(jax.devices()[:1]))
    structure, params, stats = mpjax.take_apart(abstract)
    packing = Packing.of(params, stats)  # both optimizers treat numbers one by one

    def make_state(key: jax.Array) -> mpjax.TrainState:
        _, params, stats = mpjax.take_apart(make_model(key))
        return packing.pack(mpjax.create_state(params, stats, tx))

    return Written(
        step=mpjax.make_train_step(
            PackedElementwise(structure, packing), tx, loss_of(case, policy), accumulate=pieces, layout=layout
        ),
        make_state=make_state,
        make_batch=lambda key: batch(case, key),
        parameters=lambda state: state.params,
    )


def network(case: Case, rngs: nnx.Rngs) -> nnx.Module:
    """In float32; no dropout, as the peers have none."""
    if case.name == "resnet50":
        return ResNet(
            case.stages, Bottleneck, ImageNetStem, channels=3, width=case.width, num_classes=case.classes, rngs=rngs
        )
    if case.name == "resnet18":
        return ResNet(
            case.stages, BasicBlock, SmallStem, channels=3, width=case.width, num_classes=case.classes, rngs=rngs
        )
    (depth,) = case.stages
    if case.name == "unet":
        return UNet(channels=3, num_classes=case.classes, width=case.width, depth=depth, rngs=rngs)
    sizes = {"width": case.width, "depth": depth, "heads": case.heads, "rngs": rngs}
    if case.name == "vit_b16":
        return ViT(image_shape=(case.side, case.side, 3), num_classes=case.classes, **sizes)
    return GPT2(vocabulary=case.classes, length=case.length, dropout=0.0, **sizes)


def batch(case: Case, key: jax.Array) -> dict[str, jax.Array]:
    """Normalised images, float32, and random classes; or random tokens, int32."""
    first, second = jax.random.split(key)
    if case.length:
        return {"tokens": jax.random.randint(first, (case.batch, case.length + 1), 0, case.classes)}
    images = jax.random.normal(first, (case.batch, case.side, case.side, 3))
    name, places = ("mask", (case.side, case.side)) if case.name == "unet" else ("label", ())
    return {"image": images, name: jax.random.randint(second, (case.batch, *places), 0, case.classes)}


def loss_of(case: Case, policy: Policy):
    """Cross entropy: of images, of pixels, of next tokens; `(model, batch, key) -> (loss, metrics)`."""
    if case.length:
        return RunObjective(language_modeling()).loss
    if case.name == "unet":

        def of_pixels(model, batch, key):
            logits = model(policy.cast_to_compute(batch["image"]))
            return jnp.mean(cross_entropy_over(logits, batch["mask"])), {}

        return of_pixels
    return RunObjective(classification(policy)).loss


def optimizer(case: Case) -> optax.GradientTransformation:
    """Weight decay on every parameter, as the peers' fused optimizers have it."""
    rate, decay = LEARNING_RATE[case.optimizer], WEIGHT_DECAY[case.optimizer]
    if case.optimizer == "adamw":
        return optax.adamw(rate, weight_decay=decay)
    return optax.chain(optax.add_decayed_weights(decay), optax.sgd(rate, momentum=MOMENTUM))

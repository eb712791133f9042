"""The training loop that a user of Flax writes by hand: linen modules with a dtype, and DynamicScale.

ResNets as in Flax's ImageNet example, and Transformers with cuDNN's attention where it can run: half-precision layers
on float32 parameters, `DynamicScale.value_and_grad`, and a selection of old or new parameters and optimizer state (of
nothing else) by whether the gradients were finite.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState

from gpu.cases import EPSILON, PATCH, Case, Row
from gpu.stepping import Written
from gpu.with_mpjax import batch, optimizer
from mpjax.models import implementation_for


DTYPES = {"float32": jnp.float32, "mixed_bfloat16": jnp.bfloat16, "mixed_float16": jnp.float16}


class Residual(nn.Module):
    """One block: `layers` of (kernel, channels), the first 3x3 of which strides."""

    layers: tuple[tuple[int, int], ...]
    stride: int
    dtype: Any

    @nn.compact
    def __call__(self, x, train: bool):
        norm = functools.partial(
            nn.BatchNorm, use_running_average=not train, momentum=0.9, epsilon=1e-5, dtype=self.dtype
        )
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        strided = next(index for index, (size, _) in enumerate(self.layers) if size == 3)
        y = x
        for index, (size, channels) in enumerate(self.layers):
            stride, pad = (self.stride if index == strided else 1), size // 2
            y = conv(channels, (size, size), strides=stride, padding=((pad, pad), (pad, pad)))(y)
            last = index == len(self.layers) - 1
            y = norm(scale_init=nn.initializers.zeros_init())(y) if last else nn.relu(norm()(y))
        if x.shape != y.shape:
            x = norm()(conv(y.shape[-1], (1, 1), strides=self.stride)(x))
        return nn.relu(x + y)


class LinenResNet(nn.Module):
    """As mpjax.models.resnet: with bottlenecks and the ImageNet stem, or with two 3x3 layers and the small stem."""

    case: Case
    dtype: Any

    @nn.compact
    def __call__(self, x, train: bool = True):
        bottlenecks, width = self.case.name == "resnet50", self.case.width
        conv = functools.partial(nn.Conv, width, use_bias=False, dtype=self.dtype)
        norm = nn.BatchNorm(use_running_average=not train, momentum=0.9, epsilon=1e-5, dtype=self.dtype)
        x = x.astype(self.dtype)
        if bottlenecks:
            x = nn.relu(norm(conv((7, 7), strides=2, padding=((3, 3), (3, 3)))(x)))
            # Flax takes pairs of numbers too, but its signature says only names.
            x = nn.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))  # pyright: ignore[reportArgumentType]
        else:
            x = nn.relu(norm(conv((3, 3), padding=((1, 1), (1, 1)))(x)))
        for stage, depth in enumerate(self.case.stages):
            inner = width * 2**stage
            layers = ((1, inner), (3, inner), (1, 4 * inner)) if bottlenecks else ((3, inner), (3, inner))
            for index in range(depth):
                x = Residual(layers, 2 if stage > 0 and index == 0 else 1, self.dtype)(x, train)
        head = nn.Dense(self.case.classes, kernel_init=nn.initializers.normal(0.01), dtype=self.dtype)
        return head(jnp.mean(x, axis=(1, 2))).astype(jnp.float32)


class Block(nn.Module):
    """Pre-norm attention and an MLP, each with a residual connection."""

    heads: int
    causal: bool
    dtype: Any

    @nn.compact
    def __call__(self, x):
        width, norm = x.shape[-1], functools.partial(nn.LayerNorm, epsilon=EPSILON, dtype=self.dtype)
        y = norm()(x)
        parts = [nn.DenseGeneral((self.heads, width // self.heads), dtype=self.dtype)(y) for _ in range(3)]
        implementation = implementation_for(parts[0])
        attention = jax.nn.dot_product_attention(*parts, is_causal=self.causal, implementation=implementation)
        x += nn.DenseGeneral(width, axis=(-2, -1), dtype=self.dtype)(attention)
        y = nn.gelu(nn.Dense(4 * width, dtype=self.dtype)(norm()(x)), approximate=self.causal)
        return x + nn.Dense(width, dtype=self.dtype)(y)


class LinenTransformer(nn.Module):
    """As mpjax.models.vit with the mean over patches, or as mpjax.models.gpt2 with tied embeddings."""

    case: Case
    dtype: Any

    @nn.compact
    def __call__(self, x):
        case = self.case

        def through_blocks(x):
            x += self.param("positions", nn.initializers.normal(0.02), x.shape[1:]).astype(self.dtype)
            for _ in range(case.stages[0]):
                x = Block(case.heads, bool(case.length), self.dtype)(x)
            return nn.LayerNorm(epsilon=EPSILON, dtype=self.dtype)(x)

        if case.length:
            tokens = nn.Embed(case.classes, case.width, dtype=self.dtype)
            return tokens.attend(through_blocks(tokens(x))).astype(jnp.float32)
        x = nn.Conv(case.width, (PATCH, PATCH), strides=PATCH, padding="VALID", dtype=self.dtype)(x)
        x = through_blocks(x.reshape(x.shape[0], -1, case.width))
        return nn.Dense(case.classes, dtype=self.dtype)(jnp.mean(x, axis=1)).astype(jnp.float32)


class LinenState(TrainState):
    """Flax's TrainState, batch statistics, and the loss scale, if there is one."""

    batch_stats: Any
    dynamic_scale: DynamicScale | None


def written(case: Case, row: Row, *, pieces: int = 1) -> Written:
    """The step of a case in micro-batches, and how its state and batch are made."""
    network = LinenResNet if case.optimizer == "sgd" else LinenTransformer
    model, tx = network(case, DTYPES[row.policy]), optimizer(case)

    def make_state(key: jax.Array) -> LinenState:
        example = jnp.zeros((1, case.length), jnp.int32) if case.length else jnp.zeros((1, case.side, case.side, 3))
        variables = model.init(key, example)
        # Arrays from the start: as numbers of Python they would have the step compiled twice.
        scale = DynamicScale(fin_steps=jnp.int32(0), scale=jnp.float32(65536)) if row.dynamic else None  # pyright: ignore
        return LinenState.create(
            apply_fn=model.apply,
            params=variables["params"],
            tx=tx,
            batch_stats=variables.get("batch_stats", {}),
            dynamic_scale=scale,
        )

    return Written(
        step=jax.jit(functools.partial(train_step, pieces=pieces), donate_argnums=0),
        make_state=make_state,
        make_batch=lambda key: batch(case, key),
        parameters=lambda state: state.params,
    )


def train_step(state: LinenState, batch, *, pieces: int = 1):
    """One step by hand."""

    def loss_of(params, batch):
        inputs, labels = (batch["tokens"][:, :-1], batch["tokens"][:, 1:]) if "tokens" in batch else batch.values()
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, new = state.apply_fn(variables, inputs, mutable=["batch_stats"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss, (jnp.mean(jnp.argmax(logits, -1) == labels), new.get("batch_stats", {}))

    if state.dynamic_scale is None:
        (loss, (accuracy, stats)), grads = in_pieces(jax.value_and_grad(loss_of, has_aux=True), pieces)(
            state.params, batch
        )
        new_state = state.apply_gradients(grads=grads, batch_stats=stats)
        return new_state, {"loss": loss, "accuracy": accuracy}
    scale, finite, (loss, (accuracy, stats)), grads = state.dynamic_scale.value_and_grad(loss_of, has_aux=True)(
        state.params, batch
    )
    new_state = state.apply_gradients(grads=grads, batch_stats=stats, dynamic_scale=scale)
    select = functools.partial(jnp.where, finite)
    new_state = new_state.replace(
        params=jax.tree.map(select, new_state.params, state.params),
        opt_state=jax.tree.map(select, new_state.opt_state, state.opt_state),
    )
    return new_state, {"loss": loss, "accuracy": accuracy, "finite": finite}


def in_pieces(gradients, pieces: int):
    """Averages a function of parameters and batch over equal micro-batches."""
    if pieces == 1:
        return gradients

    def averaged(params, batch):
        parts = jax.tree.map(lambda x: x.reshape(pieces, -1, *x.shape[1:]), batch)
        totals = jax.lax.map(functools.partial(gradients, params), parts)
        return jax.tree.map(lambda x: jnp.mean(x, axis=0), totals)

    return averaged

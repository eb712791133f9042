"""The training step of Keras on JAX: its own ResNet-50, and Transformers of its layers, under its mixed policies."""

import functools
import os
from typing import Any

import jax


os.environ["KERAS_BACKEND"] = "jax"

import keras  # pyright: ignore[reportMissingImports]

from gpu.cases import EPSILON, LEARNING_RATE, MOMENTUM, PATCH, WEIGHT_DECAY, Case, Row
from gpu.stepping import Written
from gpu.with_mpjax import batch


layers = keras.layers


def written(case: Case, row: Row) -> Written:
    """The step of a case, and how its state and batch are made. The initial values do not depend on the key."""
    keras.config.set_dtype_policy(row.policy)
    model, optimizer = network(case), optimizer_of(case)
    if row.dynamic:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def values(variables) -> list[Any]:
        return [variable.value for variable in variables]

    def step(state, batch):
        params, rest, moments = state
        inputs, labels = (batch["tokens"][:, :-1], batch["tokens"][:, 1:]) if case.length else batch.values()

        def scaled(params):
            logits, new_rest = model.stateless_call(params, rest, inputs, training=True)
            loss = loss_of(labels, logits)
            accuracy = keras.ops.mean(keras.ops.argmax(logits, -1) == labels)
            return optimizer.scale_loss(loss) if row.dynamic else loss, (loss, accuracy, new_rest)

        gradients, (loss, accuracy, rest) = jax.grad(scaled, has_aux=True)(params)
        params, moments = optimizer.stateless_apply(moments, gradients, params)
        return (params, rest, moments), {"loss": loss, "accuracy": accuracy}

    return Written(
        step=jax.jit(step, donate_argnums=0),
        make_state=lambda key: tuple(
            map(values, (model.trainable_variables, model.non_trainable_variables, optimizer.variables))
        ),
        make_batch=lambda key: batch(case, key),
        parameters=lambda state: state[0],
    )


def optimizer_of(case: Case) -> Any:
    """SGD with momentum or AdamW, with the weight decay of all peers."""
    rate, decay = LEARNING_RATE[case.optimizer], WEIGHT_DECAY[case.optimizer]
    if case.optimizer == "adamw":
        return keras.optimizers.AdamW(rate, weight_decay=decay)
    return keras.optimizers.SGD(rate, momentum=MOMENTUM, weight_decay=decay)


def network(case: Case) -> Any:
    """Keras' own ResNet-50, or a Transformer of its layers; logits in float32."""
    if case.name == "resnet50":
        shape = (case.side, case.side, 3)
        body = keras.applications.ResNet50(weights=None, include_top=False, pooling="avg", input_shape=shape)
        return keras.Model(body.input, layers.Dense(case.classes, dtype="float32")(body.output))
    return _gpt2(case) if case.length else _vit(case)


class Positions(layers.Layer):
    """Adds a table of position embeddings."""

    def build(self, shape):
        """Makes the table for sequences of this length."""
        self.table = self.add_weight(shape=shape[1:], initializer="random_normal", name="table")

    def call(self, x):
        """Adds the table."""
        return x + keras.ops.cast(self.table, x.dtype)


def _block(x, case: Case):
    norm = functools.partial(layers.LayerNormalization, epsilon=EPSILON)
    attention = layers.MultiHeadAttention(case.heads, case.width // case.heads)
    y = norm()(x)
    x = x + attention(y, y, use_causal_mask=bool(case.length))
    y = layers.Dense(4 * case.width)(norm()(x))
    y = keras.ops.gelu(y, approximate=bool(case.length))
    return x + layers.Dense(case.width)(y)


def _vit(case: Case):
    images = keras.Input((case.side, case.side, 3))
    x = layers.Conv2D(case.width, PATCH, strides=PATCH)(images)
    x = Positions()(layers.Reshape((-1, case.width))(x))
    for _ in range(case.stages[0]):
        x = _block(x, case)
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization(epsilon=EPSILON)(x))
    return keras.Model(images, layers.Dense(case.classes, dtype="float32")(x))


def _gpt2(case: Case):
    tokens = keras.Input((case.length,), dtype="int32")
    table = layers.ReversibleEmbedding(case.classes, case.width)
    x = Positions()(table(tokens))
    for _ in range(case.stages[0]):
        x = _block(x, case)
    x = layers.LayerNormalization(epsilon=EPSILON)(x)
    logits = layers.Activation("linear", dtype="float32")(table(x, reverse=True))
    return keras.Model(tokens, logits)

"""Keras 3 on JAX with its policies, in a compiled step as in Keras's guide to training loops in JAX."""

import os


os.environ["KERAS_BACKEND"] = "jax"

from collections.abc import Callable

import jax
import jax.numpy as jnp
import keras  # pyright: ignore[reportMissingImports]
from keras import layers  # pyright: ignore[reportMissingImports]

from peers import tasks
from peers.tasks import Dtype, TaskName
from peers.training.stepping import stepping


PACKAGES = ("keras", "jax")

POLICIES = {"float32": "float32", "bfloat16": "mixed_bfloat16", "float16": "mixed_float16"}


def conv(path: str, filters: int, side: int, stride: int):
    # As in Keras's own ResNets: "same" would pad strided convolutions on one side only.
    padding = "same" if stride == 1 else "valid"
    return layers.Conv2D(filters, side, stride, padding=padding, use_bias=False, name=path)


def batch_norm(path: str):
    return layers.BatchNormalization(momentum=tasks.MOMENTUM, epsilon=tasks.BN_EPSILON, name=path)


def block(x, path: str, channels: int, out: int, stride: int):
    y = x if stride == 1 else layers.ZeroPadding2D(1)(x)
    y = layers.ReLU()(batch_norm(f"{path}.norm1")(conv(f"{path}.conv1", out, 3, stride)(y)))
    y = batch_norm(f"{path}.norm2")(conv(f"{path}.conv2", out, 3, 1)(y))
    if channels != out:
        x = batch_norm(f"{path}.shortcut.norm")(conv(f"{path}.shortcut.conv", out, 1, stride)(x))
    return layers.ReLU()(layers.Add()([y, x]))


def resnet18():
    inputs = keras.Input((tasks.SIDE, tasks.SIDE, tasks.CHANNELS))
    x = layers.ReLU()(batch_norm("stem.norm")(conv("stem.conv", tasks.RESNET_WIDTH, 3, 1)(inputs)))
    for number, channels, out, stride in tasks.blocks_of_resnet():
        x = block(x, f"blocks.{number}", channels, out, stride)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(tasks.CLASSES, name="head", dtype="float32")(x))


class Positions(layers.Layer):
    """Adds what is learned for each position."""

    def build(self, shape):
        self.table = self.add_weight(shape=shape[1:], name="table")

    def call(self, x):
        return x + self.table


def transformer_block(x, path: str):
    def norm(name: str):
        return layers.LayerNormalization(epsilon=tasks.LN_EPSILON, name=f"{path}.{name}")

    y = norm("norm1")(x)
    attention = layers.MultiHeadAttention(tasks.HEADS, tasks.WIDTH // tasks.HEADS, name=f"{path}.attention")
    if keras.config.dtype_policy().compute_dtype == "float16" and jax.default_backend() == "cpu":
        # As it is documented it does not compile: "precision 'F16_F16_F32' is not supported by dot_general on CPU".
        y = attention(y, y, return_attention_scores=True)[0]
    else:
        y = attention(y, y)
    x = layers.Add()([x, y])
    y = layers.Dense(4 * tasks.WIDTH, activation="gelu", name=f"{path}.mlp.up")(norm("norm2")(x))
    return layers.Add()([x, layers.Dense(tasks.WIDTH, name=f"{path}.mlp.down")(y)])


def vit():
    inputs = keras.Input((tasks.SIDE, tasks.SIDE, tasks.CHANNELS))
    x = layers.Conv2D(tasks.WIDTH, tasks.PATCH, tasks.PATCH, name="patches")(inputs)
    x = Positions(name="positions")(layers.Reshape((-1, tasks.WIDTH))(x))
    for number in range(tasks.DEPTH):
        x = transformer_block(x, f"blocks.{number}")
    x = layers.LayerNormalization(epsilon=tasks.LN_EPSILON, name="norm")(x)
    return keras.Model(
        inputs, layers.Dense(tasks.CLASSES, name="head", dtype="float32")(layers.GlobalAveragePooling1D()(x))
    )


def start(task: TaskName, dtype: Dtype) -> Callable[[int], dict]:
    keras.config.set_dtype_policy(POLICIES[dtype])
    model = {"resnet18": resnet18, "vit": vit}[task]()
    set_weights(model, tasks.weights_of(task))
    optimizer = optimizer_of(task)
    if dtype == "float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**15)
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def compute(trainable, fixed, opt_variables, batch):
        images = batch["image"].astype(jnp.float32) / 255
        logits, fixed = model.stateless_call(trainable, fixed, images, training=True)
        loss = loss_of(batch["label"], logits)
        scope = keras.StatelessScope(
            state_mapping=list(zip(optimizer.variables, opt_variables, strict=True))  # for the scale
        )
        with scope:
            scaled = optimizer.scale_loss(loss)
        return scaled, (loss, logits, fixed)

    differentiate = jax.value_and_grad(compute, has_aux=True)

    @jax.jit(donate_argnums=0)
    def train_step(state, batch):
        trainable, fixed, opt_variables = state
        (scaled, (loss, logits, fixed)), grads = differentiate(trainable, fixed, opt_variables, batch)
        scale = scaled / loss
        squares = sum(jnp.sum(jnp.square(g.astype(jnp.float32) / scale)) for g in grads)
        trainable, opt_variables = optimizer.stateless_apply(opt_variables, grads, trainable)
        accuracy = jnp.mean(jnp.argmax(logits, -1) == batch["label"])
        metrics = {"loss": loss, "accuracy": accuracy, "grad_norm": jnp.sqrt(squares)}
        return (trainable, fixed, opt_variables), metrics

    state = jax.tree.map(
        lambda v: jnp.array(v.value), (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    )
    return stepping(train_step, state)


def optimizer_of(task: TaskName):
    if task == "resnet18":
        return keras.optimizers.SGD(**tasks.SGD, nesterov=True)
    names = {"b1": "beta_1", "b2": "beta_2", "eps": "epsilon"}
    return keras.optimizers.Adam(**{names.get(name, name): value for name, value in tasks.ADAM.items()})


def set_weights(model, weights: tasks.Weights) -> None:
    names = {"gamma": "scale", "beta": "bias"}
    for variable in model.trainable_variables:
        path = variable.path.replace(".", "/").removesuffix("/table").replace("attention_output", "out")
        head, _, last = path.rpartition("/")
        path = f"{head}/{names.get(last, last)}" if head else last
        variable.assign(weights[path])

"""Keras 3 on JAX: policy `mixed_float16`, `compile` and `train_on_batch`; `compile` adds the loss scaling itself."""

import os


os.environ["KERAS_BACKEND"] = "jax"

import jax
import jax.numpy as jnp
import keras  # pyright: ignore[reportMissingImports]
import numpy as np

from peers.promises.loop import MOMENTUM, RATE, WEIGHT, Kind, NotOffered, Seen


class Loop:
    """`train_on_batch` of a compiled model."""

    def __init__(self, kind: Kind, settings: dict, accumulate: int, half_loss: bool):
        keras.config.set_dtype_policy("float32" if kind == "wide" else "mixed_float16")
        inputs = keras.Input((1,))
        weight = keras.initializers.Constant(WEIGHT)
        out = keras.layers.Dense(1, use_bias=False, kernel_initializer=weight, name="line")(inputs)
        if kind == "norm":
            out = keras.layers.BatchNormalization(momentum=0.5)(out)
        self.model = keras.Model(inputs, out)
        self.programs, self.traced = 0, False

        def loss_of(wanted, out):
            self.traced = True
            out = out if half_loss else keras.ops.cast(out, "float32")
            return keras.ops.mean(keras.ops.square(out - 1) if kind == "norm" else out)

        steps = accumulate if accumulate > 1 else None
        given = {"use_ema": True, "ema_momentum": 0.5} if kind == "norm" else {}
        optimizer = keras.optimizers.SGD(
            RATE, MOMENTUM if kind == "norm" else 0.0, gradient_accumulation_steps=steps, **given
        )
        if settings:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, **settings)
        self.model.compile(optimizer, loss_of)

    def step(self, x: np.ndarray) -> Seen:
        self.traced = False
        loss = self.model.train_on_batch(x[:, None], np.zeros_like(x)[:, None])
        self.programs += self.traced
        optimizer = self.model.optimizer
        own = (optimizer.step_counter, optimizer.dynamic_scale)
        held = [*self.model.variables, *(v for v in optimizer.variables if all(v is not one for one in own))]
        return Seen(
            weight=float(self.model.get_layer("line").kernel.value[0, 0]),
            state={v.path: np.asarray(v.value) for v in held if "seed" not in v.path},
            scale=float(optimizer.dynamic_scale.value),
            good_steps=int(optimizer.step_counter.value),
            loss=float(loss),
            loss_dtype=str(self.model.metrics[0].variables[0].dtype),  # what comes is a Python number
            programs=self.programs,
        )


def start(
    kind: Kind, *, scale=None, interval=None, factor=None, minimum=None, accumulate: int = 1, half_loss: bool = False
) -> Loop:
    if minimum is not None:
        raise NotOffered("LossScaleOptimizer has no smallest scale")
    if factor is not None and factor != 2:
        raise NotOffered("LossScaleOptimizer always doubles")
    given = {"initial_scale": scale, "dynamic_growth_steps": interval}
    return Loop(kind, {k: v for k, v in given.items() if v is not None}, accumulate, half_loss)


def applied(values: np.ndarray, scale: float, **settings) -> np.ndarray:
    """What SGD of rate 1 subtracts, of float16 gradients that arrive with these values at a LossScaleOptimizer."""
    weight = keras.Variable(np.zeros(values.shape, np.float32))
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0, **settings), initial_scale=scale)
    optimizer.build([weight])

    @jax.jit
    def apply(gradients):
        held = [variable.value for variable in optimizer.variables]
        return optimizer.stateless_apply(held, [gradients], [weight.value])[0][0]

    return -np.asarray(apply(jnp.asarray(values)))


def unscaled(values: np.ndarray, scale: float) -> np.ndarray:
    return applied(values, scale)


def norm_of(values: np.ndarray) -> float:
    """Keras tells no norm; its clipping to 1 divides by it."""
    return float(values[0]) / float(applied(values, 1.0, global_clipnorm=1.0)[0])


def batch_norm(x, mean: float, var: float, scale: float, bias: float, *, epsilon: float, train: bool):
    layer = keras.layers.BatchNormalization(momentum=0.5, epsilon=epsilon, dtype="mixed_float16")
    x = jnp.asarray(x, jnp.float16)[..., None]
    layer.build(x.shape)
    for variable, value in (
        (layer.gamma, scale),
        (layer.beta, bias),
        (layer.moving_mean, mean),
        (layer.moving_variance, var),
    ):
        variable.assign([value])
    y = layer(x, training=train)
    return np.asarray(y), float(layer.moving_mean.value[0]), float(layer.moving_variance.value[0])


def stopped_at_floor() -> str | None:
    return None  # there is no smallest scale

"""mpjax: `apply_policy`, `dynamic_loss_scaling` and `make_train_step`."""

import contextlib
import io
import tempfile
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import mpjax
from mpjax.commands import run
from mpjax.config import load_config
from mpjax.errors import Diverged
from mpjax.training import create_state, take_apart
from peers.promises.loop import WEIGHT, Kind, Seen
from peers.promises.with_linen import arrays_of, loss_of, optimizer_of


class Net(nnx.Module):
    """See `loop.Kind`."""

    def __init__(self, kind: Kind):
        rngs = nnx.Rngs(0)
        weight = nnx.initializers.constant(WEIGHT)
        self.line = nnx.Linear(1, 1, use_bias=False, kernel_init=weight, rngs=rngs)
        self.norm = nnx.BatchNorm(1, momentum=0.5, rngs=rngs) if kind == "norm" else None

    def __call__(self, x):
        x = self.line(x[:, None])
        return x if self.norm is None else self.norm(x)


HALF = mpjax.get_policy("params=float32,compute=float16,output=float16")


class Loop:
    """The training step that the trainer also has."""

    def __init__(self, kind: Kind, settings: dict, accumulate: int, half_loss: bool):
        net = Net(kind)
        mpjax.apply_policy(net, "float32" if kind == "wide" else HALF)
        structure, params, stats = take_apart(net)
        tx = mpjax.dynamic_loss_scaling(optimizer_of(kind, accumulate), **settings)

        def loss_fn(model, x, key):
            return loss_of(kind, model(x), half_loss), {}

        self.state = create_state(params, stats, tx, ema=True)
        self.train_step = mpjax.make_train_step(structure, tx, loss_fn, ema=0.5)

    def step(self, x: np.ndarray) -> Seen:
        self.state, metrics = self.train_step(self.state, jnp.asarray(x))
        state, scaling = self.state, self.state.opt_state
        return Seen(
            weight=float(state.params["line/kernel"][0, 0]),
            state=arrays_of(
                params=state.params,
                opt_state=scaling.inner_state,
                statistics=state.stats,
                average=state.ema,
                step=state.step,
            ),
            scale=float(scaling.scale),
            good_steps=int(scaling.good_steps),
            loss=float(metrics["loss"]),
            loss_dtype=str(metrics["loss"].dtype),
            programs=cast(Any, self.train_step)._cache_size(),
        )


def start(
    kind: Kind, *, scale=None, interval=None, factor=None, minimum=None, accumulate: int = 1, half_loss: bool = False
) -> Loop:
    given = {"initial_scale": scale, "growth_interval": interval, "growth_factor": factor, "min_scale": minimum}
    if scale is not None and scale > 2.0**24:
        given["max_scale"] = 2.0**127
    return Loop(kind, {k: v for k, v in given.items() if v is not None}, accumulate, half_loss)


def gradients(values: np.ndarray, scale: float):
    """What the optimizer inside sees of float16 gradients that arrive with these values."""
    tx = mpjax.static_loss_scaling(optax.trace(0.0), scale)  # hands on what it is given
    params = jnp.zeros(values.shape, jnp.float16)
    return tx.update(jnp.asarray(values), tx.init(params), params)[0]


def unscaled(values: np.ndarray, scale: float) -> np.ndarray:
    return np.asarray(gradients(values, scale))


def norm_of(values: np.ndarray) -> float:
    return float(optax.global_norm(gradients(values, 1.0)))


def batch_norm(x, mean: float, var: float, scale: float, bias: float, *, epsilon: float, train: bool):
    layer = nnx.BatchNorm(1, momentum=0.5, epsilon=epsilon, use_running_average=not train, rngs=nnx.Rngs(0))
    for variable, value in ((layer.mean, mean), (layer.var, var), (layer.scale, scale), (layer.bias, bias)):
        assert variable is not None
        variable.set_value(jnp.array([value]))
    mpjax.apply_policy(layer, HALF)

    @nnx.jit
    def call(layer, x):
        return layer(x)

    y = call(layer, jnp.asarray(x, jnp.float16)[..., None])
    return np.asarray(y), float(layer.mean[...][0]), float(layer.var[...][0])


def stopped_at_floor() -> str | None:
    """The trainer's word on a run whose gradients overflow at the smallest scale that it is allowed."""
    flags = {
        "--data.name": "synthetic:8x8x1:10",
        "--data.batch_size": "16",
        "--model.name": "mlp",
        "--steps": "20",
        "--optimizer.warmup": "0",
        "--precision.initial_scale": "16777216",
        "--precision.min_scale": "16777216",
        "--precision.patience": "3",
    }
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        try:
            run(load_config([word for flag in flags.items() for word in flag] + ["--output_dir", f"{folder}/run"]))
        except Diverged as error:
            lines = str(error).splitlines()
            return "; ".join(line for line in lines if "at step" in line or "first bad layer" in line)
    return None

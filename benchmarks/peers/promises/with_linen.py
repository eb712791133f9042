"""Flax linen with TrainState and DynamicScale, the step as in Flax's ImageNet example."""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.dynamic_scale import DynamicScale

from peers.promises.loop import MOMENTUM, RATE, WEIGHT, Kind, Seen
from peers.training.with_linen import State, apply_gradients


class Net(nn.Module):
    """See `loop.Kind`."""

    kind: Kind

    @nn.compact
    def __call__(self, x):
        weight = nn.initializers.constant(WEIGHT)
        dtype = jnp.float32 if self.kind == "wide" else jnp.float16
        x = nn.Dense(1, use_bias=False, dtype=dtype, kernel_init=weight, name="line")(x[:, None])
        return nn.BatchNorm(False, momentum=0.5, dtype=dtype)(x) if self.kind == "norm" else x


def loss_of(kind: Kind, out, half: bool):
    if not half:
        out = out.astype(jnp.float32)
    return jnp.mean(jnp.square(out - 1) if kind == "norm" else out)


def optimizer_of(kind: Kind, accumulate: int) -> optax.GradientTransformation:
    tx = optax.sgd(optax.constant_schedule(RATE), momentum=MOMENTUM if kind == "norm" else None)
    return optax.MultiSteps(tx, accumulate).gradient_transformation() if accumulate > 1 else tx


def arrays_of(**trees) -> dict[str, np.ndarray]:
    """Leaves by path."""
    leaves = jax.tree_util.tree_leaves_with_path(trees)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves}


class Loop:
    """TrainState, and the example's step compiled."""

    def __init__(self, kind: Kind, scale: DynamicScale, accumulate: int, half_loss: bool):
        net = Net(kind)
        variables = net.init(jax.random.key(0), jnp.zeros(1))
        stats = variables.get("batch_stats", {})
        tx = optimizer_of(kind, accumulate)
        params = variables["params"]
        self.state = State.create(
            apply_fn=net.apply, params=params, tx=tx, batch_stats=stats, dynamic_scale=scale
        ).replace(step=jnp.int32(0))

        @jax.jit
        def train_step(state: State, x):
            assert state.dynamic_scale is not None

            def loss_fn(params):
                out, new = net.apply({"params": params, "batch_stats": state.batch_stats}, x, mutable=["batch_stats"])
                return loss_of(kind, out, half_loss), new.get("batch_stats", {})

            grad_fn = state.dynamic_scale.value_and_grad(loss_fn, has_aux=True)
            scale, finite, (loss, stats), grads = grad_fn(state.params)
            return apply_gradients(state, grads, stats, scale, finite), loss

        self.train_step = train_step

    def step(self, x: np.ndarray) -> Seen:
        self.state, loss = self.train_step(self.state, jnp.asarray(x))
        state, scale = self.state, self.state.dynamic_scale
        assert scale is not None
        return Seen(
            weight=float(state.params["line"]["kernel"][0, 0]),
            state=arrays_of(
                params=state.params, opt_state=state.opt_state, batch_stats=state.batch_stats, step=state.step
            ),
            scale=float(scale.scale),
            good_steps=int(scale.fin_steps),
            loss=float(loss),
            loss_dtype=str(loss.dtype),
            programs=self.train_step._cache_size(),  # pyright: ignore[reportAttributeAccessIssue]
        )


def start(
    kind: Kind, *, scale=None, interval=None, factor=None, minimum=None, accumulate: int = 1, half_loss: bool = False
) -> Loop:
    given = {"scale": scale, "growth_interval": interval, "growth_factor": factor, "minimum_scale": minimum}
    return Loop(kind, DynamicScale(**{k: v for k, v in given.items() if v is not None}), accumulate, half_loss)


def gradients(values: np.ndarray, scale: float):
    """What DynamicScale makes of float16 gradients that arrive with these values."""

    def loss_fn(params):
        return jnp.sum(params.astype(jnp.float32) * (values.astype(np.float32) / np.float32(scale)))

    return DynamicScale(scale=scale).value_and_grad(loss_fn)(jnp.zeros(values.shape, jnp.float16)).grad


def unscaled(values: np.ndarray, scale: float) -> np.ndarray:
    return np.asarray(gradients(values, scale))


def norm_of(values: np.ndarray) -> float:
    return float(optax.global_norm(gradients(values, 1.0)))


def batch_norm(x, mean: float, var: float, scale: float, bias: float, *, epsilon: float, train: bool):
    layer = nn.BatchNorm(not train, momentum=0.5, epsilon=epsilon, dtype=jnp.float16)
    variables = {
        "params": {"scale": jnp.array([scale]), "bias": jnp.array([bias])},
        "batch_stats": {"mean": jnp.array([mean]), "var": jnp.array([var])},
    }
    call: Callable = functools.partial(layer.apply, mutable=["batch_stats"])
    y, new = jax.jit(call)(variables, jnp.asarray(x, jnp.float16)[..., None])
    return np.asarray(y), float(new["batch_stats"]["mean"][0]), float(new["batch_stats"]["var"][0])


def stopped_at_floor() -> str | None:
    return None  # a loop of one's own goes on; nothing offers to stop it

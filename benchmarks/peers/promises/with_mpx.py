"""mpx on Equinox: its gradient and update functions as in its README, which starts at float16's largest number."""

import equinox as eqx
import jax
import jax.numpy as jnp
import mpx  # pyright: ignore[reportMissingImports]
import numpy as np
import optax

from peers.promises.loop import WEIGHT, Kind, Seen
from peers.promises.with_linen import arrays_of, loss_of, optimizer_of
from peers.training.with_mpx import BATCH_AXIS, normalised


class Net(eqx.Module):
    """See `loop.Kind`."""

    line: eqx.nn.Linear
    norm: eqx.nn.BatchNorm | None

    def __init__(self, kind: Kind):
        line = eqx.nn.Linear(1, 1, use_bias=False, key=jax.random.key(0))
        self.line = eqx.tree_at(lambda line: line.weight, line, jnp.full((1, 1), WEIGHT, jnp.float32))
        self.norm = eqx.nn.BatchNorm(1, BATCH_AXIS, momentum=0.5, mode="batch") if kind == "norm" else None

    def __call__(self, x, state):
        x = self.line(x)
        return (x, state) if self.norm is None else normalised(self.norm, x, state)


class Loop:
    """The README's step."""

    def __init__(self, kind: Kind, scaling, accumulate: int, half_loss: bool):
        model, statistics = eqx.nn.make_with_state(Net)(kind)
        tx = optimizer_of(kind, accumulate)
        self.held = (model, statistics, tx.init(eqx.filter(model, eqx.is_array)), scaling)
        self.programs = 0

        @eqx.filter_jit
        def train_step(held, x):
            self.programs += 1
            model, statistics, opt_state, scaling = held

            def loss_fn(model, x):
                forward = jax.vmap(model, axis_name=BATCH_AXIS, in_axes=(0, None), out_axes=(0, None))
                out, new = forward(x[:, None], statistics)
                return loss_of(kind, out, half_loss), new

            (loss, new), scaling, finite, grads = mpx.filter_value_and_grad(loss_fn, scaling, has_aux=True)(model, x)
            model, opt_state = mpx.optimizer_update(model, tx, opt_state, grads, finite)
            return (model, new, opt_state, scaling), loss

        self.train_step = train_step

    def step(self, x: np.ndarray) -> Seen:
        self.held, loss = self.train_step(self.held, jnp.asarray(x))
        model, statistics, opt_state, scaling = self.held
        return Seen(
            weight=float(model.line.weight[0, 0]),
            state=arrays_of(
                model=eqx.filter(model, eqx.is_array), opt_state=opt_state, statistics=jax.tree.leaves(statistics)
            ),
            scale=float(scaling.loss_scaling),
            good_steps=int(scaling.counter),
            loss=float(loss),
            loss_dtype=str(loss.dtype),
            programs=self.programs,
        )


def start(
    kind: Kind, *, scale=None, interval=None, factor=None, minimum=None, accumulate: int = 1, half_loss: bool = False
) -> Loop:
    first = mpx.FLOAT16_MAX if scale is None else jnp.float32(scale)
    given = {"factor": None if factor is None else int(factor), "period": interval}
    scaling = mpx.DynamicLossScaling(
        first, jnp.float32(1.0 if minimum is None else minimum), **{k: v for k, v in given.items() if v is not None}
    )
    return Loop(kind, scaling, accumulate, half_loss)


def unscaled(gradients: np.ndarray, scale: float) -> np.ndarray:
    scaling = mpx.DynamicLossScaling(jnp.float32(scale), jnp.float32(1))
    return np.asarray(scaling.unscale(jnp.asarray(gradients)))


def norm_of(gradients: np.ndarray) -> float:
    return float(optax.global_norm(jnp.asarray(unscaled(gradients, 1.0))))


def batch_norm(x, mean: float, var: float, scale: float, bias: float, *, epsilon: float, train: bool):
    layer, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(1, BATCH_AXIS, epsilon, momentum=0.5, mode="batch")
    layer = eqx.tree_at(lambda n: (n.weight, n.bias), layer, (jnp.array([scale]), jnp.array([bias])))
    state = state.set(layer.batch_state_index, (jnp.array([mean]), jnp.array([var])))
    if not train:
        layer = eqx.nn.inference_mode(layer)

    def call(layer, x):
        forward = jax.vmap(normalised, axis_name=BATCH_AXIS, in_axes=(None, 0, None), out_axes=(0, None))
        return forward(layer, x, state)

    # As its gradient functions do: the model and the data are cast, all of them.
    half, inputs = mpx.cast_to_half_precision((layer, jnp.asarray(x, jnp.float32)[:, None]))
    y, new = eqx.filter_jit(call)(half, inputs)
    found = new.get(layer.batch_state_index)
    return np.asarray(y), float(found[0][0]), float(found[1][0])


def stopped_at_floor() -> str | None:
    return None  # a loop of one's own goes on; nothing offers to stop it

"""The training step, a pure function (state, batch) -> (state, metrics)."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mpjax.errors import UsageError
from mpjax.precision.dtypes import FLOAT32, is_floating, widest
from mpjax.precision.float8.history import add_gradient, end_step, is_history
from mpjax.precision.gradient_norm import global_norm
from mpjax.precision.scale_state import loss_scale_state, where_finite
from mpjax.precision.scaled_loss import unscaled
from mpjax.precision.skip_step import optax_promotion
from mpjax.precision.updates import moved_by
from mpjax.training.layout import Layout
from mpjax.training.objective import Mean, Prepare, as_mean, as_stored
from mpjax.training.shares import Contribution, shares_of
from mpjax.training.state import Arrays, Assembly, TrainState, step_key, uncast


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Metrics(Mapping[str, jax.Array]):
    """A mapping from name to scalar; `jax.device_get(metrics)` fetches all of them at once.

    Attributes:
      array: float32 (or wider) [number of metrics].
      names: the name of each metric.
    """

    array: jax.Array
    names: tuple[str, ...] = dataclasses.field(metadata={"static": True})

    def __getitem__(self, name: str) -> jax.Array:
        if name not in self.names:
            raise KeyError(name)
        return self.array[self.names.index(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def pack(metrics: Mapping[str, jax.Array]) -> Metrics:
    """Packs scalars of any dtype into one `Metrics`; counters stay exact up to 2^24."""
    dtype = widest(FLOAT32, *(value.dtype for value in metrics.values() if is_floating(value)))
    return Metrics(jnp.stack([value.astype(dtype) for value in metrics.values()]), tuple(metrics))


def make_train_step(
    structure: Assembly,
    tx: optax.GradientTransformation,
    loss_fn: Callable,
    *,
    cast: Callable[[Callable], Callable] = uncast,
    learning_rate: optax.Schedule | float | None = None,
    accumulate: int = 1,
    ema: float = 0.0,
    seed: int = 0,
    prepare: Prepare = as_stored,
    layout: Layout | None = None,
    frozen: Collection[str] = (),
) -> jax.stages.Wrapped:
    """Builds the jit-compiled training step, which donates its input state.

    Args:
      structure: the model taken apart (`mpjax.training.take_apart`), with its policy applied.
      tx: the optimizer, wrapped in loss scaling.
      loss_fn: `(model, batch, key) -> (loss, metrics)`, each a scalar or a `Mean`; the model is in training mode. With
        a layout it takes one device's examples, and a key of that device. A scalar is a mean over examples. A mean over
        tokens or pixels, whose number may differ between devices, must be a `Mean`.
      cast: adds casts to the pure function that calls the model, as `functools.partial(mpjax.autocast,
        policy="mixed_float16")` does; by default the model casts its own arrays.
      learning_rate: the optimizer's schedule, only to report the learning rate of the step.
      accumulate: the number of micro-batches of a batch, run one after the other. Gradients and metrics are averaged by
        the weights of the losses and of the metrics. Each micro-batch takes the statistics of the one before.
      ema: decay of the moving average of parameters; 0 if the state keeps none.
      seed: the seed of the random numbers, which are a function of it and of the number of attempted steps.
      prepare: `(batch, key) -> batch`, applied to each whole micro-batch before it is divided among devices:
        augmentation, which may mix examples.
      layout: the mesh, and the division of parameters over it; None: one device, or replicas that the compiler makes.
      frozen: paths of parameters and statistics that keep every bit. Frozen parameters have no gradients, and `tx` gets
        gradients and parameters without them.

    Returns:
      A function whose metrics are scalars: `loss` (unscaled), those of `loss_fn`, `grad_norm` (unscaled),
        `learning_rate`, `loss_scale` (of this step), `skipped` (in total), `consecutive_skips`, and `finite` (1 or 0).

    Raises:
      UsageError: `accumulate` is below 1, or `ema` is outside [0, 1). The step raises it if the batch does not divide
        into micro-batches, or if only one of the state and `ema` has a moving average.
    """
    if accumulate < 1:
        raise UsageError(f"accumulate: wanted at least 1 micro-batch, got {accumulate}")
    if not 0 <= ema < 1:
        raise UsageError(f"ema: wanted a decay from 0 up to, not including, 1, got {ema}")

    shares = shares_of(layout)
    update = optax.with_extra_args_support(tx).update  # some optimizers take the loss, as `value`

    @cast
    def loss_of(params, stats, key, batch):
        histories = {name: stats[name] + params[_BESIDE + name] for name in filter(is_history, stats)}
        model = structure.assemble(_parameters(params), stats | histories, key)
        model.train()
        shares.adapt(model)
        loss, metrics = loss_fn(model, batch, key)
        means = {name: as_mean(value, name) for name, value in ({"loss": loss} | metrics | {"loss": loss}).items()}
        if means["loss"].total.shape:
            raise UsageError(f"loss is a Mean of shape {means['loss'].total.shape}: wanted scalars to differentiate")
        loss = means["loss"] if isinstance(loss, Mean) else loss
        return shares.loss(loss), (structure.stats_of(model), means)

    differentiate = shares.value_and_grad(loss_of, frozen)

    @functools.partial(shares.on_each, frozen=frozen)
    def run(scaling, params, stats, key, batch):
        histories = list(filter(is_history, stats))
        zeros = {_BESIDE + name: jnp.zeros_like(stats[name]) for name in histories}
        (_, (stats, means)), grads = differentiate(scaling, params | zeros, stats, key, batch)
        stats |= {name: add_gradient(stats[name], grads[_BESIDE + name]) for name in histories}
        grads = _parameters(grads)
        if accumulate > 1:
            grads = _weighted(grads, shares.add(means["loss"].weight))
        return stats, Contribution(grads, means)

    def gradients(state: TrainState, key: jax.Array, batch):
        scaling = loss_scale_state(state.opt_state)._replace(inner_state=())

        def one(stats, key, batch):
            return run(scaling, state.params, stats, key, prepare(batch, key))

        stats = shares.spread(state.stats)
        if accumulate == 1:
            return shares.at_once(one, state.params)(stats, key, batch)
        keys, batches = jax.random.split(key, accumulate), _micro_batches(batch, accumulate)
        stats, part = _added(one, stats, keys, batches)
        weight = jnp.sum(part.means["loss"].weight)  # over all shares
        weight = jnp.where(weight != 0, weight, 1)
        # Before the sum: in half precision, gradients times the weight of a batch would overflow.
        grads = {name: g / weight.astype(g.dtype) for name, g in part.grads.items()}
        return shares.together(stats, Contribution(grads, part.means))

    @jax.jit(donate_argnums=0)
    def train_step(state: TrainState, batch):
        if bool(state.ema) != (ema > 0):
            has = "keeps a moving average" if state.ema else "keeps no moving average"
            raise UsageError(f"ema={ema}, but the state {has}: write create_state(..., ema={ema > 0})")
        stats, part = gradients(state, step_key(seed, state), batch)
        stats |= {name: end_step(stats[name]) for name in filter(is_history, stats)}
        grads, metrics = part.grads, {name: mean.value for name, mean in part.means.items()}
        scale = loss_scale_state(state.opt_state).scale
        trained = {name: param for name, param in state.params.items() if name not in frozen}
        with shares.norms():
            updates, opt_state = update(grads, state.opt_state, trained, value=metrics["loss"])
            norm = global_norm(unscaled(grads, scale))
        with optax_promotion():
            changed: Any = moved_by(updates, trained)
        params = {**state.params, **changed}
        stats = {name: state.stats[name] if name in frozen else new for name, new in stats.items()}
        averaged = {
            name: mean if name in frozen else ema * mean + (1 - ema) * params[name].astype(mean.dtype)
            for name, mean in state.ema.items()
        }
        scaling = loss_scale_state(opt_state)
        metrics |= {
            "grad_norm": norm,
            "loss_scale": scale,
            "skipped": scaling.skipped,
            "consecutive_skips": scaling.consecutive_skips,
            "finite": scaling.finite,
        }
        if learning_rate is not None:
            with optax_promotion():
                rate = learning_rate(state.step) if callable(learning_rate) else learning_rate
            metrics["learning_rate"] = jnp.asarray(rate, jnp.float32)
        new_state = TrainState(
            step=state.step + scaling.finite.astype(jnp.int32),
            params=params,
            stats=where_finite(opt_state, stats, state.stats),
            opt_state=opt_state,
            ema=where_finite(opt_state, averaged, state.ema),
        )
        return shares.settle(new_state), pack(metrics)

    return train_step


_BESIDE = "(zero beside) "
"""Prefix of the zeros that are added to a history: one backward pass computes its derivative and the gradients."""


def _parameters(arrays: Arrays) -> Arrays:
    """The arrays without the zeros beside histories."""
    return {name: array for name, array in arrays.items() if not name.startswith(_BESIDE)}


def _weighted(grads: Arrays, weight: jax.Array) -> Arrays:
    """Multiplies gradients by the weight of their micro-batch, in float32 or wider."""

    def weighted(g: jax.Array) -> jax.Array:
        dtype = widest(g.dtype, FLOAT32)
        return g.astype(dtype) * weight.astype(dtype)

    return jax.tree.map(weighted, grads)


def _added(one: Callable, stats, keys: jax.Array, batches) -> tuple[Any, Contribution]:
    """Runs `one` on each micro-batch in turn; returns the final statistics and the sum of the parts."""
    _, shapes = jax.eval_shape(one, stats, keys[0], jax.tree.map(lambda x: x[0], batches))
    zeros = jax.tree.map(lambda s: jnp.full(s.shape, -0.0, s.dtype), shapes)  # -0.0 + x is x, even if x is -0.0

    def body(carry, micro):
        stats, total = carry
        stats, part = one(stats, *micro)
        return (stats, jax.tree.map(jnp.add, total, part)), None

    (stats, total), _ = jax.lax.scan(body, (stats, zeros), (keys, batches))
    return stats, total


def _micro_batches(batch, count: int):
    """Reshapes [B, ...] to [count, B / count, ...]. Each takes every count-th example, so no example changes device."""

    def cut(x):
        if x.shape[0] % count:
            raise UsageError(f"a batch of {x.shape[0]} examples does not divide into {count} micro-batches")
        return jnp.moveaxis(x.reshape(x.shape[0] // count, count, *x.shape[1:]), 1, 0)

    return jax.tree.map(cut, batch)

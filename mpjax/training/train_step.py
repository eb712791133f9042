"""The training step, a pure function (state, batch) -> (state, metrics), and compiled calls of several steps."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mpjax.errors import UsageError
from mpjax.precision.dtypes import FLOAT32, is_floating, widest
from mpjax.precision.scale_state import loss_scale_state, where_finite
from mpjax.precision.scaled_loss import scaled_value_and_grad
from mpjax.precision.skip_step import optax_promotion
from mpjax.training.state import Structure, TrainState, step_key, uncast


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Metrics(Mapping[str, jax.Array]):
    """A mapping from name to scalar; `jax.device_get(metrics)` fetches all of it at once.

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
    structure: Structure,
    tx: optax.GradientTransformation,
    loss_fn: Callable,
    *,
    cast: Callable[[Callable], Callable] = uncast,
    learning_rate: optax.Schedule | float | None = None,
    accumulate: int = 1,
    ema: float = 0.0,
    seed: int = 0,
) -> jax.stages.Wrapped:
    """Returns the jit-compiled training step, which donates its input state.

    Args:
      structure: the model taken apart (`mpjax.training.take_apart`), with its policy applied.
      tx: the optimizer, wrapped in loss scaling.
      loss_fn: `(model, batch, key) -> (loss, metrics)`, scalars; the model is in training mode.
      cast: adds casts to the pure function that calls the model, as `functools.partial(mpjax.autocast,
        policy="mixed_float16")` does; by default the model casts itself.
      learning_rate: the optimizer's schedule, only to report the learning rate of the step.
      accumulate: the number of micro-batches of a batch, run one after the other. Gradients, losses and metrics are
        averaged; statistics pass from one micro-batch to the next.
      ema: decay of the moving average of parameters; 0 if the state keeps none.
      seed: the seed of the random numbers, which are a function of it and of the number of attempted steps.

    Returns:
      A function whose metrics are scalars: `loss` (unscaled), those of `loss_fn`, `grad_norm` (unscaled),
      `learning_rate`, `loss_scale` (of this step), `skipped` (in total), `consecutive_skips`, and `finite` (1 or 0).

    Raises:
      UsageError: `accumulate` is below 1, or `ema` is outside [0, 1). The step raises it if the batch does not divide
        into micro-batches, or if only one of the state and `ema` asks for a moving average.
    """
    if accumulate < 1:
        raise UsageError(f"accumulate: wanted at least 1 micro-batch, got {accumulate}")
    if not 0 <= ema < 1:
        raise UsageError(f"ema: wanted a decay from 0 up to, not including, 1, got {ema}")

    def gradients(state: TrainState, key: jax.Array, batch):
        def loss_of(params, stats, key, batch):
            model = structure.assemble(params, stats, key)
            model.train()
            loss, metrics = loss_fn(model, batch, key)
            return loss, (structure.stats_of(model), metrics)

        differentiate = scaled_value_and_grad(cast(loss_of), has_aux=True)

        def one(stats, key, batch):
            (loss, (stats, metrics)), grads = differentiate(state.opt_state, state.params, stats, key, batch)
            return stats, (grads, {"loss": loss} | metrics | {"loss": loss})

        if accumulate == 1:
            return one(state.stats, key, batch)
        return _averaged(one, state.stats, jax.random.split(key, accumulate), _micro_batches(batch, accumulate))

    @jax.jit(donate_argnums=0)
    def train_step(state: TrainState, batch):
        if bool(state.ema) != (ema > 0):
            has = "keeps a moving average" if state.ema else "keeps no moving average"
            raise UsageError(f"ema={ema}, but the state {has}: write create_state(..., ema={ema > 0})")
        stats, (grads, metrics) = gradients(state, step_key(seed, state), batch)
        scale = loss_scale_state(state.opt_state).scale
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        with optax_promotion():
            params: Any = optax.apply_updates(state.params, updates)
        averaged = {name: ema * mean + (1 - ema) * params[name].astype(mean.dtype) for name, mean in state.ema.items()}
        scaling = loss_scale_state(opt_state)
        metrics |= {
            "grad_norm": _global_norm(grads, scale),
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
        return new_state, pack(metrics)

    return train_step


def _averaged(one: Callable, stats, keys: jax.Array, batches):
    """Runs `one` on each micro-batch in turn; returns the final statistics and the mean of the other results."""
    _, shapes = jax.eval_shape(one, stats, keys[0], jax.tree.map(lambda x: x[0], batches))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, widest(s.dtype, FLOAT32)), shapes)

    def body(carry, micro):
        stats, total = carry
        stats, out = one(stats, *micro)
        return (stats, jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, out)), None

    (stats, total), _ = jax.lax.scan(body, (stats, zeros), (keys, batches))
    return stats, jax.tree.map(lambda x: x / len(keys), total)


def _micro_batches(batch, count: int):
    """Reshapes [B, ...] to [count, B / count, ...], taking every count-th example so that no example changes device."""

    def cut(x):
        if x.shape[0] % count:
            raise UsageError(f"a batch of {x.shape[0]} examples does not divide into {count} micro-batches")
        return jnp.moveaxis(x.reshape(x.shape[0] // count, count, *x.shape[1:]), 1, 0)

    return jax.tree.map(cut, batch)


def _global_norm(grads, scale: jax.Array) -> jax.Array:
    """Computes the norm of the unscaled gradients in float32 or wider, because 300^2 overflows float16."""

    def square_sum(g):
        g = g.astype(widest(g.dtype, FLOAT32))
        return jnp.sum(jnp.square(g / scale.astype(g.dtype)))

    return jnp.sqrt(sum(square_sum(g) for g in jax.tree.leaves(grads)))


def make_train_call(train_step: Callable, batch_of: Callable[[Any, Any], Any]) -> jax.stages.Wrapped:
    """Returns the jit-compiled call `(state, fed, count) -> (state, metrics)` of `count` steps; it donates the state.

    Args:
      train_step: `(state, batch) -> (state, metrics)`.
      batch_of: `(fed, index) -> batch`, the batch of step `index` of the call, counted from 0.

    Returns:
      A function whose metrics have a leading axis [count], or are those of the step if the count is 1. The count is
      static: each count compiles its own program.
    """

    @jax.jit(donate_argnums=0, static_argnums=2)
    def train_call(state, fed, count: int):
        if count == 1:
            return train_step(state, batch_of(fed, 0))
        # The count is static, so the device runs all steps without asking the host.
        return jax.lax.scan(lambda state, index: train_step(state, batch_of(fed, index)), state, jnp.arange(count))

    return train_call


def compile_calls(call: jax.stages.Wrapped, state: Any, feeds: Mapping[int, Any]) -> Callable:
    """Compiles `call` ahead of time for the counts in `feeds`; the result raises KeyError for any other count.

    Args:
      call: a jitted function `(state, fed, count)`.
      state: the state, or its shapes, dtypes and shardings.
      feeds: the input `fed` by count, or its shapes, dtypes and shardings.
    """
    programs = {count: call.lower(state, fed, count).compile() for count, fed in feeds.items()}
    return lambda state, fed, count: programs[count](state, fed)

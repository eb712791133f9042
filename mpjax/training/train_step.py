"""The training step: (state, batch) -> (state, metrics), pure; several of them in one compiled call."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mpjax.errors import UsageError
from mpjax.precision.dtypes import FLOAT32, is_floating, widest
from mpjax.precision.loss_scale import loss_scale_state, where_finite
from mpjax.precision.scaled_loss import scaled_value_and_grad
from mpjax.precision.skip_step import optax_promotion
from mpjax.training.state import Structure, TrainState, step_key, uncast


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Metrics(Mapping[str, jax.Array]):
    """A mapping from name to scalar; `jax.device_get(metrics)` fetches all of it at once.

    Attributes:
      array: float32 (or wider) [number of metrics].
      names: one for each value.
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
    """Scalars of any dtype as one `Metrics`; counters stay exact up to 2^24."""
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
) -> Callable[[TrainState, Mapping[str, jax.Array]], tuple[TrainState, Metrics]]:
    """The jit-compiled training step; it donates (overwrites) the state it is given.

    Args:
      structure: the model taken apart (`mpjax.training.take_apart`), its policy applied.
      tx: the optimizer, inside one of the loss-scaling wrappers.
      loss_fn: `(model, batch, key) -> (loss, metrics)`, scalars; the model is in training mode.
      cast: puts casts around the pure function that calls the model, as `functools.partial(mpjax.autocast,
        policy="mixed_float16")` does; by default they are in the model.
      learning_rate: the optimizer's schedule, only to report the rate of the step.
      accumulate: micro-batches that the batch is cut into, one after the other; gradients, losses and metrics are
        averaged, statistics go from one to the next.
      ema: decay of the moving average of parameters; 0 if the state keeps none.
      seed: of the random numbers; those of a step are a function of the seed and of the attempts before.

    Returns:
      A function whose metrics are scalars: `loss` (unscaled), those of `loss_fn`, `grad_norm` (unscaled),
      `learning_rate`, `loss_scale` (that of this step), `skipped` (in all), `consecutive_skips`, and `finite` (1 or 0).

    Raises:
      UsageError: `accumulate` below 1, or `ema` outside [0, 1). The step raises it for a batch that does not divide
        into micro-batches, and where the state keeps a moving average and `ema` is 0, or the other way round.
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
            return stats, (grads, {"loss": loss, **metrics})

        if accumulate == 1:
            return one(state.stats, key, batch)
        return _averaged(one, state.stats, jax.random.split(key, accumulate), _micro_batches(batch, accumulate))

    @jax.jit(donate_argnums=0)
    def train_step(state: TrainState, batch):
        if bool(state.ema) != (ema > 0):
            has = "keeps a moving average" if state.ema else "keeps no moving average"
            raise UsageError(f"ema={ema}, and the state {has}: write create_state(..., ema={ema > 0})")
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
    """Runs `one` over micro-batches, handing on the statistics; gives those and the mean of its other results."""
    _, shapes = jax.eval_shape(one, stats, keys[0], jax.tree.map(lambda x: x[0], batches))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, widest(s.dtype, FLOAT32)), shapes)

    def body(carry, micro):
        stats, total = carry
        stats, out = one(stats, *micro)
        return (stats, jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, out)), None

    (stats, total), _ = jax.lax.scan(body, (stats, zeros), (keys, batches))
    return stats, jax.tree.map(lambda x: x / len(keys), total)


def _micro_batches(batch, count: int):
    """[B, ...] to [count, B / count, ...]; each takes every count-th example, so that no example changes device."""

    def cut(x):
        if x.shape[0] % count:
            raise UsageError(f"a batch of {x.shape[0]} examples does not divide into {count} micro-batches")
        return jnp.moveaxis(x.reshape(x.shape[0] // count, count, *x.shape[1:]), 1, 0)

    return jax.tree.map(cut, batch)


def _global_norm(grads, scale: jax.Array) -> jax.Array:
    """The norm of the unscaled gradients, summed in float32 (or wider): ten float16 values of 300 give 948.7."""

    def square_sum(g):
        g = g.astype(widest(g.dtype, FLOAT32))
        return jnp.sum(jnp.square(g / scale.astype(g.dtype)))

    return jnp.sqrt(sum(square_sum(g) for g in jax.tree.leaves(grads)))


def make_train_call(train_step: Callable, batch_of: Callable[[Any, Any], Any]) -> Callable:
    """The jit-compiled call `(state, fed, count) -> (state, metrics)` of `count` steps; it donates the state.

    Args:
      train_step: `(state, batch) -> (state, metrics)`.
      batch_of: `(fed, index) -> batch`: what step number `index` of the call, from 0, learns from.

    Returns:
      A function whose metrics are [count] for each of a step's; those of a single step are as the step gives them. The
      count is static: each one is a program of its own.
    """

    @jax.jit(donate_argnums=0, static_argnums=2)
    def train_call(state, fed, count: int):
        if count == 1:
            return train_step(state, batch_of(fed, 0))
        # A count that the compiler knows: the device then runs all steps without asking the host.
        return jax.lax.scan(lambda state, index: train_step(state, batch_of(fed, index)), state, jnp.arange(count))

    return train_call


def compile_calls(call: Callable, state: Any, feeds: Mapping[int, Any]) -> Callable:
    """`call` with its programs made now, and no other: a count that is not in `feeds` is a KeyError.

    Args:
      call: a jitted function `(state, fed, count)`.
      state: what it will be given, or its shapes and where it will be.
      feeds: the same of what is fed, by count.
    """
    programs = {count: call.lower(state, fed, count).compile() for count, fed in feeds.items()}
    return lambda state, fed, count: programs[count](state, fed)

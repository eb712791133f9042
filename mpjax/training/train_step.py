"""The training step, a pure function (state, batch) -> (state, metrics)."""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mpjax.errors import UsageError
from mpjax.precision.dtypes import FLOAT32, is_floating, widest
from mpjax.precision.float8.history import end_step, is_history
from mpjax.precision.gradient_norm import global_norm
from mpjax.precision.scale_state import loss_scale_state, where_finite
from mpjax.precision.scaled_loss import unscaled
from mpjax.precision.skip_step import optax_promotion
from mpjax.precision.updates import moved_by
from mpjax.training.batch_shards import batch_shards_of
from mpjax.training.gradients import gradients_of
from mpjax.training.layout import Layout
from mpjax.training.objective import Prepare, as_stored
from mpjax.training.state import Assembly, TrainState, uncast
from mpjax.training.xla_options import compiler_options as options_of_a_run
from mpjax.training.xla_options import jit_step


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
    """Packs scalars into one `Metrics`, cast to float32 (or a wider dtype of one); counters stay exact up to 2^24."""
    dtype = widest(FLOAT32, *(value.dtype for value in metrics.values() if is_floating(value)))
    return Metrics(jnp.stack([value.astype(dtype) for value in metrics.values()]), tuple(metrics))


_STEPS = 2**31


def step_key(seed: int, state: TrainState) -> jax.Array:
    """The random key of the next step, from the seed and the number of attempted steps."""
    # The offset keeps these keys distinct from the initial values, which nnx.Rngs draws from fold_in(key(seed), count).
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), _STEPS), state.attempts)


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
    compiler_options: Mapping[str, Any] | None = None,
) -> jax.stages.Wrapped:
    """Builds the jit-compiled training step `(state, batch) -> (state, metrics)`, which donates its input state.

    If the loss scaling of `tx` finds a gradient that is not finite, the step is skipped: parameters, statistics, the
    inner optimizer's state, the moving average and `state.step` keep their values, and only the loss scale and its
    counters change. `mpjax.no_loss_scaling` does not check, and skips no steps.

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
      compiler_options: options of XLA; None: those of `xla_options.compiler_options` for the mesh. Inside another
        `jax.jit`, they have no effect.

    Returns:
      A jitted function whose `metrics` are a `Metrics` of scalars: `loss` (unscaled), the metrics of `loss_fn`,
        `grad_norm` (unscaled, before clipping), `learning_rate` (if given), `loss_scale` (of this step), `skipped`
        (the number of skipped steps since the first one), `consecutive_skips`, and `finite` (1, or 0 if this step is
        skipped).

    Raises:
      UsageError: `accumulate` is below 1, `ema` is outside [0, 1), or an array is frozen or divided that a `Packed`
        structure cannot take. The step raises it if the batch does not divide into micro-batches, if only one of the
        state and `ema` has a moving average, if the state lacks a path of `frozen`, or if the state is not packed as
        the structure is.
    """
    if accumulate < 1:
        raise UsageError(f"accumulate: wanted at least 1 micro-batch, got {accumulate}")
    if not 0 <= ema < 1:
        raise UsageError(f"ema: wanted a decay from 0 up to, not including, 1, got {ema}")
    _require_own_arrays(structure.packed, frozen, layout.divided if layout else ())

    shards = batch_shards_of(layout)
    gradients = gradients_of(
        structure, loss_fn, shards, cast=cast, prepare=prepare, accumulate=accumulate, frozen=frozen
    )
    update = optax.with_extra_args_support(structure.optimizer(tx)).update  # some optimizers take the loss, as `value`

    def train_step(state: TrainState, batch):
        _require_average(state, ema)
        _require_paths(state, frozen)

        # Forward and backward; the gradients are still scaled.
        stats, contribution = gradients(state, step_key(seed, state), batch)
        stats |= {name: end_step(stats[name]) for name in filter(is_history, stats)}
        metrics = {name: mean.value for name, mean in contribution.means.items()}

        # The optimizer unscales the gradients. If one is not finite, its updates are -0.0 and its state stays.
        trained = {name: param for name, param in state.params.items() if name not in frozen}
        scale = loss_scale_state(state.opt_state).scale
        with shards.norms():
            updates, opt_state = update(contribution.grads, state.opt_state, trained, value=metrics["loss"])
            norm = global_norm(unscaled(contribution.grads, scale))
        with optax_promotion():
            moved: Any = moved_by(updates, trained)
        params = {**state.params, **moved}

        # A skipped step keeps statistics and averages too.
        scaling = loss_scale_state(opt_state)
        stats = {name: state.stats[name] if name in frozen else new for name, new in stats.items()}
        averages = {
            name: mean if name in frozen else ema * mean + (1 - ema) * params[name].astype(mean.dtype)
            for name, mean in state.ema.items()
        }
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
            ema=where_finite(opt_state, averages, state.ema),
        )
        return shards.constrain(new_state), pack(metrics)

    options = options_of_a_run(layout and layout.mesh) if compiler_options is None else compiler_options
    return jit_step(train_step, options)


def _require_own_arrays(packed: Collection[str], frozen: Collection[str], divided: Collection[str]) -> None:
    """Raises UsageError if arrays are packed, and an array is frozen or a packed one divided."""
    # Packed arrays are told by the paths of all arrays, which an optimizer does not get if one is frozen. A block that
    # gathers shares of its parameters would take a packed array, which is whole, for a share.
    shares = [name for name in packed if name in divided]
    if shares or (packed and frozen):
        reason = f"frozen: '{min(frozen)}' cannot be frozen" if frozen else f"layout: it divides '{shares[0]}'"
        raise UsageError(
            f"{reason} in a step of packed arrays; write the structure in place of Packed(structure, packing), with a "
            "state that is not packed"
        )


def _require_average(state: TrainState, ema: float) -> None:
    """Raises UsageError if only one of the state and `ema` has a moving average."""
    if bool(state.ema) != (ema > 0):
        has = "keeps a moving average" if state.ema else "keeps no moving average"
        raise UsageError(f"ema={ema}, but the state {has}: write create_state(..., ema={ema > 0})")


def _require_paths(state: TrainState, frozen: Collection[str]) -> None:
    """Raises UsageError if the state has no array at a path of `frozen`."""
    if missing := sorted(set(frozen) - set(state.params) - set(state.stats)):
        raise UsageError(
            f"frozen: the state has no parameter and no statistic '{missing[0]}'; wanted paths of state.params or "
            "state.stats"
        )

"""Differentiates a loss on one device, or on each device's share of a batch, and adds up what the shares give.

Collectives are written out, not left to the compiler, which would add gradients in the dtype of each operation: float16
under `mixed_float16`. Values that are not added up yet have a leading axis of shares; each device holds its own.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from mpjax.precision.dtypes import is_floating
from mpjax.precision.float8.history import is_history
from mpjax.precision.gradient_norm import added_together
from mpjax.precision.reduction import sum_in_buckets
from mpjax.precision.scaled_loss import scaled_value_and_grad
from mpjax.training.fsdp import gather_in_blocks, gathered, widened
from mpjax.training.layout import BATCH_AXES, DATA, TENSOR, Layout, over
from mpjax.training.memory_layout import row_major, row_major_before_casts
from mpjax.training.objective import Mean, value_of
from mpjax.training.state import Arrays


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Part:
    """What one micro-batch, or one device's share of it, adds to a step.

    Attributes:
      grads: gradients by path, still scaled.
      means: the loss and the metrics by name.
    """

    grads: Arrays
    means: Mapping[str, Mean]


class OneShare:
    """The whole batch at once. Where nothing is to be done, a method returns what it is given."""

    def spread(self, stats: Arrays) -> Arrays:
        """Returns statistics for each share."""
        return stats

    def add(self, array: jax.Array) -> jax.Array:
        """Returns the sum of a value over the shares, inside a function of one share."""
        return array

    def loss(self, loss: Any) -> jax.Array:
        """Returns what a loss, a scalar or a `Mean`, adds to the loss of the whole batch; this is differentiated."""
        return value_of(loss)

    def adapt(self, model: nnx.Module) -> None:
        """Makes a model, while it is traced, gather its parameters and average its statistics as the layout says."""

    def value_and_grad(self, loss_of: Callable, frozen: Collection[str] = ()) -> Callable:
        """Returns `(scaling, params, ...) -> ((loss, aux), grads)` of one share, for `loss_of(params, ...)`.

        Nothing is differentiated with respect to `frozen` parameters.
        """
        return _of_trained(loss_of, frozen)

    def on_each(self, run: Callable, frozen: Collection[str] = ()) -> Callable:
        """Returns `run(scaling, params, stats, key, batch) -> (stats, part)` as a function of the whole batch.

        The part has no gradients of `frozen` parameters.
        """
        del frozen
        return run

    def norms(self) -> contextlib.AbstractContextManager[None]:
        """Returns the context to trace the norms of gradients in."""
        return contextlib.nullcontext()

    def together(self, stats: Arrays, part: Part) -> tuple[Arrays, Part]:
        """Returns the statistics on which all devices agree, and the sums over the shares."""
        return stats, dataclasses.replace(part, grads={name: row_major(g) for name, g in part.grads.items()})

    def at_once(self, run: Callable, params: Arrays) -> Callable:
        """Returns `run(stats, key, batch) -> (stats, part)` of the only micro-batch of a step, put together."""
        # Programs without a convolution are not worth the second look.
        if not any(param.ndim == 4 for param in params.values()):
            return run
        return row_major_before_casts(run, lambda found: found[1].grads)

    def sums(self, run: Callable) -> Callable:
        """Returns `run(params, stats, batch) -> sums` as a function of the whole batch, of any size."""
        return run

    def rows(self, run: Callable) -> Callable:
        """Returns `run(params, stats, batch) -> values`, arrays [B, ...], as a function of the whole batch."""
        return run

    def settle(self, state: Any) -> Any:
        """Returns a training state with the sharding of its layout."""
        return state


class OneDevice(OneShare):
    """The whole batch on a device that is known to be the only one."""

    def norms(self) -> contextlib.AbstractContextManager[None]:
        """Returns the context in which one kernel finishes the sums of squares of all arrays."""
        return added_together()


@dataclasses.dataclass(frozen=True)
class ManyShares:
    """A share of the batch on each device, or on each group of devices that divide a model over `tensor`."""

    layout: Layout

    def spread(self, stats: Arrays) -> Arrays:
        """Returns the statistics with a leading axis of shares, each on its device."""
        own = NamedSharding(self.layout.mesh, PartitionSpec(BATCH_AXES))
        repeated = {name: jnp.broadcast_to(x, (self.layout.shares, *x.shape)) for name, x in stats.items()}
        return jax.lax.with_sharding_constraint(repeated, own)

    def add(self, array: jax.Array) -> jax.Array:
        """Returns the sum over the shares."""
        return jax.lax.psum(array, BATCH_AXES)

    def loss(self, loss: Any) -> jax.Array:
        """Returns the share's total divided by the weight of all shares; a scalar divided by their number."""
        # Not divided by the share's own weight: float16 gradients then have the magnitude that they have on one device.
        if not isinstance(loss, Mean):
            return loss / self.layout.shares
        weight = self.add(loss.weight)
        return loss.total / jnp.where(weight != 0, weight, 1)

    def adapt(self, model: nnx.Module) -> None:
        """Makes blocks gather their parameters, and batch norms average over the shares if the layout says so."""
        gather_in_blocks(model, self.layout)
        if self.layout.batch_norm == "global":
            for _, module in nnx.iter_modules(model):
                if isinstance(module, nnx.BatchNorm):
                    cast(Any, module).axis_name = BATCH_AXES

    def value_and_grad(self, loss_of: Callable, frozen: Collection[str] = ()) -> Callable:
        """Returns the value and gradient of a share; the gradients of gathered parameters are scattered again."""

        def value_and_grad(scaling, params, *args):
            def of_parts(parts, *args):
                return loss_of(gathered(self.layout, parts), *args)

            return _of_trained(of_parts, frozen)(scaling, widened(self.layout, params), *args)

        return value_and_grad

    def on_each(self, run: Callable, frozen: Collection[str] = ()) -> Callable:
        """Returns `run` on the share of each device; random numbers differ from share to share."""

        def on_share(scaling, params, stats, key, batch):
            key = jax.random.fold_in(key, jax.lax.axis_index(BATCH_AXES))
            stats, part = run(scaling, params, _first(stats), key, batch)
            return jax.tree.map(lambda x: x[None], (stats, part))

        def on_each(scaling, params, stats, key, batch):
            whole, share = PartitionSpec(), PartitionSpec(BATCH_AXES)
            given = whole, self._param_specs(params), share, whole, share
            trained = [name for name in params if name not in frozen]
            return self._mapped(on_share, given, (share, self._part_specs(trained, lead=True)))(
                scaling, params, stats, key, batch
            )

        return on_each

    def norms(self) -> contextlib.AbstractContextManager[None]:
        """Returns the context to trace the norms of gradients in."""
        return contextlib.nullcontext()

    def together(self, stats: Arrays, part: Part) -> tuple[Arrays, Part]:
        """Returns the mean statistics, and gradients added in the layout's `reduce_dtype`.

        Statistics that are not floating, such as counters, and histories of float8 scales are the largest of all
        devices'.
        """
        layout = self.layout

        def agree(name, x):
            mean = is_floating(x) and not is_history(name)
            return jax.lax.pmean(x, BATCH_AXES) if mean else jax.lax.pmax(x, BATCH_AXES)

        def add_up(stats, part):
            stats, part = _first(stats), _first(part)
            grads: Arrays = {}
            for axes in {self._unsummed(name): None for name in part.grads}:
                own = {name: g for name, g in part.grads.items() if self._unsummed(name) == axes}
                grads |= sum_in_buckets(own, layout.reduce_dtype, axes)
            stats = {name: agree(name, x) for name, x in stats.items()}
            return stats, Part(grads, jax.lax.psum(part.means, BATCH_AXES))

        given = PartitionSpec(BATCH_AXES), self._part_specs(part.grads, lead=True)
        found = PartitionSpec(), self._part_specs(part.grads, lead=False)
        return self._mapped(add_up, given, found, axes=layout.mesh.axis_names)(stats, part)

    def at_once(self, run: Callable, params: Arrays) -> Callable:
        """Returns `run(stats, key, batch) -> (stats, part)` of the only micro-batch of a step, put together."""
        del params
        return lambda *given: self.together(*run(*given))

    def sums(self, run: Callable) -> Callable:
        """Returns `run` on the share of each device, added up; a batch that does not divide runs whole on each."""

        def add_up(found: Any, divides: bool) -> Any:
            return jax.lax.psum(found, BATCH_AXES) if divides else found

        return self._on_rows(run, add_up, lambda rows: PartitionSpec())

    def rows(self, run: Callable) -> Callable:
        """Returns `run` on the share of each device; a batch that does not divide runs whole on each."""
        return self._on_rows(run, lambda found, divides: found, lambda rows: rows)

    def _on_rows(self, run: Callable, finish: Callable, out_specs: Callable) -> Callable:
        def on_rows(params, stats, batch):
            divides = all(self.layout.divides(x.shape[0]) for x in jax.tree.leaves(batch))

            def on_share(params, stats, batch):
                return finish(run(gathered(self.layout, params), stats, batch), divides)

            rows = PartitionSpec(BATCH_AXES) if divides else PartitionSpec()
            given = self._param_specs(params), PartitionSpec(), rows
            return self._mapped(on_share, given, out_specs(rows))(params, stats, batch)

        return on_rows

    def _param_specs(self, names) -> dict[str, PartitionSpec]:
        return {name: self.layout.spec(name) for name in names}

    def _part_specs(self, names, *, lead: bool) -> Any:
        """Returns the specs of a `Part`; with `lead`, those of values not yet added up."""

        def of_gradient(name: str) -> PartitionSpec:
            own = self.layout.spec(name)
            if not lead:
                return own
            return PartitionSpec(self._unsummed(name), *own)

        grads: Any = {name: of_gradient(name) for name in names}
        means: Any = PartitionSpec(BATCH_AXES) if lead else PartitionSpec()
        return Part(grads, means)

    def _unsummed(self, name: str) -> tuple[str, ...]:
        """Returns the axes over which the gradient of a share is still to be added up."""
        return BATCH_AXES if self.layout.fsdp_axis(name) is None else (DATA,)

    def _mapped(self, function: Callable, in_specs: Any, out_specs: Any, axes: Sequence[str] = ()) -> Callable:
        """Returns a function that runs on each device; what `tensor` divides is left to the compiler by default."""
        mesh = self.layout.mesh
        # With nothing to divide over `tensor`, the program of a device has nothing left for the compiler to divide.
        axes = axes or (BATCH_AXES if mesh.shape[TENSOR] > 1 else mesh.axis_names)
        only = functools.partial(over, axes)
        in_specs, out_specs = (jax.tree.map(only, specs, is_leaf=_is_spec) for specs in (in_specs, out_specs))
        # JAX does not check which values are replicated: a user's loop may begin with values that no device changed.
        return jax.shard_map(
            function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(axes), check_vma=False
        )

    def settle(self, state: Any) -> Any:
        """Returns the state with parameters, moments, masters and EMA divided as the layout says."""
        return jax.lax.with_sharding_constraint(state, self.layout.state(state))


Shares = OneShare | ManyShares
"""The shares that a batch is divided into: both have the same methods."""


def shares_of(layout: Layout | None) -> Shares:
    """Returns the shares of a layout; with one device, or without a layout, there is one."""
    if layout is None:
        return OneShare()
    return OneDevice() if layout.mesh.size == 1 else ManyShares(layout)


def _of_trained(loss_of: Callable, frozen: Collection[str]) -> Callable:
    """Returns the scaled value and gradient of `loss_of(params, ...)`, with respect to all but `frozen` parameters."""
    if not frozen:
        return scaled_value_and_grad(loss_of, has_aux=True)

    def value_and_grad(scaling, params, *args):
        fixed = {name: param for name, param in params.items() if name in frozen}
        trained = {name: param for name, param in params.items() if name not in frozen}

        def of_trained(trained, fixed, *args):
            return loss_of({**fixed, **trained}, *args)

        return scaled_value_and_grad(of_trained, has_aux=True)(scaling, trained, fixed, *args)

    return value_and_grad


def _first(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[0], tree)


def _is_spec(node: Any) -> bool:
    return isinstance(node, PartitionSpec)

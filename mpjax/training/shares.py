"""Differentiates a loss on one device, or on each device's share of a batch, and sums over the shares.

Collectives are explicit. The compiler would add gradients in the dtype of each operation: float16 under
`mixed_float16`. Values before the sum have a leading axis of shares; each device holds its own.
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

from mpjax.mesh_axes import BATCH_AXES, DATA, TENSOR
from mpjax.precision.dtypes import is_floating
from mpjax.precision.float8.history import is_history
from mpjax.precision.gradient_norm import added_together
from mpjax.precision.reduction import sum_in_buckets
from mpjax.precision.scaled_loss import scaled_value_and_grad
from mpjax.training.fsdp import gather_in_blocks, gathered, widened
from mpjax.training.layout import Layout, over
from mpjax.training.memory_layout import row_major, row_major_before_casts
from mpjax.training.objective import Mean, value_of
from mpjax.training.state import Arrays


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Contribution:
    """The contribution of one micro-batch, or of one device's share of it, to a step.

    Attributes:
      grads: gradients by path, still scaled.
      means: the loss and the metrics by name.
    """

    grads: Arrays
    means: Mapping[str, Mean]


class Shares:
    """One share of a batch, all of it; the base of `ManyShares`. Methods without work to do return their argument."""

    def spread(self, stats: Arrays) -> Arrays:
        """Adds the axis of shares to statistics; unchanged for one share."""
        return stats

    def add(self, array: jax.Array) -> jax.Array:
        """Returns the value itself: the sum over one share."""
        return array

    def loss(self, loss: Any) -> jax.Array:
        """The share's term of the loss of the whole batch, from a scalar or a `Mean`; this term is differentiated."""
        return value_of(loss)

    def adapt(self, model: nnx.Module) -> None:
        """Does nothing: a model on one share needs no gathers and no averages of statistics."""

    def value_and_grad(self, loss_of: Callable, frozen: Collection[str] = ()) -> Callable:
        """Builds `(scaling, params, ...) -> ((loss, aux), grads)` of one share, for `loss_of(params, ...)`.

        The loss is unscaled, the gradients are scaled. `frozen` parameters have no gradients.
        """
        return _of_trained(loss_of, frozen)

    def on_each(self, run: Callable, frozen: Collection[str] = ()) -> Callable:
        """Returns `run(scaling, params, stats, key, batch) -> (stats, part)` itself: the batch is one share.

        `frozen` is ignored: the part that `run` returns has no gradients of these parameters.
        """
        del frozen
        return run

    def norms(self) -> contextlib.AbstractContextManager[None]:
        """Context in which gradient norms are traced; it changes nothing here."""
        return contextlib.nullcontext()

    def together(self, stats: Arrays, part: Contribution) -> tuple[Arrays, Contribution]:
        """Combines statistics and sums parts over the shares; for one share, lays gradients out by `row_major`."""
        return stats, dataclasses.replace(part, grads={name: row_major(g) for name, g in part.grads.items()})

    def at_once(self, run: Callable, params: Arrays) -> Callable:
        """Wraps `run(stats, key, batch) -> (stats, part)` of a step's only micro-batch to do what `together` does."""
        # A program without a convolution has no gradient to lay out.
        if not any(param.ndim == 4 for param in params.values()):
            return run
        return row_major_before_casts(run, lambda result: result[1].grads)

    def sums(self, run: Callable) -> Callable:
        """Returns `run(params, stats, batch) -> sums` itself, for a whole batch of any size."""
        return run

    def rows(self, run: Callable) -> Callable:
        """Returns `run(params, stats, batch) -> values`, arrays [B, ...], itself, for a whole batch."""
        return run

    def settle(self, state: Any) -> Any:
        """Returns a training state unchanged: one share is not divided."""
        return state


class OneDevice(Shares):
    """The whole batch on the only device of a layout."""

    def norms(self) -> contextlib.AbstractContextManager[None]:
        """Context in which gradient norms are traced: one kernel finishes the sums of squares of all arrays."""
        return added_together()


@dataclasses.dataclass(frozen=True)
class ManyShares(Shares):
    """One share of the batch per device, or per group of devices that divide a model over `tensor`."""

    layout: Layout

    def spread(self, stats: Arrays) -> Arrays:
        """Repeats statistics along a leading axis of shares, each on its device."""
        sharding = NamedSharding(self.layout.mesh, PartitionSpec(BATCH_AXES))
        repeated = {name: jnp.broadcast_to(x, (self.layout.shares, *x.shape)) for name, x in stats.items()}
        return jax.lax.with_sharding_constraint(repeated, sharding)

    def add(self, array: jax.Array) -> jax.Array:
        """Sums a value over the shares, inside a function of one share."""
        return jax.lax.psum(array, BATCH_AXES)

    def loss(self, loss: Any) -> jax.Array:
        """The share's term of the loss: its total divided by the weight of all shares, or a scalar by their number."""
        # Not divided by the share's own weight, so that float16 gradients have the same magnitude as on one device.
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
        """Builds `(scaling, params, ...) -> ((loss, aux), grads)` of this device's share.

        `params` are the device's parts of the parameters, and so are `grads`. The loss is unscaled, the
        gradients are scaled. Gradients of parameters that are divided over `fsdp` are already summed over it. `frozen`
        parameters have no gradients.
        """

        def value_and_grad(scaling, params, *args):
            def of_parts(parts, *args):
                return loss_of(gathered(self.layout, parts), *args)

            return _of_trained(of_parts, frozen)(scaling, widened(self.layout, params), *args)

        return value_and_grad

    def on_each(self, run: Callable, frozen: Collection[str] = ()) -> Callable:
        """Maps `run` over the shares, one on each device; random numbers differ from share to share.

        Statistics have a leading axis of shares, and the part gets one, over which `together` sums.
        """

        def on_share(scaling, params, stats, key, batch):
            key = jax.random.fold_in(key, jax.lax.axis_index(BATCH_AXES))
            stats, contribution = run(scaling, params, _first(stats), key, batch)
            return jax.tree.map(lambda x: x[None], (stats, contribution))

        def on_each(scaling, params, stats, key, batch):
            whole, share = PartitionSpec(), PartitionSpec(BATCH_AXES)
            in_specs = whole, self._param_specs(params), share, whole, share
            trained = [name for name in params if name not in frozen]
            return self._mapped(on_share, in_specs, (share, self._part_specs(trained, lead=True)))(
                scaling, params, stats, key, batch
            )

        return on_each

    def together(self, stats: Arrays, part: Contribution) -> tuple[Arrays, Contribution]:
        """Averages statistics over the shares, and sums gradients (in the layout's `reduce_dtype`), loss and metrics.

        Statistics that are not floating, such as counters, and histories of float8 scales take the maximum over all
        devices.
        """
        layout = self.layout

        def agree(name, x):
            mean = is_floating(x) and not is_history(name)
            return jax.lax.pmean(x, BATCH_AXES) if mean else jax.lax.pmax(x, BATCH_AXES)

        def add_up(stats, contribution):
            stats, contribution = _first(stats), _first(contribution)
            grads: Arrays = {}
            for axes in {self._unsummed(name): None for name in contribution.grads}:
                group = {name: g for name, g in contribution.grads.items() if self._unsummed(name) == axes}
                grads |= sum_in_buckets(group, layout.reduce_dtype, axes)
            stats = {name: agree(name, x) for name, x in stats.items()}
            return stats, Contribution(grads, jax.lax.psum(contribution.means, BATCH_AXES))

        in_specs = PartitionSpec(BATCH_AXES), self._part_specs(part.grads, lead=True)
        out_specs = PartitionSpec(), self._part_specs(part.grads, lead=False)
        return self._mapped(add_up, in_specs, out_specs, axes=layout.mesh.axis_names)(stats, part)

    def at_once(self, run: Callable, params: Arrays) -> Callable:
        """Wraps `run(stats, key, batch) -> (stats, part)` of a step's only micro-batch to do what `together` does."""
        del params
        return lambda *inputs: self.together(*run(*inputs))

    def sums(self, run: Callable) -> Callable:
        """Maps `run` over the shares, one on each device, and adds up the sums.

        A batch that does not divide runs whole on each device, and nothing is added.
        """

        def add_up(sums: Any, divides: bool) -> Any:
            return jax.lax.psum(sums, BATCH_AXES) if divides else sums

        return self._on_rows(run, add_up, lambda rows: PartitionSpec())

    def rows(self, run: Callable) -> Callable:
        """Maps `run` over the shares, one on each device; a batch that does not divide runs whole on each."""
        return self._on_rows(run, lambda values, divides: values, lambda rows: rows)

    def _on_rows(self, run: Callable, finish: Callable, out_specs: Callable) -> Callable:
        def on_rows(params, stats, batch):
            divides = all(self.layout.divides(x.shape[0]) for x in jax.tree.leaves(batch))

            def on_share(params, stats, batch):
                return finish(run(gathered(self.layout, params), stats, batch), divides)

            rows = PartitionSpec(BATCH_AXES) if divides else PartitionSpec()
            in_specs = self._param_specs(params), PartitionSpec(), rows
            return self._mapped(on_share, in_specs, out_specs(rows))(params, stats, batch)

        return on_rows

    def _param_specs(self, names) -> dict[str, PartitionSpec]:
        return {name: self.layout.spec(name) for name in names}

    def _part_specs(self, names, *, lead: bool) -> Any:
        """The partition specs of a `Contribution` with the gradients `names`; with `lead`, of one not yet summed."""

        def of_gradient(name: str) -> PartitionSpec:
            spec = self.layout.spec(name)
            if not lead:
                return spec
            return PartitionSpec(self._unsummed(name), *spec)

        grads: Any = {name: of_gradient(name) for name in names}
        means: Any = PartitionSpec(BATCH_AXES) if lead else PartitionSpec()
        return Contribution(grads, means)

    def _unsummed(self, name: str) -> tuple[str, ...]:
        """The axes over which the gradient of a share is still to be summed."""
        return BATCH_AXES if self.layout.fsdp_axis(name) is None else (DATA,)

    def _mapped(self, function: Callable, in_specs: Any, out_specs: Any, axes: Sequence[str] = ()) -> Callable:
        """Wraps a function to run on each device, on its parts of the arrays.

        By default the compiler divides the arrays over `tensor`; `axes` are the mesh axes over which the
        function gets parts.
        """
        mesh = self.layout.mesh
        # Without a division over `tensor`, the program of a device leaves nothing for the compiler to divide.
        axes = axes or (BATCH_AXES if mesh.shape[TENSOR] > 1 else mesh.axis_names)
        only = functools.partial(over, axes)
        in_specs, out_specs = (jax.tree.map(only, specs, is_leaf=_is_spec) for specs in (in_specs, out_specs))
        # No check of replicated values: a user's loop may begin with values that no device changed.
        return jax.shard_map(
            function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(axes), check_vma=False
        )

    def settle(self, state: Any) -> Any:
        """Divides parameters, moments, masters and EMA of a state by the layout."""
        return jax.lax.with_sharding_constraint(state, self.layout.state(state))


def shares_of(layout: Layout | None) -> Shares:
    """Chooses the shares of a layout; one share for one device or without a layout."""
    if layout is None:
        return Shares()
    return OneDevice() if layout.mesh.size == 1 else ManyShares(layout)


def _of_trained(loss_of: Callable, frozen: Collection[str]) -> Callable:
    """Builds `(scaling, params, ...) -> ((loss, aux), grads)` for `loss_of(params, ...) -> (loss, aux)`.

    The loss is unscaled, the gradients are scaled. `frozen` parameters have no gradients.
    """
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

"""Differentiates a loss on one device, or on each device's shard of a batch, and sums over the shards.

A shard is the examples of a batch, or a part of their positions, that one device computes, or one group of devices that
divide a model over `tensor`.
Collectives are explicit. The compiler would add gradients in the dtype of each operation: float16 under
`mixed_float16`. Values before the sum have a leading axis of shards; each device holds its own.
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

from mpjax.mesh_axes import BATCH_AXES, CONTEXT, LOSS_AXES, TENSOR
from mpjax.precision.dtypes import is_floating
from mpjax.precision.float8.history import is_history
from mpjax.precision.gradient_norm import added_together
from mpjax.precision.reduction import sum_in_buckets
from mpjax.precision.scaled_loss import scaled_value_and_grad
from mpjax.training.fsdp import gather_in_blocks, gathered, in_reduce_dtype
from mpjax.training.layout import Layout, over
from mpjax.training.memory_layout import row_major, row_major_before_casts
from mpjax.training.objective import Mean, value_of
from mpjax.training.state import Arrays


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Contribution:
    """What one micro-batch, or one device's examples of it, adds to a training step: gradients, loss and metrics.

    Attributes:
      grads: gradients by path, still multiplied by the loss scale.
      means: totals and weights of the loss (`loss`) and of the metrics, by name.
    """

    grads: Arrays
    means: Mapping[str, Mean]


class BatchShards:
    """Runs functions on the whole batch at once, without collectives; `ManyBatchShards` divides the batch over devices.

    Methods that have nothing to do here return their argument.
    """

    def spread(self, stats: Arrays) -> Arrays:
        """Returns the statistics unchanged; `ManyBatchShards` adds a leading axis with one copy for each shard."""
        return stats

    def add(self, array: jax.Array) -> jax.Array:
        """Returns `array` itself; `ManyBatchShards` sums it over the devices."""
        return array

    def loss(self, loss: Any) -> jax.Array:
        """The scalar to differentiate: the loss itself, or the value of a `Mean`."""
        return value_of(loss)

    def adapt(self, model: nnx.Module) -> None:
        """Does nothing: a model on one device needs no gathers of parameters and no averages of batch statistics."""

    def value_and_grad(self, loss_of: Callable, frozen: Collection[str] = ()) -> Callable:
        """Builds `(scaling, params, ...) -> ((loss, aux), grads)` for `loss_of(params, ...) -> (loss, aux)`.

        `scaling` is the state of the loss scale. The loss is unscaled; the gradients are multiplied by the loss scale.
        Parameters at the paths in `frozen` have no gradients.
        """
        return _of_trained(loss_of, frozen)

    def on_each(self, function: Callable, frozen: Collection[str] = ()) -> Callable:
        """Returns `function(scaling, params, stats, key, batch) -> (stats, contribution)` itself, for the whole batch.

        `frozen` is ignored: the contribution that `function` returns has no gradients of these parameters.
        """
        del frozen
        return function

    def norms(self) -> contextlib.AbstractContextManager[None]:
        """Context in which gradient norms are traced; it changes nothing here."""
        return contextlib.nullcontext()

    def together(self, stats: Arrays, contribution: Contribution) -> tuple[Arrays, Contribution]:
        """Returns the statistics and the contribution with its gradients laid out in memory by `row_major`.

        `ManyBatchShards` averages and sums them over the devices.
        """
        return stats, dataclasses.replace(
            contribution, grads={name: row_major(g) for name, g in contribution.grads.items()}
        )

    def at_once(self, function: Callable, params: Arrays) -> Callable:
        """Wraps `function(stats, key, batch) -> (stats, contribution)` to apply `together`, for one micro-batch.

        Returns `function` itself if no parameter has four axes.
        """
        # A program without a convolution has no gradient to lay out.
        if not any(param.ndim == 4 for param in params.values()):
            return function
        return row_major_before_casts(function, lambda result: result[1].grads)

    def sums(self, function: Callable) -> Callable:
        """Returns `function(params, stats, batch) -> sums` itself, for a whole batch of any size."""
        return function

    def per_example(self, function: Callable) -> Callable:
        """Returns `function(params, stats, batch) -> values`, arrays [B, ...], itself, for a whole batch."""
        return function

    def constrain(self, state: Any) -> Any:
        """Returns a training state unchanged: on one device nothing is divided."""
        return state


class OneDevice(BatchShards):
    """Runs functions on the whole batch, on the only device of a layout; differs from its base in `norms` alone."""

    def norms(self) -> contextlib.AbstractContextManager[None]:
        """Context in which gradient norms are traced, so that one kernel finishes the sums of squares of all arrays."""
        return added_together()


@dataclasses.dataclass(frozen=True)
class ManyBatchShards(BatchShards):
    """Divides the batch over the axes `data`, `fsdp` and `context` of a mesh, and adds up by explicit collectives.

    A shard is the examples of one device, or a part of their positions, or those of one group of devices that divide a
    model over `tensor`.
    """

    layout: Layout

    def spread(self, stats: Arrays) -> Arrays:
        """Adds a leading axis with a copy of the statistics for each shard; each device holds the copy of its shard."""
        sharding = NamedSharding(self.layout.mesh, PartitionSpec(LOSS_AXES))
        repeated = {name: jnp.broadcast_to(x, (self.layout.terms, *x.shape)) for name, x in stats.items()}
        return jax.lax.with_sharding_constraint(repeated, sharding)

    def add(self, array: jax.Array) -> jax.Array:
        """Sums a value over the shards by `jax.lax.psum`; call it only inside a function that runs on each device."""
        return jax.lax.psum(array, LOSS_AXES)

    def loss(self, loss: Any) -> jax.Array:
        """Computes this device's term of the loss of the whole batch; the terms of all shards add up to that loss.

        A scalar is divided by the number of shards. The total of a `Mean` is divided by the sum of its weights over all
        shards (by 1 if the sum is 0).
        """
        # Not divided by the shard's own weight, so that float16 gradients have the same magnitude as on one device.
        if not isinstance(loss, Mean):
            return loss / self.layout.terms
        weight = self.add(loss.weight)
        return loss.total / jnp.where(weight != 0, weight, 1)

    def adapt(self, model: nnx.Module) -> None:
        """Makes blocks gather their parameters when they are called, in place, as `gather_in_blocks` does.

        With the layout's `sequence`, they also divide positions, as `divide_sequence` does; with its `context`, the
        whole model does, as `divide_positions` does. If its `batch_norm` is "global", batch norms also average mean and
        variance over all shards.
        """
        gather_in_blocks(model, self.layout)
        if self.layout.sequence:
            from mpjax.training.sequence import divide_sequence  # local, because few runs divide positions

            divide_sequence(model, self.layout)
        if self.layout.context:
            from mpjax.models.context import divide_positions  # local, as above

            divide_positions(model, CONTEXT, self.layout.mesh.shape[CONTEXT])
        if self.layout.batch_norm == "global":
            for _, module in nnx.iter_modules(model):
                if isinstance(module, nnx.BatchNorm):
                    cast(Any, module).axis_name = BATCH_AXES

    def value_and_grad(self, loss_of: Callable, frozen: Collection[str] = ()) -> Callable:
        """Builds `(scaling, params, ...) -> ((loss, aux), grads)` of this device's examples.

        `params` and `grads` hold this device's shards; `loss_of` gets whole parameters, except those that a block
        gathers itself. The loss is unscaled; the gradients are multiplied by the loss scale. Gradients of parameters
        that are gathered are already summed over the axes of the gather. Parameters at the paths in `frozen` have no
        gradients.
        """

        def value_and_grad(scaling, params, *args):
            def of_shards(shards, *args):
                return loss_of(gathered(self.layout, shards), *args)

            return _of_trained(of_shards, frozen)(scaling, in_reduce_dtype(self.layout, params), *args)

        return value_and_grad

    def on_each(self, function: Callable, frozen: Collection[str] = ()) -> Callable:
        """Wraps `function(scaling, params, stats, key, batch) -> (stats, contribution)` to run on each shard.

        The wrapper takes the whole batch, and statistics with a leading axis of shards (`spread`). Its results have
        this axis too; `together` reduces it. Each shard gets its own random key. Parameters at the paths in `frozen`
        have no gradients.
        """

        def on_shard(scaling, params, stats, key, batch):
            key = jax.random.fold_in(key, jax.lax.axis_index(LOSS_AXES))
            stats, contribution = function(scaling, params, _first(stats), key, batch)
            return jax.tree.map(lambda x: x[None], (stats, contribution))

        def on_each(scaling, params, stats, key, batch):
            whole, sharded = PartitionSpec(), PartitionSpec(LOSS_AXES)
            in_specs = whole, self._param_specs(params), sharded, whole, PartitionSpec(BATCH_AXES)
            trained = [name for name in params if name not in frozen]
            return self._mapped(on_shard, in_specs, (sharded, self._contribution_specs(trained, lead=True)))(
                scaling, params, stats, key, batch
            )

        return on_each

    def together(self, stats: Arrays, contribution: Contribution) -> tuple[Arrays, Contribution]:
        """Averages statistics over the shards, and sums gradients (in the layout's `reduce_dtype`), loss and metrics.

        Of statistics that are not floating, such as counters, of fixed ones, whose mean would be rounded, and of
        histories of float8 scales, it takes the maximum over the shards. Arguments have a leading axis of shards (see
        `on_each`), results do not. Gradients of divided parameters stay divided.
        """
        layout = self.layout

        def agree(name, x):
            mean = is_floating(x) and not is_history(name) and name not in layout.fixed
            return jax.lax.pmean(x, LOSS_AXES) if mean else jax.lax.pmax(x, LOSS_AXES)

        def add_up(stats, contribution):
            stats, contribution = _first(stats), _first(contribution)
            grads: Arrays = {}
            for axes in {self._unsummed(name): None for name in contribution.grads}:
                group = {name: g for name, g in contribution.grads.items() if self._unsummed(name) == axes}
                grads |= sum_in_buckets(group, layout.reduce_dtype, axes)
            stats = {name: agree(name, x) for name, x in stats.items()}
            return stats, Contribution(grads, jax.lax.psum(contribution.means, LOSS_AXES))

        in_specs = PartitionSpec(LOSS_AXES), self._contribution_specs(contribution.grads, lead=True)
        out_specs = PartitionSpec(), self._contribution_specs(contribution.grads, lead=False)
        return self._mapped(add_up, in_specs, out_specs, axes=layout.mesh.axis_names)(stats, contribution)

    def at_once(self, function: Callable, params: Arrays) -> Callable:
        """Wraps `function(stats, key, batch) -> (stats, contribution)` to apply `together`, for one micro-batch."""
        del params
        return lambda *inputs: self.together(*function(*inputs))

    def sums(self, function: Callable) -> Callable:
        """Wraps `function(params, stats, batch) -> sums` to run on each device's examples, and adds up the sums.

        `function` gets whole parameters, but those that a block gathers itself. If the batch does not divide evenly,
        each device computes the whole batch. Sums of parts of the positions are added in any case.
        """

        def add_up(sums: Any, divides: bool) -> Any:
            axes = (*(BATCH_AXES if divides else ()), *((CONTEXT,) if self.layout.context else ()))
            return jax.lax.psum(sums, axes) if axes else sums

        return self._on_examples(function, add_up, lambda spec: PartitionSpec())

    def per_example(self, function: Callable) -> Callable:
        """Wraps `function(params, stats, batch) -> values`, arrays [B, ...], to run on each device's examples.

        The values stay divided among the devices, in the order of the batch. If the batch does not divide evenly, each
        device computes the whole batch.
        """
        return self._on_examples(function, lambda values, divides: values, lambda spec: spec)

    def _on_examples(self, function: Callable, finish: Callable, out_specs: Callable) -> Callable:
        def on_examples(params, stats, batch):
            divides = all(self.layout.divides(x.shape[0]) for x in jax.tree.leaves(batch))

            def on_shard(params, stats, batch):
                return finish(function(gathered(self.layout, params), stats, batch), divides)

            spec = PartitionSpec(BATCH_AXES) if divides else PartitionSpec()
            in_specs = self._param_specs(params), PartitionSpec(), spec
            return self._mapped(on_shard, in_specs, out_specs(spec))(params, stats, batch)

        return on_examples

    def _param_specs(self, names) -> dict[str, PartitionSpec]:
        return {name: self.layout.spec(name) for name in names}

    def _contribution_specs(self, names, *, lead: bool) -> Any:
        """The partition specs of a `Contribution` with the gradients `names`; with `lead`, not yet summed."""

        def of_gradient(name: str) -> PartitionSpec:
            spec = self.layout.spec(name)
            if not lead:
                return spec
            return PartitionSpec(self._unsummed(name), *spec)

        grads: Any = {name: of_gradient(name) for name in names}
        means: Any = PartitionSpec(LOSS_AXES) if lead else PartitionSpec()
        return Contribution(grads, means)

    def _unsummed(self, name: str) -> tuple[str, ...]:
        """The mesh axes over which the gradient of the parameter at `name` is still to be summed.

        The backward pass of a parameter that is gathered has already summed its gradient over the axes of the gather.
        """
        summed = self.layout.gathered_over(name)
        return tuple(axis for axis in LOSS_AXES if axis not in summed)

    def _mapped(self, function: Callable, in_specs: Any, out_specs: Any, axes: Sequence[str] = ()) -> Callable:
        """Wraps a function by `jax.shard_map`, to run on each device on its shards of the arrays.

        `axes` are the mesh axes that are manual inside the function; the compiler divides the arrays over the others.
        By default all axes are manual, except a `tensor` axis of more than one device.
        """
        mesh = self.layout.mesh
        # Without a division over `tensor`, the program of a device leaves nothing for the compiler to divide.
        axes = axes or (LOSS_AXES if mesh.shape[TENSOR] > 1 else mesh.axis_names)
        only = functools.partial(over, axes)
        in_specs, out_specs = (jax.tree.map(only, specs, is_leaf=_is_spec) for specs in (in_specs, out_specs))
        # No check of replicated values: a user's loop may begin with values that no device changed.
        return jax.shard_map(
            function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(axes), check_vma=False
        )

    def constrain(self, state: Any) -> Any:
        """Constrains the arrays of a training state to the shardings of `Layout.state`; call it inside `jax.jit`."""
        return jax.lax.with_sharding_constraint(state, self.layout.state(state))


def batch_shards_of(layout: Layout | None) -> BatchShards:
    """How a batch is computed: `BatchShards` without a layout, `OneDevice` on a mesh of one, else `ManyBatchShards`."""
    if layout is None:
        return BatchShards()
    return OneDevice() if layout.mesh.size == 1 else ManyBatchShards(layout)


def _of_trained(loss_of: Callable, frozen: Collection[str]) -> Callable:
    """Builds `(scaling, params, ...) -> ((loss, aux), grads)` for `loss_of(params, ...) -> (loss, aux)`.

    The loss is unscaled; the gradients are multiplied by the loss scale. Parameters at the paths in `frozen` have no
    gradients.
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

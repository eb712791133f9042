"""Divides the values between the blocks of a Transformer along the sequence, over the mesh axis `tensor`.

Norms and residual sums then take a share of the positions on each device, and a block's input, which the backward pass
keeps, is a share too. The sum after a layer divided by rows becomes a sum of shares, and each share is gathered before
the next layer divided by columns: the same bytes (Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models", 2022, arXiv:2205.05198, section 4.2). The compiler places both; values do not change.
"""

import dataclasses
from typing import Any, ClassVar

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from mpjax.errors import UsageError
from mpjax.mesh_axes import TENSOR
from mpjax.models.remat import blocks_of
from mpjax.precision.calls import wrap
from mpjax.training.layout import Layout


def divide_sequence(model: nnx.Module, layout: Layout) -> None:
    """Makes the blocks that are divided over `tensor` take and return values divided along the sequence, in place.

    Does nothing unless `layout.sequence` is set. Blocks have to be called inside `jax.shard_map`, with `tensor` left to
    the compiler.
    """
    if not layout.sequence:
        return
    divided = [name for name, spec in layout.divided.items() if TENSOR in spec]
    for path, block in blocks_of(model).items():
        if any(name.startswith(f"{path}/") for name in divided):
            wrap(block, DividesSequence(layout.mesh.shape[TENSOR]))


@dataclasses.dataclass(frozen=True)
class DividesSequence:
    """A wrapper that divides the first argument and the result of a block, [B, T, D], along T over `tensor`."""

    parts: int
    depth: ClassVar[int] = -1  # outside of rematerialisation, which keeps the divided input

    def __call__(self, call, module, x, *args, **kwargs):
        """Calls the block.

        Raises:
          UsageError: the positions do not divide among the devices.
        """
        return self._divided(call(module, self._divided(x), *args, **kwargs))

    def _divided(self, x: Any) -> Any:
        if x.ndim != 3 or x.shape[1] % self.parts:
            raise UsageError(
                f"--mesh.sequence divides positions among {self.parts} devices, and a block has an input "
                f"{list(x.shape)}: wanted [examples, positions, features] with a multiple of {self.parts} positions; "
                "write --mesh.no_sequence, or another length"
            )
        free = PartitionSpec.UNCONSTRAINED
        sharding = NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec(free, TENSOR, free))
        return jax.lax.with_sharding_constraint(x, sharding)

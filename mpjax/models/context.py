"""Divides the positions of texts over an axis of a mesh, inside a language model, for texts too long for one device.

Each device computes neighbouring positions of all texts, alone, up to attention. There, devices exchange positions for
heads, and back: each attends with all positions of its share of the heads (Jacobs et al., "DeepSpeed Ulysses", 2023,
arXiv:2309.14509). So masks, windows, documents and kernels of attention are those of whole texts, all devices have
equal work, and no value or gradient is a sum over devices.

Shapes: B batch, T positions of a device, S of the whole texts, N heads, K key and value heads, H features per head.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from mpjax.errors import UsageError
from mpjax.mesh_axes import TENSOR
from mpjax.models.attention import Attend, attend
from mpjax.models.transformer import WholeTexts
from mpjax.precision.dtypes import FLOAT32, widest


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class PartsOfTexts(WholeTexts):
    """What a language model holds as `context` while a mesh divides positions; call it inside `jax.shard_map`.

    Attributes:
      axis: the name of the mesh axis.
      parts: its size.
    """

    axis: str
    parts: int

    def places(self, length: int) -> Int[Array, " T"]:
        """The positions of a device's `length` tokens in their texts, int32."""
        return jnp.arange(length, dtype=jnp.int32) + self._first(length)

    def rows(self, table: Float[Array, "L D"], length: int) -> Float[Array, "T D"]:
        """The rows of a table of positions that belong to a device's `length` tokens."""
        return jax.lax.dynamic_slice_in_dim(table, self._first(length), length)

    def own(self, whole: jax.Array) -> jax.Array:
        """Takes a device's positions out of an array [B, S, ...] of whole texts.

        Raises:
          UsageError: the number of positions does not divide among the devices.
        """
        if whole.shape[1] % self.parts:
            raise UsageError(
                f"--mesh.{self.axis} {self.parts} does not divide the {whole.shape[1]} positions of a text: take a "
                f"multiple of {self.parts} as --data.length"
            )
        length = whole.shape[1] // self.parts
        return jax.lax.dynamic_slice_in_dim(whole, self._first(length), length, axis=1)

    def whole(self, tokens: Int[Array, "B T"]) -> Int[Array, "B S"]:
        """Gathers the tokens of whole texts."""
        return jax.lax.all_gather(tokens, self.axis, axis=1, tiled=True)

    def attend(self, attends: Attend | None) -> Attend:
        """Makes the function of attention for a device's positions, which calls `attends` with whole texts."""
        # A pytree, so that rematerialised blocks take the arrays of `attends` as arguments. They would be no leaves of
        # a Partial of a Partial.
        is_tree = isinstance(attends, jax.tree_util.Partial)
        return jax.tree_util.Partial(self._exchanged, attends if is_tree else jax.tree_util.Partial(attends or attend))

    def _first(self, length: int) -> jax.Array:
        return jax.lax.axis_index(self.axis) * jnp.int32(length)

    def _exchanged(
        self,
        attends: Attend,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B T K H"],
        value: Float[Array, "B T K H"],
        **options: Any,
    ) -> Float[Array, "B T N H"]:
        arrays = {name: option for name, option in options.items() if isinstance(option, jax.Array)}
        others = {name: option for name, option in options.items() if name not in arrays}

        def exchanged(
            query: jax.Array, key: jax.Array, value: jax.Array, attends: Attend, arrays: dict[str, Any]
        ) -> jax.Array:
            key, value = (self._repeated(x, query.shape[2]) for x in (key, value))
            mixed = attends(*(self._heads(x) for x in (query, key, value)), **arrays, **others)
            return jax.lax.all_to_all(mixed, self.axis, 1, 2, tiled=True)

        mesh = jax.sharding.get_abstract_mesh()
        if mesh.shape.get(TENSOR, 1) > 1:  # each device exchanges its own heads
            heads, whole = PartitionSpec(None, None, TENSOR), PartitionSpec()
            exchanged = jax.shard_map(
                exchanged,
                in_specs=(heads, heads, heads, whole, whole),
                out_specs=heads,
                axis_names={TENSOR},
                check_vma=False,
            )
        return exchanged(query, key, value, attends, arrays)

    def _heads(self, x: Float[Array, "B T N H"]) -> jax.Array:
        """Exchanges a device's positions of all heads for all positions of its share of the heads."""
        return jax.lax.all_to_all(x, self.axis, 2, 1, tiled=True)

    def _repeated(self, x: Float[Array, "B T K H"], heads: int) -> jax.Array:
        """Repeats key or value heads that are fewer than devices, so that each device gets the one that it reads.

        The derivative of a repetition is a sum: in float32, not in the dtype of the heads.
        """
        if x.shape[2] % self.parts == 0:
            return x
        if heads % self.parts or self.parts % x.shape[2]:
            raise UsageError(
                f"--mesh.{self.axis} {self.parts} does not divide the {heads} heads of a device, with {x.shape[2]} of "
                f"keys and values: write --mesh.data -1 --mesh.{self.axis} {self._fitting(heads, x.shape[2])}"
            )
        wide = x.astype(widest(x.dtype, FLOAT32))
        return jnp.repeat(wide, self.parts // x.shape[2], axis=2).astype(x.dtype)

    def _fitting(self, heads: int, key_heads: int) -> int:
        """The largest size of the axis, below this one, that divides heads and key heads, or repeats key heads."""
        return next(
            size
            for size in range(self.parts - 1, 0, -1)
            if heads % size == 0 and (key_heads % size == 0 or size % key_heads == 0)
        )


def divide_positions(model: nnx.Module, axis: str, parts: int) -> None:
    """Makes a language model take a device's positions of each text, and return theirs, in place.

    It has to be called inside `jax.shard_map`, with the axis manual.
    """
    divided: Any = model
    divided.context = PartsOfTexts(axis, parts)

"""A sparse mixture of experts in place of an MLP: each token goes to a few of many gated MLPs, chosen by a router.

Shazeer et al., "Outrageously Large Neural Networks", 2017 (arXiv:1701.06538); no token is dropped. The balance of
experts: Fedus et al., "Switch Transformers", 2022 (arXiv:2101.03961), equations 4 to 6.

XLA compiles `jax.lax.ragged_dot` for an H200 to a product with all experts, most rows of which are zeros. So tokens
are sorted by expert here, and each expert's are padded to whole tiles, which are multiplied by the kernels of their
experts.

Shapes: B batch, T positions, D width, E experts, K experts of a token, F hidden width of an expert, N = B T tokens,
S tiles, M rows of a tile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.models.decoder.settings import ExpertSettings
from mpjax.models.gated_mlp import GATES
from mpjax.precision.dtypes import FLOAT32, widest


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float, Int


LARGEST_TILE = 512
ROWS_OF_ANY = 32


class Routing(NamedTuple):
    """What a router decides for each token.

    Attributes:
      chances: [B, T, E], the probability of each expert.
      chosen: int32 [B, T, K], the experts of the token, the likeliest first.
      weights: [B, T, K], the factors of their results.
    """

    chances: jax.Array
    chosen: jax.Array
    weights: jax.Array


class Load(NamedTuple):
    """How much the layers so far have used each expert, in float32: what blocks pass on beside features.

    Attributes:
      counted: [B, T], 1 for tokens that count and 0 for others, such as padding.
      chances: [E], the sum of the probabilities of each expert over counted tokens and layers.
      uses: [E], the number of counted tokens and layers that chose the expert.
      layers: the number of layers, a scalar.
    """

    counted: jax.Array
    chances: jax.Array
    uses: jax.Array
    layers: jax.Array

    def after(self, routing: Routing) -> Load:
        """The load with one layer more."""
        counted = jnp.broadcast_to(self.counted[..., None], routing.chances.shape)
        uses = jnp.sum(jax.nn.one_hot(routing.chosen, routing.chances.shape[-1], dtype=self.uses.dtype), axis=-2)
        return Load(
            self.counted,
            self.chances + jnp.sum(counted * routing.chances.astype(self.chances.dtype), axis=(0, 1)),
            self.uses + jax.lax.stop_gradient(jnp.sum(counted * uses, axis=(0, 1))),
            self.layers + jnp.ones_like(self.layers),
        )


def no_load(counted: Float[Array, "B T"], experts: int) -> Load:
    """The load before the first layer; `counted` is 1 for tokens that count, and 0 for others."""
    counted = counted.astype(FLOAT32)
    zeros = jnp.zeros(experts, FLOAT32)
    return Load(counted, zeros, zeros, jnp.zeros((), FLOAT32))


class Routings(NamedTuple):
    """The routings of the layers so far, in place of a `Load`. Blocks must not be in a stack."""

    layers: tuple[Routing, ...] = ()

    def after(self, routing: Routing) -> Routings:
        """The routings with those of one layer more."""
        return Routings((*self.layers, routing))


class Router(nnx.Module):
    """A linear layer to the experts, a softmax over all of them, and the K largest probabilities.

    All of it is computed in `dtype`, to which input and kernel are cast. `apply_policy` sets it to float32 by the rule
    `type:Router`: experts whose logits are close would change places in half precision.
    """

    def __init__(self, width: int, settings: ExpertSettings, *, rngs: nnx.Rngs):
        normal = nnx.initializers.normal(0.02)
        self.kernel = nnx.Param(normal(rngs.params(), (width, settings.count), FLOAT32))
        self.dtype: Any = None
        self.each = settings.each
        self.normalised = settings.normalised

    def __call__(self, x: Float[Array, "B T D"]) -> Routing:
        dtype = self.dtype or widest(x.dtype, FLOAT32)
        # By default, a GPU rounds float32 operands to tensorfloat32, which has no more digits than float16.
        logits = jnp.matmul(x.astype(dtype), self.kernel[...].astype(dtype), precision=jax.lax.Precision.HIGHEST)
        chances = jax.nn.softmax(logits, axis=-1)
        weights, chosen = jax.lax.top_k(chances, self.each)
        if self.normalised:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return Routing(chances, chosen, weights)


class Experts(nnx.Module):
    """Gated MLPs without biases, whose kernels are stacked.

    Attributes:
      gate: [E, D, F].
      up: [E, D, F].
      down: [E, F, D].
      dtype: the dtype of the products; None: the wider one of their operands.
    """

    stacked_kernels = ("gate", "up", "down")
    """Parameters that are kernels [inputs, outputs] behind one leading axis."""
    hidden_axes: ClassVar[Mapping[str, int]] = {"gate": -1, "up": -1, "down": -2}
    """The axis of each parameter that `--mesh.tensor` divides."""

    def __init__(self, width: int, settings: ExpertSettings, *, activation: str, out_init: Any, rngs: nnx.Rngs):
        normal = nnx.initializers.normal(0.02)
        count, hidden = settings.count, settings.hidden
        self.gate = nnx.Param(normal(rngs.params(), (count, width, hidden), FLOAT32))
        self.up = nnx.Param(normal(rngs.params(), (count, width, hidden), FLOAT32))
        self.down = nnx.Param(out_init(rngs.params(), (count, hidden, width), FLOAT32))
        self.gated = GATES[activation]
        self.dtype: Any = None

    def __call__(
        self, x: Float[Array, "N D"], chosen: Int[Array, "N K"], weights: Float[Array, "N K"]
    ) -> Float[Array, "N D"]:
        """Computes the weighted sum of the results of each token's experts, in float32, and casts it as `x` is."""
        kernels = [kernel[...] for kernel in (self.gate, self.up, self.down)]
        dtype = self.dtype or widest(x.dtype, *(kernel.dtype for kernel in kernels))
        gate, up, down = (kernel.astype(dtype) for kernel in kernels)
        tiles = tiles_of(chosen, gate.shape[0])
        rows = _in_tiles(x.astype(dtype), tiles)
        hidden = self.gated(_products(rows, gate, tiles.experts), _products(rows, up, tiles.experts))
        results = _products(hidden, down, tiles.experts)
        results = results.reshape(-1, results.shape[-1])
        # Each slot is read once, so the transpose adds nothing, in any order.
        each = results.at[tiles.slots].get(mode="promise_in_bounds", unique_indices=True)
        wide = widest(dtype, weights.dtype, FLOAT32)
        return jnp.sum(each.astype(wide) * weights.astype(wide)[..., None], axis=1).astype(x.dtype)


class Tiles(NamedTuple):
    """Where the tokens stand for each of their experts.

    Attributes:
      slots: int32 [N, K], the row among those of all tiles.
      sources: int32 [S, M], the pair `token * K + choice` in each row; for an empty row, a number from N K on.
      experts: int32 [S], the expert of each tile.
    """

    slots: jax.Array
    sources: jax.Array
    experts: jax.Array


def tiles_of(chosen: Int[Array, "N K"], experts: int) -> Tiles:
    """Sorts the choices of tokens by expert, and pads those of each expert to whole tiles. None is left out.

    A tile has as many rows as an expert has tokens on average, rounded down to a power of two, at most 512, or
    `ROWS_OF_ANY` if the number of tokens is symbolic. There are as many tiles as the least balanced choice needs.
    """
    pairs = chosen.size
    if isinstance(pairs, int):
        rows = min(LARGEST_TILE, 1 << (max(1, pairs // experts).bit_length() - 1))
        count = min(pairs, (pairs + experts * (rows - 1)) // rows)
    else:  # any number of examples, in an exported program
        rows = ROWS_OF_ANY
        count = (pairs + experts * (rows - 1)) // rows
    by_pair = chosen.reshape(-1).astype(jnp.int32)
    order = jnp.argsort(by_pair, stable=True).astype(jnp.int32)
    used = jnp.zeros(experts, jnp.int32).at[by_pair].add(1)
    tiles = (used + jnp.int32(rows - 1)) // jnp.int32(rows)
    ends, first_pairs = jnp.cumsum(tiles), jnp.cumsum(used) - used
    expert = by_pair[order]
    number = jnp.arange(pairs, dtype=jnp.int32) - first_pairs[expert]  # among the tokens of the expert
    slot = (ends - tiles)[expert] * jnp.int32(rows) + number
    slots = jnp.zeros(pairs, jnp.int32).at[order].set(slot, unique_indices=True)
    empty = jnp.arange(pairs, pairs + count * rows, dtype=jnp.int32)
    sources = empty.at[slot].set(order, unique_indices=True)
    # Tiles behind the last hold nothing, and any expert will do.
    of_tile = jnp.searchsorted(ends, jnp.arange(count, dtype=jnp.int32), side="right")
    of_tile = jnp.minimum(of_tile, experts - 1).astype(jnp.int32)
    return Tiles(slots.reshape(chosen.shape), sources.reshape(count, rows), of_tile)


def _in_tiles(x: Float[Array, "N D"], tiles: Tiles) -> Float[Array, "S M D"]:
    """Copies tokens to the rows of tiles; empty rows are zero. The gradient of a token is summed in float32."""
    each = tiles.slots.shape[1]
    wide = jnp.broadcast_to(x.astype(widest(x.dtype, FLOAT32))[:, None], (x.shape[0], each, x.shape[1]))
    pairs = wide.astype(x.dtype).reshape(-1, x.shape[1])
    return pairs.at[tiles.sources].get(mode="fill", fill_value=0, unique_indices=True)


@jax.checkpoint
def _products(
    rows: Float[Array, "S M D"], kernels: Float[Array, "E D F"], experts: Int[Array, " S"]
) -> Float[Array, "S M F"]:
    """Multiplies each tile by the kernel of its expert. A kernel's gradients by several tiles are summed in float32.

    The copies of kernels are made again in the backward pass.
    """
    wide = kernels.astype(widest(kernels.dtype, FLOAT32))
    copies = wide.at[experts].get(mode="promise_in_bounds").astype(kernels.dtype)
    return jax.lax.dot_general(rows, copies, (((2,), (1,)), ((0,), (0,))))


class MixtureOfExperts(nnx.Module):
    """A router and its experts."""

    def __init__(self, width: int, settings: ExpertSettings, *, activation: str, out_init: Any, rngs: nnx.Rngs):
        self.router = Router(width, settings, rngs=rngs)
        self.experts = Experts(width, settings, activation=activation, out_init=out_init, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], load: Load | Routings | None = None) -> Any:
        """Maps features to features [B, T, D]; with a `load`, returns `(features, load after this layer)`."""
        routing = self.router(x)
        rows = x.reshape(-1, x.shape[-1])
        each = routing.chosen.shape[-1]
        y = self.experts(rows, routing.chosen.reshape(-1, each), routing.weights.reshape(-1, each)).reshape(x.shape)
        return y if load is None else (y, load.after(routing))

"""The two compiled programs of generation: one reads prompts, the other draws one more token of each text.

Prompts are padded to 32, 64, 128, ... tokens, and so is the cache, so that few programs are compiled. All values that
change from token to token are arguments.

Shapes: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax.errors import UsageError
from mpjax.models.generation.cache import Continues, Reads
from mpjax.models.generation.sampling import Sampling, sampled
from mpjax.models.remat import Rematerialised
from mpjax.models.scan import one_by_one
from mpjax.precision.calls import unwrap
from mpjax.precision.casting.narrowing import narrowed_inputs
from mpjax.precision.dtypes import FLOAT32, widest


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Bool, Float, Int, Key


SHORTEST = 32
"""The smallest number of tokens that prompts are padded to."""


class LanguageModel(Protocol):
    """What generation calls of a model; `mpjax.models.decoder.Decoder` and `mpjax.models.gpt2.GPT2` have it.

    Attributes:
      length: the largest number of tokens in a text.
      tokens: the embedding of tokens.
      blocks: the blocks, each with attention.
    """

    length: int
    tokens: nnx.Embed
    blocks: Any

    def continued(self, tokens: Any, positions: Any, attend_by: Any) -> Any:
        """Computes the features of tokens at any positions, as `features` does, with other functions of attention.

        Args:
          tokens: int32 [B, T], a part of each text.
          positions: int32 [B, T], the position of each token in its text.
          attend_by: the function of attention of each block, which may know more keys than those of these tokens.
        """
        ...

    def logits(self, features: Any) -> Any:
        """Computes logits from features."""
        ...


class Drawn(NamedTuple):
    """The token that was drawn for each text.

    Attributes:
      tokens: int32 [B].
      log_probs: float32 (or wider) [B], the logarithm of its probability under the model, whatever the sampling.
      finite: bool [B], False if a logit is NaN or inf, so that the token means nothing.
    """

    tokens: jax.Array
    log_probs: jax.Array
    finite: jax.Array


class DecodeState(NamedTuple):
    """What a step takes and returns. It is donated: a step writes into the cache of the one before.

    Attributes:
      cache: the keys and values of each block (`mpjax.models.generation.cache.Slots`), or what else a model keeps.
      tokens: int32 [B], the last token of each text, which the model has not read.
      positions: int32 [B], their positions.
      keys: the random key of each text, which never changes.
    """

    cache: tuple[Any, ...]
    tokens: jax.Array
    positions: jax.Array
    keys: jax.Array


class Programs(NamedTuple):
    """The compiled functions of one model and one way of sampling.

    Attributes:
      read: for a number of slots in the cache, `(arrays, tokens [B, T], lengths [B], keys [B]) -> (Drawn, Progress)`.
      step: `(arrays, progress) -> (Drawn, Progress)`.
    """

    read: Callable
    step: Callable


class SplitModel(NamedTuple):
    """A model taken apart: its graph, and its arrays, of which weights are in the dtype in which they are used.

    Attributes:
      graph: the NNX graph definition.
      arrays: the NNX state, as leaves.
      form: what makes a state of the leaves, with the dtypes that the model has them in.
      length: the largest number of tokens in a text.
      vocabulary: the number of tokens that it knows.
      documents: what keeps documents apart in the model (`mpjax.models.documents.Apart`); None where nothing does.
    """

    graph: Any
    arrays: tuple[jax.Array, ...]
    form: Form
    length: int
    vocabulary: int
    documents: Any = None


class Form(NamedTuple):
    """The structure of an NNX state and the dtypes of its leaves."""

    tree: Any
    dtypes: tuple[np.dtype | None, ...]

    def state(self, arrays: tuple[jax.Array, ...]) -> Any:
        """Makes the state; a leaf that was narrowed is widened again, which costs nothing before the cast to come."""
        pairs = zip(arrays, self.dtypes, strict=True)
        return jax.tree.unflatten(self.tree, [x if dtype is None else x.astype(dtype) for x, dtype in pairs])


def uncast(fn: Callable) -> Callable:
    """Returns a function unchanged: the argument `cast` for a model that casts its own arrays."""
    return fn


def padded_length(length: int, most: int) -> int:
    """The number of tokens that texts of `length` tokens are padded to: a power of two from 32 on, at most `most`.

    >>> [padded_length(length, 1000) for length in (1, 33, 64, 600)]
    [32, 64, 64, 1000]
    """
    return min(max(SHORTEST, 1 << (length - 1).bit_length()), most)


def split(model: Any, *, cast: Callable[[Callable], Callable] = uncast) -> SplitModel:
    """Takes a model apart for `programs_of`. The model stays as it is; its copy is in evaluation mode.

    A parameter that the model only uses after a cast to half precision is cast once, here, which changes no result.

    Raises:
      UsageError: the model cannot continue texts.
    """
    wanted = ("length", "tokens", "blocks", "continued", "logits")
    if missing := [name for name in wanted if not hasattr(model, name)]:
        raise UsageError(
            f"{type(model).__name__} cannot continue texts: it has no {' and no '.join(missing)}; wanted a language "
            "model of mpjax (gpt2 or hf:FOLDER), or your own with the methods of mpjax.models.gpt2.GPT2"
        )
    model = one_by_one(model)
    model = nnx.merge(*nnx.split(model))
    for block in model.blocks:
        unwrap(block, Rematerialised)  # nothing is kept for a backward pass, and keys and values leave the block
    model.eval()
    graph, state = nnx.split(model)
    leaves, tree = jax.tree.flatten(state)
    plain = Form(tree, (None,) * len(leaves))
    programs = _programs(graph, plain, Sampling(), cast)
    shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    text = jax.ShapeDtypeStruct((1, 1), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    keys = jax.eval_shape(lambda: jax.random.key(0)[None])
    read, (_, progress) = jax.make_jaxpr(programs.read(1), return_shape=True)(tuple(shapes), *text, keys)
    step = jax.make_jaxpr(programs.step)(tuple(shapes), progress)
    casts = [narrowed_inputs(program.jaxpr)[: len(leaves)] for program in (read, step)]
    both = [dtype if dtype == other else None for dtype, other in zip(*casts, strict=True)]
    pairs = list(zip(leaves, both, strict=True))
    arrays = tuple(leaf if dtype is None else leaf.astype(dtype) for leaf, dtype in pairs)
    dtypes = tuple(None if dtype is None else leaf.dtype for leaf, dtype in pairs)
    documents = getattr(model, "documents", None)
    return SplitModel(graph, arrays, Form(tree, dtypes), model.length, model.tokens.num_embeddings, documents)


def programs_of(model: SplitModel, sampling: Sampling, *, cast: Callable[[Callable], Callable] = uncast) -> Programs:
    """Builds the programs of a model; the same ones for a model of the same structure, so that they compile once."""
    return _programs(model.graph, model.form, sampling, cast)


@functools.lru_cache(maxsize=16)
def _programs(graph: Any, form: Form, sampling: Sampling, cast: Callable[[Callable], Callable]) -> Programs:
    def drawn(model: LanguageModel, features: jax.Array, positions: jax.Array, keys: jax.Array) -> Drawn:
        return drawn_from(sampling, model.logits(features), jax.vmap(jax.random.fold_in)(keys, positions))

    @functools.cache
    def read(size: int) -> Callable:
        @jax.jit
        @cast
        def of_size(arrays, tokens, lengths, keys):
            model: Any = nnx.merge(graph, form.state(arrays))
            features, cache = first_features(model, tokens, size, lengths)
            last = jnp.take_along_axis(features, (lengths - 1)[:, None, None], axis=1)[:, 0]
            out = drawn(model, last, lengths, keys)
            return out, DecodeState(cache, out.tokens, lengths, keys)

        return of_size

    @functools.partial(jax.jit, donate_argnums=1)
    @cast
    def step(arrays, progress):
        model: Any = nnx.merge(graph, form.state(arrays))
        features, cache = next_features(model, progress.tokens, progress.positions, progress.cache)
        positions = progress.positions + 1
        out = drawn(model, features, positions, progress.keys)
        return out, DecodeState(cache, out.tokens, positions, progress.keys)

    return Programs(read, step)


def first_features(
    model: LanguageModel, tokens: Int[Array, "B T"], size: int, lengths: Int[Array, " B"] | None = None
) -> tuple[jax.Array, tuple[Any, ...]]:
    """Computes the features [B, T, D] of the first tokens of texts, and a cache of `size` slots with their keys.

    A model that keeps something else has `reads` and `continues`, which make what takes the place of `Reads(size)` and
    `Continues(kept, positions)`: `reads(lengths)` for texts of `lengths` tokens without padding, and `continues(...)`.
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    reads = getattr(model, "reads", None)
    blocks = [Reads(size) if reads is None else reads(lengths) for _ in model.blocks]
    features = model.continued(tokens, positions, blocks)
    return features, tuple(block.kept for block in blocks)


def next_features(
    model: LanguageModel, tokens: Int[Array, " B"], positions: Int[Array, " B"], cache: tuple[Any, ...]
) -> tuple[jax.Array, tuple[Any, ...]]:
    """Computes the features [B, D] of one more token of each text, and the cache with its keys."""
    blocks = [getattr(model, "continues", Continues)(kept, positions) for kept in cache]
    features = model.continued(tokens[:, None], positions[:, None], blocks)
    return features[:, 0], tuple(block.kept for block in blocks)


def drawn_from(
    sampling: Sampling,
    logits: Float[Array, "B V"],
    keys: Key[Array, " B"],
    allowed: Bool[Array, "B V"] | None = None,
) -> Drawn:
    """Draws a token of each text from its logits, in float32 or wider; with `allowed`, one of the tokens that are so.

    The probabilities are those of all tokens.
    """
    logits = logits.astype(widest(logits.dtype, FLOAT32))
    drawable = logits if allowed is None else jnp.where(allowed, logits, -jnp.inf)
    tokens = sampled(sampling, drawable, keys)
    total = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return Drawn(tokens, chosen - total, jnp.all(jnp.isfinite(logits), axis=-1))

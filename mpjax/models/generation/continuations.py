"""Continues prompts: the host reads tokens while the device draws the next, and says where each text ends."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.errors import UsageError
from mpjax.models.generation.programs import Drawn, SplitModel, padded_length, programs_of, split, uncast
from mpjax.models.generation.sampling import GREEDY, Sampling


Stopped = Literal["end", "stop", "limit", "length"]
"""Why a text ends: an end-of-text token, the caller's `watch`, the limit of tokens, or the model's length."""


class Continuation(NamedTuple):
    """What a model wrote behind a prompt.

    Attributes:
      tokens: int32 [N], with the end-of-text token if that is why it ends.
      log_probs: float32 (or wider) [N], the logarithm of each token's probability under the model, whatever the
        sampling.
      stopped: why it ends.
    """

    tokens: np.ndarray
    log_probs: np.ndarray
    stopped: Stopped


def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int = 128,
    sampling: Sampling = GREEDY,
    seed: int = 0,
    end: Collection[int] = (),
    watch: Callable[[int, int], bool] | None = None,
    numbers: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
    cast: Callable[[Callable], Callable] = uncast,
) -> list[Continuation]:
    """Continues a batch of prompts, token by token, under the policy of the model.

    A model that keeps documents apart continues the last document of a prompt, and ends at its end-of-text token.

    Logits, softmax and sampling are in float32 (or wider). A text does not depend on the others in its batch, but for
    the rounding of products of another size: in half precision, two tokens of about one probability may change places.

    Args:
      model: a language model of mpjax (`mpjax.models.decoder.Decoder`, `mpjax.models.gpt2.GPT2`), which stays as it is,
        or the result of `mpjax.models.generation.programs.split` or `mpjax.models.t5.generation.split_t5`, for several
        calls, or of `mpjax.models.whisper.generation.split_whisper`.
      prompts: the tokens of each prompt, of different lengths; for Whisper, the features of each sound.
      max_tokens: the largest number of tokens to write. A text also ends at the model's length.
      sampling: how tokens are chosen.
      seed: with the number of the prompt, the seed of its random numbers.
      end: the end-of-text tokens.
      watch: called with the position of a prompt in `prompts` and its next token, in order; True ends that text.
      numbers: the number of each prompt, for its random numbers; None: its position.
      names: the name of each prompt, for messages; None: `prompt 0` and so on.
      cast: the casts of a policy per operation; see `mpjax.training.make_train_step`.

    Raises:
      UsageError: the model cannot continue texts, there is no prompt, a prompt is empty, has a token that the model
        does not know or leaves no room, or a logit is not finite.
    """
    draws = getattr(model, "drawn", None)  # of a model that reads another text than the one that it writes
    parts: Any = model if draws or isinstance(model, SplitModel) else split(model, cast=cast)
    token_arrays = [np.asarray(prompt) for prompt in prompts]
    if parts.documents is not None:
        token_arrays = [parts.documents.last(tokens) for tokens in token_arrays]
        end = {*end, parts.documents.end}
    if max_tokens < 1:
        raise UsageError(f"max_tokens is {max_tokens}: wanted at least 1")
    names = [f"prompt {number}" for number in range(len(token_arrays))] if names is None else names
    for name, row in zip(names, token_arrays, strict=True):
        (parts.check if draws else check_prompt)(row, parts, name=name)
    if not token_arrays:
        raise UsageError("there is no prompt: wanted one or more")
    texts: list[list[int]] = [[] for _ in token_arrays]
    scores: list[list[Any]] = [[] for _ in token_arrays]
    stopped: list[Stopped | None] = [None for _ in token_arrays]
    room = [min(max_tokens, parts.room(row) if draws else parts.length - len(row)) for row in token_arrays]
    keys = _keys(seed, range(len(token_arrays)) if numbers is None else numbers)
    draws = draws or functools.partial(_drawn, parts)
    drawing = draws(token_arrays, max(room), sampling, keys, cast)
    for drawn in drawing:
        for number, (token, score, finite) in enumerate(zip(*drawn, strict=True)):
            if stopped[number]:
                continue
            if not finite:
                raise UsageError(
                    f"{names[number]}: a logit of token {len(texts[number]) + 1} behind it is not finite; compute in "
                    "float32, or with another checkpoint"
                )
            texts[number].append(int(token))
            scores[number].append(score)
            if token in end:
                stopped[number] = "end"
            elif watch is not None and watch(number, int(token)):
                stopped[number] = "stop"
            elif len(texts[number]) == room[number]:
                stopped[number] = "limit" if room[number] == max_tokens else "length"
        if all(stopped):
            break
    return [
        Continuation(np.asarray(text, np.int32), np.asarray(score), reason)
        for text, score, reason in zip(texts, scores, stopped, strict=True)
        if reason
    ]


def check_prompt(tokens: np.ndarray, model: SplitModel, *, name: str) -> None:
    """Raises UsageError if a prompt is empty or as long as the model's texts, or has tokens that it does not know."""
    if not tokens.size:
        raise UsageError(f"{name} has no tokens: wanted one or more, such as the end-of-text token")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise UsageError(f"{name} is {tokens.dtype}{list(tokens.shape)}: wanted a list of whole numbers")
    if len(tokens) >= model.length:
        raise UsageError(
            f"{name} has {len(tokens)} tokens, and the model takes texts of at most {model.length}, which leaves no "
            f"room: cut it to {model.length - 1} tokens or fewer"
        )
    if len(unknown := tokens[(tokens < 0) | (tokens >= model.vocabulary)]):
        raise UsageError(f"{name} has the token {unknown[0]}, and the model knows 0 to {model.vocabulary - 1}")


def _keys(seed: int, numbers: Sequence[int]) -> jax.Array:
    """The random key of each text, from the seed and the text's number."""
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.asarray(numbers, jnp.uint32))


def _drawn(
    model: SplitModel, token_arrays: list[np.ndarray], count: int, sampling: Sampling, keys: jax.Array, cast: Callable
) -> Iterator[Drawn]:
    """Yields the next tokens of all texts, `count` times, on the host. The device is a token ahead."""
    lengths = np.asarray([len(row) for row in token_arrays], np.int32)
    longest = int(lengths.max())
    tokens = np.zeros((len(token_arrays), padded_length(longest, model.length)), np.int32)
    for number, row in enumerate(token_arrays):
        tokens[number, : len(row)] = row
    # The last token is not read, so it needs no slot.
    size = padded_length(max(longest + count - 1, tokens.shape[1]), model.length)
    programs = programs_of(model, sampling, cast=cast)
    drawn, progress = programs.read(size)(model.arrays, tokens, lengths, keys)
    for _ in range(count - 1):
        following, progress = programs.step(model.arrays, progress)
        yield jax.device_get(drawn)
        drawn = following
    yield jax.device_get(drawn)

"""Compares the probabilities that two forward passes give to the same tokens.

A language model is trained by one program and writes texts by another, perhaps in other dtypes. Training on texts that
a model wrote itself weights each token by the ratio of its two probabilities, and takes it for 1 where it is left out.

Shapes: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.errors import UsageError
from mpjax.precision.dtypes import FLOAT32, widest


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float, Int

    Pass = Callable[[Any], Any] | Array | np.ndarray


BAND = (0.999, 1.002)
"""The ratios that count as equal. MaxText names this the strict band of MLPerf, for reinforcement learning
(AI-Hypercomputer/maxtext#5231)."""


_ROUNDING = 0.2
"""The largest logarithm of a probability that may be a 1 with the rounding of logits in half precision."""


class TokenRatio(NamedTuple):
    """A token with its two probabilities.

    Attributes:
      text: the number of the text in the batch.
      position: the position of the token in the text.
      token: the token.
      shown: the text of the token; empty without `text_of`.
      first: the logarithm of its probability by the first pass.
      second: that by the second pass.
      ratio: the first probability divided by the second.
    """

    text: int
    position: int
    token: int
    shown: str
    first: float
    second: float
    ratio: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mismatch:
    """How far the probabilities of two forward passes differ. `print` it for a table of the worst tokens.

    Attributes:
      tokens: the number of tokens that were compared.
      not_finite: how many of them have a ratio of 0, inf or NaN, because a probability is 0 or NaN. They count as
        outside the band, and are in no mean.
      mean: the mean ratio of the others; NaN without any.
      lowest: their smallest ratio; NaN without any.
      highest: their largest ratio; NaN without any.
      outside: the share of all tokens whose ratio is outside the band, or 0, inf or NaN.
      band: the smallest and the largest ratio that count as equal.
      worst: the tokens whose ratio is farthest from 1 in either direction, those with 0, inf or NaN first.
    """

    tokens: int
    not_finite: int
    mean: float
    lowest: float
    highest: float
    outside: float
    band: tuple[float, float]
    worst: tuple[TokenRatio, ...]

    @property
    def agrees(self) -> bool:
        """Whether every ratio is inside the band, and none is 0, inf or NaN."""
        return self.outside == 0

    def __str__(self) -> str:
        low, high = self.band
        lines = [
            f"{self.tokens} tokens, {self.outside:.2%} outside [{low:g}, {high:g}]; ratio {self.mean:.6f} on average, "
            f"{self.lowest:.6f} to {self.highest:.6f}"
        ]
        if self.not_finite:
            rest = "; the numbers above are of the others" if self.not_finite < self.tokens else ""
            lines.append(f"{self.not_finite} tokens have a ratio of 0, inf or nan{rest}")
        rows = [("text", "position", "token", "first", "second", "ratio")]
        rows += [
            (
                str(row.text),
                str(row.position),
                f"{row.token} {row.shown!r}" if row.shown else str(row.token),
                f"{row.first:.5f}",
                f"{row.second:.5f}",
                f"{row.ratio:.6f}",
            )
            for row in self.worst
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        return "\n".join(lines)


def mismatch(
    first: Pass,
    second: Pass,
    tokens: Int[Array, "B T"],
    *,
    lengths: Int[Array, " B"] | None = None,
    prompt: int | Int[Array, " B"] = 1,
    band: tuple[float, float] = BAND,
    worst: int = 5,
    text_of: Callable[[Sequence[int]], str] | None = None,
) -> Mismatch:
    """Compares the probabilities that two forward passes give to each token of texts, from the second token on.

    A pass is a function from tokens [B, T] to the logits [B, T, V] of each next token, such as a model under a policy,
    or the logarithms of the probabilities of the tokens, [B, T - 1], from any other program. Softmax is in float32 (or
    wider), ratios are in float64.

    Args:
      first: the pass whose probabilities are divided, such as that of training.
      second: the pass that they are divided by, such as that of generation: `lambda tokens:
        mpjax.models.generation.through_cache(model, tokens)`.
      tokens: int32, padded on the right.
      lengths: the number of tokens of each text that are not padding; all if None.
      prompt: the number of tokens of each text that are not compared, at least 1.
      band: the smallest and the largest ratio that count as equal.
      worst: the number of tokens to name.
      text_of: the text of tokens, such as the method of a tokenizer.

    Raises:
      UsageError: there is no token to compare, a pass has another shape, or a setting is out of range.
    """
    token_array = np.asarray(tokens)
    if token_array.ndim != 2 or token_array.dtype.kind not in "iu":
        raise UsageError(f"tokens are {token_array.dtype}{list(token_array.shape)}: wanted whole numbers [B, T]")
    low, high = band
    if not 0 <= low <= 1 <= high:
        raise UsageError(f"the band is [{low:g}, {high:g}]: wanted a number up to 1 and one from 1 on")
    texts, size = token_array.shape
    ends = _of_each(size if lengths is None else lengths, texts, "lengths", 0, size)
    starts = _of_each(prompt, texts, "prompt", 1, max(size, 1))
    positions = np.arange(1, size)[None]
    compared = (positions >= starts[:, None]) & (positions < ends[:, None])
    if not compared.any():
        raise UsageError("there is no token to compare: wanted texts that are longer than their prompts, of 1 or more")
    a, b = (_log_probs(scores, token_array, name)[compared] for scores, name in ((first, "first"), (second, "second")))
    with np.errstate(invalid="ignore", over="ignore"):
        change = a - b  # NaN of two that are -inf
        ratios = np.exp(change)
    finite = np.isfinite(ratios) & np.isfinite(change)
    inside = finite & (ratios >= low) & (ratios <= high)
    farness = np.where(finite, np.abs(change, where=finite, out=np.zeros_like(change)), np.inf)
    rows, columns = np.nonzero(compared)

    def row(at: int) -> TokenRatio:
        position = int(rows[at]), int(columns[at]) + 1
        token = int(token_array[position])
        return TokenRatio(
            *position, token, text_of([token]) if text_of else "", float(a[at]), float(b[at]), float(ratios[at])
        )

    usable = ratios[finite]
    nothing = float("nan")
    return Mismatch(
        tokens=len(ratios),
        not_finite=int(np.sum(~finite)),
        mean=float(np.mean(usable)) if len(usable) else nothing,
        lowest=float(np.min(usable)) if len(usable) else nothing,
        highest=float(np.max(usable)) if len(usable) else nothing,
        outside=float(np.mean(~inside)),
        band=(float(low), float(high)),
        worst=tuple(row(at) for at in np.argsort(-farness, kind="stable")[: max(worst, 0)]),
    )


def _of_each(values: Any, texts: int, name: str, least: int, most: int) -> np.ndarray:
    numbers = np.asarray(values)
    if numbers.shape not in ((), (texts,)) or numbers.dtype.kind not in "iu":
        raise UsageError(
            f"{name} is {numbers.dtype}{list(numbers.shape)}: wanted a whole number for each of {texts} texts"
        )
    if np.any((numbers < least) | (numbers > most)):
        raise UsageError(f"{name} is {numbers.tolist()}: wanted {least} to {most}")
    return np.broadcast_to(numbers, (texts,))


def _log_probs(scores_or_model: Any, tokens: np.ndarray, name: str) -> np.ndarray:
    """The logarithms of the probabilities of all tokens but the first, float64 [B, T - 1]."""
    texts, size = tokens.shape
    if not callable(scores_or_model):
        scores = np.asarray(scores_or_model)
        if scores.shape != (texts, size - 1):
            raise UsageError(
                f"the {name} pass has the shape {list(scores.shape)}: wanted log-probabilities [{texts}, {size - 1}], "
                "or a function from tokens to logits"
            )
        if np.any(scores > _ROUNDING):
            raise UsageError(
                f"the {name} pass has values up to {np.nanmax(scores):g}: wanted logarithms of probabilities, at most 0"
            )
        return scores.astype(np.float64)
    logits: Any = scores_or_model(jnp.asarray(tokens, jnp.int32))
    if logits.ndim != 3 or logits.shape[:2] != tokens.shape:
        raise UsageError(f"the {name} pass gives {list(logits.shape)}: wanted logits [{texts}, {size}, V]")
    if tokens.min() < 0 or tokens.max() >= logits.shape[2]:
        raise UsageError(f"the {name} pass knows {logits.shape[2]} tokens, and the texts have {int(tokens.max())}")
    return np.asarray(_scores(logits, jnp.asarray(tokens, jnp.int32)), np.float64)


@jax.jit
def _scores(logits: Float[Array, "B T V"], tokens: Int[Array, "B T"]) -> Float[Array, "B T-1"]:
    float_logits = logits[:, :-1].astype(widest(logits.dtype, FLOAT32))
    chosen = jnp.take_along_axis(float_logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(float_logits, axis=-1)

"""Documents in a row of tokens that do not see each other: the document of each token, and its position there.

An end-of-text token begins a document: training puts one before each text, as generation does before a prompt. What
stands before the first one in a row is the rest of a document that the row before began.

Shapes: B batch, T tokens.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax.errors import UsageError
from mpjax.models.attention import Attend, attend


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Int


@dataclasses.dataclass(frozen=True)
class Apart:
    """What a language model holds as `documents` to keep them apart; a model with None joins them.

    Attributes:
      end: the end-of-text token, which begins a document.
    """

    end: int

    def segments(self, tokens: Int[Array, "B T"]) -> Int[Array, "B T"]:
        """Numbers the documents of a row: int32, the running count of end-of-text tokens, each counted itself.

        >>> Apart(1).segments(jnp.asarray([[7, 1, 5, 5, 1, 1, 8]])).tolist()
        [[0, 1, 1, 1, 2, 3, 3]]
        """
        return jnp.cumsum(tokens == self.end, axis=1, dtype=jnp.int32)

    def positions(self, tokens: Int[Array, "B T"]) -> Int[Array, "B T"]:
        """The position of each token in its document, int32, from 0; in the first of a row, from the row's beginning.

        >>> Apart(1).positions(jnp.asarray([[7, 1, 5, 5, 1, 1, 8]])).tolist()
        [[0, 0, 1, 2, 0, 0, 1]]
        """
        places = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
        begun = jnp.where(tokens == self.end, places, jnp.zeros_like(places))
        return places - jax.lax.cummax(begun, axis=1)

    def attend(self, tokens: Int[Array, "B T"]) -> Attend:
        """Makes the function of attention for these tokens: `mpjax.models.attention.attend` within their documents."""
        # A pytree, so that rematerialised blocks take the segments as an argument.
        return jax.tree_util.Partial(attend, segments=self.segments(tokens))

    def last(self, tokens: np.ndarray) -> np.ndarray:
        """Cuts a text, on the host, to its last document: the only one that a next token sees."""
        begun = np.flatnonzero(tokens == self.end)
        return tokens[begun[-1] :] if begun.size else tokens


_CONTRACT = (
    "give it the attribute `documents = None`, which mpjax sets to an mpjax.models.documents.Apart, and let its "
    "attention be `self.documents.attend(tokens)`, or mask it by `self.documents.segments(tokens)`; or write "
    "--data.documents joined"
)


def keep_apart(model: nnx.Module, end: int, *, name: str) -> None:
    """Lets no token of a language model attend to another document, in place.

    Args:
      model: the model, which may be abstract.
      end: the end-of-text token.
      name: the name of the model in messages.

    Raises:
      UsageError: the model has no attribute `documents`, which says that it can keep documents apart.
    """
    documented: Any = model
    if not hasattr(model, "documents") or not isinstance(documented.documents, Apart | None):
        reason = "its attribute `documents` is not None" if hasattr(model, "documents") else "it has no `documents`"
        raise UsageError(
            f"--data.documents apart: --model.name {name} cannot keep documents apart: {reason}; {_CONTRACT}"
        )
    documented.documents = Apart(end)


def require_apart(model: Any, tokens: jax.ShapeDtypeStruct, *, name: str) -> None:
    """Checks that a model computes something else because it keeps documents apart, by two traces.

    Args:
      model: the model, which may be abstract; it stays as it is.
      tokens: the shape of its tokens, [B, T].
      name: the name of the model in messages.

    Raises:
      UsageError: its program does not depend on its attribute `documents`.
    """
    joined = nnx.merge(*nnx.split(model))
    joined.documents = None

    def program(model: Any) -> str:
        graph, state = nnx.split(model)
        return str(jax.make_jaxpr(lambda state, tokens: nnx.merge(graph, state)(tokens))(state, tokens))

    if program(model) == program(joined):
        raise UsageError(
            f"--data.documents apart: --model.name {name} has an attribute `documents` and computes the same without "
            f"it: its tokens attend to those of other documents; {_CONTRACT}"
        )

"""Takes a T5 apart to write targets."""

import numpy as np

from mpjax.models.generation.continuations import check_prompt
from mpjax.models.generation.programs import padded_length
from mpjax.models.generation.targets import SplitTargets, apart_in_evaluation
from mpjax.models.t5.network import T5


LONGEST = 1 << 30
"""The largest number of tokens: distances between positions have no end."""


def split_t5(model: T5) -> SplitTargets:
    """Takes a T5 apart. The model stays as it is; its copy is in evaluation mode. Sources are tokens, integer [T]."""
    graph, state = apart_in_evaluation(model)
    start = (model.settings.start,)
    return SplitTargets(graph, state, model.settings.vocabulary, LONGEST, start, _padded, check_prompt)


def _padded(token_arrays: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of texts, int32 [B, T], padded on the right, and their numbers, int32 [B]."""
    lengths = np.asarray([len(row) for row in token_arrays], np.int32)
    tokens = np.zeros((len(token_arrays), padded_length(int(lengths.max()), LONGEST)), np.int32)
    for number, row in enumerate(token_arrays):
        tokens[number, : len(row)] = row
    return tokens, lengths

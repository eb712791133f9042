"""The best checkpoint of a run: which of several scores is best, and which checkpoints count."""

import math
from collections.abc import Mapping
from typing import Any


NOT_MEASURED = -math.inf
"""The score of a checkpoint without an evaluation. Every evaluated checkpoint has a better score."""

BEST_ANEW = "best_anew"
"""The entry of a line of a run's history at whose `step` the search for the best checkpoint begins anew."""


def best_since(history: Any) -> int:
    """The position up to which checkpoints no longer count in the search for the best; 0 if all count.

    `history` is the entry of a description, or the content of history.jsonl: lines of which some have `BEST_ANEW`.
    """
    lines = [line for line in history if isinstance(line, dict)] if isinstance(history, list) else []
    return max((line["step"] for line in lines if BEST_ANEW in line and isinstance(line.get("step"), int)), default=0)


def best_of(scores: Mapping[int, float], since: int = 0) -> int:
    """Chooses the best of several checkpoints, at least one, by their scores; returns its position.

    It has the highest score, and is the latest of several with that score. A score of NaN counts as `NOT_MEASURED`.
    Checkpoints up to position `since` do not count if there are later ones.

    >>> best_of({20: 0.5, 40: 1.0, 60: 1.0, 80: 0.75}), best_of({20: 0.5, 40: 1.0, 60: 1.0, 80: 0.75}, since=60)
    (60, 80)
    """
    counted = {position: score for position, score in scores.items() if position > since} or scores

    def rank(position: int) -> tuple[float, int]:
        score = counted[position]
        return NOT_MEASURED if math.isnan(score) else score, position

    return max(counted, key=rank)

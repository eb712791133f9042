"""The line that `predict` writes for an input: the outputs of the prediction step in the words of the data."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpjax.config.tasks import NEXT_TOKEN, OF_TARGETS, TaskName
from mpjax.data.fields import Fields


Record = dict[str, Any]
"""A line of the result: `input`, and the outputs of the task."""


def record_of(task: TaskName, rows: Sequence[Mapping[str, Any]], fields: Fields) -> Record:
    """Returns the record of an input, without its name, of the outputs of `outputs_for` for each of its rows.

    A long text has several rows; any other input has one. Rows of a split also have the fields that are predicted.
    """
    if task in (*NEXT_TOKEN, *OF_TARGETS) and task != "preference":
        return _loss(rows)
    (row,) = rows
    match task:
        case "preference":
            return _rewards(row)
        case "embedding" | "image_text":
            return _vector(row)
        case "regression":
            return _numbers(row, fields["target"])
        case "multilabel":
            return _labels(row, fields["labels"])
        case _:
            return _classes(row, fields.get("label"))


def _classes(row: Mapping[str, Any], label: Any) -> Record:
    names = getattr(label, "names", ())

    def called(number: Any) -> str | int | None:
        if number < 0:  # an ignored label
            return None
        return names[int(number)] if names else int(number)

    top = [[called(c), float(p)] for c, p in zip(row["classes"], row["probabilities"], strict=True)]
    stored = {"label": called(row["label"])} if "label" in row else {}
    return {"class": top[0][0], "probability": top[0][1], "top": top, **stored}


def _numbers(row: Mapping[str, Any], target: Any) -> Record:
    """The predicted numbers by the names of their columns, and those of the data, in their units."""

    def by_name(standardised: Any) -> dict[str, float]:
        return dict(zip(target.columns, map(float, target.in_units(standardised)), strict=True))

    return {"prediction": by_name(row["numbers"])} | ({"target": by_name(row["target"])} if "target" in row else {})


def _labels(row: Mapping[str, Any], labels: Any) -> Record:
    """The predicted labels, the probability of each, and the labels of the data."""
    probabilities = dict(zip(labels.names, map(float, row["applies"]), strict=True))
    predicted = [name for name, probability in probabilities.items() if probability > 0.5]
    return {"prediction": predicted, "probabilities": probabilities} | (
        {"labels": [name for name, there in zip(labels.names, row["labels"], strict=True) if there]}
        if "labels" in row
        else {}
    )


def _rewards(row: Mapping[str, Any]) -> Record:
    chosen, rejected = float(row["chosen"]), float(row["rejected"])
    return {"chosen": chosen, "rejected": rejected, "margin": chosen - rejected}


def _vector(row: Mapping[str, Any]) -> Record:
    cosine = {"cosine": float(row["cosine"])} if "cosine" in row else {}
    vectors = {name: row[name].tolist() for name in ("embedding", "text") if name in row}
    return {**vectors, **cosine}


def _loss(rows: Sequence[Mapping[str, Any]]) -> Record:
    tokens = sum(int(row["tokens"]) for row in rows)
    loss = sum(float(row["loss"]) for row in rows) / tokens
    with np.errstate(over="ignore"):
        return {"loss": loss, "perplexity": float(np.exp(np.float64(loss))), "tokens": tokens}

"""The tasks: the columns that their examples are made of, the call of their model, and the score of a checkpoint."""

from collections.abc import Container, Mapping
from typing import Literal, NamedTuple


TaskName = Literal[
    "classification",
    "segmentation",
    "text_classification",
    "language_modeling",
    "instructions",
    "preference",
    "regression",
    "multilabel",
    "embedding",
    "text_to_text",
    "diffusion",
    "transcription",
    "audio_classification",
    "image_text",
    "own",
]


class TaskKind(NamedTuple):
    """The properties of a task.

    Attributes:
      columns: the fields for which a column of the data is looked for by name and type; empty: the task looks for its
        columns itself.
      inputs: the fields of a batch with which the model is called, in order (`inputs_of`: a row or a text may be in
        place of an image). `time` is made on the device.
      targets: the fields of a batch that only the loss reads.
      outputs: the result of the model, for messages.
      score: the metric that chooses the best checkpoint.
    """

    columns: tuple[str, ...]
    inputs: tuple[str, ...]
    targets: tuple[str, ...]
    outputs: str
    score: str


_OF_TEXT = ("tokens", "length")
_TOKENS = "logits [B, T, vocabulary]"
_TARGETS = "logits [B, U, vocabulary]"
_CLASSES = "logits [B, num_classes]"

TASKS: Mapping[TaskName, TaskKind] = {
    "classification": TaskKind(("image", "label"), ("image",), ("label",), _CLASSES, "accuracy"),
    "segmentation": TaskKind(("image", "mask"), ("image",), ("mask",), "logits [B, H, W, num_classes]", "iou"),
    "text_classification": TaskKind(("text", "label"), _OF_TEXT, ("label",), _CLASSES, "accuracy"),
    "language_modeling": TaskKind(("text",), ("tokens",), (), _TOKENS, "perplexity"),
    "instructions": TaskKind((), ("tokens",), ("answers",), _TOKENS, "perplexity"),
    "preference": TaskKind((), ("tokens",), ("answers", "rejected", "rejected_answers"), _TOKENS, "accuracy"),
    "regression": TaskKind(("image", "target"), ("image",), ("target",), "numbers [B, targets]", "rmse"),
    "multilabel": TaskKind(("image", "labels"), ("image",), ("labels",), "logits [B, labels]", "f1"),
    "embedding": TaskKind((), _OF_TEXT, ("positive", "positive_length"), "vectors [B, D]", "accuracy"),
    "text_to_text": TaskKind((), (*_OF_TEXT, "target_tokens"), ("target_length",), _TARGETS, "perplexity"),
    "diffusion": TaskKind(("image",), ("image", "time", "label"), (), "images [B, H, W, C]", "loss"),
    "transcription": TaskKind((), ("sound", "target_tokens"), ("answers",), _TARGETS, "perplexity"),
    "audio_classification": TaskKind((), ("sound",), ("label",), _CLASSES, "accuracy"),
    "image_text": TaskKind(("image", "text"), ("image", *_OF_TEXT), (), "vectors [B, 2, D]", "image_to_text"),
    "own": TaskKind((), (), (), "", "loss"),
}

CHATS: tuple[TaskName, ...] = ("instructions", "preference")
"""The tasks that learn from conversations, by the chat template of the tokenizer."""

NEXT_TOKEN: tuple[TaskName, ...] = ("language_modeling", *CHATS)
"""The tasks whose model predicts each next token of a text."""

OF_TARGETS: tuple[TaskName, ...] = ("text_to_text", "transcription")
"""The tasks whose model predicts each next token of a target, from a source of its own."""

OF_SOUNDS = tuple(name for name, kind in TASKS.items() if "sound" in kind.inputs)
"""The tasks that learn from sounds."""

COMPARED: tuple[TaskName, ...] = ("embedding", "image_text")
"""The tasks that compare each example with the others of its batch."""

OF_NUMBERS: tuple[TaskName, ...] = ("regression", "multilabel")
"""The tasks that predict columns of numbers, from images, from texts, or from the rows of a table."""

OF_ROWS: tuple[TaskName, ...] = ("classification", *OF_NUMBERS)
"""The tasks that learn from the rows of a table."""

WITH_CLASSES = tuple(name for name, kind in TASKS.items() if not {"label", "mask"}.isdisjoint(kind.targets))
"""The tasks whose loss compares logits with one class of each example or pixel."""

WITHOUT_TEXTS = tuple(
    name
    for name, kind in TASKS.items()
    if kind.inputs and {"tokens", "target_tokens"}.isdisjoint(kind.inputs) and name not in OF_NUMBERS
)
"""The tasks whose data have no texts, and need no tokenizer."""


def inputs_of(task: TaskName, fields: Container[str]) -> tuple[str, ...]:
    """The fields with which the model of a task is called, in order: a `row` or a text if there is no `image`."""
    inputs = TASKS[task].inputs
    if "image" not in inputs or "image" in fields:
        return inputs
    if "row" in fields:
        return ("row",)
    return _OF_TEXT if "tokens" in fields else inputs

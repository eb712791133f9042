"""The networks that a folder of Hugging Face files may describe: their kind, their settings, and advice on them."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from mpjax.config.tasks import NEXT_TOKEN, OF_NUMBERS, TaskName
from mpjax.errors import UsageError
from mpjax.models.config_keys import CONFIG, read_object
from mpjax.models.decoder import config_json as decoder
from mpjax.models.encoder import config_json as encoder
from mpjax.models.image_text import config_json as two_towers
from mpjax.models.mamba2 import config_json as mamba2
from mpjax.models.t5 import config_json as t5
from mpjax.models.vision import config_json as vision
from mpjax.models.whisper import config_json as whisper
from mpjax.strict_json import encode


Kind = Literal["decoder", "mamba2", "encoder", "t5", "vision", "whisper"]

_FILES: Mapping[Kind, Any] = {
    "decoder": decoder,
    "mamba2": mamba2,
    "encoder": encoder,
    "t5": t5,
    "vision": vision,
    "whisper": whisper,
}
"""For each kind, the file that reads its config.json, with the names of its `FAMILIES`."""


_TASKS: Mapping[Kind, tuple[TaskName, ...]] = {
    "decoder": NEXT_TOKEN,
    "mamba2": NEXT_TOKEN,
    "encoder": ("text_classification", "embedding", *OF_NUMBERS),
    "t5": ("text_to_text",),
    "vision": ("classification", *OF_NUMBERS),
    "whisper": ("transcription", "audio_classification"),
}


def require_task(name: str, folder: pathlib.Path, task: TaskName) -> None:
    """Raises UsageError if the network of a folder is for other tasks; `name` is its name in the message.

    An objective of the user's own (`own`) may use any network.
    """
    fitting = _TASKS[kind_of(folder)]
    if read_object(folder / CONFIG)["model_type"] in two_towers.FAMILIES:
        fitting = ("image_text", *fitting)
    if task not in (*fitting, "own"):
        raise UsageError(
            f"--model.name {name} is for other tasks than {task}: write --task {' or '.join(fitting)}, or name another "
            "model",
            repair={"task": fitting[0]} if len(fitting) == 1 else None,
        )


def kind_of(folder: pathlib.Path) -> Kind:
    """The kind of the network in a folder, by the `model_type` of its config.json.

    Raises:
      UsageError: there is no config.json, it is damaged, or it is of no network that mpjax has.
    """
    config = read_object(folder / CONFIG)
    name = config.get("model_type") if isinstance(config, Mapping) else None
    for kind, file in _FILES.items():
        if isinstance(name, str) and name in file.FAMILIES:
            return kind
    known = "; ".join(f"{kind}: {', '.join(sorted(file.FAMILIES))}" for kind, file in _FILES.items())
    raise UsageError(f"{folder / CONFIG}: model_type is {encode(name)}: wanted a network that mpjax has ({known})")


def read_settings(folder: pathlib.Path) -> Any:
    """Reads the settings of the network in a folder, a frozen dataclass of its kind.

    Raises:
      UsageError: as `kind_of`, or the network has settings that mpjax does not have.
    """
    return _FILES[kind_of(folder)].read_settings(folder)


def advice_on(folder: pathlib.Path, image_shape: tuple[int, ...] | None = None, length: int | None = None) -> list[str]:
    """Advises, in a list of sentences, on what training does not do as a folder's files say.

    `image_shape` is the height, width and channels of images, and `length` the tokens of a text with its padding.
    """
    match kind_of(folder):
        case "decoder":
            return decoder.advice_on_balance(folder)
        case "encoder":
            return encoder.advice_on_dropout(folder)
        case "t5":
            return t5.advice_on_t5(folder)
        case "vision":
            from mpjax.models.vision.images import advice_on_images  # local, as it reads what images are made of

            about_texts = [] if length is None else two_towers.advice_on_length(folder, length)
            return [*advice_on_images(folder, image_shape), *about_texts]
    return []


def advice_on_classes(folder: pathlib.Path, names: Sequence[str]) -> list[str]:
    """Says, in a list of at most one sentence, that the head of a folder is for as many other classes than `names`.

    Names that transformers gives to classes without any, LABEL_0 and so on, tell nothing.
    """
    named = read_object(folder / CONFIG).get("id2label") or {}
    theirs = [str(named.get(str(number))) for number in range(len(named))]
    if len(theirs) != len(names) or all(name.startswith("LABEL_") for name in theirs):
        return []
    for number, (there, here) in enumerate(zip(theirs, names, strict=True)):
        if there.casefold() != here.casefold():
            return [
                f"the head of {folder} is for other classes: number {number} is {there!r} there, and {here!r} in the "
                'data; for a new head, write --model.pretrained_skip "head/*"'
            ]
    return []

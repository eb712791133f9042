"""Takes a Whisper apart to write the texts of sounds."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpjax.errors import UsageError
from mpjax.models.generation.targets import SplitTargets, apart_in_evaluation
from mpjax.models.whisper.network import Whisper


def split_whisper(
    model: Whisper,
    *,
    prompt: Sequence[int] = (),
    suppressed: Sequence[int] = (),
    suppressed_first: Sequence[int] = (),
) -> SplitTargets:
    """Takes a Whisper apart. The model stays as it is; its copy is in evaluation mode.

    Sources are log-mel features, float32 [F, M].

    Args:
      model: the model.
      prompt: the tokens that every text begins with, behind the one that the decoder reads first.
      suppressed: tokens that are never drawn.
      suppressed_first: tokens that are not drawn right behind the prompt.

    Raises:
      UsageError: the model does not know one of the tokens, or the prompt leaves no room.
    """
    settings = model.settings
    start = (settings.start, *prompt)
    for name, tokens in {"prompt": start, "suppressed": suppressed, "suppressed first": suppressed_first}.items():
        if unknown := [token for token in tokens if not 0 <= token < settings.vocabulary]:
            raise UsageError(f"{name} tokens: {unknown[0]}, and the model knows 0 to {settings.vocabulary - 1}")
    if len(start) >= settings.length:
        raise UsageError(f"a prompt of {len(start)} tokens leaves no room: texts have at most {settings.length}")
    graph, state = apart_in_evaluation(model)
    return SplitTargets(
        graph,
        state,
        settings.vocabulary,
        settings.length,
        start,
        _stacked,
        _check,
        tuple(suppressed),
        tuple(suppressed_first),
    )


def _stacked(sounds: list[np.ndarray]) -> tuple[np.ndarray, None]:
    return np.stack(sounds), None


def _check(sound: np.ndarray, model: Any, *, name: str) -> None:
    if sound.ndim != 2 or sound.dtype != np.float32:
        raise UsageError(
            f"{name} is {sound.dtype}{list(sound.shape)}: wanted log-mel features, float32 [frames, bins], such as "
            "mpjax.data.audio.log_mels computes"
        )

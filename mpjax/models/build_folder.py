"""Builds the network that the files of a folder of Hugging Face describe."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flax import nnx

from mpjax.data.fields import outputs_of
from mpjax.errors import UsageError
from mpjax.models.folder_kinds import kind_of
from mpjax.models.pretrained.files import find_folder


if TYPE_CHECKING:  # at run time, the networks need no settings
    from mpjax.config import schema
    from mpjax.config.tasks import TaskName
    from mpjax.data.fields import Fields

    Require = Callable[[TaskName], None]


def build_from_folder(config: schema.Model, fields: Fields, require: Require, *, rngs: nnx.Rngs) -> nnx.Module:
    """Builds the network of the folder that `config` names, with initial values; its weights are not read.

    Args:
      config: the `model` section of the settings.
      fields: the fields of a batch.
      require: raises UsageError if the fields are not those of a task.
      rngs: the random streams for initial values.

    Raises:
      UsageError: as `require`, the files describe what mpjax does not have, or the network takes other tokens, or
        longer or shorter inputs than the data has.
    """
    folder = find_folder(config.folder)
    makers = {
        "decoder": _decoder,
        "mamba2": _mamba2,
        "encoder": _encoder,
        "t5": _t5,
        "vision": _vision,
        "whisper": _whisper,
    }
    return makers[kind_of(folder)](config, folder, fields, require, rngs)


def _decoder(
    config: schema.Model, folder: pathlib.Path, fields: Fields, require: Require, rngs: nnx.Rngs
) -> nnx.Module:
    from mpjax.models.decoder.config_json import read_settings
    from mpjax.models.decoder.network import Decoder

    require("language_modeling")
    settings = read_settings(folder)
    tokens: Any = fields["tokens"]
    _require_tokens(config, settings, tokens.vocabulary, tokens.length - 1)
    return Decoder(settings, scan_blocks=config.scan_blocks, rngs=rngs)


def _mamba2(config: schema.Model, folder: pathlib.Path, fields: Fields, require: Require, rngs: nnx.Rngs) -> nnx.Module:
    from mpjax.models.mamba2.config_json import read_settings
    from mpjax.models.mamba2.network import Mamba2

    require("language_modeling")
    settings = read_settings(folder)
    tokens: Any = fields["tokens"]
    _require_tokens(config, settings, tokens.vocabulary, tokens.length - 1)
    return Mamba2(settings, scan_blocks=config.scan_blocks, rngs=rngs)


def _encoder(
    config: schema.Model, folder: pathlib.Path, fields: Fields, require: Require, rngs: nnx.Rngs
) -> nnx.Module:
    """Builds the encoder of a folder: a classifier for data with labels, else one that makes a vector of a text."""
    from mpjax.models.encoder.config_json import read_settings
    from mpjax.models.encoder.kinds import make_classifier, make_encoder

    classifies = "positive" not in fields
    require("text_classification" if classifies else "embedding")
    settings = read_settings(folder)
    tokens: Any = fields["tokens"]
    _require_tokens(config, settings, tokens.vocabulary, tokens.length)
    if classifies:
        return make_classifier(settings, num_classes=outputs_of(fields), scan_blocks=config.scan_blocks, rngs=rngs)
    return make_encoder(settings, scan_blocks=config.scan_blocks, rngs=rngs)


def _vision(config: schema.Model, folder: pathlib.Path, fields: Fields, require: Require, rngs: nnx.Rngs) -> nnx.Module:
    """Builds the network for images of a folder."""
    if "tokens" in fields:
        return _image_text(config, folder, fields, require, rngs)
    from mpjax.models.vision.config_json import read_settings
    from mpjax.models.vision.kinds import make_network

    require("classification")
    image: Any = fields["image"]
    sizes = {"image_shape": image.shape, "num_classes": outputs_of(fields)}
    return make_network(read_settings(folder), **sizes, scan_blocks=config.scan_blocks, rngs=rngs)


def _image_text(
    config: schema.Model, folder: pathlib.Path, fields: Fields, require: Require, rngs: nnx.Rngs
) -> nnx.Module:
    """Builds the two towers of a folder, for images with texts."""
    from mpjax.models.image_text.config_json import read_settings
    from mpjax.models.image_text.network import ImageText

    require("image_text")
    settings = read_settings(folder)
    tokens: Any = fields["tokens"]
    _require_tokens(config, settings, tokens.vocabulary, tokens.length)
    image: Any = fields["image"]
    return ImageText(settings, image_shape=image.shape, scan_blocks=config.scan_blocks, rngs=rngs)


def _t5(config: schema.Model, folder: pathlib.Path, fields: Fields, require: Require, rngs: nnx.Rngs) -> nnx.Module:
    from mpjax.models.t5.config_json import read_settings
    from mpjax.models.t5.network import T5

    require("text_to_text")
    settings = read_settings(folder)
    tokens: Any = fields["tokens"]
    _require_tokens(config, settings, tokens.vocabulary, tokens.length)
    return T5(settings, scan_blocks=config.scan_blocks, rngs=rngs)


def _whisper(
    config: schema.Model, folder: pathlib.Path, fields: Fields, require: Require, rngs: nnx.Rngs
) -> nnx.Module:
    """Builds the Whisper of a folder, or for data with labels a classifier with its encoder."""
    from mpjax.models.whisper.config_json import read_settings
    from mpjax.models.whisper.network import Whisper, WhisperClassifier

    classifies = "label" in fields
    require("audio_classification" if classifies else "transcription")
    settings, sound = read_settings(folder), fields["sound"]
    heard = [*getattr(sound, "shape", ())]
    if heard != (wanted := [2 * settings.positions, settings.bins]):
        raise UsageError(
            f"--model.name {config.name} hears {wanted[0]} frames of {wanted[1]} mel bins, and the data has {heard[0]} "
            f"of {heard[1]}: write --data.features {config.folder}",
            repair={"data.features": config.folder},
        )
    if classifies:
        return WhisperClassifier(settings, num_classes=outputs_of(fields), scan_blocks=config.scan_blocks, rngs=rngs)
    tokens: Any = fields["target_tokens"]
    _require_tokens(config, settings, tokens.vocabulary, tokens.length)
    return Whisper(settings, scan_blocks=config.scan_blocks, rngs=rngs)


def _require_tokens(config: schema.Model, settings: Any, vocabulary: int, length: int) -> None:
    """Raises UsageError if the data has more tokens, or longer texts, than the network of a folder takes."""
    if vocabulary > settings.vocabulary:
        raise UsageError(
            f"--model.name {config.name} has {settings.vocabulary} tokens, and the data {vocabulary}: write "
            f"--data.tokenizer {config.folder}",
            repair={"data.tokenizer": config.folder},
        )
    if length > getattr(settings, "length", length):  # T5 takes texts of any length
        raise UsageError(
            f"--model.name {config.name} takes texts of at most {settings.length} tokens, and the data has texts of "
            f"{length}: write --data.length {settings.length}",
            repair={"data.length": settings.length},
        )

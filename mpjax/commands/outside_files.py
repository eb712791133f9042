"""What a run reads beside its checkpoints: they describe its files and its data, and their readers compare."""

import dataclasses
import pathlib
import warnings
from collections.abc import Mapping
from typing import Any

from mpjax.config.schema import Config
from mpjax.data.examples import Source
from mpjax.data.stored_fields import described_fields
from mpjax.errors import CheckpointWarning, UsageError
from mpjax.loop.stored import DECODER, ENCODING, FEATURES, FIELDS, TOKENIZER


# The imports inside are local, like all imports that few runs need.


def described_files(config: Config, source: Source) -> dict[str, Any]:
    """Describes what decides, outside of the checkpoints, what a run computes, as entries of a description."""
    entries: dict[str, Any] = {FIELDS: described_fields(source, config.data)}
    if config.is_encoded:
        from mpjax.commands.encoding_of_run import digest_of_encoding

        entries[ENCODING] = digest_of_encoding(source.encoding)
    if config.model.folder:
        from mpjax.commands.decoder_of_run import described_decoder

        entries[DECODER] = described_decoder(config.model)
    if "tokens" in source.fields:
        from mpjax.commands.tokenizer_of_run import digests_of_tokenizer

        entries[TOKENIZER] = digests_of_tokenizer(config.data)
    if "sound" in source.fields:
        entries[FEATURES] = _features(config)
    return entries


def compare_files(config: Config, source: Source, folder: pathlib.Path, about: Mapping[str, Any]) -> None:
    """Compares what a run reads now, its data from `source`, with the description of a checkpoint in its folder.

    Warns:
      CheckpointWarning: the files of the tokenizer have changed, or a field comes from another column.

    Raises:
      UsageError: the statistics of the columns, the settings of a decoder in its folder, the features of sounds, the
        names of classes, or the dtype or range of images have changed. With `config.other_data`, the last two may.
    """
    if FIELDS in about and not config.other_data:
        now = described_fields(source, config.data)
        for name in now.keys() & about[FIELDS].keys():
            _require_names(name, about[FIELDS][name], now[name], other=", or write --other_data" * config.resume)
            if not config.resume:  # which compares the data themselves
                _require_same_values(name, about[FIELDS][name], now[name])
    if ENCODING in about:
        from mpjax.commands.encoding_of_run import verify_encoding

        verify_encoding(folder, about[ENCODING])
    if DECODER in about and config.model.folder:
        from mpjax.commands.decoder_of_run import verify_decoder

        verify_decoder(config.model, about[DECODER])
    if TOKENIZER in about:
        from mpjax.commands.tokenizer_of_run import compare_tokenizer

        compare_tokenizer(config.data, about[TOKENIZER])
    if FEATURES in about and (now := _features(config)) != (before := about[FEATURES]):
        others = (f"{name} {now[name]}, before {before.get(name)}" for name in now if now[name] != before.get(name))
        raise UsageError(
            f"--data.features {config.data.features} makes other features of sounds than the checkpoint learned: "
            f"{'; '.join(others)}; put the file of before back"
        )


def _features(config: Config) -> dict[str, int]:
    """The settings by which the sounds of a run become features."""
    from mpjax.data.audio.feature_settings import read_features

    return dataclasses.asdict(read_features(config.data.features))


_SHOWN = 5


def _require_names(field: str, before: Mapping[str, Any], now: Mapping[str, Any], *, other: str) -> None:
    """Raises UsageError if the data gives other names to the numbers that a checkpoint predicts; `other` is advice."""
    names, others = before.get("names", []), now.get("names", [])
    if names == others:
        return
    first = next((at for at in range(len(names)) if names[at : at + 1] != others[at : at + 1]), len(names))
    raise UsageError(
        f"the checkpoint predicts the classes {_shown(names, first) or 'by number, without names'} ({field}), and the "
        f"data has {_shown(others, first) or 'none with names'} now: numbers would get the wrong names; put the "
        f"classes back as they were{other}"
    )


def _require_same_values(field: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Compares the dtype and range of images, and the values of masks.

    Warns:
      CheckpointWarning: the field comes from another column.

    Raises:
      UsageError: one of them is another now.
    """
    # Floats from 0 to 1 have no dtype there, because bytes are scaled to them.
    for name, usual in {"trained_dtype": "uint8", "depth": None, "values": None}.items():
        if (old := before.get(name, usual)) != (new := now.get(name, usual)):
            raise UsageError(
                f"the checkpoint was trained on {field} with {name.removeprefix('trained_')} {old}, and the data has "
                f"{new} now: the model would read other numbers; put the data back as it was"
            )
    if (old := before.get("origin", "")) != (new := now.get("origin", "")):
        warnings.warn(
            f"{field} is {new or f'column {field!r}'} now, and was {old or f'column {field!r}'} when the checkpoint "
            "was trained; if it means something else, write data.columns in the run's config.toml",
            CheckpointWarning,
            stacklevel=2,
        )


def _shown(names: list[str], first: int) -> str:
    """Lists names with their numbers: all of a few, otherwise a few from number `first` on."""
    start = first if len(names) > _SHOWN else 0
    listed = ", ".join(f"{number}: {name}" for number, name in enumerate(names) if 0 <= number - start < _SHOWN)
    return f"{listed}, ..." if len(names) > start + _SHOWN else listed

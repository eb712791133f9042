"""The files that a run reads beside its checkpoints: checkpoints describe them, and readers of a checkpoint compare."""

import pathlib
from collections.abc import Mapping
from typing import Any

from mpjax.config.schema import Config
from mpjax.data.examples import Source
from mpjax.loop.stored import DECODER, ENCODING, TOKENIZER


# The imports inside are local, like all imports that few runs need.


def described_files(config: Config, source: Source) -> dict[str, Any]:
    """Describes the files outside of the checkpoints that decide what a run computes, as entries of a description."""
    entries: dict[str, Any] = {}
    if config.is_encoded:
        from mpjax.commands.encoding_of_run import digest_of_encoding

        entries[ENCODING] = digest_of_encoding(source.encoding)
    if config.model.folder:
        from mpjax.commands.decoder_of_run import described_decoder

        entries[DECODER] = described_decoder(config.model)
    if "tokens" in source.fields:
        from mpjax.commands.tokenizer_of_run import digests_of_tokenizer

        entries[TOKENIZER] = digests_of_tokenizer(config.data)
    return entries


def compare_files(config: Config, folder: pathlib.Path, about: Mapping[str, Any]) -> None:
    """Compares the files that a run reads now with the description of a checkpoint in its folder.

    Warns:
      CheckpointWarning: the files of the tokenizer have changed.

    Raises:
      UsageError: the statistics of the columns, or the settings of a decoder in its folder, have changed.
    """
    if ENCODING in about:
        from mpjax.commands.encoding_of_run import verify_encoding

        verify_encoding(folder, about[ENCODING])
    if DECODER in about and config.model.folder:
        from mpjax.commands.decoder_of_run import verify_decoder

        verify_decoder(config.model, about[DECODER])
    if TOKENIZER in about:
        from mpjax.commands.tokenizer_of_run import compare_tokenizer

        compare_tokenizer(config.data, about[TOKENIZER])

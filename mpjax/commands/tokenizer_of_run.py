"""The files of a run's tokenizer: its checkpoints name their digests, since another tokenizer makes other tokens."""

import hashlib
import pathlib
import warnings
from collections.abc import Mapping

from mpjax.config.schema import Data
from mpjax.data.text.tokenizers import PLAIN, find_tokenizer
from mpjax.errors import CheckpointWarning


_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""What says how a text, or a conversation, becomes tokens."""


def digests_of_tokenizer(data: Data) -> dict[str, str]:
    """The SHA-256, in hexadecimal, of each file of the tokenizer; empty for one without files."""
    if data.tokenizer in PLAIN:
        return {}
    path = find_tokenizer(data.tokenizer)
    files = [path / name for name in _FILES] if path.is_dir() else [path, *(path.parent / name for name in _FILES[1:])]
    return {file.name: _digest(file) for file in files if file.is_file()}


def compare_tokenizer(data: Data, before: Mapping[str, str]) -> None:
    """Compares the files of the tokenizer with the digests in a checkpoint.

    Warns:
      CheckpointWarning: a file has changed, appeared or gone, so that a text may be other tokens than in training.
    """
    now = digests_of_tokenizer(data)
    changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if changed:
        warnings.warn(
            f"the tokenizer {data.tokenizer} is not that of the checkpoint (changed: {', '.join(changed)}): texts may "
            "become other tokens than the model learned; put the files of before back",
            CheckpointWarning,
            stacklevel=2,
        )


def _digest(file: pathlib.Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()

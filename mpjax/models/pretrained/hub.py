"""Weights from the Hugging Face hub: safetensors and the model's settings, nothing else."""

import pathlib
import shlex

from mpjax.errors import UsageError


PATTERNS = ["model.safetensors", "model-*.safetensors", "model.safetensors.index.json", "config.json"]


def download(name: str) -> pathlib.Path:
    """The folder of a hub model's files, fetched unless they are in the hub's cache.

    Args:
      name: `owner/name`, or the bare name of an old model.

    Raises:
      UsageError: huggingface_hub is not installed, the hub cannot be reached, or it has no such model.
    """
    taken = f"there is no file or folder '{name}', so it was taken for an id of the Hugging Face hub"
    try:
        import huggingface_hub
    except ImportError as error:
        raise UsageError(
            f"{taken}, for which huggingface_hub is needed: pip install huggingface_hub\n{_by_hand(name)}"
        ) from error
    try:
        return pathlib.Path(huggingface_hub.snapshot_download(name, allow_patterns=PATTERNS))
    except Exception as error:  # those of its HTTP library too, and which library that is differs by version
        reason = str(error).partition("\n")[0][:200] or type(error).__name__
        raise UsageError(f"{taken}, which did not give it: {reason}\n{_by_hand(name)}") from error


def _by_hand(name: str) -> str:
    folder = name.rpartition("/")[2]
    return (
        "or fetch it by hand on a machine with network, and give the folder in place of the id:\n"
        f'  hf download {shlex.quote(name)} --include "*.safetensors" "*.json" --local-dir {shlex.quote(folder)}'
    )

"""The settings of a run's network from a folder: its checkpoints name them, since the files that say them may change.

Most of them, such as the angles of position embeddings, are in no shape of an array.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import jax

from mpjax.config.schema import Model
from mpjax.errors import UsageError
from mpjax.models.config_keys import CONFIG
from mpjax.models.folder_kinds import read_settings
from mpjax.models.pretrained.files import find_folder
from mpjax.precision.dtypes import path_name
from mpjax.strict_json import encode


_NO_EFFECT = ("length",)
"""Settings that change no logit: a run may go on with longer texts."""


def described_decoder(model: Model) -> dict[str, Any]:
    """The settings of the network in the folder that `model` names, as nested values of JSON."""
    folder = find_folder(model.folder)
    settings = dataclasses.asdict(read_settings(folder))
    return json.loads(encode({name: value for name, value in settings.items() if name not in _NO_EFFECT}))


def verify_decoder(model: Model, expected: Mapping[str, Any]) -> None:
    """Checks that the folder that `model` names has the network that a checkpoint was trained with.

    Raises:
      UsageError: its config.json has other settings. The weights would compute something else.
    """
    before, now = (_flat(settings) for settings in (expected, described_decoder(model)))
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if names:
        first = names[0]
        raise UsageError(
            f"{find_folder(model.folder) / CONFIG} has another network than the checkpoint: {first} is "
            f"{encode(now.get(first))}, before {encode(before.get(first))}"
            f"{f', and {len(names) - 1} more' if names[1:] else ''}; put the file of before back, or name its folder, "
            "by --model.name with --resume or as model.name in the run's config.toml"
        )


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers, texts and nulls of nested settings by path, such as `layers/0/window`."""
    leaves = jax.tree_util.tree_leaves_with_path(settings, is_leaf=lambda value: value is None)
    return {path_name(path): value for path, value in leaves}

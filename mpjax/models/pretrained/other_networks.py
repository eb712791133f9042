"""Refuses files of networks with the same tensors that compute something else, by the config.json beside them."""

import json
import pathlib

from mpjax.errors import UsageError
from mpjax.models.pretrained.layouts.entry import WeightMap


def refuse_other_networks(file: pathlib.Path, layout: WeightMap) -> None:
    """Checks the `architecture` that the config.json in the folder of a file names, as timm writes it.

    Files without a config.json say nothing of it, and are read.

    Raises:
      UsageError: it begins with one of the layout's `others`, or config.json is damaged.
    """
    config = file.with_name("config.json")
    if not layout.others or not config.is_file():
        return
    try:
        architecture = str(json.loads(config.read_text(encoding="utf-8")).get("architecture", ""))
    except (ValueError, AttributeError, RecursionError) as error:
        raise UsageError(f"{config} is damaged ({error!r}); fetch it again") from error
    for prefix, difference in layout.others.items():
        if architecture.startswith(prefix):
            raise UsageError(
                f"{file} has the weights of {architecture} (by {config.name}), a network with the same tensors, which "
                f"{difference}: its weights would compute something else here; take those of "
                f"{architecture.removeprefix(prefix)}"
            )

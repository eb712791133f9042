"""Loads CLIP and SigLIP from a folder of Hugging Face files, and exports them to one that transformers loads."""

from __future__ import annotations

import os
from collections.abc import Sequence

from flax import nnx
from jax.typing import DTypeLike

from mpjax.config.paths import expanded
from mpjax.models.config_keys import CONFIG, read_object
from mpjax.models.image_text.config_json import FAMILIES, read_settings
from mpjax.models.image_text.network import ImageText
from mpjax.models.pretrained.files import find_folder
from mpjax.models.pretrained.report import PretrainedReport
from mpjax.models.pretrained.whole_folder import TOKENIZER_FILES, export_folder, load_folder, require_settings
from mpjax.models.vision.images import PREPROCESSOR
from mpjax.precision.policy import Policy


def load_image_text(
    path: str | os.PathLike,
    *,
    image_shape: tuple[int, int, int],
    policy: str | Policy = "float32",
    scan_blocks: bool = False,
    skip: Sequence[str] = (),
) -> ImageText:
    """Builds the two towers of a folder of Hugging Face files, with their weights, under a policy.

    Args:
      path: a folder with config.json and safetensors, or an id of the Hugging Face hub.
      image_shape: height, width and channels of an image.
      policy: the precision of the model, which is applied by `mpjax.apply_policy`; weights are stored in its dtypes.
      scan_blocks: whether the blocks of each tower are one loop over stacked arrays; see `mpjax.models.scan`.
      skip: patterns of paths that keep their initial values, as in `mpjax.load_pretrained`.

    Raises:
      UsageError: config.json has what mpjax does not know, or the weights do not fit (`mpjax.load_pretrained`).
    """
    folder = find_folder(path)
    settings = read_settings(folder)

    def make() -> ImageText:
        return ImageText(settings, image_shape=image_shape, scan_blocks=scan_blocks, rngs=nnx.Rngs(0))

    return load_folder(make, folder, policy, skip)


def export_image_text(
    model: ImageText,
    path: str | os.PathLike,
    *,
    source: str | os.PathLike,
    dtype: DTypeLike | None = None,
    allow_lossy: bool = False,
) -> PretrainedReport:
    """Writes a folder that `transformers.CLIPModel` or `SiglipModel` loads, with the other files of `source`.

    A temperature of CLIP that is beyond its limit is written as the limit, because transformers has none.

    Args:
      model: the network.
      path: the folder, which must be empty or absent.
      source: the folder, or the id on the hub, that the network was loaded from.
      dtype: the dtype of the weights in the file; None: the model's own.
      allow_lossy: whether values may overflow to inf or flush to zero in `dtype`.

    Raises:
      UsageError: `path` is a file or not empty, the settings of `source` are not those of the model, or values overflow
        or flush to zero without `allow_lossy`.
    """
    origin = find_folder(source)
    require_settings(origin, read_settings(origin), model.settings)
    temperature = model.temperature
    before = temperature.scale[...]
    if temperature.largest is not None:
        temperature.scale[...] = before.clip(max=temperature.largest)
    kind = FAMILIES[read_object(origin / CONFIG)["model_type"]]
    try:
        return export_folder(
            model,
            expanded(path),
            origin=origin,
            copied=[PREPROCESSOR, *TOKENIZER_FILES],
            changes={"architectures": [f"{kind}Model"]},
            dtype=dtype,
            allow_lossy=allow_lossy,
        )
    finally:
        temperature.scale[...] = before

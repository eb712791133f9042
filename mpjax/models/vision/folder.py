"""Loads a network for images from a folder of Hugging Face files, and exports it to one that transformers loads."""

from __future__ import annotations

import fnmatch
import os
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from safetensors.numpy import load_file

from mpjax.config.paths import expanded
from mpjax.models.config_keys import CONFIG, read_object
from mpjax.models.pretrained.export import write_tensors
from mpjax.models.pretrained.files import SINGLE, find_files, find_folder, open_tensors
from mpjax.models.pretrained.layouts.families import layouts_of
from mpjax.models.pretrained.load import cast
from mpjax.models.pretrained.report import PretrainedReport
from mpjax.models.pretrained.whole_folder import export_folder, load_folder, named_classes, require_settings
from mpjax.models.vision.config_json import MASK_TOKEN, UNREAD, WITH_TEACHER, class_of, read_settings
from mpjax.models.vision.images import PREPROCESSOR
from mpjax.models.vision.kinds import make_network
from mpjax.precision.dtypes import widest
from mpjax.precision.policy import Policy


if TYPE_CHECKING:
    from mpjax.models.vision.kinds import AnyVision


def load_vision(
    path: str | os.PathLike,
    *,
    image_shape: tuple[int, int, int],
    num_classes: int,
    policy: str | Policy = "float32",
    scan_blocks: bool = False,
    skip: Sequence[str] = (),
) -> AnyVision:
    """Builds the network of a folder of Hugging Face files, with its weights, under a policy.

    Args:
      path: a folder with config.json and safetensors, or an id of the Hugging Face hub.
      image_shape: height, width and channels of an image.
      num_classes: the number of logits, which has to be that of the file.
      policy: the precision of the model, which is applied by `mpjax.apply_policy`; weights are stored in its dtypes.
      scan_blocks: whether the blocks are one loop over stacked arrays; see `mpjax.models.scan`.
      skip: patterns of paths that keep their initial values, as in `mpjax.load_pretrained`.

    Raises:
      UsageError: config.json has what mpjax does not know, or the weights do not fit (`mpjax.load_pretrained`).
    """
    folder = find_folder(path)
    settings = read_settings(folder)

    def make() -> AnyVision:
        options: dict[str, Any] = {"image_shape": image_shape, "num_classes": num_classes, "scan_blocks": scan_blocks}
        return make_network(settings, **options, rngs=nnx.Rngs(0))

    return load_folder(make, folder, policy, skip)


def export_vision(
    model: AnyVision,
    path: str | os.PathLike,
    *,
    source: str | os.PathLike,
    classes: Sequence[str] = (),
    problem: str | None = None,
    dtype: DTypeLike | None = None,
    allow_lossy: bool = False,
) -> PretrainedReport:
    """Writes a folder that `transformers.AutoModelForImageClassification.from_pretrained` loads.

    A DeiT with two heads is for `DeiTForImageClassificationWithTeacher`. A DINOv3 is for `transformers.AutoModel`,
    which has no head: it is in the file, where mpjax reads it. The folder has the weights in one file, the
    config.json of `source` with the dtype of these weights, the class of the model and its classes, and the
    preprocessor_config.json of `source`. Tensors that no logit depends on, such as the
    token of hidden patches, are copied too.

    Args:
      model: the network.
      path: the folder, which must be empty or absent.
      source: the folder, or the id on the hub, that the network was loaded from.
      classes: the name of each logit; empty: those in config.json of `source` if they are as many, else `LABEL_0`,
        `LABEL_1`, ...
      problem: the `problem_type` of transformers; None: that of `source`.
      dtype: the dtype of the weights in the file; None: the model's own.
      allow_lossy: whether values may overflow to inf or flush to zero in `dtype`.

    Returns:
      A `PretrainedReport` of the written variables.

    Raises:
      UsageError: `path` is a file or not empty, the settings of `source` are not those of the model, or values overflow
        or flush to zero without `allow_lossy`.
    """
    origin, folder = find_folder(source), expanded(path)
    require_settings(origin, read_settings(origin), model.settings)
    config = read_object(origin / CONFIG)
    two = getattr(model.settings, "second_head", False)
    kind = WITH_TEACHER if two else class_of(config["model_type"])
    if (tower := config["model_type"]).endswith("_vision_model"):  # the class of a classifier has the tower inside
        kept = {key: config[key] for key in _OUTSIDE & config.keys()}
        config = kept | {"model_type": tower.removesuffix("_vision_model"), "vision_config": config}
    changes: dict[str, Any] = {"architectures": [kind]} | ({"problem_type": problem} if problem else {})
    head: Any = model.head
    head = head.first if two else head
    outputs = head.kernel[...].shape[1]
    changes |= named_classes(config, outputs, classes)
    options: dict[str, Any] = {"dtype": dtype, "allow_lossy": allow_lossy}
    report = export_folder(
        model, folder, origin=origin, copied=[PREPROCESSOR], changes=changes, config=config, **options
    )
    if unread := UNREAD.get(getattr(model.settings, "kind", ""), (MASK_TOKEN,)):
        base = layouts_of(model)["huggingface"](model).base
        _add_unread(folder / SINGLE, origin, base, unread, widest(*(row.after for row in report)))
    return report


_OUTSIDE = {"id2label", "label2id", "problem_type", "torch_dtype", "dtype", "transformers_version"}
"""The keys of a tower's config.json that belong to the classifier."""


def _add_unread(file: pathlib.Path, origin: pathlib.Path, base: str, patterns: Sequence[str], dtype: np.dtype) -> None:
    """Copies the tensors of `origin` that no logit depends on, but the classes of transformers have."""
    with open_tensors(find_files(origin)) as tensors:
        kept = {
            base + key: np.array(cast(tensor.read(), dtype), order="C")
            for name, tensor in tensors.items()
            if any(fnmatch.fnmatchcase(key := name.removeprefix(base), pattern) for pattern in patterns)
        }
    if kept:
        write_tensors(file, load_file(file) | kept, format="pt")

"""Builds the network that the settings name."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.config.tasks import TASKS
from mpjax.data.fields import PREDICTED, outputs_of
from mpjax.errors import UsageError
from mpjax.models.named_networks import network
from mpjax.precision.calls import name_scopes
from mpjax.precision.module_tree import plain_arrays


if TYPE_CHECKING:  # at run time, the networks need neither settings nor data
    from mpjax.config import schema
    from mpjax.config.tasks import TaskName
    from mpjax.data.fields import Fields


class NamedModel(NamedTuple):
    """A model in the table of names.

    Attributes:
      task: the task of the model.
      make: builds the module from the results of `inputs`, from `rngs`, and from the `settings` that are given.
      inputs: computes arguments of `make` from the fields of a batch and the settings.
      settings: the fields of `mpjax.config.schema.Model` that the model reads, in `inputs` or as arguments of `make`.
    """

    task: TaskName
    make: Callable[..., nnx.Module]
    inputs: Callable[[Fields, schema.Model], dict[str, Any]]
    settings: tuple[str, ...] = ()


def build_model(config: schema.Model, *, fields: Fields, rngs: nnx.Rngs) -> nnx.Module:
    """Builds the network that `config` names, in float32. Each module runs under a named scope of its path.

    Args:
      config: the `model` section of the settings.
      fields: the fields of a batch (`mpjax.data.batch_fields`).
      rngs: the random streams for initial values.

    Raises:
      UsageError: the model does not accept the fields or one of the settings, or the user's own model does not have
        the required signature, does not return a Flax module or cannot keep documents apart.
    """
    make = _from_folder if config.folder else _own if ":" in str(config.name) else _named
    model = make(config, fields, rngs)
    if (end := getattr(fields.get("tokens"), "document_end", None)) is not None:
        from mpjax.models.documents import keep_apart  # local, as few runs need it

        keep_apart(model, end, name=str(config.name))
    name_scopes(model)
    return model


def _named(config: schema.Model, fields: Fields, rngs: nnx.Rngs) -> nnx.Module:
    """Builds a model of `ENTRIES`; raises UsageError if it does not accept the fields or one of the settings."""
    entry = ENTRIES[str(config.name)]
    _require_fields(config, fields, entry.task)
    _refuse_others(config, entry.settings)
    # The stem is a class among the results of `inputs`.
    read = {name: value for name, value in _given(config).items() if name in entry.settings and name != "stem"}
    return entry.make(**{**entry.inputs(fields, config), **read}, rngs=rngs)


def _from_folder(config: schema.Model, fields: Fields, rngs: nnx.Rngs) -> nnx.Module:
    """Builds the network that the files of a folder describe, with initial values; its weights are not read."""
    from mpjax.models.build_folder import build_from_folder  # local, as few runs need files of Hugging Face

    _refuse_others(config, FROM_FOLDER)
    return build_from_folder(config, fields, functools.partial(_require_fields, config, fields), rngs=rngs)


def _require_fields(config: schema.Model, fields: Fields, task: TaskName) -> None:
    """Raises UsageError if the fields are not those of the model's task; the message names models that fit the data."""
    read = {name: field for name, field in fields.items() if name not in _OF_LOSS}
    if not _accepts(config.name, task, read):
        # Images with labels are for classifiers, unless --task diffusion is said, which names its networks itself.
        fits = {name: other.task for name, other in ENTRIES.items() if _accepts(name, other.task, read)}
        fitting = [name for name, other in fits.items() if other != "diffusion" or "label" not in fields]
        others = [f"hf:FOLDER of {kind}" for name, kind in _IN_FOLDERS.items() if name in fields][:1]
        names = " or ".join(fitting or [*others, "FILE.py:NAME of your own model"])
        raise UsageError(
            f"--model.name {config.name} is for {task}: it takes {', '.join(_fields_of(task))}, but the data "
            f"has {', '.join(fields)}; write --model.name {names}, "
            f"or --task {task} for other data",
            repair={"model.name": fitting[0]} if len(fitting) == 1 else None,
        )


_IN_FOLDERS = {"sound": "a Whisper", "target_tokens": "a T5", "positive": "an encoder"}
"""The networks of folders alone for data with a field."""


def _accepts(name: object, task: TaskName, fields: Fields) -> bool:
    """True if a model takes batches of these fields. Classifiers also predict numbers, and the MLP also takes rows.

    A network for diffusion is told a label as well, if the images have one.
    """
    if task == "diffusion":
        return set(fields) in ({"image"}, {"image", "label"})
    inputs, outputs = (set(fields) - PREDICTED, set(fields) & PREDICTED)
    wanted = set(_fields_of(task))
    taken = [wanted - PREDICTED, *([{"row"}] if name == "mlp" else [])]
    predicted = PREDICTED if task in ("classification", "text_classification") else wanted & PREDICTED
    return inputs in taken and len(outputs) == len(wanted & PREDICTED) and outputs <= predicted


def _fields_of(task: TaskName) -> tuple[str, ...]:
    """The fields in a batch of a task, without those that the loss alone reads."""
    if task == "diffusion":  # times are drawn on the device, and labels may be absent
        return ("image",)
    kind = TASKS[task]
    return tuple(name for name in (*kind.inputs, *kind.targets) if name not in _OF_LOSS)


def _refuse_others(config: schema.Model, read: tuple[str, ...]) -> None:
    """Raises UsageError with a line for each setting that differs from its default and that is not in `read`.

    The settings in `_WITHOUT_EFFECT` are let through.
    """
    settings = _given(config)
    faults = []
    for name in sorted(settings.keys() - set(read) - _WITHOUT_EFFECT):
        usual = getattr(type(config), name)
        instead = f"no_{name}" if usual is False else f"{name} {usual}"
        faults.append(
            f"--model.{name} {settings[name]}: {config.name} has no such setting; leave it out, or write "
            f"--model.{instead}"
        )
    if faults:
        raise UsageError("\n".join(faults))


def _given(config: schema.Model) -> dict[str, Any]:
    """The settings of the network that differ from their defaults, by name."""
    usual = {field.name: field.default for field in dataclasses.fields(config) if field.name not in _OF_EVERY_MODEL}
    return {name: value for name in usual if (value := getattr(config, name)) != usual[name]}


_WITHOUT_EFFECT = frozenset({"pool", "stem"})
"""Settings that are named, not refused, where a model does not read them: runs have been stored with them."""


def advice_on(config: schema.Model, fields: Fields = MappingProxyType({})) -> list[str]:
    """Advises, in a list of sentences, on settings that the model does not read, of the run and of its config.json.

    Settings with their default values are not named. The user's own model reads no settings. With the `fields` of a
    batch, sentences say if a network from a folder interpolates its position embeddings, reads another position of
    texts, or has a head for classes of other names.
    """
    is_users_model = ":" in str(config.name) and not config.folder
    read = FROM_FOLDER if config.folder else () if is_users_model else ENTRIES[str(config.name)].settings
    unread = [f"--model.{name} {value}" for name, value in _given(config).items() if name not in read]
    why = "is your own model, which its code alone describes" if is_users_model else "does not read it"
    advice = [f"{', '.join(unread)} without effect: {config.name} {why}"] if unread else []
    if not config.folder:
        return advice
    from mpjax.models import folder_kinds
    from mpjax.models.pretrained.files import find_folder

    folder = find_folder(config.folder)
    image_shape, length = getattr(fields.get("image"), "shape", None), getattr(fields.get("tokens"), "length", None)
    advice += folder_kinds.advice_on(folder, image_shape, length)
    names = next((names for name in ("label", "labels") if (names := getattr(fields.get(name), "names", ()))), ())
    if config.weights == config.folder and not any("head" in pattern for pattern in config.pretrained_skip):
        advice += folder_kinds.advice_on_classes(folder, names)
    return advice


def _own(config: schema.Model, fields: Fields, rngs: nnx.Rngs) -> nnx.Module:
    """Builds the user's own model; raises UsageError if it has another signature or is no Flax NNX module."""
    from mpjax.config.user_code import load_function

    name = config.name
    make = load_function(name, flag="--model.name")
    try:
        _signature(make).bind(fields, rngs=rngs)
    except TypeError as error:
        raise UsageError(
            f"--model.name {name}: {error}; wanted NAME(fields, *, rngs), where fields is a dict of the fields of a "
            f"batch, here {dict(fields)}; write def __init__(self, fields, *, rngs: nnx.Rngs)"
        ) from error
    model = make(fields, rngs=rngs)
    if not isinstance(model, nnx.Module):
        raise UsageError(f"--model.name {name} returned {type(model).__name__}; wanted a flax.nnx.Module")
    _hold_arrays(model, f"--model.name {name}")
    return model


def _hold_arrays(model: nnx.Module, flag: str) -> None:
    """Makes plain arrays, as in `self.offsets = jnp.arange(8)`, part of the model's state, in place.

    Outside of a trace they are so anyway. Within a trace, Flax treats them as static attributes, which would outlive
    the trace.

    Raises:
      UsageError: an attribute is a random key or complex, which a checkpoint cannot hold.
    """
    for path, module, array in plain_arrays(model):
        if jnp.iscomplexobj(array):
            raise UsageError(
                f"{flag} keeps a complex array, {path}, which a checkpoint cannot hold; make it where it is used, "
                "or keep its real and its imaginary part"
            )
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            raise UsageError(
                f"{flag} keeps a random key, {path}, which a checkpoint cannot hold; "
                "write jax.random.key(SEED) where it is used, or keep nnx.Rngs(SEED), whose keys change each step"
            )
        setattr(module, path.rpartition("/")[2], nnx.data(array))


def _signature(make: Callable) -> inspect.Signature:
    """The signature of a call of `make`; for a class, that of `__init__` without `self`.

    The signature of a Flax module's class itself accepts any arguments, because of its metaclass.
    """
    return inspect.signature(functools.partial(make.__init__, None) if inspect.isclass(make) else make)


FROM_FOLDER = ("scan_blocks",)
"""The settings that a model of `hf:FOLDER` reads; all else is in its files."""

_OF_LOSS = ("answers", "rejected", "rejected_answers", "positive", "positive_length", "negative", "negative_length")
"""The fields of conversations and of pairs of texts that the loss alone reads, beside `tokens` and `length`."""

_OF_EVERY_MODEL = ("name", "pretrained", "pretrained_skip")
"""The fields of `mpjax.config.schema.Model` that are no settings of the network."""


def _images(fields: Mapping[str, Any], config: schema.Model) -> dict[str, Any]:
    return {"channels": fields["image"].shape[2], "num_classes": outputs_of(fields)}


def _flat(fields: Mapping[str, Any], config: schema.Model) -> dict[str, Any]:
    features = math.prod(fields["row" if "row" in fields else "image"].shape)
    return {"features": features, "num_classes": outputs_of(fields), "width": 16, "depth": 2}


def _sized_images(fields: Mapping[str, Any], config: schema.Model) -> dict[str, Any]:
    return {"image_shape": fields["image"].shape, "num_classes": outputs_of(fields), "pool": config.pool}


def _with_stem(fields: Mapping[str, Any], config: schema.Model) -> dict[str, Any]:
    from mpjax.models import resnet  # local, like the networks themselves

    stem = {"small": resnet.SmallStem, "imagenet": resnet.ImageNetStem}[config.stem]
    return {"stem": stem, **_images(fields, config)}


def _for_resnet(fields: Mapping[str, Any], config: schema.Model) -> dict[str, Any]:
    # The channels of the first stage in the paper: on CIFAR-10, and on ImageNet.
    return {"width": {"small": 16, "imagenet": 64}[config.stem], **_with_stem(fields, config)}


def _for_xception(fields: Mapping[str, Any], config: schema.Model) -> dict[str, Any]:
    from mpjax.models import xception

    stem = {"small": xception.SmallXceptionStem, "imagenet": xception.XceptionStem}[config.stem]
    return {"stem": stem, **_images(fields, config)}


def _strided(fields: Mapping[str, Any], config: schema.Model) -> dict[str, Any]:
    return {"stride": {"small": 1, "imagenet": 2}[config.stem], **_images(fields, config)}


def _pixels(fields: Mapping[str, Any], config: schema.Model) -> dict[str, Any]:
    return {"channels": fields["image"].shape[2], "num_classes": fields["mask"].num_classes}


def _texts(fields: Mapping[str, Any], config: schema.Model) -> dict[str, Any]:
    sizes = {"vocabulary": fields["tokens"].vocabulary, "length": fields["tokens"].length}
    return {**sizes, "num_classes": outputs_of(fields), "dropout": config.dropout}


def _next_tokens(fields: Mapping[str, Any], config: schema.Model) -> dict[str, Any]:
    tokens = fields["tokens"]  # one token more than the model reads: the target of the last position
    return {"vocabulary": tokens.vocabulary, "length": tokens.length - 1, "dropout": config.dropout}


def _noisy_images(fields: Mapping[str, Any], config: schema.Model) -> dict[str, Any]:
    # Images without labels are data too; the network is then built without classes.
    classes = fields["label"].num_classes if "label" in fields else 0
    return {"image_shape": fields["image"].shape, "num_classes": classes}


_DIT = ("width", "depth", "heads", "patch", "scan_blocks")
_TRANSFORMER = ("width", "depth", "heads", "dropout", "scan_blocks")
_XCEPTION = ("width", "depth", "stem")
_PRE_NORM = (*_TRANSFORMER, "norm_kernel")


def _classifiers(family: str, inputs: Callable, settings: tuple[str, ...], *names: str) -> dict[str, NamedModel]:
    """The entries of classifiers of images whose names here are those in the file of their family."""
    return {name: NamedModel("classification", network(family, name), inputs, settings) for name in names}


ENTRIES = {
    "mlp": NamedModel("classification", network("mlp", "MLP"), _flat, ("width", "depth")),
    "resnet18": NamedModel("classification", network("resnet", "resnet18"), _for_resnet, ("width", "stem")),
    "resnet34": NamedModel("classification", network("resnet", "resnet34"), _for_resnet, ("width", "stem")),
    "resnet50": NamedModel("classification", network("resnet", "resnet50"), _for_resnet, ("width", "stem")),
    "resnet101": NamedModel("classification", network("resnet", "resnet101"), _for_resnet, ("width", "stem")),
    "resnet152": NamedModel("classification", network("resnet", "resnet152"), _for_resnet, ("width", "stem")),
    "resnext50": NamedModel("classification", network("resnet", "resnext50"), _for_resnet, ("width", "stem")),
    "wrn16_4": NamedModel("classification", network("wide_resnet", "wrn16_4"), _images, ("width", "dropout")),
    "wrn28_10": NamedModel("classification", network("wide_resnet", "wrn28_10"), _images, ("width", "dropout")),
    "xception": NamedModel("classification", network("xception", "xception8"), _for_xception, _XCEPTION),
    "convnext_t": NamedModel("classification", network("convnext", "convnext_t"), _images, ("width", "patch")),
    **_classifiers(
        *("efficientnet", _strided, ("width", "dropout", "stem")),
        *("efficientnet_b0", "efficientnet_b1", "efficientnet_b2", "efficientnet_b3", "efficientnet_b4"),
    ),
    **_classifiers(
        *("mobilenetv3", _strided, ("width", "dropout", "stem")),
        *("mobilenetv3_large", "mobilenetv3_small"),
    ),
    **_classifiers(
        *("regnet", _strided, ("width", "stem")),
        *("regnetx_004", "regnetx_032", "regnety_004", "regnety_016", "regnety_032"),
    ),
    **_classifiers("densenet", _with_stem, ("width", "stem"), "densenet121"),
    "vit_ti16": NamedModel("classification", network("vit", "vit_ti16"), _sized_images, ("patch", "pool", *_PRE_NORM)),
    "vit_s16": NamedModel("classification", network("vit", "vit_s16"), _sized_images, ("patch", "pool", *_PRE_NORM)),
    "vit_b16": NamedModel("classification", network("vit", "vit_b16"), _sized_images, ("patch", "pool", *_PRE_NORM)),
    "unet": NamedModel("segmentation", network("unet", "unet64"), _pixels, ("width", "depth")),
    "dit_s2": NamedModel("diffusion", network("dit", "dit_s2"), _noisy_images, _DIT),
    "dit_b2": NamedModel("diffusion", network("dit", "dit_b2"), _noisy_images, _DIT),
    "dit_l2": NamedModel("diffusion", network("dit", "dit_l2"), _noisy_images, _DIT),
    "dit_xl2": NamedModel("diffusion", network("dit", "dit_xl2"), _noisy_images, _DIT),
    "unet_ddpm": NamedModel(
        *("diffusion", network("diffusion_unet", "unet_ddpm"), _noisy_images), ("width", "depth", "heads", "dropout")
    ),
    "bert": NamedModel("text_classification", network("bert", "bert_base"), _texts, _TRANSFORMER),
    "gpt2": NamedModel("language_modeling", network("gpt2", "gpt2_small"), _next_tokens, _PRE_NORM),
}
"""The models of `mpjax.config.choices.MODELS`."""

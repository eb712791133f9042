"""Maps a `VisionTransformer` to the files of transformers (`ViTForImageClassification`, and DeiT's and DINOv2's)."""

import dataclasses
from typing import Any

import numpy as np

from mpjax.models.pretrained.layouts.entry import (
    FileEntry,
    FusedPart,
    WeightMap,
    attention_entries,
    layer_entries,
    reshaped,
)
from mpjax.models.pretrained.layouts.in_memory import OF_DINO, OF_VIT
from mpjax.models.vision.config_json import MASK_TOKEN
from mpjax.models.vision.network import VisionTransformer


MODEL = VisionTransformer

_VIT = {
    "norm1": "layernorm_before",
    "norm2": "layernorm_after",
    "mlp/up": "intermediate.dense",
    "mlp/down": "output.dense",
}
_DINO = {"norm1": "norm1", "norm2": "norm2", "mlp/up": "mlp.fc1", "mlp/down": "mlp.fc2"}
_DINO3 = {"norm1": "norm1", "norm2": "norm2"} | {f"mlp/{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")}
_GATED = {**_DINO, "mlp/gate": "mlp.weights_in", "mlp/up": "mlp.weights_in", "mlp/down": "mlp.weights_out"}
_FUSED = {"gate": FusedPart(0, 2, axis=0), "up": FusedPart(1, 2, axis=0)}


def huggingface(model: VisionTransformer) -> WeightMap:
    """Builds the layout of `...ForImageClassification`, of DeiT's with two heads, and of `DINOv3ViTModel`."""
    settings = model.settings
    if settings.family == "dinov3_vit":
        return _dinov3(model)
    base = f"{settings.family}."
    names = {
        "patches": f"{base}embeddings.patch_embeddings.projection",
        "norm": f"{base}layernorm",
        "head": "classifier",
        "head/first": "cls_classifier",
        "head/second": "distillation_classifier",
    }
    table: Any = model.positions
    positions = table.get_value().shape
    entries = {
        "class_token": FileEntry(f"{base}embeddings.cls_token"),
        "distillation_token": FileEntry(f"{base}embeddings.distillation_token"),
        "registers": FileEntry(f"{base}embeddings.register_tokens"),
        "positions": FileEntry(f"{base}embeddings.position_embeddings", reshaped((1, *positions), positions)),
    }
    layers = _GATED if settings.gated else _DINO if settings.family.startswith("dinov2") else _VIT
    for number, block in enumerate(model.blocks):
        path, layer = f"blocks/{number}", f"{base}encoder.layer.{number}"
        names |= {f"{path}/{ours}": f"{layer}.{theirs}" for ours, theirs in layers.items()}
        attention = {name: f"{layer}.attention.attention.{name}" for name in ("query", "key", "value")}
        entries |= attention_entries(
            block.attention, f"{path}/attention", **attention, out=f"{layer}.attention.output.dense"
        )
        for index in (1, 2):
            entries[f"{path}/scale{index}/scale"] = FileEntry(f"{layer}.layer_scale{index}.lambda1")
    entries |= layer_entries(model, names)
    if settings.gated:
        for path, entry in entries.items():
            if (name := path.split("/")[-2:-1]) and name[0] in _FUSED:
                entries[path] = dataclasses.replace(entry, part=_FUSED[name[0]])
    in_memory = OF_DINO if settings.family.startswith("dinov2") else OF_VIT
    return WeightMap("huggingface", entries, base=base, ignored=("pooler.*", MASK_TOKEN), in_memory=in_memory)


def _dinov3(model: VisionTransformer) -> WeightMap:
    """Transformers has no class with a head: its tensors are `classifier.weight` and `classifier.bias` here."""
    names = {"patches": "embeddings.patch_embeddings", "norm": "norm", "head": "classifier"}
    entries = {
        "class_token": FileEntry("embeddings.cls_token"),
        "registers": FileEntry("embeddings.register_tokens"),
    }
    for number, block in enumerate(model.blocks):
        path, layer = f"blocks/{number}", f"layer.{number}"
        names |= {f"{path}/{ours}": f"{layer}.{theirs}" for ours, theirs in _DINO3.items()}
        projections = {name: f"{layer}.attention.{name[0]}_proj" for name in ("query", "key", "value", "out")}
        entries |= attention_entries(block.attention, f"{path}/attention", **projections)
        for index in (1, 2):
            entries[f"{path}/scale{index}/scale"] = FileEntry(f"{layer}.layer_scale{index}.lambda1")
    # A model without registers has an empty tensor of them.
    none = {} if model.registers is not None else {"embeddings.register_tokens": _no_registers(model.settings.width)}
    ignored = (MASK_TOKEN, *none)
    entries |= layer_entries(model, names)
    return WeightMap("huggingface", entries, ignored=ignored, filler=none, in_memory=(("layer.", "model.layer."),))


def _no_registers(width: int) -> np.ndarray:
    return np.zeros((1, 0, width), np.float32)


LAYOUTS = {"huggingface": huggingface}

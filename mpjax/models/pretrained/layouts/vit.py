"""Maps ViT to the files of Hugging Face transformers (`ViTForImageClassification`)."""

import dataclasses

from mpjax.models.pretrained.layouts.entry import FileEntry, WeightMap, attention_entries, layer_entries, reshaped
from mpjax.models.pretrained.layouts.in_memory import OF_VIT, loaded_name
from mpjax.models.vit import ViT


MODEL = ViT


def huggingface_vit(model: ViT) -> WeightMap:
    """Builds the layout of `ViTForImageClassification` in files of `save_pretrained`.

    That model has a class token (`pool="cls"`) and an epsilon of 1e-12.
    """
    names = {
        "patches": "vit.embeddings.patch_embeddings.projection",
        "norm": "vit.layernorm",
        "head": "classifier",
    }
    positions = model.positions.get_value().shape
    entries = {
        "class_token": FileEntry("vit.embeddings.cls_token"),
        "positions": FileEntry("vit.embeddings.position_embeddings", reshaped((1, *positions), positions)),
    }
    for number, block in enumerate(model.blocks):
        path, prefix = f"blocks/{number}", f"vit.encoder.layer.{number}"
        names[f"{path}/norm1"] = f"{prefix}.layernorm_before"
        names[f"{path}/norm2"] = f"{prefix}.layernorm_after"
        names[f"{path}/mlp/up"] = f"{prefix}.intermediate.dense"
        names[f"{path}/mlp/down"] = f"{prefix}.output.dense"
        inputs = {name: f"{prefix}.attention.attention.{name}" for name in ("query", "key", "value")}
        out = f"{prefix}.attention.output.dense"
        entries |= attention_entries(block.attention, f"{path}/attention", **inputs, out=out)
    entries |= layer_entries(model, names)
    return WeightMap("huggingface", entries, base="vit.", ignored=("pooler.*",), in_memory=OF_VIT)


def state_dict(model: ViT) -> WeightMap:
    """Builds the layout of a `state_dict` of transformers 5 or later that was saved without `save_pretrained`."""
    saved = huggingface_vit(model)
    entries = {
        path: dataclasses.replace(entry, key=loaded_name(entry.key, OF_VIT)) for path, entry in saved.entries.items()
    }
    return dataclasses.replace(saved, name="huggingface_state_dict", entries=entries)


LAYOUTS = {"huggingface": huggingface_vit, "huggingface_state_dict": state_dict}

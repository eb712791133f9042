"""Maps ViT to the files of Hugging Face transformers (`ViTForImageClassification`)."""

from collections.abc import Mapping

from mpjax.models.pretrained.layouts.entry import FileEntry, WeightMap, attention_entries, layer_entries, reshaped
from mpjax.models.pretrained.layouts.in_memory import OF_VIT
from mpjax.models.vit import ViT


MODEL = ViT


SAVED = {
    "block": "vit.encoder.layer",
    "up": "intermediate.dense",
    "down": "output.dense",
    "query": "attention.attention.query",
    "key": "attention.attention.key",
    "value": "attention.attention.value",
    "out": "attention.output.dense",
}
"""The names of the layers of a block in files of `save_pretrained`."""

IN_MEMORY = {
    "block": "vit.layers",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
    "query": "attention.q_proj",
    "key": "attention.k_proj",
    "value": "attention.v_proj",
    "out": "attention.o_proj",
}
"""The names of the layers of a block in a `state_dict`, from transformers 5 on."""


def huggingface_vit(model: ViT) -> WeightMap:
    """Builds the layout of `ViTForImageClassification` in files of `save_pretrained`.

    That model has a class token (`pool="cls"`) and an epsilon of 1e-12.
    """
    return _layout("huggingface", model, SAVED)


def state_dict(model: ViT) -> WeightMap:
    """Builds the layout of a `state_dict` of transformers 5 or later that was saved without `save_pretrained`."""
    return _layout("huggingface_state_dict", model, IN_MEMORY)


def _layout(name: str, model: ViT, parts: Mapping[str, str]) -> WeightMap:
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
        path, prefix = f"blocks/{number}", f"{parts['block']}.{number}"
        names[f"{path}/norm1"] = f"{prefix}.layernorm_before"
        names[f"{path}/norm2"] = f"{prefix}.layernorm_after"
        names[f"{path}/mlp/up"] = f"{prefix}.{parts['up']}"
        names[f"{path}/mlp/down"] = f"{prefix}.{parts['down']}"
        products = {product: f"{prefix}.{parts[product]}" for product in ("query", "key", "value", "out")}
        entries |= attention_entries(block.attention, f"{path}/attention", **products)
    entries |= layer_entries(model, names)
    return WeightMap(name, entries, base="vit.", ignored=("pooler.*",), in_memory=OF_VIT)


LAYOUTS = {"huggingface": huggingface_vit, "huggingface_state_dict": state_dict}

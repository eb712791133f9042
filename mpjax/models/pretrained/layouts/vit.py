"""ViT in the files of Hugging Face transformers (`ViTForImageClassification`)."""

from mpjax.models.pretrained.layouts.attention import attention_entries
from mpjax.models.pretrained.layouts.entry import Entry, Layout, reshaped
from mpjax.models.pretrained.layouts.layers import layer_entries
from mpjax.models.vit import ViT


MODEL = ViT


def huggingface(model: ViT) -> Layout:
    """The keys of `ViTForImageClassification`, which has a class token: `pool="cls"`, and an epsilon of 1e-12."""
    names = {
        "patches": "vit.embeddings.patch_embeddings.projection",
        "norm": "vit.layernorm",
        "head": "classifier",
    }
    positions = model.positions.get_value().shape
    entries = {
        "class_token": Entry("vit.embeddings.cls_token"),
        "positions": Entry("vit.embeddings.position_embeddings", reshaped((1, *positions), positions)),
    }
    for number, block in enumerate(model.blocks):
        ours, theirs = f"blocks/{number}", f"vit.encoder.layer.{number}"
        names[f"{ours}/norm1"] = f"{theirs}.layernorm_before"
        names[f"{ours}/norm2"] = f"{theirs}.layernorm_after"
        names[f"{ours}/mlp/up"] = f"{theirs}.intermediate.dense"
        names[f"{ours}/mlp/down"] = f"{theirs}.output.dense"
        entries |= attention_entries(
            block.attention,
            f"{ours}/attention",
            query=f"{theirs}.attention.attention.query",
            key=f"{theirs}.attention.attention.key",
            value=f"{theirs}.attention.attention.value",
            out=f"{theirs}.attention.output.dense",
        )
    return Layout("huggingface", layer_entries(model, names) | entries, base="vit.", ignored=("pooler.*",))


LAYOUTS = {"huggingface": huggingface}

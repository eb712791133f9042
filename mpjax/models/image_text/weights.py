"""Maps an `ImageText` to the files of Hugging Face transformers (`CLIPModel` and `SiglipModel`)."""

import dataclasses

from mpjax.models.image_text.network import ImageText, Pooling
from mpjax.models.pretrained.layouts.entry import (
    SAME,
    FileEntry,
    FusedPart,
    WeightMap,
    attention_entries,
    layer_entries,
    reshaped,
)
from mpjax.models.vision.tower_weights import BLOCK, projections, vision_entries


MODEL = ImageText

_PARTS = {"query": FusedPart(0, 3, axis=0), "key": FusedPart(1, 3, axis=0), "value": FusedPart(2, 3, axis=0)}


def huggingface(model: ImageText) -> WeightMap:
    """Builds the layout of `CLIPModel` or `SiglipModel`."""
    is_clip = model.settings.vision.kind == "clip"
    pool = "vision_model.head"
    names = {
        "vision_norm": "vision_model.post_layernorm",
        "vision_out": "visual_projection",
        "text/tokens": "text_model.embeddings.token_embedding",
        "text/norm": "text_model.final_layer_norm",
        "text_out": "text_projection" if is_clip else "text_model.head",
        "vision_out/norm": f"{pool}.layernorm",
        "vision_out/mlp/up": f"{pool}.mlp.fc1",
        "vision_out/mlp/down": f"{pool}.mlp.fc2",
    }
    entries = {
        "text/positions": FileEntry("text_model.embeddings.position_embedding.weight"),
        # One number, which CLIP's files have without an axis.
        "temperature/scale": FileEntry("logit_scale", reshaped((), (1,)) if is_clip else SAME),
        "temperature/bias": FileEntry("logit_bias"),
    }
    for number, block in enumerate(model.text.blocks):
        ours, theirs = f"text/blocks/{number}", f"text_model.encoder.layers.{number}"
        names |= {f"{ours}/{layer}": f"{theirs}.{name}" for layer, name in BLOCK.items()}
        entries |= attention_entries(block.attention, f"{ours}/attention", **projections(f"{theirs}.self_attn"))
    if isinstance(model.vision_out, Pooling):
        entries["vision_out/probe"] = FileEntry(f"{pool}.probe")
        path, fused = "vision_out/attention", f"{pool}.attention.in_proj"
        keys = {"query": fused, "key": fused, "value": fused, "out": f"{pool}.attention.out_proj"}
        for name, entry in attention_entries(model.vision_out.attention, path, **keys).items():
            part = _PARTS.get(name.split("/")[2])
            entries[name] = entry if part is None else dataclasses.replace(entry, key=_flat(entry.key), part=part)
    entries |= layer_entries(model, names) | vision_entries(model.vision, "vision/", "vision_model.")
    return WeightMap("huggingface", entries, ignored=("*.embeddings.position_ids",))


def _flat(key: str) -> str:
    """PyTorch's name of the stacked weights or biases of an attention: in_proj_weight."""
    return key.replace("in_proj.", "in_proj_")


LAYOUTS = {"huggingface": huggingface}

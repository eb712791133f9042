"""Maps a `TowerClassifier` to the files of transformers (`CLIPForImageClassification`, and SigLIP's)."""

import dataclasses

from mpjax.models.pretrained.layouts.entry import FileEntry, WeightMap, attention_entries, layer_entries, reshaped
from mpjax.models.vision.tower import TowerClassifier, VisionTower


MODEL = TowerClassifier

BLOCK = {"norm1": "layer_norm1", "norm2": "layer_norm2", "mlp/up": "mlp.fc1", "mlp/down": "mlp.fc2"}


def huggingface(model: TowerClassifier) -> WeightMap:
    """Builds the layout of `...ForImageClassification`. Tensors that it has beside the classifier's are not read."""
    base = "vision_model."
    names = {"norm": f"{base}post_layernorm", "head": "classifier"}
    entries = layer_entries(model, names) | vision_entries(model.vision, "vision/", base)
    # CLIP's last norm and SigLIP's attention over patches change no logit; the towers of texts are beside them.
    ignored = ("head.*", "post_layernorm.*", "embeddings.position_ids", *OTHER_TENSORS)
    return WeightMap("huggingface", entries, base=base, ignored=ignored)


OTHER_TENSORS = ("text_model.*", "text_projection.*", "visual_projection.*", "logit_scale", "logit_bias")
"""The tensors of files of two towers that a classifier does not read."""


def vision_entries(tower: VisionTower, path: str, base: str) -> dict[str, FileEntry]:
    """Maps the variables of a tower at `path` to their entries below `base`."""
    width = tower.settings.width
    names = {
        "patches": "embeddings.patch_embedding",
        "norm_before": "pre_layrnorm",  # as transformers spells it
    }
    entries = {"positions": FileEntry("embeddings.position_embedding.weight")}
    if tower.class_token is not None:
        entries["class_token"] = FileEntry("embeddings.class_embedding", reshaped((width,), (1, 1, width)))
    for number, block in enumerate(tower.blocks):
        ours, theirs = f"blocks/{number}", f"encoder.layers.{number}"
        names |= {f"{ours}/{layer}": f"{theirs}.{name}" for layer, name in BLOCK.items()}
        entries |= attention_entries(block.attention, f"{ours}/attention", **projections(f"{theirs}.self_attn"))
    entries |= layer_entries(tower, names)
    return {path + name: dataclasses.replace(entry, key=base + entry.key) for name, entry in entries.items()}


def projections(name: str) -> dict[str, str]:
    """The names of the projections of an attention in a file, by ours."""
    return {"query": f"{name}.q_proj", "key": f"{name}.k_proj", "value": f"{name}.v_proj", "out": f"{name}.out_proj"}


LAYOUTS = {"huggingface": huggingface}

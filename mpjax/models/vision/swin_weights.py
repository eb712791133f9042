"""Maps a `Swin` to the files of Hugging Face transformers (`SwinForImageClassification`)."""

from typing import Any

from mpjax.models.pretrained.layouts.entry import FileEntry, WeightMap, attention_entries, layer_entries
from mpjax.models.pretrained.layouts.in_memory import OF_SWIN
from mpjax.models.vision.config_json import MASK_TOKEN
from mpjax.models.vision.swin import Merging, Swin


MODEL = Swin

_BLOCK = {
    "norm1": "layernorm_before",
    "norm2": "layernorm_after",
    "mlp/up": "intermediate.dense",
    "mlp/down": "output.dense",
}


def huggingface(model: Swin) -> WeightMap:
    """Builds the layout of `SwinForImageClassification`."""
    base = "swin."
    names = {
        "patches": f"{base}embeddings.patch_embeddings.projection",
        "patch_norm": f"{base}embeddings.norm",
        "norm": f"{base}layernorm",
        "head": "classifier",
    }
    entries: dict[str, FileEntry] = {}
    stage = index = 0
    layer: Any
    for number, layer in enumerate(model.layers):
        path, names_of = f"layers/{number}", f"{base}encoder.layers.{stage}"
        if isinstance(layer, Merging):
            names |= {f"{path}/{name}": f"{names_of}.downsample.{name}" for name in ("norm", "reduction")}
            stage, index = stage + 1, 0
            continue
        block = f"{names_of}.blocks.{index}"
        names |= {f"{path}/{ours}": f"{block}.{theirs}" for ours, theirs in _BLOCK.items()}
        attention = {name: f"{block}.attention.self.{name}" for name in ("query", "key", "value")}
        out = f"{block}.attention.output.dense"
        entries |= attention_entries(layer.attention, f"{path}/attention", **attention, out=out)
        entries[f"{path}/positions/table"] = FileEntry(f"{block}.attention.self.relative_position_bias_table")
        index += 1
    return WeightMap(
        "huggingface",
        layer_entries(model, names) | entries,
        base=base,
        # Old files have the rows of the table, which the size of a window decides.
        ignored=("*.relative_position_index", MASK_TOKEN),
        in_memory=OF_SWIN,
    )


LAYOUTS = {"huggingface": huggingface}

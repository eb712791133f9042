"""Maps ModernBERT to the files of Hugging Face transformers (`ModernBertModel` and that with a classifier)."""

import dataclasses

from mpjax.models.encoder.modernbert import ModernBERT, ModernBERTClassifier
from mpjax.models.pretrained.layouts.entry import FusedPart, WeightMap, attention_entries, layer_entries


MODEL = ModernBERT

_FUSED = {"query": (0, 3), "key": (1, 3), "value": (2, 3), "gate": (0, 2), "up": (1, 2)}
"""The layers that are equal parts of one matrix in the files: the number of each, and how many there are."""


def huggingface(model: ModernBERT) -> WeightMap:
    """Builds the layout of `ModernBertModel`, or of `ModernBertForSequenceClassification` for a classifier."""
    prefix = "model." if isinstance(model, ModernBERTClassifier) else ""
    names = {
        "tokens": f"{prefix}embeddings.tok_embeddings",
        "norm": f"{prefix}embeddings.norm",
        "pooler/dense": "head.dense",
        "pooler/norm": "head.norm",
        "head": "classifier",
    }
    entries, count = {}, len(model.settings.layers)
    for number, block in enumerate(model.blocks):
        path, layer = f"blocks/{number}", f"{prefix}layers.{number}"
        names[f"{path}/mlp_norm"] = f"{layer}.mlp_norm"
        names[f"{path}/mlp/gate"] = names[f"{path}/mlp/up"] = f"{layer}.mlp.Wi"
        names[f"{path}/mlp/down"] = f"{layer}.mlp.Wo"
        is_last = number + 1 == count
        names[f"{path}/next_norm"] = f"{prefix}final_norm" if is_last else f"{prefix}layers.{number + 1}.attn_norm"
        fused = dict.fromkeys(("query", "key", "value"), f"{layer}.attn.Wqkv")
        entries |= attention_entries(block.attention, f"{path}/attention", **fused, out=f"{layer}.attn.Wo")
    entries |= layer_entries(model, names)
    for path, entry in entries.items():
        if (name := path.split("/")[-2]) in _FUSED:
            entries[path] = dataclasses.replace(entry, part=FusedPart(*_FUSED[name], axis=0))
    of_pretraining = ("decoder.*",) if prefix else ("head.*", "decoder.*")  # no vector depends on them
    return WeightMap("huggingface", entries, base="model.", ignored=of_pretraining)


LAYOUTS = {"huggingface": huggingface}

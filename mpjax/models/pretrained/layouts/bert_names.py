"""The names that transformers gives to the layers of BERT and of the models of its shape."""

from collections.abc import Mapping
from typing import Any

from mpjax.models.pretrained.layouts.entry import FileEntry, WeightMap, attention_entries, layer_entries


def bert_layout(
    model: Any, prefix: str, *, base: str, others: Mapping[str, str], ignored: tuple[str, ...]
) -> WeightMap:
    """Builds the layout of embeddings and post-norm blocks.

    Args:
      model: the model, with `blocks` and layers `tokens`, `segments`, `norm`.
      prefix: what the names of embeddings and blocks begin with, such as `bert.`.
      base: what names begin with in files of models with a head, and not in others.
      others: the names in files of the model's other layers, by path; those that it has not are left out.
      ignored: patterns of names that are not read.
    """
    embeddings = f"{prefix}embeddings"
    names = {
        "tokens": f"{embeddings}.word_embeddings",
        "segments": f"{embeddings}.token_type_embeddings",
        "norm": f"{embeddings}.LayerNorm",
        **others,
    }
    entries = {"positions": FileEntry(f"{embeddings}.position_embeddings.weight")}
    for number, block in enumerate(model.blocks):
        path, layer = f"blocks/{number}", f"{prefix}encoder.layer.{number}"
        names[f"{path}/norm1"] = f"{layer}.attention.output.LayerNorm"
        names[f"{path}/norm2"] = f"{layer}.output.LayerNorm"
        names[f"{path}/mlp/up"] = f"{layer}.intermediate.dense"
        names[f"{path}/mlp/down"] = f"{layer}.output.dense"
        attention = {name: f"{layer}.attention.self.{name}" for name in ("query", "key", "value")}
        attention["out"] = f"{layer}.attention.output.dense"
        entries |= attention_entries(block.attention, f"{path}/attention", **attention)
    return WeightMap(
        "huggingface",
        layer_entries(model, names) | entries,
        base=base,
        ignored=ignored,
        renamed=(("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")),
    )

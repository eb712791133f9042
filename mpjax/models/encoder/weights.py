"""Maps encoders to the files of Hugging Face transformers (`BertModel`, `RobertaModel` and those with a classifier)."""

from mpjax.models.encoder.network import Encoder, EncoderClassifier
from mpjax.models.pretrained.layouts.entry import FileEntry, WeightMap, attention_entries, layer_entries


MODEL = Encoder

UNREAD = ("pooler.*", "cls.*", "lm_head.*", "embeddings.position_ids")
"""Keys of files that no vector depends on: a layer above the first token, heads of pre-training, constants."""


def huggingface(model: Encoder) -> WeightMap:
    """Builds the layout of `BertModel` and `RobertaModel`, or of `...ForSequenceClassification` for a classifier."""
    family, classifies = model.settings.family, isinstance(model, EncoderClassifier)
    base = f"{family}."
    prefix = base if classifies else ""
    embeddings = f"{prefix}embeddings"
    names = {
        "tokens": f"{embeddings}.word_embeddings",
        "segments": f"{embeddings}.token_type_embeddings",
        "norm": f"{embeddings}.LayerNorm",
        "pooler": f"{prefix}pooler.dense" if family == "bert" else "classifier.dense",
        "head": "classifier" if family == "bert" else "classifier.out_proj",
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
        ignored=UNREAD,
        renamed=(("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")),
    )


LAYOUTS = {"huggingface": huggingface}

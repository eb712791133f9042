"""Maps BERT to the files of Hugging Face transformers (`BertForSequenceClassification`)."""

from mpjax.models.bert import BERT
from mpjax.models.pretrained.layouts.entry import FileEntry, WeightMap, attention_entries, layer_entries


MODEL = BERT


def huggingface_bert(model: BERT) -> WeightMap:
    """Builds the layout of `BertForSequenceClassification`. The pre-training heads are not read."""
    embeddings = "bert.embeddings"
    names = {
        "tokens": f"{embeddings}.word_embeddings",
        "segments": f"{embeddings}.token_type_embeddings",
        "norm": f"{embeddings}.LayerNorm",
        "pooler": "bert.pooler.dense",
        "head": "classifier",
    }
    entries = {"positions": FileEntry(f"{embeddings}.position_embeddings.weight")}
    for number, block in enumerate(model.blocks):
        path, prefix = f"blocks/{number}", f"bert.encoder.layer.{number}"
        names[f"{path}/norm1"] = f"{prefix}.attention.output.LayerNorm"
        names[f"{path}/norm2"] = f"{prefix}.output.LayerNorm"
        names[f"{path}/mlp/up"] = f"{prefix}.intermediate.dense"
        names[f"{path}/mlp/down"] = f"{prefix}.output.dense"
        entries |= attention_entries(
            block.attention,
            f"{path}/attention",
            query=f"{prefix}.attention.self.query",
            key=f"{prefix}.attention.self.key",
            value=f"{prefix}.attention.self.value",
            out=f"{prefix}.attention.output.dense",
        )
    return WeightMap(
        "huggingface",
        layer_entries(model, names) | entries,
        base="bert.",
        ignored=("cls.*", "embeddings.position_ids"),
        renamed=(("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")),
    )


LAYOUTS = {"huggingface": huggingface_bert}

"""Maps BERT to the files of Hugging Face transformers (`BertForSequenceClassification`)."""

from mpjax.models.bert import BERT
from mpjax.models.pretrained.layouts.entry import FileEntry, WeightMap, attention_entries, layer_entries


MODEL = BERT


def huggingface(model: BERT) -> WeightMap:
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
        ours, theirs = f"blocks/{number}", f"bert.encoder.layer.{number}"
        names[f"{ours}/norm1"] = f"{theirs}.attention.output.LayerNorm"
        names[f"{ours}/norm2"] = f"{theirs}.output.LayerNorm"
        names[f"{ours}/mlp/up"] = f"{theirs}.intermediate.dense"
        names[f"{ours}/mlp/down"] = f"{theirs}.output.dense"
        entries |= attention_entries(
            block.attention,
            f"{ours}/attention",
            query=f"{theirs}.attention.self.query",
            key=f"{theirs}.attention.self.key",
            value=f"{theirs}.attention.self.value",
            out=f"{theirs}.attention.output.dense",
        )
    return WeightMap(
        "huggingface",
        layer_entries(model, names) | entries,
        base="bert.",
        ignored=("cls.*", "embeddings.position_ids"),
        renamed=(("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")),
    )


LAYOUTS = {"huggingface": huggingface}

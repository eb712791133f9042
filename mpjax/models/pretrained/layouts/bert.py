"""Maps BERT to the files of Hugging Face transformers (`BertForSequenceClassification`)."""

from mpjax.models.bert import BERT
from mpjax.models.pretrained.layouts.bert_names import bert_layout
from mpjax.models.pretrained.layouts.entry import WeightMap


MODEL = BERT


def huggingface_bert(model: BERT) -> WeightMap:
    """Builds the layout of `BertForSequenceClassification`. The pre-training heads are not read."""
    return bert_layout(
        model,
        "bert.",
        base="bert.",
        others={"pooler": "bert.pooler.dense", "head": "classifier"},
        ignored=("cls.*", "embeddings.position_ids"),
    )


LAYOUTS = {"huggingface": huggingface_bert}

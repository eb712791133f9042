"""Maps encoders to the files of Hugging Face transformers (`BertModel`, `RobertaModel` and those with a classifier)."""

from mpjax.models.encoder.network import Encoder, EncoderClassifier
from mpjax.models.pretrained.layouts.bert_names import bert_layout
from mpjax.models.pretrained.layouts.entry import WeightMap


MODEL = Encoder

UNREAD = ("pooler.*", "cls.*", "lm_head.*", "embeddings.position_ids")
"""Keys of files that no vector depends on: a layer above the first token, heads of pre-training, constants."""


def huggingface(model: Encoder) -> WeightMap:
    """Builds the layout of `BertModel` and `RobertaModel`, or of `...ForSequenceClassification` for a classifier."""
    base = f"{model.settings.family}."
    prefix = base if isinstance(model, EncoderClassifier) else ""
    others = {"pooler": "classifier.dense", "head": "classifier.out_proj"}
    if model.settings.family == "bert":
        others = {"pooler": f"{prefix}pooler.dense", "head": "classifier"}
    return bert_layout(model, prefix, base=base, others=others, ignored=UNREAD)


LAYOUTS = {"huggingface": huggingface}

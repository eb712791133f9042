"""From the name of a data set to host batches at any position, and from those, on the device, to what models take."""

from mpjax.data.contract import conform
from mpjax.data.examples import Source, labelled_images
from mpjax.data.fields import Fields, Image, Label, Length, Mask, Tokens
from mpjax.data.prepare import prepare
from mpjax.data.read import batch_fields
from mpjax.data.source import open_source
from mpjax.data.stream import Batches, EvalBatches, Share, eval_batches, train_batches
from mpjax.data.synthetic import synthetic_source


__all__ = [
    "Batches",
    "EvalBatches",
    "Fields",
    "Image",
    "Label",
    "Length",
    "Mask",
    "Share",
    "Source",
    "Tokens",
    "batch_fields",
    "conform",
    "eval_batches",
    "labelled_images",
    "open_source",
    "prepare",
    "synthetic_source",
    "train_batches",
]

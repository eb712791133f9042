"""Opens data sets by name, reads host batches from any position, and prepares batches on the device."""

from mpjax.data.augment.on_device import prepare
from mpjax.data.batches import eval_batches, require_batch, train_batches
from mpjax.data.example_reader import batch_fields
from mpjax.data.examples import Source, conform, labelled_images
from mpjax.data.fields import Fields, Image, Label, Length, Mask, Tokens, batch_shapes
from mpjax.data.open import open_source
from mpjax.data.order import epoch_size
from mpjax.data.sources.synthetic import synthetic_source
from mpjax.data.stream import Batches, EvalBatches, Share


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
    "batch_shapes",
    "conform",
    "epoch_size",
    "eval_batches",
    "labelled_images",
    "open_source",
    "prepare",
    "require_batch",
    "synthetic_source",
    "train_batches",
]

"""From the name of a data set to host batches at any position, and from those, on the device, to float32 images."""

from mpjax.data.augment import prepare
from mpjax.data.contract import conform
from mpjax.data.examples import Source
from mpjax.data.read import image_shape
from mpjax.data.source import open_source
from mpjax.data.stream import Batches, EvalBatches, eval_batches, train_batches
from mpjax.data.synthetic import synthetic_source


__all__ = [
    "Batches",
    "EvalBatches",
    "Source",
    "conform",
    "eval_batches",
    "image_shape",
    "open_source",
    "prepare",
    "synthetic_source",
    "train_batches",
]

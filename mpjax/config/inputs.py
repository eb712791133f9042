"""The settings of what is trained on what: data and model."""

import dataclasses
from typing import Literal

from mpjax.config.flag_types import ModelName, OrAuto, settle_auto
from mpjax.config.several_words import FloatByName, Floats, Integers, TextByName, Texts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """Data set, preprocessing, batching and augmentation."""

    name: str = "digits"
    """Data set: `digits`, `digits_canvas` (segmentation), `docstrings` (text), any data set of tensorflow-datasets
    prepared under data_dir, `folder:PATH` of images, `hf:NAME` or `hf:PATH` for Hugging Face datasets (also csv, json,
    parquet, arrow and image folders), `synthetic:32x32x3:100` for generated images of that shape and number of
    classes, or your own: `FILE.py:NAME` or `package.module:NAME` of a function that returns both splits."""
    mix: FloatByName = dataclasses.field(default_factory=dict)
    """More data sets to train on, named as in name, each with its share of the training examples: `--data.mix
    folder:more 0.3`. The set of name has the rest, is evaluated on, and says how long an epoch is. All other settings
    are for all sets."""
    data_dir: str = ""
    """Folder of prepared data sets; empty: the folder `data` in cache_dir."""
    train_split: str = "train"
    """Split to train on, in the notation of tensorflow-datasets (`train[:90%]`)."""
    test_split: str = "test"
    """Split to evaluate on."""
    columns: TextByName = dataclasses.field(default_factory=dict)
    """Column for each field (image, label, mask, text), if their names differ: `--data.columns image img label
    fine_label`."""
    header: Texts = ()
    """Names of the columns of a csv or tsv file whose first line is an example, in order: `--data.header label text`;
    empty: the first line has the names."""
    num_classes: int = 0
    """Number of classes, if the data set does not state it; 0: as the data set states, or as many as mask_values."""
    mask_values: Integers = ()
    """Segmentation: stored value of each class, from class 0 (`--data.mask_values 0 255`); empty: stored values are
    class numbers; other values, if exactly as many as classes, are numbered in ascending order."""
    ignore_index: Integers = ()
    """Stored labels to ignore, of pixels or of examples (`--data.ignore_index 255`): they count in no loss and no
    metric; empty: none."""
    preprocess: str = ""
    """Your function from a stored example to an example, both dicts of fields: `FILE.py:NAME` or
    `package.module:NAME`."""
    tokenizer: str = "bytes"
    """Tokenizer: `bytes`, `words` (hashed), or a Hugging Face tokenizer as a folder, a tokenizer.json or a name."""
    length: int = 128
    """Tokens per example; longer texts are truncated, shorter ones padded."""
    batch_size: OrAuto = 64
    """Examples per training step, over all devices. `auto`: the largest power of two (times devices and micro-batches)
    that fits into memory."""
    eval_batch_size: int = 360
    """Examples per evaluation step."""
    image_size: int = 0
    """Side of the square image in pixels, resized and cropped on the host; 0: as stored."""
    antialias: bool = True
    """Average all pixels when images are shrunk to image_size; False: interpolate between the nearest pixels, which is
    faster and aliases as tf.data does; needs `pip install 'mpjax[images]'`."""
    in_memory_mb: int = 2048
    """Data sets of at most this many MB decoded are held in memory; larger ones are streamed."""
    on_device_mb: int = 1024
    """With training.steps_per_call above 1: in-memory data sets of at most this many MiB are kept on the device."""
    workers: int = 2
    """Threads that read and decode a streamed data set; 0: none, a batch is read when it is requested."""
    range: Floats = ()
    """Numbers of image files of more than 8 bits (16-bit, 32-bit or float grayscale) that become 0 and 1:
    `--data.range 0 4095`; empty: all that the bits hold, and floats as they are stored."""
    mean: Floats = (0.0,)
    """Mean per channel, subtracted from images scaled to [0, 1]; one value applies to all channels."""
    std: Floats = (1.0,)
    """Standard deviation per channel; images are divided by it after the mean is subtracted."""
    crop_padding: int = -1
    """Augmentation: pixels of padding before a random crop back to size; 0: none; -1: 1, and none for the task `own`,
    because its other columns stay where they are."""
    crop_edges: Literal["black", "reflect"] = "black"
    """Augmentation: padding of crop_padding, black or the image reflected at its edges."""
    flip: bool = False
    """Augmentation: flip images horizontally with probability 0.5."""
    alternate_flips: bool = False
    """Augmentation: with flip, each image is flipped in every second epoch, half of them beginning with the first,
    instead of at random."""
    random_resized_crop: float = 0.0
    """Augmentation on the device: crop a random part of at least this share of the area (0.08 is usual) and resize it;
    0: none. Images of varying size already get a random crop on the host."""
    randaugment_ops: int = 0
    """Augmentation: RandAugment operations per image (2 is usual); 0: none."""
    randaugment_magnitude: float = 9.0
    """Augmentation: strength of RandAugment, 0 to 10."""
    random_erasing: float = 0.0
    """Augmentation: share of images in which a rectangle is replaced by noise (0.25 is usual)."""
    mixup: float = 0.0
    """Augmentation: Mixup of pairs of images, with weights from Beta(mixup, mixup) (0.2 is usual, 0.8 with cutmix);
    0: none."""
    cutmix: float = 0.0
    """Augmentation: CutMix of pairs of images, with areas from Beta(cutmix, cutmix) (1 is usual); 0: none."""
    augment: str = ""
    """Augmentation: your function of a batch and a key, in the compiled step after all others: `FILE.py:NAME` or
    `package.module:NAME`."""
    test_time_augmentation: Literal["none", "mirror", "mirror_translate"] = "none"
    """Evaluation of classifiers: average the logits of an image and its mirror image (mirror, 2 views), and of both
    shifted by a pixel in two directions (mirror_translate, 6 views)."""

    def __post_init__(self) -> None:
        settle_auto(self, "batch_size")

    @property
    def padding(self) -> int:
        """Returns the pixels of `crop_padding`; by default 1."""
        return 1 if self.crop_padding == -1 else self.crop_padding

    def for_task(self, task: str) -> "Data":
        """Returns the settings with the default of `crop_padding` for a task."""
        return dataclasses.replace(self, crop_padding=0 if task == "own" and self.crop_padding == -1 else self.padding)

    @property
    def stated_classes(self) -> int:
        """Returns the number of classes of a mask that the settings state, or 0."""
        return self.num_classes or len(self.mask_values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """The model and its sizes."""

    name: ModelName = "resnet18"
    """Architecture, or your own: `FILE.py:NAME` or `package.module:NAME` of a class or function that takes the fields
    of a batch and `rngs`."""
    width: int = 0
    """Channels of the first stage, or units of each layer; 0: as published (ResNet: 64 with the ImageNet stem, 16 with
    the small one; MLP: 16)."""
    depth: int = 0
    """Number of blocks (Transformers), halvings (U-Net), middle blocks (Xception) or hidden layers (MLP); 0: as
    published (MLP: 2)."""
    heads: int = 0
    """Transformers: attention heads; 0: as published."""
    patch: int = 0
    """ViT: side of a patch in pixels. ConvNeXt: the same in the stem. 0: as published."""
    pool: Literal["gap", "cls"] = "gap"
    """ViT: input of the classifier: mean of all patches (gap) or class token (cls, as pretrained weights have it)."""
    dropout: float = 0.0
    """Dropout rate of Transformers and Wide-ResNets."""
    scan_blocks: bool = False
    """Transformers: stack the parameters of all blocks and compile one loop, in less time; rules of the policy have to
    hold for all blocks alike."""
    stem: Literal["imagenet", "small"] = "small"
    """Stem of ResNet: 7x7 convolution of stride 2 and max-pooling (imagenet), or one 3x3 convolution (small). Xception
    has two 3x3 convolutions, at full resolution if small."""
    pretrained: str = ""
    """Initial weights: a safetensors file or folder, or a name on the Hugging Face Hub."""
    pretrained_skip: Texts = ()
    """Patterns of parameters to initialise randomly all the same: `"head/*"` for another number of classes."""

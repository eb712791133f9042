"""Every setting of a run, with its default and meaning; the defaults are the default task.

No JAX here: `--help` and a mistyped flag must answer at once.
"""

import dataclasses
from typing import Annotated, Literal

import tyro

from mpjax.config.choices import TaskName, parse_model_name
from mpjax.config.durations import Duration, as_duration, parse_duration


Steps = Annotated[
    Duration,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="DURATION",
        instance_from_str=lambda words: parse_duration(words[0]),
        is_instance=lambda value: isinstance(value, Duration),
        str_from_instance=lambda duration: [str(duration)],
    ),
]
"""A `Duration` on the command line: `500`, `1e6 examples`, `30 epochs`."""


ModelName = Annotated[
    str,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="MODEL",
        instance_from_str=lambda words: parse_model_name(words[0]),
        is_instance=lambda value: isinstance(value, str),
        str_from_instance=lambda name: [name],
    ),
]
"""The name of a model on the command line."""


def _settle_durations(section, *names: str) -> None:
    """From Python, a duration may also be given as a number of steps or as text."""
    for name in names:
        object.__setattr__(section, name, as_duration(getattr(section, name)))


def epochs(amount: float) -> Duration:
    """A `Duration` in epochs."""
    return Duration(amount, "epochs")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """Which examples, and how they reach the device."""

    name: str = "digits"
    """Data set: `digits`, `digits_canvas` (segmentation), `docstrings` (text), any set of tensorflow-datasets that is
    prepared under data_dir, `folder:PATH` of images, `hf:NAME` or `hf:PATH` for Hugging Face datasets (csv, json,
    parquet, arrow and image folders included); `synthetic:32x32x3:100` generates images of that shape and number of
    classes."""
    data_dir: str = ""
    """Folder of prepared data sets; empty: `$MPJAX_CACHE/data`, by default `~/.cache/mpjax/data`."""
    train_split: str = "train"
    """Split to train on, in tensorflow-datasets' notation (`train[:90%]`)."""
    test_split: str = "test"
    """Split to evaluate on."""
    columns: dict[str, str] = dataclasses.field(default_factory=dict)
    """Which column serves as which field (image, label, mask, text), where names do not say it:
    `--data.columns image img label fine_label`."""
    num_classes: int = 0
    """Classes, where the data set does not say how many; 0: as it says."""
    mask_values: tuple[int, ...] = ()
    """Segmentation: the stored value of each class, from class 0 (`--data.mask_values 0 255`); empty: as stored, or,
    where the stored values are others and exactly as many as classes, those in ascending order."""
    ignore_index: tuple[int, ...] = ()
    """Segmentation: the stored value (or values) of pixels that do not count (`--data.ignore_index 255`); empty: all
    count."""
    preprocess: str = ""
    """Your own function from a stored example to one, dicts of fields: `FILE.py:NAME` or `package.module:NAME`."""
    tokenizer: str = "bytes"
    """Text to tokens: `bytes`, `words` (hashed), or a tokenizer of Hugging Face: a folder, a tokenizer.json, a name."""
    length: int = 128
    """Tokens per example; longer texts are cut, shorter ones padded."""
    batch_size: int = 64
    """Examples per training step, over all devices."""
    eval_batch_size: int = 360
    """Examples per evaluation step."""
    image_size: int = 0
    """Side of the square image in pixels, by resizing and cropping on the host; 0: as stored."""
    in_memory_mb: int = 2048
    """Sets that decode to at most this many MB are held in memory; larger ones are streamed."""
    on_device_mb: int = 1024
    """With training.steps_per_call: sets in memory of at most this many MB are put on the device as a whole."""
    workers: int = 2
    """Threads that read and decode a streamed set."""
    mean: tuple[float, ...] = (0.0,)
    """Per-channel mean subtracted from images scaled to [0, 1]; one value serves all channels."""
    std: tuple[float, ...] = (1.0,)
    """Per-channel standard deviation divided by after the mean."""
    crop_padding: int = 1
    """Augmentation: pixels of zero padding before a random crop back to size; 0: none."""
    flip: bool = False
    """Augmentation: mirror images left to right with probability one half."""
    random_resized_crop: float = 0.0
    """Augmentation on the device: cut out a random part of at least this share of the area (0.08 is usual) and stretch
    it back to size; 0: none. Images that vary in size are cut so on the host already."""
    randaugment_ops: int = 0
    """Augmentation: RandAugment's random operations per image (2 is usual); 0: none."""
    randaugment_magnitude: float = 9.0
    """Augmentation: their strength, 0 to 10."""
    random_erasing: float = 0.0
    """Augmentation: share of images with a rectangle of noise in them (0.25 is usual)."""
    mixup: float = 0.0
    """Augmentation: average pairs of images, Beta(mixup, mixup) distributed (0.2, with cutmix 0.8); 0: none."""
    cutmix: float = 0.0
    """Augmentation: paste a part of one image into another, Beta(cutmix, cutmix) distributed (1 is usual); 0: none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """Which network."""

    name: ModelName = "resnet18"
    """Architecture, or your own: `FILE.py:NAME` or `package.module:NAME` of a class or function that takes the fields
    of a batch and `rngs`."""
    width: int = 0
    """Channels of the first stage, units of each layer; 0: as published (ResNet: 64 with the ImageNet stem, 16 with the
    small one; MLP: 16)."""
    depth: int = 0
    """Transformers: blocks. U-Net: halvings. Xception: middle blocks. MLP: hidden layers. 0: as published (MLP: 2)."""
    heads: int = 0
    """Transformers: attention heads; 0: as published."""
    patch: int = 0
    """ViT: side of a patch in pixels; ConvNeXt: of the stem. 0: as published."""
    pool: Literal["gap", "cls"] = "gap"
    """ViT: the mean of all patches goes to the classifier, or a class token, as pretrained weights want."""
    dropout: float = 0.0
    """Transformers: share of values dropped."""
    stem: Literal["imagenet", "small"] = "small"
    """ResNet: 7x7 stride 2 and max-pooling, or one 3x3 convolution for small images."""
    pretrained: str = ""
    """Weights to start from: a safetensors file or folder, or a name on the Hugging Face hub."""
    pretrained_skip: tuple[str, ...] = ()
    """Patterns of parameters that start anew all the same: `"head/*"` for another number of classes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """In which dtypes the run computes, and how gradients are kept in range."""

    policy: str = "mixed_float16"
    """Preset (float32, mixed_bfloat16, mixed_float16, bfloat16, float16, O0-O3, float64), alias, or a policy such as
    `params=float32,compute=float16,output=float32`."""
    mode: Literal["auto", "module", "autocast"] = "auto"
    """Where casts are: at the modules' boundaries (module), or at each operation (autocast), as torch.amp has it; auto:
    module, and autocast for O1."""
    rules: dict[str, str] = dataclasses.field(default_factory=dict)
    """Exceptions: module pattern to dtype or policy, first match wins, as `--precision.rules "stem/*" float32`."""
    loss_scale: str = "auto"
    """`auto` (what the policy asks for), `dynamic`, `none`, or a number: a static scale."""
    master_weights: Literal["auto", "on", "off"] = "auto"
    """Float32 copies of half-precision parameters in the optimizer; auto: what the policy asks for."""
    stochastic_rounding: bool = False
    """Round half-precision parameters from their float32 copies by chance, right in the mean, not to the nearest."""
    initial_scale: float = 2.0**15
    """Dynamic loss scale: first scale."""
    growth_interval: int = 2000
    """Dynamic loss scale: good steps in a row until it doubles."""
    min_scale: float = 1.0
    """Dynamic loss scale: smallest. Training stops when gradients stay non-finite there."""
    max_scale: float = 2.0**24
    """Dynamic loss scale: largest."""
    hysteresis: int = 1
    """Dynamic loss scale: overflows in a row until it halves."""
    tolerance: float = 0.0
    """Dynamic loss scale: it halves only when at least this share of the steps since it last changed overflowed."""
    tune: bool = False
    """Before training, time the model's products in both dtypes on this device and add rules that keep in float32 what
    is slower in half precision, if that makes the step faster; kept in the cache for the next run."""
    patience: int = 10
    """Training stops when so many steps in a row were skipped, the last at the smallest scale (or a static one)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer:
    """How parameters move."""

    name: Literal["sgd", "adamw", "lamb"] = "sgd"
    """Update rule."""
    learning_rate: float = 0.1
    """Peak learning rate."""
    schedule: Literal["cosine", "one_cycle", "linear", "constant"] = "cosine"
    """How the learning rate falls from its peak."""
    warmup: Steps = epochs(2)
    """Linear warm-up from 0 to the peak (one_cycle: the rising part), at most a fifth of training."""
    momentum: float = 0.9
    """sgd: momentum."""
    nesterov: bool = True
    """sgd: Nesterov momentum."""
    b1: float = 0.9
    """adamw, lamb: decay of the first moment."""
    b2: float = 0.999
    """adamw, lamb: decay of the second moment."""
    eps: float = 1e-8
    """adamw, lamb: added to the root of the second moment."""
    weight_decay: float = 5e-4
    """Weight decay of kernels; norms and biases are spared. sgd: added to the gradient; adamw, lamb: decoupled."""
    clip_norm: float = 0.0
    """Largest global norm of the unscaled gradient; 0: no clipping."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """What moments are stored in. bfloat16: half their memory, rounded by chance, so that they are right in the mean.
    Not float16: squares of gradients below 2e-4 are zero in it."""

    def __post_init__(self):
        _settle_durations(self, "warmup")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """What one step does besides."""

    label_smoothing: float = 0.1
    """Share of the target spread evenly over all classes."""
    accumulate: int = 1
    """Micro-batches per step; their gradients are averaged."""
    remat: Literal["none", "dots", "full"] = "none"
    """What the backward pass computes again, to save memory. none: nothing. dots: all but products of matrices and
    convolutions. full: all of a block (module in a list) but its input, at about a third more computing."""
    steps_per_call: int = 1
    """Steps in one compiled call, for steps so short that the host cannot keep up; a set that fits into
    data.on_device_mb stays on the device and is read there."""
    ema: float = 0.0
    """Decay of a moving average of the parameters, which is then evaluated too; 0: none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    """How often something happens besides training."""

    log_every: Steps = Duration(20)
    """Between lines of metrics."""
    eval_every: Steps = epochs(5)
    """Between evaluations; there is always one at the end."""
    save_every: Steps = epochs(5)
    """Between checkpoints; there is always one at the end and on interruption."""
    keep: int = 2
    """Newest checkpoints to keep, besides the best."""

    def __post_init__(self):
        _settle_durations(self, "log_every", "eval_every", "save_every")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What a run leaves behind besides metrics.jsonl."""

    tensorboard: bool = True
    """Write TensorBoard events."""
    plot: bool = True
    """Draw curves.png at the end."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What to find out while training goes on, and when it diverges."""

    every: Steps = Duration(0)
    """Between statistics of every layer (range, overflow, underflow, histogram) in metrics.jsonl and TensorBoard; 0:
    none, at no cost."""
    search: bool = True
    """On divergence, look for the smallest set of modules to keep in float32 that repairs the step, and verify it."""

    def __post_init__(self):
        _settle_durations(self, "every")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Train a model in mixed precision."""

    steps: Steps = epochs(30)
    """Length of training: steps (attempted: skipped ones count), `1e6 examples` or `30 epochs`."""
    seed: int = 0
    """Seed of initialisation, shuffling and augmentation."""
    task: TaskName = "classification"
    """What is learnt: the class of an image, of each of its pixels, or of a text, or the next token of a text."""
    output_dir: str = ""
    """Folder of the run, new or with --resume; empty: runs/<data>-<model>-<policy>-<time>."""
    resume: bool = False
    """Go on from the last checkpoint in output_dir, with its settings where no others are given."""
    trust_code: bool = False
    """Execute code outside mpjax that the settings of a stored run name (--resume, or --config of a run's file): a
    model, a function for its data. What this command line names itself needs it not."""
    profile: bool = False
    """Trace calls 6 to 10 into the run's tensorboard folder, for TensorBoard's profile plugin and XProf."""
    cache_dir: str = ""
    """Folder of compiled programs and prepared data; empty: `$MPJAX_CACHE`, by default `~/.cache/mpjax`."""
    data: Data = Data()
    model: Model = Model()
    precision: Precision = Precision()
    optimizer: Optimizer = Optimizer()
    training: Training = Training()
    loop: Loop = Loop()
    report: Report = Report()
    diagnosis: Diagnosis = Diagnosis()

    def __post_init__(self):
        _settle_durations(self, "steps")

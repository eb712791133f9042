"""Every setting of a run, with its default and its help text; the defaults train ResNet-18 on digits.

This file imports no JAX, so that `--help` and a mistyped flag answer at once.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from mpjax.config.choices import AUTO, HF, NAMES_OF_SETTINGS, RANDOM, TABULAR
from mpjax.config.durations import Duration, epochs, settle_durations
from mpjax.config.setting_types import (
    BelowOne,
    Count,
    CountOrZero,
    FloatByName,
    Floats,
    Integers,
    Limit,
    ModelName,
    Named,
    NotNegative,
    OptimizerName,
    OrAuto,
    PlotFormats,
    ScheduleName,
    SeveralNamed,
    Steps,
    TextByName,
    Texts,
    WayByName,
    settle_auto,
    words,
)
from mpjax.config.tasks import COMPARED, OF_NUMBERS, OF_SOUNDS, WITHOUT_TEXTS, TaskName


def _are_two(bounds: Sequence[float]) -> bool:
    """True for an empty sequence, or for two different finite numbers."""
    return not bounds or (len(bounds) == len(set(bounds)) == 2 and all(map(math.isfinite, bounds)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """Data set, preprocessing, batching and augmentation."""

    name: Named = "digits"
    """Data set: `digits`, `digits_canvas` (segmentation), `docstrings` (text), any data set of tensorflow-datasets
    prepared under data_dir, `folder:PATH` of images or of wav and flac files, `FILE.npz` of NumPy's arrays, `hf:NAME`
    or `hf:PATH` for Hugging Face datasets (also csv, json, parquet, arrow and image folders), `webdataset:PATH` of tar
    files, `tabular:PATH` for the numbers and categories of csv, tsv or parquet files,
    `synthetic:32x32x3:100` for generated images of that shape and number of classes, or your own: `FILE.py:NAME` or
    `package.module:NAME` of a function that returns both splits."""
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
    """Column for each field (image, label, mask, text, query, positive), if their names differ: `--data.columns image
    img label fine_label`."""
    header: Annotated[Texts, Limit("different names", lambda names: len(set(names)) == len(names), words)] = ()
    """Names of the columns of a csv or tsv file whose first line is an example, in order: `--data.header label text`;
    empty: the first line has the names."""
    text_template: str = ""
    """Text made of several columns, each named in braces: `--data.text_template "{premise} [SEP] {hypothesis}"`; write
    `{{` and `}}` for braces; empty: the text is one column."""
    targets: Annotated[Texts, Limit("different names", lambda names: len(set(names)) == len(names), words)] = ()
    """Columns to predict: the numbers of a regression, one column of 0 and 1 for each label of multilabel, or the class
    of a row; empty: the column with a usual name, such as `target`."""
    drop: Texts = ()
    """Tables: columns that are not read, such as an id. All columns but these and the targets are inputs."""
    categories: Texts = ()
    """Tables: columns of numbers that are categories, such as a month; columns of text are so anyway."""
    missing: Texts = ()
    """Tables: words that mean a missing number, besides an empty cell, NA, N/A, NaN, null, None and ?."""
    decimal: Literal["", ".", ","] = ""
    """Tables: decimal sign of the numbers in csv and tsv files, whose thousands are then separated by the other sign;
    empty: a point, and no thousands are separated."""
    rows: Literal["shuffled", "stored"] = "shuffled"
    """Tables: order of the rows of a file of which a split takes a part. shuffled: a fixed random order, so that
    `train[:80%]` is a random part; stored: as in the file, for rows in the order of time."""
    num_classes: CountOrZero = 0
    """Number of classes, if the data set does not state it; 0: as the data set states, or as many as mask_values."""
    mask_values: Integers = ()
    """Segmentation: stored value of each class, from class 0 (`--data.mask_values 0 255`); empty: stored values are
    class numbers; other values, if exactly as many as classes, are numbered in ascending order."""
    ignore_index: Integers = ()
    """Stored labels to ignore, of pixels or of examples (`--data.ignore_index 255`): they count in no loss and no
    metric; empty: none."""
    preprocess: Named = ""
    """Your function from a stored example to an example, both dicts of fields: `FILE.py:NAME` or
    `package.module:NAME`."""
    tokenizer: str = "auto"
    """Tokenizer: `bytes`, `words` (hashed), or a Hugging Face tokenizer as a folder, a tokenizer.json or a name; auto:
    that in the folder of `--model.name hf:FOLDER`, else bytes."""
    features: str = "auto"
    """Sounds: folder, or id of the hub, whose preprocessor_config.json says how log-mel features are computed, or
    `whisper` for 80 bins of up to 30 s; auto: the folder of `--model.name hf:FOLDER`, else whisper."""
    language: str = ""
    """Transcription: language of the texts, as in `en`; empty: that in the generation_config.json beside the
    tokenizer, or none for a model of one language."""
    length: Count = 128
    """Tokens per example; longer texts are truncated, shorter ones padded."""
    documents: Literal["joined", "apart"] = "joined"
    """Language modelling: the documents in a row of length tokens. joined: a token attends to all tokens before it.
    apart: only to those of its own document, whose positions begin with its end-of-text token."""
    batch_size: OrAuto = 64
    """Examples per training step, over all devices. `auto`: the largest power of two (times devices and micro-batches)
    that fits into memory."""
    eval_batch_size: CountOrZero = 0
    """Examples per evaluation step, over all devices; 0: as many as batch_size with `hf:FOLDER`, 360 without one, and
    for embedding and image_text, which compare each example with the others of a step."""
    image_size: CountOrZero = 0
    """Side of the square image in pixels, resized and cropped on the host; 0: as stored."""
    antialias: bool = True
    """Average all pixels when images are shrunk to image_size; False: interpolate between the nearest pixels, which is
    faster and aliases as tf.data does; needs `pip install 'mpjax[images]'`."""
    in_memory_mb: CountOrZero = 2048
    """Data sets of at most this many MB decoded are held in memory; larger ones are streamed."""
    on_device_mb: CountOrZero = 1024
    """With training.steps_per_call above 1: in-memory data sets of at most this many MiB are kept on the device."""
    workers: CountOrZero = 2
    """Threads that read and decode a streamed data set; 0: none, a batch is read when it is requested."""
    range: Annotated[Floats, Limit("two different numbers, as in --data.range 0 4095", _are_two)] = ()
    """Numbers of image files of more than 8 bits (16-bit, 32-bit or float grayscale) that become 0 and 1:
    `--data.range 0 4095`; empty: all that the bits hold, and floats as they are stored."""
    mean: Annotated[Floats, Limit("finite numbers", lambda means: all(map(math.isfinite, means)))] = (0.0,)
    """Mean per channel, subtracted from images scaled to [0, 1]; one value applies to all channels. Not for
    diffusion, whose images are scaled to [-1, 1]."""
    std: Annotated[Floats, Limit("positive numbers", lambda stds: all(0 < std < math.inf for std in stds))] = (1.0,)
    """Standard deviation per channel; images are divided by it after the mean is subtracted."""
    crop_padding: Annotated[int, Limit("a number of pixels, 0 for none", lambda value: -1 <= value < 2**31)] = -1
    """Augmentation: pixels of padding before a random crop back to size; 0: none; -1: 1, and none for the tasks `own`
    and `regression`, because their other columns stay where they are, and `diffusion`, which would learn shifted
    images."""
    crop_edges: Literal["black", "reflect"] = "black"
    """Augmentation: padding of crop_padding, black or the image reflected at its edges."""
    flip: bool = False
    """Augmentation: flip images horizontally with probability 0.5."""
    alternate_flips: bool = False
    """Augmentation: with flip, each image is flipped in every second epoch, half of them beginning with the first,
    instead of at random."""
    random_resized_crop: BelowOne = 0.0
    """Augmentation on the device: crop a random part of at least this share of the area (0.08 is usual) and resize it;
    0: none. Images of varying size already get a random crop on the host."""
    randaugment_ops: CountOrZero = 0
    """Augmentation: RandAugment operations per image (2 is usual); 0: none."""
    randaugment_magnitude: Annotated[float, Limit("0 to 10", lambda value: 0 <= value <= 10)] = 9.0
    """Augmentation: strength of RandAugment, 0 to 10."""
    random_erasing: Annotated[float, Limit("a share from 0 to 1", lambda value: 0 <= value <= 1)] = 0.0
    """Augmentation: share of images in which a rectangle is replaced by noise (0.25 is usual)."""
    mixup: NotNegative = 0.0
    """Augmentation: Mixup of pairs of images, with weights from Beta(mixup, mixup) (0.2 is usual, 0.8 with cutmix);
    0: none."""
    cutmix: NotNegative = 0.0
    """Augmentation: CutMix of pairs of images, with areas from Beta(cutmix, cutmix) (1 is usual); 0: none."""
    augment: Named = ""
    """Augmentation: your function of a batch and a key, in the compiled step after all others: `FILE.py:NAME` or
    `package.module:NAME`."""

    def __post_init__(self) -> None:
        settle_auto(self, "batch_size")

    @property
    def padding(self) -> int:
        """The pixels of `crop_padding`; 1 if that has its default, -1, whatever the task (`for_task`)."""
        return 1 if self.crop_padding == -1 else self.crop_padding

    @property
    def tested(self) -> int:
        """The examples of an evaluation step; 360 if `eval_batch_size` is 0 and no run has replaced it."""
        return self.eval_batch_size or 360

    def for_task(self, task: str) -> "Data":
        """Returns a copy with the values of a task.

        A `crop_padding` of -1, the default, becomes 0 for `own`, `regression` and `diffusion`, 1 for others. For
        `diffusion`, `mean` and `std` become 0.5, which scales [0, 1] to [-1, 1].
        """
        unmoved = task in ("own", "regression", "diffusion") and self.crop_padding == -1
        scaled = {"mean": (0.5,), "std": (0.5,)} if task == "diffusion" else {}
        return dataclasses.replace(self, crop_padding=0 if unmoved else self.padding, **scaled)

    @property
    def stated_classes(self) -> int:
        """The number of classes by `num_classes`, or else by the number of `mask_values`; 0 if neither is set."""
        return self.num_classes or len(self.mask_values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """The model and its sizes."""

    name: ModelName = "resnet18"
    """Architecture; `hf:FOLDER`, a decoder, an encoder, a T5, a Whisper or a vision network with its weights from
    Hugging Face files, or `hf:ID` from the hub; or your own: `FILE.py:NAME` or `package.module:NAME` of a class or
    function that takes the fields of a batch and `rngs`."""
    width: CountOrZero = 0
    """Channels of the first stage (EfficientNet, MobileNetV3, DenseNet: of the first convolution), or units of each
    layer; 0: as published (ResNet: 64 with the ImageNet stem, 16 with the small one; MLP: 16)."""
    depth: CountOrZero = 0
    """Number of blocks (Transformers), halvings (U-Net), middle blocks (Xception) or hidden layers (MLP); 0: as
    published (MLP: 2)."""
    heads: CountOrZero = 0
    """Transformers: attention heads; 0: as published."""
    patch: CountOrZero = 0
    """ViT: side of a patch in pixels. ConvNeXt: the same in the stem. 0: as published."""
    pool: Literal["gap", "cls"] = "gap"
    """ViT: input of the classifier: mean of all patches (gap) or class token (cls, as pretrained weights have it)."""
    dropout: BelowOne = 0.0
    """Dropout rate of Transformers and Wide-ResNets, and before the classifier of EfficientNet and MobileNetV3."""
    scan_blocks: bool = False
    """Transformers: stack the parameters of all blocks and compile one loop, in less time; rules of the policy have to
    hold for all blocks alike."""
    norm_kernel: Literal["xla", "pallas"] = "xla"
    """ViT and GPT-2: what computes the gradients of the layer norms in blocks: XLA's kernels, or one kernel of mpjax's
    own (pallas), which moves fewer bytes. It needs an NVIDIA GPU of compute capability 8.0, norms in float32, and
    mesh.tensor 1."""
    stem: Literal["imagenet", "small"] = "small"
    """Stem of ResNet and DenseNet: 7x7 convolution of stride 2 and max-pooling (imagenet), or one 3x3 convolution
    (small). Xception has two 3x3 convolutions, EfficientNet, MobileNetV3 and RegNet have one, at full resolution if
    small."""
    pretrained: str = ""
    """Initial weights: a safetensors file or folder, or a name on the Hugging Face Hub. `none`: random weights, also
    for `hf:FOLDER`, whose files then need not have any."""
    pretrained_skip: Texts = ()
    """Patterns of parameters to initialise randomly all the same: `"head/*"` for another number of classes."""

    @property
    def folder(self) -> str:
        """The text after `hf:` in `name`, a folder or an id on the Hugging Face Hub; empty for other names."""
        name = str(self.name)
        folder = name.removeprefix(HF) if name.startswith(HF) else ""
        return f"./{folder}" if folder in NAMES_OF_SETTINGS else folder

    @property
    def weights(self) -> str:
        """The file, folder or id of the initial weights: `pretrained`, or else `folder`; empty for random weights."""
        return "" if self.pretrained == RANDOM else self.pretrained or self.folder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """Precision policy and loss scaling."""

    policy: str = "mixed_float16"
    """Preset (float32, mixed_bfloat16, mixed_float16, mixed_float8, mixed_mxfp8, bfloat16, float16, O0-O3, float64), an
    alias of one, or a policy such as `params=float32,compute=float16,output=float32`."""
    mode: Literal["auto", "module", "autocast"] = "auto"
    """Where casts happen: at module boundaries (module), or at each operation as in torch.amp (autocast); auto:
    autocast for O1, else module."""
    rules: TextByName = dataclasses.field(default_factory=dict)
    """Exceptions: module pattern to dtype or policy, the first match wins: `--precision.rules "stem/*" float32`."""
    loss_scale: str = "auto"
    """`dynamic`, `none`, a number (static scale), or `auto` (chosen by the policy)."""
    master_weights: Literal["auto", "on", "off", "stochastic", "kahan"] = "auto"
    """Float32 copies of half-precision parameters in the optimizer; auto: chosen by the policy. Without copies:
    `stochastic` rounds updates to the parameters' dtype at random, right in the mean; `kahan` keeps what rounding
    leaves over in a second number of that dtype; `off` rounds to nearest, so that small updates are lost."""
    stochastic_rounding: bool = False
    """Round master weights to half-precision parameters stochastically (unbiased) instead of to nearest."""
    initial_scale: float = 2.0**15
    """Dynamic loss scale: initial scale."""
    growth_interval: int = 2000
    """Dynamic loss scale: consecutive finite steps after which it doubles."""
    min_scale: float = 1.0
    """Dynamic loss scale: smallest scale; training stops if gradients stay non-finite there."""
    max_scale: float = 2.0**24
    """Dynamic loss scale: largest scale."""
    hysteresis: int = 1
    """Dynamic loss scale: consecutive overflows after which it halves."""
    tolerance: float = 0.0
    """Dynamic loss scale: share of steps since its last change that must overflow before it halves."""
    strict: bool = False
    """Refuse to train if a product, a sum over devices or an update of the compiled step runs in another dtype than
    asked for, or if that cannot be told; `receipt.json` lists all. Half precision that a CPU computes in float32 is
    told and accepted: no program for a CPU could do otherwise."""
    patience: Count = 10
    """Training stops after this many consecutive skipped steps, if the last was at the smallest (or static) scale."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Optimizer and learning rate."""

    name: OptimizerName = "sgd"
    """Update rule: `sgd`, `adamw`, `lamb`, an optimizer of optax or optax.contrib by its name there (`lion`, `muon`,
    `adafactor`), or your function `(learning_rate, ...)` that returns an `optax.GradientTransformation`:
    `FILE.py:NAME` or `package.module:NAME`."""
    arguments: TextByName = dataclasses.field(default_factory=dict)
    """Arguments of an optimizer of optax or of your own, as Python literals: `--optimizer.arguments b2 0.99 nesterov
    True`."""
    learning_rate: NotNegative = 0.1
    """Peak learning rate."""
    schedule: ScheduleName = "cosine"
    """Learning rate after the warm-up: `cosine`, `linear`, `constant`, `one_cycle` (which includes the warm-up), or
    your function that returns a function from step to learning rate, `FILE.py:NAME` or `package.module:NAME`. It takes
    some of `peak`, `steps` and `warmup`; without `warmup`, it begins after a linear warm-up."""
    warmup: Steps = epochs(2)
    """Linear warm-up from 0 to the peak (one_cycle: its rising part); at most a fifth of training."""
    momentum: BelowOne = 0.9
    """sgd: momentum coefficient."""
    nesterov: bool = True
    """sgd: use Nesterov momentum."""
    b1: BelowOne = 0.9
    """adamw, lamb: decay rate of the first moment."""
    b2: BelowOne = 0.999
    """adamw, lamb: decay rate of the second moment."""
    eps: NotNegative = 1e-8
    """adamw, lamb: constant added to the root of the second moment."""
    weight_decay: NotNegative = 5e-4
    """Weight decay of kernels, not of norms and biases. sgd: added to the gradient; adamw, lamb: decoupled; others:
    as they define it."""
    clip_norm: NotNegative = 0.0
    """Clip the unscaled gradient to this global norm; 0: no clipping."""
    moments: Literal["float32", "bfloat16", "float8", "int8", "int8_linear"] = "float32"
    """Dtype of the optimizer moments. bfloat16: half the memory, rounded stochastically (unbiased). float8: first
    moments in float8, in groups of 128 with a scale each, and second ones in bfloat16, both rounded so. int8: all in 8
    bits, in such groups, as codes of seven decades (int8_linear: of equal steps). Not float16: squares of gradients
    below 2e-4 underflow in it."""
    rates: FloatByName = dataclasses.field(default_factory=dict)
    """Factors on the learning rate, by pattern of paths; the first match wins: `--optimizer.rates "head/*" 10`."""
    layer_decay: Annotated[float, Limit("above 0, up to 1", lambda value: 0 < value <= 1)] = 1.0
    """Transformers: factor on the learning rate from each block to the one below it; the head has the whole rate, and
    what comes before the blocks the smallest; 1: the same rate for all."""

    def __post_init__(self):
        settle_durations(self, "warmup")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """Options of the training step."""

    objective: Named = ""
    """Your function from model, batch and key to the loss and the metrics of each example, in place of the task's:
    `FILE.py:NAME` or `package.module:NAME`."""
    metrics: SeveralNamed = ()
    """Your metrics of the test set, functions from the model's outputs and a batch to values per example or a metric of
    clu or metrax: `FILE.py:NAME` or `package.module:NAME` each."""
    loss: Literal["mse", "mae", "huber"] = "mse"
    """Regression: squared error, absolute error, or Huber's loss, of targets in units of their standard deviation."""
    huber_delta: Annotated[float, Limit("a positive number", lambda delta: 0 < delta < math.inf)] = 1.0
    """Regression: error, in standard deviations of the target, from which Huber's loss is linear."""
    beta: Annotated[float, Limit("a positive number", lambda beta: 0 < beta < math.inf)] = 0.1
    """Preference: how strongly DPO holds the model to the one before training, by its log-probabilities."""
    temperature: Annotated[float, Limit("a positive number", lambda value: 0 < value < math.inf)] = 0.05
    """Embedding: what cosines are divided by before the softmax, in float32; a smaller one looks at the nearest wrong
    candidates alone."""
    symmetric: bool = False
    """Embedding: positives also look for their queries, and the loss is the mean of both directions."""
    prediction: Literal["v", "eps"] = "v"
    """Diffusion: what the network predicts of a noisy image: its noise (eps), or v, noise and image weighted so that
    neither is lost at any time."""
    noise_schedule: Literal["cosine", "linear"] = "cosine"
    """Diffusion: how noise grows over the 1000 times: cosine (Nichol & Dhariwal), or linear in its variance (DDPM)."""
    drop_label: BelowOne = 0.1
    """Diffusion: share of examples whose label is dropped in training, for classifier-free guidance; 0: none."""
    min_snr: NotNegative = 0.0
    """Diffusion: limit of the ratio of signal to noise that weighs the error of a time in the training loss (min-SNR, 5
    is usual); 0: errors of all times count alike."""
    label_smoothing: BelowOne = 0.1
    """Share of the target probability spread evenly over all classes, in the task's own loss."""
    class_weights: Floats = ()
    """Weight of each class in the training loss, in the order of their numbers: `--training.class_weights 1 10`; the
    weighted sum is divided by the sum of the weights. Empty: all classes count alike. Metrics are not weighted."""
    chunked_loss: CountOrZero = 0
    """Language models: the number of tokens whose logits exist at a time, as in 4096, to save memory; their
    gradients are computed beside the loss. 0: all tokens of a batch at once."""
    accumulate: OrAuto = 1
    """Gradient accumulation: micro-batches per step, whose gradients are averaged; for embedding, the loss stays that
    of the whole batch (gradient caching). `auto`: the smallest power of two
    with which the batch fits into memory."""
    remat: Literal["none", "dots", "full"] = "none"
    """Rematerialisation in the backward pass, to save memory. none: nothing. dots: everything but matrix products and
    convolutions. full: everything in a block (a module in a list) except its input, at about a third more
    computation."""
    steps_per_call: Count = 1
    """Steps per compiled call, for steps so short that the host cannot keep up. A data set that fits into
    data.on_device_mb is kept and read on the device."""
    ema: BelowOne = 0.0
    """Decay rate of an exponential moving average of the parameters, which is also evaluated; 0: none."""
    freeze: Texts = ()
    """Patterns of parameters and statistics, by path, that are not trained: `--training.freeze "stem/*" "blocks/0"`."""
    lora: Texts = ()
    """Patterns of linear layers, by path, that get low-rank adapters; all else is frozen: `--training.lora
    "blocks/*/attention/*"`. Empty: no adapters, all is trained."""
    lora_rank: Count = 16
    """LoRA: the rank of the adapters."""
    lora_alpha: Annotated[float, Limit("a positive number", lambda alpha: 0 < alpha < math.inf)] = 16.0
    """LoRA: the product of an adapter is multiplied by this number over its rank (rslora: over the root of it)."""
    lora_variant: Literal["lora", "rslora", "dora"] = "lora"
    """LoRA: `lora`, `rslora` (another scale), or `dora` (the norms of the weight's columns are trained too)."""
    lora_base: Literal["policy", "float32", "bfloat16", "float16", "int8", "nf4"] = "policy"
    """LoRA: what frozen weights are stored in, whatever the policy computes in; norms stay in float32. policy: as the
    policy stores all parameters. int8, nf4: linear layers but the head in blocks of 8- or 4-bit codes (QLoRA), the rest
    in bfloat16."""
    lora_trained: Texts = ()
    """LoRA: patterns of parameters, by path, that are trained as they are, beside the adapters: `"head/*"` for new
    classes."""
    batch_norm: Literal["device", "global"] = "device"
    """With several devices, the examples that batch norms take their statistics from: each device's own, or the whole
    batch's, which costs a sum over all devices for each norm."""

    def __post_init__(self) -> None:
        settle_auto(self, "accumulate")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mesh:
    """Division over devices; the product of the four is the number of devices, and -1 stands for what is left."""

    data: int = -1
    """Replicas: each has its own examples."""
    fsdp: int = 1
    """Parts that parameters, optimizer state and moving averages are divided into; each has its own examples, too, and
    gathers a parameter when it is used."""
    context: int = 1
    """Parts that the positions of each text are divided into, for long texts; parameters are divided too, as by fsdp,
    and attention exchanges positions for heads."""
    tensor: int = 1
    """Parts that the attention heads and the MLPs of Transformers are divided into; all see the same examples."""
    sequence: bool = False
    """With tensor above 1, divide the values between blocks of a Transformer along the sequence: norms and sums take a
    share of the positions, and the backward pass keeps shares. Values do not change."""
    overlap: bool = True
    """On several GPUs, compile with XLA's options that let them compute while they communicate."""
    float8_gather: bool = False
    """Gather weights over fsdp in float8, half the bytes, where layers quantise them by one scale in any case: with the
    recipe `float8` of a policy. Results keep every bit."""
    rules: WayByName = dataclasses.field(default_factory=dict)
    """Layers to divide over tensor: module pattern to columns (by outputs), rows (by inputs) or whole; the first match
    wins, before the rules for mpjax's own Transformers: `--mesh.rules "layers/*/up" columns "layers/*/down" rows`."""

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis of the mesh, by name; -1 stands for the number of devices over the other sizes."""
        return {"data": self.data, "fsdp": self.fsdp, "context": self.context, "tensor": self.tensor}


__all__ = [
    "Config",
    "Data",
    "Diagnosis",
    "Distributed",
    "Loop",
    "Mesh",
    "Model",
    "Optimizer",
    "Precision",
    "Report",
    "Training",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distributed:
    """One run over several processes. Started by SLURM, Open MPI, Kubernetes or on TPUs, it needs no flags."""

    coordinator: str = ""
    """Address of process 0 as the others reach it, `HOST:PORT`, with a port that is free there."""
    processes: int = 0
    """Number of processes; 0: as the cluster says; 1: this process alone, whatever the cluster says."""
    process: int = -1
    """Number of this process, from 0; -1: as the cluster says."""
    timeout: Annotated[float, Limit("a positive number of seconds", lambda value: 0 < value < math.inf)] = 300.0
    """Seconds to wait until all processes are there."""
    elastic: bool = False
    """Go on if a process dies: the others start again from the last checkpoint with the same batch, and take the lost
    one in when it comes back (Linux)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    """Frequency of logging, evaluations and checkpoints."""

    log_every: Steps = Duration(20)
    """Interval between logged metrics."""
    eval_every: Steps = epochs(5)
    """Interval between evaluations; there is always one at the end."""
    save_every: Steps = epochs(5)
    """Interval between checkpoints; there is always one at the end and on interruption."""
    keep: Count = 2
    """Number of newest checkpoints to keep, besides the best."""
    best: str = ""
    """Metric of the test set that chooses the best checkpoint, as in `loss`; empty: as usual for the task."""
    best_is: Literal["auto", "min", "max"] = "auto"
    """Whether the best value of loop.best is the smallest or the largest; auto: known for mpjax's own metrics."""
    stop_after: CountOrZero = 0
    """Early stopping: training ends after this many evaluations in a row without a better loop.best; 0: never."""
    stop_delta: NotNegative = 0.0
    """Early stopping: a value is better if it differs from the best so far by more than this."""
    callbacks: SeveralNamed = ()
    """Your callbacks, classes (or functions that return an object) with methods such as `evaluated`: `FILE.py:NAME` or
    `package.module:NAME` each."""

    def __post_init__(self):
        settle_durations(self, "log_every", "eval_every", "save_every")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Outputs of a run besides metrics.jsonl."""

    tensorboard: bool = True
    """Write TensorBoard events."""
    images: CountOrZero = 4
    """Segmentation: number of test images that TensorBoard and loggers get at each evaluation, with their masks and the
    predicted ones; 0: none."""
    plot: bool = True
    """Plot the curves of the run at the end: curves.png, and of several seeds seeds.png."""
    plot_format: PlotFormats = ("png",)
    """Formats of plots, one or more: `png`, `pdf`, `svg`."""
    writers: SeveralNamed = ()
    """Further destinations of metrics: `wandb`, `mlflow`, `comet`, or your own functions of the run that return a
    writer, `FILE.py:NAME` or `package.module:NAME` each."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Statistics during training, and the search on divergence."""

    every: Steps = Duration(0)
    """Interval between statistics of every layer (range, overflow, underflow, histogram) in metrics.jsonl and
    TensorBoard; 0: none, at no cost."""
    search: bool = True
    """On divergence, find and verify the smallest set of modules that repairs the step when kept in float32."""

    def __post_init__(self):
        settle_durations(self, "every")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Train a model in mixed precision."""

    steps: Annotated[Steps, Limit("at least one step", lambda steps: steps.amount > 0)] = epochs(30)
    """Length of training: attempted steps (skipped ones count), `1e6 examples` or `30 epochs`."""
    seed: Annotated[int, Limit("0 to 2**32 - 1", lambda seed: 0 <= seed < 2**32)] = 0
    """Random seed of initialisation, shuffling and augmentation."""
    seeds: Annotated[
        Integers, Limit("0 to 2**32 - 1", lambda seeds: all(0 <= seed < 2**32 for seed in seeds), words)
    ] = ()
    """Train one run for each of these seeds in place of seed, in `seed_N` of output_dir; empty: one run."""
    task: TaskName = "classification"
    """What the model predicts: the class of an image or row, of each pixel or of a text, the next token of a text or of
    the answers in conversations (instructions), numbers (regression), any number of labels (multilabel), or the noise
    in an image, to draw new ones (diffusion). own: all columns of the data set are read, and --training.objective says
    what is learned."""
    output_dir: str = ""
    """Folder of the run: a new one, or with --resume an existing one; empty: runs/<data>-<model>-<policy>-<time>."""
    resume: bool = False
    """Resume from the last checkpoint in output_dir, with the settings of that run unless others are given."""
    trust_code: bool = False
    """Allow execution of code outside mpjax that the settings of a stored run name (--resume, or --config of a run's
    file): a model, or a function for its data. Code that this command line names does not need it."""
    other_data: bool = False
    """Allow --resume on other data than that of the checkpoint: other examples, labels, order or dtypes. The run says
    what differs."""
    profile: bool = False
    """Trace calls 6 to 10 into the run's tensorboard folder, for the TensorBoard profile plugin and XProf."""
    cache_dir: str = ""
    """Folder of compiled programs and prepared data; empty: `$MPJAX_CACHE`, by default `~/.cache/mpjax`."""
    data: Data = Data()
    model: Model = Model()
    precision: Precision = Precision()
    optimizer: Optimizer = Optimizer()
    training: Training = Training()
    mesh: Mesh = Mesh()
    distributed: Distributed = Distributed()
    loop: Loop = Loop()
    report: Report = Report()
    diagnosis: Diagnosis = Diagnosis()

    @property
    def is_encoded(self) -> bool:
        """Whether the data are read by statistics of the training split, which the run stores: rows, and targets."""
        return str(self.data.name).startswith(TABULAR) or self.task in OF_NUMBERS

    def __post_init__(self):
        settle_durations(self, "steps")
        known = isinstance(self.data, Data) and isinstance(self.model, Model)  # else `check` says what is wrong
        if known and self.data.tokenizer == "auto":
            has_texts = self.task not in WITHOUT_TEXTS
            tokenizer = self.model.folder if has_texts else ""
            data = dataclasses.replace(self.data, tokenizer=tokenizer or "bytes")
            object.__setattr__(self, "data", data)
        if known and not self.data.eval_batch_size:
            as_trained = self.model.folder and self.task not in COMPARED
            if not as_trained or self.data.batch_size != AUTO:  # else it is not known yet
                tested = self.data.batch_size if as_trained else self.data.tested
                object.__setattr__(self, "data", dataclasses.replace(self.data, eval_batch_size=tested))
        if known and self.data.features == "auto" and self.task in OF_SOUNDS:
            data = dataclasses.replace(self.data, features=self.model.folder or "whisper")
            object.__setattr__(self, "data", data)


def with_settings(config: Any, settings: Mapping[str, Any]) -> Any:
    """Returns a copy of a config, or of a section, with other values, given by names such as `data.image_size`.

    Values are not checked, but `__post_init__` of the dataclasses runs.
    """
    for name, value in settings.items():
        section, _, inner = name.partition(".")
        changed = with_settings(getattr(config, section), {inner: value}) if inner else value
        config = dataclasses.replace(config, **{section: changed})
    return config

"""The settings of a training step: precision, optimizer, options of the step, division over devices."""

import dataclasses
from typing import Literal

from mpjax.config.flag_types import OptimizerName, OrAuto, ScheduleName, Steps, epochs, settle_auto, settle_durations
from mpjax.config.several_words import FloatByName, Floats, TextByName, Texts, WayByName


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
    tune: bool = False
    """Before training, time the model's matrix products and convolutions in both dtypes on this device; add rules that
    keep in float32 what is slower in half precision, if that makes the step faster. The result is cached."""
    strict: bool = False
    """Refuse to train if a product, a sum over devices or an update of the compiled step runs in another dtype than
    asked for, or if that cannot be told; `receipt.json` lists all. Half precision that a CPU computes in float32 is
    told and accepted: no program for a CPU could do otherwise."""
    patience: int = 10
    """Training stops after this many consecutive skipped steps, if the last was at the smallest (or static) scale."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Optimizer and learning rate."""

    name: OptimizerName = "sgd"
    """Update rule: `sgd`, `adamw`, `lamb`, `muon` (orthogonalized momentum for the filters of convolutions, sgd for
    everything else), an optimizer of optax or optax.contrib by its name there (`lion`, `adam`, `adafactor`), or your
    function `(learning_rate, ...)` that returns an `optax.GradientTransformation`: `FILE.py:NAME` or
    `package.module:NAME`."""
    arguments: TextByName = dataclasses.field(default_factory=dict)
    """Arguments of an optimizer of optax or of your own, as Python literals: `--optimizer.arguments b2 0.99 nesterov
    True`."""
    learning_rate: float = 0.1
    """Peak learning rate."""
    schedule: ScheduleName = "cosine"
    """Learning rate after the warm-up: `cosine`, `linear`, `constant`, `one_cycle` (which includes the warm-up), or
    your function that returns a function from step to learning rate, `FILE.py:NAME` or `package.module:NAME`. It takes
    some of `peak`, `steps` and `warmup`; without `warmup`, it begins after a linear warm-up."""
    warmup: Steps = epochs(2)
    """Linear warm-up from 0 to the peak (one_cycle: its rising part); at most a fifth of training."""
    momentum: float = 0.9
    """sgd, muon: momentum coefficient."""
    nesterov: bool = True
    """sgd, muon: use Nesterov momentum."""
    rest_learning_rate: float = 0.0
    """muon: peak learning rate of everything but the filters of convolutions; 0: learning_rate."""
    rest_momentum: float = 0.9
    """muon: momentum coefficient of everything but the filters of convolutions."""
    normalise_filters: bool = False
    """muon: scale each filter to a norm of sqrt(outputs) before its update is added, instead of weight decay."""
    b1: float = 0.9
    """adamw, lamb: decay rate of the first moment."""
    b2: float = 0.999
    """adamw, lamb: decay rate of the second moment."""
    eps: float = 1e-8
    """adamw, lamb: constant added to the root of the second moment."""
    weight_decay: float = 5e-4
    """Weight decay of kernels, not of norms and biases. sgd: added to the gradient; adamw, lamb: decoupled; muon:
    decoupled for filters, added for everything else; others: as they define it."""
    clip_norm: float = 0.0
    """Clip the unscaled gradient to this global norm; 0: no clipping."""
    moments: Literal["float32", "bfloat16", "float8"] = "float32"
    """Dtype of the optimizer moments. bfloat16: half the memory, rounded stochastically (unbiased). float8: first
    moments in float8, in groups of 128 with a scale each, and second ones in bfloat16, both rounded so. Not float16:
    squares of gradients below 2e-4 underflow in it."""
    rates: FloatByName = dataclasses.field(default_factory=dict)
    """Factors on the learning rate, by pattern of paths; the first match wins: `--optimizer.rates "head/*" 10`."""
    layer_decay: float = 1.0
    """Transformers: factor on the learning rate from each block to the one below it; the head has the whole rate, and
    what comes before the blocks the smallest; 1: the same rate for all."""

    def __post_init__(self):
        settle_durations(self, "warmup")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """Options of the training step."""

    objective: str = ""
    """Your function from model, batch and key to the loss and the metrics of each example, in place of the task's:
    `FILE.py:NAME` or `package.module:NAME`."""
    metrics: Texts = ()
    """Your metrics of the test set, functions from the model's outputs and a batch to values per example or a metric of
    clu or metrax: `FILE.py:NAME` or `package.module:NAME` each."""
    label_smoothing: float = 0.1
    """Share of the target probability spread evenly over all classes, in the task's own loss."""
    class_weights: Floats = ()
    """Weight of each class in the training loss, in the order of their numbers: `--training.class_weights 1 10`; the
    weighted sum is divided by the sum of the weights. Empty: all classes count alike. Metrics are not weighted."""
    chunked_loss: int = 0
    """Language models: the number of tokens whose logits exist at a time, as in 4096, to save memory; the backward pass
    computes them again. 0: all tokens of a batch at once."""
    accumulate: OrAuto = 1
    """Gradient accumulation: micro-batches per step, whose gradients are averaged. `auto`: the smallest power of two
    with which the batch fits into memory."""
    remat: Literal["none", "dots", "full"] = "none"
    """Rematerialisation in the backward pass, to save memory. none: nothing. dots: everything but matrix products and
    convolutions. full: everything in a block (a module in a list) except its input, at about a third more
    computation."""
    steps_per_call: int = 1
    """Steps per compiled call, for steps so short that the host cannot keep up. A data set that fits into
    data.on_device_mb is kept and read on the device."""
    ema: float = 0.0
    """Decay rate of an exponential moving average of the parameters, which is also evaluated; 0: none."""
    freeze: Texts = ()
    """Patterns of parameters and statistics, by path, that are not trained: `--training.freeze "stem/*" "blocks/0"`."""
    batch_norm: Literal["device", "global"] = "device"
    """With several devices, the examples that batch norms take their statistics from: each device's own, or the whole
    batch's, which costs a sum over all devices for each norm."""

    def __post_init__(self) -> None:
        settle_auto(self, "accumulate")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mesh:
    """Division over devices; the product of the three is the number of devices, and -1 stands for what is left."""

    data: int = -1
    """Replicas: each has its own examples."""
    fsdp: int = 1
    """Parts that parameters, optimizer state and moving averages are divided into; each has its own examples, too, and
    gathers a parameter when it is used."""
    tensor: int = 1
    """Parts that the attention heads and the MLPs of Transformers are divided into; all see the same examples."""
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
        """Returns the sizes by axis."""
        return {"data": self.data, "fsdp": self.fsdp, "tensor": self.tensor}

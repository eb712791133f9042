"""The values that settings choose from: model names, and the best value of each metric."""

import difflib
import pathlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

from mpjax.errors import UsageError


MODELS: Mapping[str, str] = {
    "mlp": "hidden linear layers with ReLU; the tutorial's",
    "resnet18": "ResNet v1.5, basic blocks (2, 2, 2, 2)",
    "resnet34": "ResNet v1.5, basic blocks (3, 4, 6, 3)",
    "resnet50": "ResNet v1.5, bottlenecks (3, 4, 6, 3)",
    "resnet101": "ResNet v1.5, bottlenecks (3, 4, 23, 3)",
    "resnet152": "ResNet v1.5, bottlenecks (3, 8, 36, 3)",
    "resnext50": "ResNeXt-50 32x4d, grouped convolutions",
    "wrn16_4": "Wide-ResNet of 16 layers, 4 times as wide",
    "wrn28_10": "Wide-ResNet of 28 layers, 10 times as wide",
    "xception": "Xception, depthwise separable convolutions",
    "convnext_t": "ConvNeXt-T, 7x7 depthwise convolutions and LayerNorm",
    "efficientnet_b0": "EfficientNet-B0, inverted residual blocks with squeeze-excitation",
    "efficientnet_b1": "EfficientNet-B1, 1.1 times as deep as B0",
    "efficientnet_b2": "EfficientNet-B2, 1.1 times as wide and 1.2 times as deep as B0",
    "efficientnet_b3": "EfficientNet-B3, 1.2 times as wide and 1.4 times as deep as B0",
    "efficientnet_b4": "EfficientNet-B4, 1.4 times as wide and 1.8 times as deep as B0",
    "mobilenetv3_large": "MobileNetV3-Large, for phones",
    "mobilenetv3_small": "MobileNetV3-Small, for phones",
    "regnetx_004": "RegNetX of 0.4 GFLOPs, grouped convolutions",
    "regnetx_032": "RegNetX of 3.2 GFLOPs",
    "regnety_004": "RegNetY of 0.4 GFLOPs, with squeeze-excitation",
    "regnety_016": "RegNetY of 1.6 GFLOPs",
    "regnety_032": "RegNetY of 3.2 GFLOPs",
    "densenet121": "DenseNet-121, layers that read all layers before them",
    "vit_ti16": "Vision Transformer, width 192, patches of 16 pixels",
    "vit_s16": "Vision Transformer, width 384, patches of 16 pixels",
    "vit_b16": "Vision Transformer, width 768, patches of 16 pixels",
    "unet": "U-Net, a class for every pixel",
    "dit_s2": "Diffusion Transformer, width 384, patches of 2 pixels",
    "dit_b2": "Diffusion Transformer, width 768, patches of 2 pixels",
    "dit_l2": "Diffusion Transformer, width 1024, patches of 2 pixels",
    "dit_xl2": "Diffusion Transformer, width 1152, patches of 2 pixels",
    "unet_ddpm": "U-Net with a time embedding, for diffusion",
    "bert": "BERT-style text encoder (BERT-base)",
    "gpt2": "GPT-2-style decoder (GPT-2 small)",
}

DIFFUSION_MODELS = ("dit_s2", "dit_b2", "dit_l2", "dit_xl2", "unet_ddpm")
"""The names of `MODELS` for the task `diffusion`."""


NAMES_OF_SETTINGS = frozenset({"auto", "bytes", "whisper", "words"})
"""Values of `--data.tokenizer` and `--data.features` that are no folders; a folder of such a name is `./NAME`."""

HF = "hf:"
"""The prefix of a model name that is a folder of Hugging Face files or an id on the hub, as in `hf:FOLDER`."""
RANDOM = "none"
"""The value of `--model.pretrained` for random initial weights, whatever files there are."""


def parse_model_name(text: str) -> str:
    """Checks the name of a model and returns it unchanged: one of `MODELS`, or any text with a colon.

    Such texts are `hf:FOLDER`, and `FILE.py:NAME` or `package.module:NAME` for the user's own. Whether the folder or
    the code exists is not checked.

    Raises:
      UsageError: there is no such model; the message suggests the closest name.
    """
    if text == HF:
        raise UsageError(f"no model {text!r}: wanted a folder of Hugging Face files, as in {HF}FOLDER")
    if text not in MODELS and ":" not in text and pathlib.Path(text, "config.json").is_file():
        raise UsageError(f"no model {text!r}, but there is a folder of Hugging Face files: write {HF}{text}")
    return _known_or_own("model", text, [*MODELS, f"{HF}FOLDER"])


def _known_or_own(kind: str, text: str, known: Collection[str]) -> str:
    if text in known or ":" in text:
        return text
    near = difflib.get_close_matches(text, known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UsageError(
        f"no {kind} {text!r}; {hint}wanted {', '.join(known)}, or FILE.py:NAME or package.module:NAME for your own"
    )


def parse_optimizer_name(text: str) -> str:
    """Checks the name of an update rule and returns it unchanged: a Python identifier, or any text with a colon.

    Texts with a colon are `FILE.py:NAME` or `package.module:NAME`. Whether optax has the name or the code exists is not
    checked.

    Raises:
      UsageError: the text has neither form.
    """
    if ":" in text or text.isidentifier():
        return text
    raise UsageError(
        f"no optimizer {text!r}; wanted sgd, adamw, lamb, a name of optax such as lion, or FILE.py:NAME or "
        "package.module:NAME for your own"
    )


_ADAM = ("b1", "b2", "eps")

SETTINGS_OF_RULES: Mapping[str, tuple[str, ...]] = {
    "sgd": ("momentum", "nesterov"),
    "adamw": _ADAM,
    "lamb": _ADAM,
}
"""The update rules of mpjax, and their settings in the `optimizer` section that not all rules share."""

SCHEDULES = ("cosine", "linear", "constant", "one_cycle")


def parse_schedule_name(text: str) -> str:
    """Checks the name of a schedule and returns it unchanged: one of `SCHEDULES`, or any text with a colon (own code).

    Raises:
      UsageError: there is no such schedule; the message suggests the closest name.
    """
    return _known_or_own("schedule", text, SCHEDULES)


AUTO = -1
"""The number that stands for `auto`: mpjax finds the value. It is not 0, so that a typed 0 is an error."""


def parse_or_auto(text: str) -> int:
    """Parses a whole number of at least 1; the text `auto` becomes `AUTO`, -1.

    Raises:
      UsageError: the text is neither.
    """
    if text == "auto":
        return AUTO
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"wanted auto or a whole number from 1 on, got {text}")
    return int(text)


PlotFormat = Literal["png", "pdf", "svg"]
"""A format of the plots of a run."""

FILE_KINDS = ("folder", "hf", "tabular", "webdataset")
"""The words before the colon of a `--data.name` that names files, as in `hf:PATH`."""

DATA_KINDS = (*FILE_KINDS, "synthetic")
"""The words before the colon of a `--data.name` that is not code, as in `hf:NAME`."""

NPZ = ".npz"
"""The end of a `--data.name` that is a file of NumPy's arrays, in upper or lower case."""

GENERATED = ("digits", "digits_canvas", "docstrings")
"""Data sets that mpjax generates at their first use."""


Way = Literal["columns", "rows", "whole"]
"""The division of a linear layer or convolution: along its outputs, along its inputs, or none."""


TABULAR = "tabular:"
"""The prefix of a `--data.name` of csv, tsv or parquet files, whose rows take the place of images."""

BEST: Mapping[str, Callable[[Sequence[float]], float]] = {
    "loss": min,
    "perplexity": min,
    "accuracy": max,
    "top5": max,
    "iou": max,
    "mse": min,
    "mae": min,
    "rmse": min,
    "r2": max,
    "f1": max,
    "macro_f1": max,
    "exact": max,
    "margin": max,
    "mrr": max,
    "image_to_text": max,
    "text_to_image": max,
}
"""For each metric, the function that chooses the best of several values."""

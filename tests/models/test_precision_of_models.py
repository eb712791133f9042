"""Every model under every preset: each product in the policy's dtype, no silent upcast, forward and backward."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.errors import UsageError
from mpjax.models import (
    B0_STAGES,
    BERT,
    GPT2,
    LARGE_STAGES,
    MLP,
    SMALL_STAGES,
    BasicBlock,
    Bottleneck,
    ConvNeXt,
    DenseNet,
    EfficientNet,
    ImageNetStem,
    LayerKind,
    MobileNetV3,
    ResNet,
    ResNeXtBottleneck,
    Rope,
    SmallStem,
    SmallXceptionStem,
    ViT,
    WideResNet,
    Xception,
    regnetx,
    regnety,
    unet64,
)
from mpjax.models.decoder import Decoder, DecoderSettings
from mpjax.models.diffusion import DiffusionUNet, DiT
from mpjax.models.encoder import ModernBERTSettings, make_classifier
from mpjax.models.image_text import ImageText
from mpjax.models.image_text import settings_of as of_two_towers
from mpjax.models.t5 import T5, T5Settings
from mpjax.models.vision import make_network, settings_of
from mpjax.precision import HALF, PRESETS, apply_policy, audit, storage_policy
from mpjax.precision.casting import autocast


class Case(NamedTuple):
    """A small version of a model: `make(rngs=...)`, and the shape and dtype of what it is called with.

    A dtype of None is what the policy computes in; float32 where autocast does the casting.
    """

    make: Callable[..., nnx.Module]
    shape: tuple[int, ...]
    dtype: str | None = None


IMAGES = (4, 8, 8, 1)
SETTINGS = {"channels": 1, "num_classes": 3}
TEXTS = (4, 6)
TRANSFORMER = {"width": 16, "depth": 1, "heads": 2, "dropout": 0.1}
PATCHES = {"image_shape": (8, 8, 1), "num_classes": 3, "patch": 4}


def decoder(width, **settings):
    sizes = {"vocabulary": 20, "length": 8, "heads": 4, "key_heads": 2, "head_features": width // 4}
    return DecoderSettings(**sizes, width=width, hidden=2 * width, **settings)


INVERTED = (B0_STAGES[0], B0_STAGES[2])
ROWS = (*LARGE_STAGES[:2], (SMALL_STAGES[2][0]._replace(expanded=72),))
LLAMA = {"layers": (LayerKind(),)}
GEMMA = {
    "layers": (LayerKind(window=3), LayerKind(rope=None)),
    "activation": "tanh_gelu",
    "norm_offset": 1.0,
    "norms_after": True,
    "norms_of_heads": True,
    "embedding_scale": 4.0,
    "score_cap": 5.0,
    "logit_cap": 3.0,
    "qkv_bias": True,
    "tied": True,
}


def modernbert(width):
    local, whole = LayerKind(window=3), LayerKind(rope=Rope(theta=100.0))
    sizes = {"vocabulary": 20, "length": 8, "width": width, "heads": 4, "hidden": 2 * width, "layers": (whole, local)}
    settings = ModernBERTSettings(**sizes, mlp_dropout=0.1, attention_dropout=0.1, classifier_pooling="mean")
    return functools.partial(make_classifier, settings, num_classes=3)


def dinov2(width):
    """With registers, layer scale, a gated MLP, dropped paths, and positions that are interpolated from 4 x 4."""
    sizes = {"image_size": 16, "patch_size": 4, "hidden_size": width, "num_attention_heads": 2, "num_channels": 1}
    rates = {"drop_path_rate": 0.1, "hidden_dropout_prob": 0.1, "use_swiglu_ffn": True, "num_hidden_layers": 1}
    settings = settings_of({"model_type": "dinov2_with_registers", **sizes, **rates})
    return functools.partial(make_network, settings, image_shape=(8, 8, 1), num_classes=3)


def diffusing(kind, **settings):
    """A network of diffusion at fixed times and labels, whose modulations and outputs are not zero."""

    class Diffusing(kind):
        def __call__(self, images):
            times = jnp.arange(images.shape[0], dtype=jnp.int32)
            return super().__call__(images, times, times % 3)

    return functools.partial(Diffusing, image_shape=(8, 8, 1), num_classes=3, width=16, depth=1, heads=2, **settings)


def dinov3(width):
    """With a gated MLP, and rotary positions of patches beside two registers."""
    sizes = {"patch_size": 4, "hidden_size": width, "num_attention_heads": 2, "num_channels": 1, "use_gated_mlp": True}
    rates = {"drop_path_rate": 0.1, "num_hidden_layers": 1, "num_register_tokens": 2, "intermediate_size": 2 * width}
    settings = settings_of({"model_type": "dinov3_vit", **sizes, **rates})
    return functools.partial(make_network, settings, image_shape=(8, 8, 1), num_classes=3)


def clip(width):
    sizes = {"patch_size": 4, "hidden_size": width, "num_attention_heads": 2, "num_channels": 1, "image_size": 16}
    settings = settings_of({"model_type": "clip_vision_model", **sizes, "num_hidden_layers": 1})
    return functools.partial(make_network, settings, image_shape=(8, 8, 1), num_classes=3)


def swin(width):
    """With a shifted window that is filled up, and dropped paths."""
    sizes = {"patch_size": 2, "window_size": 3, "embed_dim": width, "depths": [2], "num_heads": [2], "num_channels": 1}
    settings = settings_of({"model_type": "swin", **sizes, "drop_path_rate": 0.1, "hidden_dropout_prob": 0.1})
    return functools.partial(make_network, settings, image_shape=(8, 8, 1), num_classes=3)


class WithTexts(ImageText):
    """CLIP or SigLIP with texts of five tokens, of images."""

    def __call__(self, images):
        tokens = jnp.ones((len(images), 5), jnp.int32)
        return self.temperature(super().__call__(images, tokens, tokens[:, 0] + 3)[:, 0])


def image_text(kind, width):
    sizes = {"hidden_size": width, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 2 * width}
    vision = {**sizes, "patch_size": 4, "image_size": 8, "num_channels": 1}
    text = {**sizes, "vocab_size": 20, "max_position_embeddings": 5}
    settings = of_two_towers({"model_type": kind, "vision_config": vision, "text_config": text})
    return functools.partial(WithTexts, settings, image_shape=(8, 8, 1))


class OfItself(T5):
    """A T5 whose targets are its sources."""

    def __call__(self, tokens):
        return super().__call__(tokens, None, tokens)


def t5(width, **settings):
    sizes = {"vocabulary": 20, "heads": 4, "head_features": width // 4, "encoder_depth": 1, "decoder_depth": 1}
    return functools.partial(OfItself, T5Settings(**sizes, width=width, hidden=2 * width, **settings))


GATED = {"gated": True, "activation": "tanh_gelu", "tied": False, "scaled": False}

MODELS = {
    "mlp": Case(functools.partial(MLP, 64, width=8, depth=2, num_classes=3), IMAGES),
    "resnet": Case(functools.partial(ResNet, (1, 1), BasicBlock, ImageNetStem, width=8, **SETTINGS), (4, 16, 16, 1)),
    "resnet bottleneck": Case(functools.partial(ResNet, (1, 1), Bottleneck, ImageNetStem, width=8, **SETTINGS), IMAGES),
    "resnext": Case(functools.partial(ResNet, (1, 1), ResNeXtBottleneck, ImageNetStem, width=16, **SETTINGS), IMAGES),
    "wide_resnet": Case(functools.partial(WideResNet, 10, 1, width=8, dropout=0.1, **SETTINGS), IMAGES),
    "xception": Case(functools.partial(Xception, SmallXceptionStem, width=4, depth=1, **SETTINGS), IMAGES),
    "unet": Case(functools.partial(unet64, width=4, depth=2, **SETTINGS), (2, 7, 5, 1)),
    "convnext": Case(functools.partial(ConvNeXt, (1, 1), width=8, patch=2, drop=0.1, **SETTINGS), IMAGES),
    "efficientnet": Case(functools.partial(EfficientNet, stages=INVERTED, width=8, drop=0.1, **SETTINGS), IMAGES),
    "mobilenetv3": Case(functools.partial(MobileNetV3, ROWS, 64, width=8, dropout=0.1, **SETTINGS), IMAGES),
    "regnetx": Case(functools.partial(regnetx, (1, 2), (16, 32), 8, **SETTINGS), IMAGES),
    "regnety": Case(functools.partial(regnety, (1, 2), (16, 32), 8, **SETTINGS), IMAGES),
    "densenet": Case(functools.partial(DenseNet, (2, 1), SmallStem, width=8, **SETTINGS), IMAGES),
    "vit": Case(functools.partial(ViT, **PATCHES, **TRANSFORMER), IMAGES),
    "vit with a class token": Case(functools.partial(ViT, pool="cls", **PATCHES, **TRANSFORMER), IMAGES),
    "bert": Case(functools.partial(BERT, vocabulary=20, length=8, num_classes=3, **TRANSFORMER), TEXTS, "int32"),
    "gpt2": Case(functools.partial(GPT2, vocabulary=20, length=8, **TRANSFORMER), TEXTS, "int32"),
    "llama": Case(functools.partial(Decoder, decoder(16, **LLAMA)), TEXTS, "int32"),
    "gemma": Case(functools.partial(Decoder, decoder(16, **GEMMA)), TEXTS, "int32"),
    "modernbert": Case(modernbert(16), TEXTS, "int32"),
    "dinov2": Case(dinov2(16), (2, 8, 8, 1)),
    "dinov3": Case(dinov3(16), (2, 8, 8, 1)),
    "clip": Case(clip(16), (2, 8, 8, 1)),
    "two towers of clip": Case(image_text("clip", 16), (2, 8, 8, 1)),
    "two towers of siglip": Case(image_text("siglip", 16), (2, 8, 8, 1)),
    "swin": Case(swin(16), (2, 8, 8, 1)),
    "convnextv2": Case(functools.partial(ConvNeXt, (1, 1), width=8, patch=2, version=2, **SETTINGS), IMAGES),
    "dit": Case(diffusing(DiT, patch=4), (2, 8, 8, 1)),
    "unet of diffusion": Case(diffusing(DiffusionUNet, dropout=0.1), (2, 8, 8, 1)),
    "t5": Case(t5(16), TEXTS, "int32"),
    "t5 v1.1": Case(t5(16, **GATED), TEXTS, "int32"),
}


def called(case: Case, policy, mode: str):
    """An abstract model under `policy`, what calls it, and an abstract input."""
    stored = storage_policy(policy) if mode == "autocast" else policy

    def make():
        model = case.make(rngs=nnx.Rngs(0))
        apply_policy(model, stored)
        return model

    dtype = jnp.dtype(case.dtype or stored.compute_dtype)
    call = autocast(forward, policy) if mode == "autocast" else forward
    return nnx.eval_shape(make), call, jax.ShapeDtypeStruct(case.shape, dtype)


def forward(model, x):
    return model(x)


FLOAT8_PRESETS = [preset for preset in PRESETS if preset.policy.products is not None]
OTHER_PRESETS = [preset for preset in PRESETS if preset not in FLOAT8_PRESETS]


QUICK = {
    (name, "mixed_float16")
    for name in ("mlp", "resnet", "convnext", "vit", "gpt2", "gemma", "modernbert", "dinov2", "convnextv2", "t5", "dit")
}
QUICK |= {(name, "mixed_float16") for name in ("efficientnet", "mobilenetv3", "swin", "dinov3")}
QUICK |= {("vit", "mixed_bfloat16"), ("vit", "O1"), ("vit", "O3"), ("resnet", "O1"), ("gemma", "O1")}


def marks(name, preset):
    """Every model by module and by operation, two under all presets; or None: the rest differ in the dtype."""
    if (name, preset.name) in QUICK:
        return []
    # Norms with statistics are treated by rules of their own, and casts go by the operations of each model.
    every = preset.name in ("mixed_float16", "O1") or name in ("vit", "resnet", "gemma")
    return [pytest.mark.slow] if every else None


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        pytest.param(name, preset, id=f"{name}-{preset.name}", marks=found)
        for name in MODELS
        for preset in OTHER_PRESETS
        if (found := marks(name, preset)) is not None
    ],
)
def test_evaluation_and_gradient_are_clean(name, preset):
    with jax.enable_x64(preset.name == "float64"), jax.numpy_dtype_promotion("standard"):
        model, call, x = called(MODELS[name], preset.policy, preset.mode)

        def gradient(model, x):
            return nnx.grad(lambda model: jnp.mean(call(model, x)))(model)

        backward = audit(gradient, model, x, policy=preset.policy)
        model.eval()
        evaluation = audit(call, model, x, policy=preset.policy)
    for report in (evaluation, backward):
        report.assert_clean()
        assert {row.dtype for row in report if row.kind == "low"} == {np.dtype(preset.policy.compute_dtype)}
        if preset.name != "O3":  # which has norms, and their statistics, in half
            assert [row for row in report if row.operation == "reduce_sum" and row.dtype in HALF] == []


WIDE = {"width": 64, "depth": 1, "heads": 2}
LARGE_ENOUGH = {
    "mlp": Case(functools.partial(MLP, 64, width=64, depth=4, num_classes=3), (16, 8, 8, 1)),
    "convnext": Case(functools.partial(ConvNeXt, (1, 1), width=64, patch=2, drop=0.1, **SETTINGS), (4, 8, 8, 1)),
    "vit": Case(functools.partial(ViT, **PATCHES, **WIDE), (4, 8, 8, 1)),
    "bert": Case(functools.partial(BERT, vocabulary=20, length=8, num_classes=3, **WIDE), (4, 8), "int32"),
    "gpt2": Case(functools.partial(GPT2, vocabulary=20, length=8, **WIDE), (4, 8), "int32"),
    "llama": Case(functools.partial(Decoder, decoder(128, **LLAMA)), (4, 8), "int32"),
    "gemma": Case(functools.partial(Decoder, decoder(128, **GEMMA)), (4, 8), "int32"),
    "modernbert": Case(modernbert(128), (4, 8), "int32"),
    "dinov2": Case(dinov2(64), (4, 8, 8, 1)),
    "dinov3": Case(dinov3(64), (4, 8, 8, 1)),
    "clip": Case(clip(64), (4, 8, 8, 1)),
    "two towers of siglip": Case(image_text("siglip", 64), (4, 8, 8, 1)),
    "swin": Case(swin(64), (4, 8, 8, 1)),
    "t5": Case(t5(128), (4, 8), "int32"),
    "t5 v1.1": Case(t5(128, **GATED), (4, 8), "int32"),
}
"""Models with linear layers of a size that stays in float8."""


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        pytest.param(
            name,
            preset,
            id=f"{name}-{preset.name}",
            marks=[] if (name, preset.name) in {("vit", "mixed_float8"), ("vit", "mixed_mxfp8")} else pytest.mark.slow,
        )
        for name in LARGE_ENOUGH
        for preset in FLOAT8_PRESETS
    ],
)
def test_products_in_float8_take_in_its_dtypes_and_the_rest_is_clean(name, preset):
    model, call, x = called(LARGE_ENOUGH[name], preset.policy, preset.mode)

    def gradient(model, x):
        return nnx.grad(lambda model: jnp.mean(call(model, x)))(model)

    backward = audit(gradient, model, x, policy=preset.policy)
    model.eval()
    evaluation = audit(call, model, x, policy=preset.policy)
    for report in (evaluation, backward):
        report.assert_clean()
    low = {str(row.dtype) for row in backward if row.kind == "low"}
    assert low >= {"bfloat16", "float8_e4m3fn"}
    assert low <= {"bfloat16", "float8_e4m3fn", "float8_e5m2"}


@pytest.mark.parametrize("preset", FLOAT8_PRESETS, ids=lambda preset: preset.name)
def test_a_model_of_convolutions_is_not_said_to_be_in_float8(preset):
    with pytest.raises(UsageError, match=r"no layer multiplies in float8: type:first_or_last decided all 1 linear"):
        called(MODELS["resnet"], preset.policy, preset.mode)


@pytest.mark.parametrize("groups", [2, 8], ids=["grouped", "depthwise"])
def test_gradients_of_grouped_convolutions_in_float16_are_those_of_float32(groups):
    x = jax.random.normal(jax.random.key(1), (4, 8, 8, 8))
    towards = jax.random.normal(jax.random.key(2), (4, 4, 4, 8))

    def gradients(policy, dtype):
        conv = nnx.Conv(8, 8, (3, 3), strides=2, padding=1, feature_group_count=groups, rngs=nnx.Rngs(0))
        apply_policy(conv, policy)
        graph, params = nnx.split(conv)

        def loss(params, x):
            y = nnx.merge(graph, params)(x)
            return jnp.mean(y.astype(jnp.float32) * towards) * 1024

        of_params, of_input = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, x.astype(dtype))
        return [np.asarray(leaf, np.float32) for leaf in (*jax.tree.leaves(of_params), of_input)]

    wide, half = gradients("float32", jnp.float32), gradients("mixed_float16", jnp.float16)
    assert [gradient.shape for gradient in half] == [(8,), (3, 3, 8 // groups, 8), (4, 8, 8, 8)]
    for expected, found in zip(wide, half, strict=True):
        assert np.linalg.norm(found - expected) < 0.002 * np.linalg.norm(expected)

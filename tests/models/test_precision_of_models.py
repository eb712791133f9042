"""Every model under every preset: each product in the policy's dtype, no silent upcast, forward and backward."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.models.convnext import ConvNeXt
from mpjax.models.resnet import BasicBlock, Bottleneck, ImageNetStem, ResNet, ResNeXtBottleneck
from mpjax.models.wide_resnet import WideResNet
from mpjax.models.xception import SmallStem, Xception
from mpjax.precision import apply_policy, audit, autocast
from mpjax.precision.dtypes import HALF
from mpjax.precision.modules import storage_policy
from mpjax.precision.presets import PRESETS


class Case(NamedTuple):
    """A small version of a model: `make(rngs=...)`, and the shape and dtype of what it is called with.

    A dtype of None is the one that the policy computes in.
    """

    make: Callable[..., nnx.Module]
    shape: tuple[int, ...]
    dtype: str | None = None


IMAGES = (4, 8, 8, 1)
SETTINGS = {"channels": 1, "num_classes": 3}

MODELS = {
    "resnet": Case(functools.partial(ResNet, (1, 1), BasicBlock, ImageNetStem, width=8, **SETTINGS), (4, 16, 16, 1)),
    "resnet bottleneck": Case(functools.partial(ResNet, (1, 1), Bottleneck, ImageNetStem, width=8, **SETTINGS), IMAGES),
    "resnext": Case(functools.partial(ResNet, (1, 1), ResNeXtBottleneck, ImageNetStem, width=16, **SETTINGS), IMAGES),
    "wide_resnet": Case(functools.partial(WideResNet, 10, 1, width=8, dropout=0.1, **SETTINGS), IMAGES),
    "xception": Case(functools.partial(Xception, SmallStem, width=4, depth=1, **SETTINGS), IMAGES),
    "convnext": Case(functools.partial(ConvNeXt, (1, 1), width=8, patch=2, drop=0.1, **SETTINGS), IMAGES),
}


def called(case: Case, policy, rule: str = "module"):
    """An abstract model under `policy`, what calls it, and an abstract input."""
    stored = storage_policy(policy) if rule == "autocast" else policy

    def make():
        model = case.make(rngs=nnx.Rngs(0))
        apply_policy(model, stored)
        return model

    dtype = jnp.dtype(case.dtype or (stored.param_dtype if rule == "autocast" else policy.compute_dtype))
    call = autocast(forward, policy) if rule == "autocast" else forward
    return nnx.eval_shape(make), call, jax.ShapeDtypeStruct(case.shape, dtype)


def forward(model, x):
    return model(x)


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
@pytest.mark.parametrize("name", MODELS)
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
        if preset.name != "O3":
            assert [row for row in report if row.operation == "reduce_sum" and row.dtype in HALF] == []

"""The adapters of a run: what is frozen and how it is stored, and layers that no adapter can change."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from mpjax.config import Training
from mpjax.errors import UsageError
from mpjax.models import in_series
from mpjax.precision import apply_policy, get_policy
from mpjax.training import left_out, lora_of, source_of, take_apart


class Net(nnx.Module):
    def __init__(self, rngs):
        self.stem = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.inner = nnx.Linear(8, 8, rngs=rngs)
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.inner(self.norm(self.stem(x))))


def planned(policy="mixed_bfloat16", **settings):
    model = nnx.eval_shape(lambda: Net(nnx.Rngs(0)))
    policy = get_policy(policy)
    lora = lora_of(Training(lora=("inner",), **settings), model, policy)
    report = lora.store(model, apply_policy(model, policy))
    return model, lora, report


def test_all_but_adapters_and_what_is_named_is_frozen_statistics_too():
    _, lora, _ = planned(lora_trained=("head",))
    assert sorted(lora.frozen) == [
        *("inner/bias", "inner/kernel", "norm/bias", "norm/mean", "norm/scale", "norm/var", "stem/bias", "stem/kernel")
    ]


def test_frozen_weights_are_stored_in_bfloat16_norms_and_what_is_trained_in_float32():
    model, lora, report = planned(lora_base="bfloat16", lora_trained=("head",))
    complete = lora.adapted(model)
    _, params, _ = take_apart(model)
    half = sorted(name for name, param in params.items() if param.dtype == jnp.bfloat16)
    assert half == ["inner/bias", "inner/kernel", "stem/bias", "stem/kernel"]
    assert {row.path: str(row.param_dtype) for row in report} == {
        "stem": "bfloat16",
        "norm": "float32",
        "inner": "bfloat16",
        "head": "float32",
    }
    assert {name: param.shape for name, param in params.items() if "lora" in name} == {
        "inner/lora_a": (8, 16),
        "inner/lora_b": (16, 8),
    }
    real = Net(nnx.Rngs(0))
    lora.store(real, apply_policy(real, "mixed_bfloat16"))
    arrays, _ = complete(*take_apart(real)[1:], jax.random.key(0))
    assert {name: (array.shape, array.dtype) for name, array in arrays.items()} == {
        name: (array.shape, array.dtype) for name, array in params.items()
    }


def test_codes_are_of_linear_layers_but_heads_and_come_from_the_weights_of_the_file():
    model, lora, _ = planned(lora_base="nf4")
    lora.adapted(model)
    _, params, stats = take_apart(model)
    assert sorted(name for name, array in stats.items() if array.dtype == jnp.uint8) == ["inner/kernel", "stem/kernel"]
    assert params["head/kernel"].dtype == jnp.bfloat16
    assert {"inner/kernel", "inner/kernel_scales", "stem/kernel_scales"} <= lora.frozen
    assert source_of("inner/kernel_scales") == "inner/kernel"
    file = [name for name in take_apart(nnx.eval_shape(lambda: Net(nnx.Rngs(0))))[1] if name != "head/bias"]
    assert sorted(lora.frozen - left_out(lora.frozen, file, model)) == ["head/bias", "norm/mean", "norm/var"]


def test_a_stack_is_left_out_if_the_file_has_all_of_its_blocks():
    class Stacked(nnx.Module):
        def __init__(self):
            self.blocks = in_series(lambda rngs: nnx.Linear(2, 2, rngs=rngs), 2, rngs=nnx.Rngs(0), scan=True)

    both = ["blocks/0/kernel", "blocks/1/kernel"]
    assert left_out(["blocks/all/kernel"], both, Stacked()) == {"blocks/all/kernel"}
    assert left_out(["blocks/all/kernel"], both[:1], Stacked()) == frozenset()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"lora_trained": ("haed",)}, "--training.lora_trained 'haed' matches nothing; nearest: head"),
        ({"lora_trained": ("inner",)}, "--training.lora_trained inner covers inner/kernel, which has an adapter"),
        ({"policy": "mixed_float8,", "lora_base": "nf4"}, "--training.lora_base nf4 under .* not float8; write"),
    ],
)
def test_settings_that_contradict_each_other_are_errors(settings, says):
    policy = settings.get("policy", "mixed_bfloat16").rstrip(",")
    model = nnx.eval_shape(lambda: Net(nnx.Rngs(0)))
    others = {name: value for name, value in settings.items() if name != "policy"}
    with pytest.raises(UsageError, match=says):
        lora_of(Training(lora=("inner",), **others), model, get_policy(policy))

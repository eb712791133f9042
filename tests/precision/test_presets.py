"""Presets: what every name means, what it switches on, and that reading one touches no device."""

import dataclasses
import os
import subprocess
import sys

import jmp
import pytest

from mpjax.errors import UsageError
from mpjax.precision import PRESETS, Policy, Preset, find_preset, get_policy


FLOAT32 = Policy("float32", "float32", "float32")
MIXED_FLOAT16 = Policy("float32", "float16", "float32")
MIXED_BFLOAT16 = Policy("float32", "bfloat16", "float32")


def float8(recipe):
    wide = {"type:first_or_last": "bfloat16", "type:small_product": "bfloat16"}
    return Policy("float32", "bfloat16", "float32", rules=wide, products=recipe)


@pytest.mark.parametrize(
    ("policy", "spellings"),
    [
        (FLOAT32, ("float32", "fp32", "full", "32-true", "32", "O0", "f32", 32)),
        (MIXED_BFLOAT16, ("mixed_bfloat16", "bf16-mixed", "bf16", "Mixed BFloat16", "MIXED-BFLOAT16")),
        (MIXED_FLOAT16, ("mixed_float16", "16-mixed", "16", 16, "fp16", "half", "O2", "o2", "O1", " mixedfloat16 ")),
        (Policy("bfloat16", "bfloat16", "float32"), ("bfloat16", "bf16-true", "BF16_TRUE")),
        (Policy("float16", "float16", "float32"), ("float16", "16-true")),
        (Policy("float16", "float16", "float16", rules={"type:norm": "float16"}), ("O3",)),
        (Policy("float64", "float64", "float64"), ("float64", "64-true", 64)),
        (float8("float8"), ("mixed_float8", "fp8-mixed", "FP8", "float8", "tensorwise", "Float8CurrentScaling")),
        (float8("float8_rowwise"), ("mixed_float8_rowwise", "float8_rowwise", "rowwise")),
        (float8("float8_delayed"), ("mixed_float8_delayed", "transformer-engine", "delayed", "DelayedScaling")),
        (float8("mxfp8"), ("mixed_mxfp8", "mxfp8-mixed", "MXFP8BlockScaling")),
    ],
)
def test_every_name_and_alias_gives_its_policy(policy, spellings):
    for spelling in spellings:
        assert get_policy(spelling) == policy


@pytest.mark.parametrize(
    ("name", "loss_scale", "master_weights", "mode"),
    [
        ("float32", "none", False, "module"),
        ("bf16", "none", False, "module"),
        ("fp16", "dynamic", False, "module"),
        ("O1", "dynamic", False, "autocast"),
        ("bfloat16", "none", True, "module"),
        ("float16", "dynamic", True, "module"),
        ("O3", "static", False, "module"),
        ("float64", "none", False, "module"),
        ("mixed_float16; stem=float32", "dynamic", False, "module"),
        ("fp8-mixed", "none", False, "module"),
    ],
)
def test_what_a_preset_switches_on(name, loss_scale, master_weights, mode):
    preset = find_preset(name)
    assert (preset.loss_scale, preset.master_weights, preset.mode) == (loss_scale, master_weights, mode)


def test_every_preset_is_told_apart_from_every_other():
    names = [name for preset in PRESETS for name in (preset.name, *preset.aliases)]
    assert len(names) == len({name.lower().replace("-", "").replace("_", "") for name in names})
    assert all(find_preset(name).name == preset.name for preset in PRESETS for name in (preset.name, *preset.aliases))


def test_a_preset_cannot_be_changed():
    preset = Preset("mine", FLOAT32)
    with pytest.raises(dataclasses.FrozenInstanceError):
        preset.mode = "autocast"


def test_a_policy_of_ones_own_is_no_preset():
    assert find_preset("compute=float16") is None
    assert find_preset(FLOAT32) is None


def test_rules_are_added_to_a_preset():
    policy = get_policy("Mixed-Float16; stem/* = float32; head=bf16")
    assert policy == Policy("float32", "float16", "float32", rules={"stem/*": "float32", "head": "bfloat16"})


def test_a_rule_of_ones_own_comes_before_the_presets_and_replaces_it():
    assert [*get_policy("O3;stem=float32").rules] == ["stem", "type:norm"]
    assert get_policy("O3;type:norm=float32") == Policy("float16", rules={"type:norm": "float32"})


def test_a_bare_jmp_dtype_that_is_no_preset_is_that_dtype_everywhere():
    assert get_policy("f16") == Policy("float16", "float16", "float16") == get_policy(jmp.get_policy("f16"))


def test_a_policy_goes_through_unchanged():
    policy = Policy("float16", rules={"stem": "float32"})
    assert get_policy(policy) is policy


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("mixed_flaot16", "unknown precision policy 'mixed_flaot16'; did you mean 'mixed_float16'"),
        ("tomato", r"unknown precision policy 'tomato'\. Presets: float32, mixed_bfloat16, mixed_float16, O1"),
        ("", "unknown precision policy ''"),
        (8, "unknown precision policy '8'"),
        (None, "not a policy: None"),
        (["float32"], "not a policy"),
        ("float32;stem", "bad rule 'stem'"),
    ],
)
def test_an_unknown_policy_lists_the_presets_and_the_nearest(spec, message):
    with pytest.raises(UsageError, match=message):
        get_policy(spec)


def run_python(code):
    """What a program prints that cannot use any device."""
    environment = {**os.environ, "JAX_PLATFORMS": "none"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return done.stdout.split()


def test_reading_a_policy_touches_no_device_and_imports_neither_flax_nor_a_data_library():
    code = (
        "import sys, mpjax.precision, mpjax\n"
        "for spec in ('half', 'O3', 'p=f32,c=f16;a=f32'): str(mpjax.get_policy(spec).jmp)\n"
        "print(*[name for name in ('flax', 'grain', 'tensorflow_datasets', 'tensorflow') if name in sys.modules])\n"
        "import jax\n"
        "try: jax.devices()\n"
        "except RuntimeError: print('none')\n"
    )
    assert run_python(code) == ["none"]

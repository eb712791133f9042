"""A run whose layer norms have a kernel of mpjax's own, and where the kernel cannot run."""

import types

import jax
import numpy as np
import pytest

from mpjax import cli
from mpjax.commands import build_run, evaluate_run, fields_of, on_devices_here, planned_step, require_norm_kernel, run
from mpjax.config import Evaluation, load_config
from mpjax.errors import PrecisionWarning, UsageError
from mpjax.models import why_not_on


VIT = (
    "--model.name vit_ti16 --model.width 8 --model.depth 2 --model.heads 2 --model.patch 4 "
    "--data.name synthetic:8x8x1:10 --data.batch_size 16 --data.eval_batch_size 100 --steps 3 --optimizer.name adamw "
    "--optimizer.warmup 0"
)
H100 = types.SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="NVIDIA H100")
T4 = types.SimpleNamespace(platform="gpu", compute_capability="7.5", device_kind="Tesla T4")
MI300 = types.SimpleNamespace(platform="gpu", compute_capability="gfx942", device_kind="AMD Instinct MI300X")


def config_of(flags=""):
    return load_config(f"{VIT} --model.norm_kernel pallas {flags}".split())


def mesh_of(device, *, tensor=1):
    """As much of a mesh of absent devices as is looked at."""
    return types.SimpleNamespace(devices=np.asarray([[device]], object), shape={"tensor": tensor})


def required(flags="", device=H100, **sizes):
    with jax.numpy_dtype_promotion("standard"):  # as rules for some modules need it
        step = planned_step(config := config_of(flags), fields_of(config))
    require_norm_kernel(step.task.abstract, step.plan, mesh_of(device, **sizes))


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--model.scan_blocks",
        "--precision.policy float32",
        "--precision.policy bfloat16",
        "--precision.policy mixed_float8 --model.width 64",
        "--precision.rules blocks/0 float32",
    ],
)
def test_policies_that_keep_norms_in_float32_can_have_the_kernel(flags):
    required(flags)


@pytest.mark.parametrize(
    ("flags", "device", "sizes", "reason"),
    [
        ("", jax.devices("cpu")[0], {}, "needs a GPU, this is a cpu"),
        ("", MI300, {}, "needs an NVIDIA GPU, this is a AMD Instinct MI300X"),
        ("", T4, {}, "needs compute capability 8.0, Tesla T4 has 7.5"),
        ("", H100, {"tensor": 2}, "cannot be divided over --mesh.tensor 2, which the compiler divides"),
        ("--precision.mode autocast", H100, {}, "is one operation, and autocast casts the operations of a norm"),
        ("--precision.policy O3", H100, {}, "the policy computes or stores blocks/0/norm1 and 3 others in another"),
        (
            "--precision.policy float64",
            H100,
            {},
            "the policy computes or stores blocks/0/norm1 and 3 others in another",
        ),
        ("--precision.rules blocks/1/norm2 bfloat16", H100, {}, "or stores blocks/1/norm2 in another dtype"),
    ],
)
def test_where_the_kernel_cannot_run_is_an_error_with_the_reason(flags, device, sizes, reason):
    with pytest.raises(UsageError) as raised:
        required(flags, device, **sizes)
    message = str(raised.value)
    assert message.startswith(f"--model.norm_kernel pallas {reason}") or reason in message
    assert message.endswith("write --model.norm_kernel xla, or leave it out")


def test_training_on_a_cpu_with_the_kernel_is_an_error():
    with pytest.raises(UsageError, match="--model.norm_kernel pallas needs a GPU, this is a cpu; write --model.norm_k"):
        build_run(config_of())


def test_a_step_is_replayed_where_the_kernel_cannot_run():
    with pytest.warns(PrecisionWarning, match="--model.norm_kernel pallas needs a GPU, this is a cpu: the step is"):
        assert on_devices_here(config_of()).model.norm_kernel == "xla"


@pytest.mark.slow
def test_other_commands_read_a_run_with_the_kernel_on_a_cpu(tmp_path):
    """No GPU is here: the run is one with XLA's kernels, in whose settings the kernel is written."""
    folder = tmp_path / "run"
    run(load_config(f"{VIT} --output_dir {folder} --report.no_plot --report.no_tensorboard".split()))
    before = evaluate_run(Evaluation(run=str(folder)))
    settings = folder / "config.toml"
    text = settings.read_text()
    assert 'norm_kernel = "xla"' in text
    settings.write_text(text.replace('norm_kernel = "xla"', 'norm_kernel = "pallas"'))
    assert evaluate_run(Evaluation(run=str(folder))) == before
    assert cli.export(["--run", str(folder), "--output", str(tmp_path / "a.safetensors")]) == 0


def test_ampere_and_later_can_run_it():
    assert why_not_on(H100) is None

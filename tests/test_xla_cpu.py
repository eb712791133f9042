"""A bfloat16 program that jaxlib 0.11 and 0.12 compute wrongly on a CPU is right once mpjax is imported."""

import os
import subprocess
import sys

import pytest

from mpjax import xla_cpu
from mpjax.errors import PrecisionWarning


RESIDUAL_BLOCK = """
import mpjax
import jax, jax.numpy as jnp

def mean(x, kernel):
    x = jax.nn.relu(x)
    layout = ("NHWC", "HWIO", "NHWC")
    y = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=layout)
    return jax.nn.relu(x + y).mean((1, 2))

x = jax.random.normal(jax.random.key(0), (32, 4, 4, 128), jnp.bfloat16)
kernel = jax.random.normal(jax.random.key(1), (3, 3, 128, 128), jnp.bfloat16) / 32
exact = mean(x.astype(jnp.float32), kernel.astype(jnp.float32))
print(float(jnp.abs(jax.jit(mean)(x, kernel) - exact).max()))
"""
OPTION = "--xla_cpu_experimental_ynn_fusion_type=-LIBRARY_FUSION_TYPE_REDUCE"


def test_the_mean_of_a_residual_block_is_right():
    """The largest mean is 1.9, of which bfloat16 has steps of 0.008; without the option the error is inf or NaN."""
    unset = ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    printed = subprocess.check_output([sys.executable, "-c", RESIDUAL_BLOCK], text=True, env=environment)
    assert float(printed) < 0.02


@pytest.mark.parametrize(
    ("jaxlib", "flags", "left"),
    [
        ("0.12.0.1", "", OPTION),
        ("0.11.2", "--xla_dump_to=x", f"--xla_dump_to=x {OPTION}"),
        ("0.10.2", "", ""),
        ("0.13.0", "", ""),
        ("0.12.0", f"{xla_cpu.OPTION}=", f"{xla_cpu.OPTION}="),
    ],
)
def test_the_option_is_added_where_jaxlib_needs_it_and_the_user_has_not_set_it(monkeypatch, jaxlib, flags, left):
    monkeypatch.setattr(xla_cpu, "JAXLIB", jaxlib)
    monkeypatch.setattr(xla_cpu, "_has_computed_on_cpu", lambda: False)
    monkeypatch.setenv("XLA_FLAGS", flags)
    xla_cpu.keep_sums_right()
    assert os.environ["XLA_FLAGS"] == left


@pytest.mark.parametrize(
    ("flags", "computed", "message"),
    [
        ("flags.txt", False, rf"because XLA_FLAGS names a file; add {OPTION} to it"),
        ("", True, r"because JAX had computed before mpjax was imported; import mpjax first"),
    ],
)
def test_what_cannot_be_prevented_is_said(monkeypatch, flags, computed, message):
    monkeypatch.setattr(xla_cpu, "JAXLIB", "0.12.0.1")
    monkeypatch.setattr(xla_cpu, "_has_computed_on_cpu", lambda: computed)
    monkeypatch.setenv("XLA_FLAGS", flags)
    with pytest.warns(PrecisionWarning, match=message):
        xla_cpu.keep_sums_right()
    assert os.environ["XLA_FLAGS"] == flags


def test_jax_has_computed_only_after_its_first_computation():
    """In a fresh interpreter: an import of jax before mpjax is no computation."""
    code = "import jax, mpjax, mpjax.jax_internals as i; print(i.has_computed_on_cpu())\n"
    code += "jax.numpy.zeros(1); print(i.has_computed_on_cpu())"
    printed = subprocess.check_output([sys.executable, "-W", "error", "-c", code], text=True)
    assert printed.split() == ["False", "True"]

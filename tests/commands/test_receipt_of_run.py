"""What a run says of the dtypes that it really computes in, and what `--precision.strict` refuses."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import mpjax
from mpjax.commands import receipt_of_run
from mpjax.errors import DtypeError, UsageError


class Careless(nnx.Module):
    """A layer with a policy, and a product that widens what it gets."""

    def __init__(self, fields, *, rngs):
        del fields
        self.first = nnx.Linear(64, 16, rngs=rngs)
        self.last = nnx.Param(jnp.zeros((16, 10), jnp.float32))

    def __call__(self, x):
        x = nnx.relu(self.first(x.reshape(x.shape[0], -1))).astype(jnp.float32)
        with jax.named_scope("last"):
            return x @ self.last[...]


@pytest.fixture
def quick(small, tmp_path):
    """Two steps, without plots."""
    report = dataclasses.replace(small.report, plot=False, tensorboard=False)
    return dataclasses.replace(small, steps=mpjax.Duration(2, "steps"), report=report, output_dir=str(tmp_path / "run"))


def strict(config):
    return dataclasses.replace(config, precision=dataclasses.replace(config.precision, strict=True))


def read(config):
    return json.loads(pathlib.Path(config.output_dir, "receipt.json").read_text())


@pytest.mark.slow
def test_a_run_says_in_one_line_what_its_products_run_in_and_writes_the_rest(quick, capsys):
    mpjax.run(quick)
    line = "float16 asked; this CPU computes 8 of 8 products in float32 (wider)"
    assert line in capsys.readouterr().out.splitlines()
    written = read(quick)
    assert (written["line"], written["device"]) == (line, "this CPU")
    assert {row["operands"] for row in written["rows"] if row["kind"] == "update"} == {"float32"}


@pytest.mark.slow
def test_what_a_cpu_cannot_do_otherwise_is_accepted_and_said(quick, capsys):
    mpjax.run(strict(quick))
    assert "(wider); --precision.strict accepts that, as no program for this device could do otherwise" in (
        capsys.readouterr().out
    )


@pytest.mark.slow
def test_a_product_that_the_model_itself_widens_is_refused_with_its_module(quick):
    with pytest.raises(DtypeError) as error:
        mpjax.run(strict(quick), model=Careless)
    said = str(error.value)
    assert said.startswith("--precision.strict: this CPU does not run what was asked for: float16 asked; ")
    assert "last, forward product: asked in float16, runs in float32, wider (lost speed): the function itself" in said
    assert '--precision.rules "PATH" float32, or --precision.no_strict' in said
    assert "first" not in said


class Rounding(nnx.Module):
    """A model that rounds its own activations."""

    def __init__(self, fields, *, rngs):
        del fields
        self.first = nnx.Linear(64, 16, rngs=rngs)
        self.last = nnx.Linear(16, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.first(x.reshape(x.shape[0], -1)))
        return self.last(x.astype(jnp.bfloat16).astype(jnp.float32))


def test_activations_that_a_model_rounds_itself_are_refused_under_float32(quick):
    config = dataclasses.replace(quick, precision=dataclasses.replace(quick.precision, policy="float32"))
    with pytest.raises(
        DtypeError, match=r"last, forward product: .* the function itself rounds an operand to bfloat16"
    ):
        mpjax.run(strict(config), model=Rounding)


def test_without_strict_such_a_run_trains_and_points_to_the_file(quick, capsys):
    mpjax.run(quick, model=Careless)
    assert "; see receipt.json" in capsys.readouterr().out
    assert {row["path"] for row in read(quick)["rows"] if row["verdict"] == "wider"} == {"first", "last"}


@pytest.mark.slow
def test_a_program_that_cannot_be_read_ends_no_run_unless_it_is_strict(quick, monkeypatch, capsys):
    def unreadable(*_, **__):
        raise ValueError("no ENTRY computation")

    monkeypatch.setattr(receipt_of_run, "receipt_of", unreadable)
    with pytest.raises(UsageError, match="--precision.strict: this program cannot be read .ValueError: no ENTRY"):
        mpjax.run(strict(quick))
    mpjax.run(dataclasses.replace(quick, output_dir=f"{quick.output_dir}_2"))
    assert "receipt.json is not written: this program cannot be read (ValueError: no ENTRY computation)" in (
        capsys.readouterr().out
    )

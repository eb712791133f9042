"""Weights of a run in a file: those of its checkpoint, or their moving average."""

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import mpjax
from mpjax import cli
from mpjax.commands import export_run
from mpjax.config import Export
from mpjax.errors import UsageError
from mpjax.loop import read_checkpoint
from mpjax.models import MLP


pytestmark = pytest.mark.slow  # each runs whole commands; what they are made of has tests of its own


@pytest.fixture(scope="module")
def trained(folder_of):
    """A short run whose parameters are stored in bfloat16 and averaged in float32."""
    flags = "--precision.policy bfloat16 --steps 20 --training.ema 0.9 --loop.eval_every 10 --loop.save_every 10"
    return folder_of(flags)


@pytest.mark.slow
@pytest.mark.parametrize(("ema", "dtype"), [(False, "bfloat16"), (True, "float32")])
def test_the_file_has_the_checkpoints_parameters_or_their_average(trained, tmp_path, ema, dtype):
    export_run(Export(run=str(trained), output=str(tmp_path / "a.safetensors"), checkpoint="20", ema=ema))
    _, saved, _ = read_checkpoint(trained / "checkpoints", "20")
    part = "ema/" if ema else "params/"
    wanted = {
        name.removeprefix(part).replace("/", "."): array for name, array in saved.items() if name.startswith(part)
    }
    tensors = load_file(tmp_path / "a.safetensors")
    assert tensors.keys() == wanted.keys()
    assert {str(array.dtype) for array in tensors.values()} == {dtype}
    for name, array in tensors.items():
        np.testing.assert_array_equal(array, wanted[name], err_msg=name)


@pytest.mark.slow
def test_what_a_run_wrote_is_where_a_model_can_start(trained, tmp_path, capsys):
    argv = ["--run", str(trained), "--output", str(tmp_path / "a.safetensors"), "--dtype", "float32"]
    assert cli.export(argv) == 0
    wanted = f"of {tmp_path}/a.safetensors, mpjax layout: 6 bfloat16 to float32; 0 overflow, 0 flush to zero"
    assert wanted in capsys.readouterr().out
    model = MLP(64, 8, 2, 10, rngs=nnx.Rngs(0))
    assert len(mpjax.load_pretrained(model, tmp_path / "a.safetensors")) == 6


def test_a_layout_that_the_model_does_not_have_is_refused(trained, tmp_path):
    with pytest.raises(UsageError, match="no layout 'timm' for MLP: wanted one of mpjax"):
        export_run(Export(run=str(trained), output=str(tmp_path / "a.safetensors"), layout="timm"))


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no run in"):
        export_run(Export(run=str(tmp_path), output="a.safetensors"))

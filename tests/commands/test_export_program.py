"""A run as a program that needs JAX alone."""

import subprocess
import sys
from typing import Any

import numpy as np
import optax
import pytest
from jax import export

from mpjax import cli
from mpjax.commands import evaluate_run, export_run, open_task, write_program
from mpjax.commands import export as export_program
from mpjax.config import Evaluation, Export, load_config
from mpjax.errors import UsageError
from mpjax.precision import no_loss_scaling
from mpjax.training import Layout, initial_state, make_mesh, plan_precision


ALONE = """
import sys
import jax.export, numpy as np
program = jax.export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
images = np.load(sys.argv[2])
print(*np.asarray(program.call({"image": images})).argmax(-1))
assert not any(name.startswith(("mpjax", "flax")) for name in sys.modules)
"""


@pytest.fixture(scope="module")
def trained(folder_of):
    return folder_of("--steps 60 --loop.eval_every 60")


@pytest.mark.slow
def test_the_program_alone_predicts_as_the_run_does(trained, tmp_path, capsys):
    file = tmp_path / "digits.jaxexport"
    assert cli.export(["--run", str(trained), "--what", "program", "--output", str(file), "--platforms", "cpu"]) == 0
    assert (
        "image uint8[B, 8, 8, 1] to logits float32[B, 10] under params=float32,compute=float16"
        in capsys.readouterr().out
    )
    _, source, _ = open_task(load_config(["--config", str(trained / "config.toml")]))
    examples = [source.test[index] for index in range(len(source.test))]
    np.save(tmp_path / "images.npy", np.stack([example["image"] for example in examples]))
    command = [sys.executable, "-c", ALONE, str(file), str(tmp_path / "images.npy")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    right = np.mean([int(word) == example["label"] for word, example in zip(said.split(), examples, strict=True)])
    assert right == pytest.approx(evaluate_run(Evaluation(run=str(trained)))["test/accuracy"], abs=1 / len(examples))


@pytest.mark.slow
def test_the_program_is_computed_under_another_policy(trained, tmp_path):
    file = tmp_path / "digits.jaxexport"
    export_run(Export(run=str(trained), output=str(file), what="program", policy="float32", platforms=("cpu", "tpu")))
    program = export.deserialize(bytearray(file.read_bytes()))
    assert program.platforms == ("cpu", "tpu")
    assert "f16" not in program.mlir_module()


TEXTS = "--data.name docstrings --data.length 8"
MODELS = [
    "--model.name resnet18 --model.width 8 --data.name digits",
    "--model.name resnet18 --model.width 8 --data.name digits --precision.policy O1",
    "--model.name vit_ti16 --model.depth 1 --model.patch 4 --data.name digits",
    "--task segmentation --model.name unet --model.width 4 --model.depth 1 --data.name digits_canvas",
    f"--task text_classification {TEXTS} --model.name bert --model.depth 1 --model.width 16 --model.heads 2",
    f"--task language_modeling {TEXTS} --model.name gpt2 --model.depth 1 --model.width 16 --model.heads 2",
    f"--task language_modeling {TEXTS} --data.documents apart --model.name gpt2 --model.depth 1 --model.width 8 "
    "--model.heads 2",
]


@pytest.mark.slow
@pytest.mark.parametrize("flags", MODELS)
def test_every_kind_of_model_can_be_a_program_of_any_batch_size(tmp_path, flags):
    config = load_config(flags.split())
    plan, source, task = open_task(config)
    state = initial_state(task, no_loss_scaling(optax.identity()), seed=0, ema=False, layout=Layout(make_mesh()))
    settings = Export(run="", output=str(tmp_path / "a.jaxexport"), what="program")
    said = write_program(settings, config, plan, source, task, state.params, state.stats)
    assert "for cpu, cuda" in said
    assert float(said.partition("at most ")[2].split()[0]) < 0.02
    program = export.deserialize(bytearray((tmp_path / "a.jaxexport").read_bytes()))
    (batch,) = program.in_avals[:1]
    assert str(batch.shape[0]) == "batch"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"policy": "float32"}, "--policy has no meaning for --what weights: leave it out"),
        ({"what": "program", "layout": "timm"}, "--layout has no meaning for --what program"),
        ({"what": "program", "output": "a.safetensors"}, "--output a.safetensors: .safetensors is for --what weights"),
        ({"what": "program", "platforms": ("gpu",)}, "--platforms gpu: wanted some of cpu, cuda, rocm, tpu"),
    ],
)
def test_settings_of_the_other_kind_are_errors(settings, said):
    with pytest.raises(UsageError, match=said):
        export_run(Export(**{"run": "a", "output": "a.x", **settings}))


def test_products_in_blocks_are_refused_with_the_policy_to_write():
    config = load_config(["--precision.policy", "mixed_mxfp8"])
    plan = plan_precision(config.precision)
    given: Any = None  # nothing is looked at
    with pytest.raises(UsageError, match="cannot export products in mxfp8: .* write --policy mixed_float8 or mixed_bf"):
        write_program(Export(run="a", output="b", what="program"), config, plan, given, given, {}, {})


@pytest.mark.slow
def test_a_program_that_computes_something_else_is_not_written(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(export_program, "_ROUNDING", -1.0)
    with pytest.raises(UsageError, match="on 8 test examples the program's logits differ from the model's by 0"):
        export_run(Export(run=str(trained), output=str(tmp_path / "a.x"), what="program"))
    assert not (tmp_path / "a.x").exists()

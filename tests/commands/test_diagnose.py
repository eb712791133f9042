"""The diagnosis of a run's step: reached by running again, held against float32, left in the run's folder."""

import dataclasses
import json
import shlex

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax import cli
from mpjax.commands import build_run, diagnose_run, fresh_state, on_devices_here, replay, run
from mpjax.config import Diagnose, load_config
from mpjax.diagnosis import make_probe, program_of_step
from mpjax.errors import Diverged, PrecisionWarning, UsageError
from mpjax.loop import read_checkpoint, to_arrays
from mpjax.training import RunObjective, step_key


FLAGS = shlex.split("""
--model.name mlp --model.width 8 --data.name digits --data.eval_batch_size 100 --steps 12 --optimizer.name adamw
--optimizer.learning_rate 0.01 --optimizer.warmup 2 --loop.save_every 5 --loop.eval_every 0 --loop.keep 9
--report.no_plot --report.no_tensorboard
""")


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "healthy"
    run(load_config([*FLAGS, "--output_dir", str(folder)]))
    return folder


@pytest.fixture(scope="module")
def built(healthy):
    return build_run(load_config(["--config", str(healthy / "config.toml")]))


@pytest.mark.parametrize("position", [5, pytest.param(10, marks=pytest.mark.slow), 12])
def test_a_replayed_state_is_that_of_the_run_bit_for_bit(healthy, built, position):
    state, batch = replay(built, built.train_call, healthy, position)
    state, _ = built.train_step(built.packing.pack(state), batch)
    state = built.packing.unpack(state)
    _, arrays, _ = read_checkpoint(healthy / "checkpoints", str(position))
    replayed = jax.device_get(to_arrays(state))
    assert replayed.keys() == arrays.keys()
    assert all(np.asarray(replayed[name]).tobytes() == arrays[name].tobytes() for name in arrays)


@pytest.mark.slow
def test_a_healthy_step_is_healthy_and_its_page_is_in_the_folder(healthy, capsys):
    found = diagnose_run(Diagnose(run=str(healthy), step=8))
    assert (found.verdict, found.path, found.rules, found.policy) == (
        "healthy",
        None,
        {},
        "params=float32,compute=float16,output=float32",
    )
    assert found.loss_scale == 2**15
    assert abs(found.loss[0] / found.loss[1] - 1) < 5e-3
    assert capsys.readouterr().out.startswith(f"step 8 of {healthy}\nverdict: healthy\n")
    assert json.loads((healthy / "diagnosis_8.json").read_text())["verdict"] == "healthy"
    assert "<html" in (healthy / "diagnosis_8.html").read_text()


@pytest.mark.slow
def test_another_policy_and_another_scale_can_be_asked_about(healthy):
    found = diagnose_run(Diagnose(run=str(healthy), policy="mixed_bfloat16", loss_scale=1.0))
    assert (found.verdict, found.loss_scale) == ("healthy", 1.0)
    assert found.policy.startswith("params=float32,compute=bfloat16")
    assert (healthy / "diagnosis_13.json").exists()  # the step after the last


@pytest.mark.slow
def test_a_scale_too_high_is_named_with_one_that_is_not(healthy):
    found = diagnose_run(Diagnose(run=str(healthy), step=3, loss_scale=2.0**24))
    assert (found.verdict, found.direction, found.verified, found.rules) == ("loss_scale", "backward", True, {})
    assert found.better_scale < 2.0**24


@pytest.mark.slow
def test_a_learning_rate_that_float32_does_not_survive_either_is_no_precision_problem(tmp_path):
    flags = [*FLAGS, "--output_dir", str(tmp_path / "a"), "--optimizer.name", "sgd", "--optimizer.learning_rate", "1e7"]
    with pytest.raises(Diverged, match="first bad layer: layers/0"):
        run(
            load_config(
                [*flags, "--optimizer.warmup", "0", "--optimizer.schedule", "constant", "--precision.patience", "9"]
            )
        )
    found = diagnose_run(Diagnose(run=str(tmp_path / "a"), step=2))
    assert (found.verdict, found.path, found.direction) == ("not_precision", "layers/0", "forward")
    assert (found.rules, found.better_scale, found.verified) == ({}, None, False)
    assert "But the run does not recover in float32 either: 20 steps from here the loss is" in found.evidence
    page = found.to_html()
    assert "<h1>The run does not recover in float32 either: layers/0</h1>" in page
    assert "In float32 the step is finite" in page  # and no headline says that it fails


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"run": "nowhere"}, r"no run in nowhere \(no config.toml\)"),
        ({"policy": "mixed_flot16"}, "did you mean 'mixed_float16'"),
        ({"step": -1}, "--step is -1: wanted 0 or more"),
        ({"loss_scale": -2.0}, "--loss_scale is -2.0: wanted 0 or more"),
        ({"tolerance": -1.0}, "--tolerance is -1.0: wanted 0 or more"),
        ({"evaluation": True, "search": "fastest"}, "--search fastest is about a step, and an evaluation has no"),
        ({"evaluation": True, "loss_scale": 8.0}, "--loss_scale is about a step"),
    ],
)
def test_what_cannot_be_asked_says_why_before_anything_is_read(settings, says):
    with pytest.raises(UsageError, match=says):
        diagnose_run(Diagnose(**{"run": "nowhere", **settings}))


@pytest.mark.slow
def test_the_command_answers_with_json_and_refuses_with_code_2(healthy, capsys):
    assert cli.diagnose(["--run", str(healthy), "--step", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "healthy"
    assert cli.diagnose(["--run", "nowhere"]) == 2
    assert "error: no run in nowhere" in capsys.readouterr().err


@pytest.mark.slow
def test_the_fastest_policy_of_a_step(healthy, capsys):
    assert cli.diagnose(["--run", str(healthy), "--step", "8", "--search", "fastest"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[:2] == [f"step 8 of {healthy}", "fastest policy within 0.05: --precision.policy bfloat16"]
    assert [line.split()[:2] for line in printed[2:6]] == [
        ["yes", "bfloat16"],
        ["yes", "float16"],
        ["yes", "mixed_bfloat16"],
        ["yes", "mixed_float16"],
    ]
    assert printed[6].startswith("float8: no layer. ")
    assert "type:first_or_last decided all 3 linear layers" in printed[6]


@pytest.mark.slow
def test_half_stored_parameters_that_stall_are_found_in_the_run(tmp_path):
    flags = [*FLAGS, "--output_dir", str(tmp_path / "a"), "--precision.policy", "bfloat16", "--optimizer.name", "sgd"]
    stalling = ["--precision.master_weights", "off", "--optimizer.learning_rate", "1e-4", "--optimizer.warmup", "0"]
    run(load_config([*flags, *stalling]))
    found = diagnose_run(Diagnose(run=str(tmp_path / "a"), step=5))
    assert (found.verdict, found.direction) == ("rounding", "update")
    assert "--precision.master_weights on" in found.advice[0]


@pytest.mark.slow
def test_a_run_whose_gradients_are_finite_and_their_norm_is_not_is_no_precision_problem(tmp_path):
    flags = [*FLAGS, "--output_dir", str(tmp_path / "a"), "--optimizer.name", "sgd", "--optimizer.learning_rate", "1e4"]
    flags += ["--precision.policy", "mixed_bfloat16", "--steps", "40", "--optimizer.warmup", "0"]
    with pytest.raises(Diverged, match="verdict: not_precision"):
        run(load_config(flags))


@pytest.mark.slow
def test_a_run_without_metrics_or_checkpoints_is_diagnosed_from_its_settings(healthy, tmp_path):
    (tmp_path / "config.toml").write_text((healthy / "config.toml").read_text())
    assert diagnose_run(Diagnose(run=str(tmp_path), step=1, search="none")).verdict == "healthy"


def test_a_step_that_the_run_never_had_is_refused(healthy):
    with pytest.raises(UsageError, match=r"--step 100: the run has 12 steps"):
        diagnose_run(Diagnose(run=str(healthy), step=100))


def test_a_mesh_of_more_devices_than_are_here_is_replaced_with_a_warning():
    config = load_config([*FLAGS, "--mesh.data", "8"])
    refused = r"mesh \(data 8, fsdp 1, context 1, tensor 1\) does not fit the devices here \(2\)"
    with pytest.warns(PrecisionWarning, match=refused):
        assert on_devices_here(config).mesh.sizes == {"data": -1, "fsdp": 1, "context": 1, "tensor": 1}
    fits = load_config([*FLAGS, "--mesh.fsdp", "2"])
    assert on_devices_here(fits) is fits


def test_the_layers_are_those_of_the_first_micro_batch_with_its_random_numbers(built):
    def drawn(model, batch, key):
        return {"loss": jnp.sum(model.head.bias[...]) * jax.random.uniform(key) * jnp.ones(len(batch["label"]))}

    task = dataclasses.replace(built.task, objective=RunObjective(drawn))
    state = fresh_state(built)
    batch = jax.tree.map(np.asarray, next(iter(built.batches.from_position(0))))
    key = step_key(7, state)
    for accumulate, own in ((1, key), (2, jax.random.split(key)[0])):
        layers = make_probe(task, built.learner.tx, seed=7, accumulate=accumulate)(state, batch).by_layer()
        (bias,) = (row for row in layers if (row.path, row.direction) == ("head/bias", "gradient"))
        assert bias.largest == pytest.approx(float(jax.random.uniform(own)))


@pytest.mark.slow
def test_frozen_parameters_have_no_gradient_to_diagnose():
    config = load_config([*FLAGS, "--training.freeze", "layers/0"])
    built = build_run(config)
    batch = jax.tree.map(np.asarray, next(iter(built.batches.from_position(0))))
    program = program_of_step(built.task, jax.random.key(0), fresh_state(built), batch)
    _, *gradients = jax.extend.core.jaxpr_as_fun(program.jaxpr)(*program.inputs, np.float32(1))
    still = {name for name, value in zip(program.gradients, gradients, strict=True) if not np.any(value)}
    assert still == {"layers/0/kernel", "layers/0/bias"}

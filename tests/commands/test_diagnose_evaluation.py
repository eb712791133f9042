"""The diagnosis of an evaluation whose loss is not finite although the training steps are."""

import dataclasses
import shlex
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.commands import build_run, diagnose_run, diagnosed_evaluation, fresh_state, run
from mpjax.config import Diagnose, load_config
from mpjax.diagnosis import mean_loss
from mpjax.errors import Diverged, UsageError
from mpjax.training import Mean, RunObjective


FLAGS = shlex.split("""
--model.name mlp --model.width 8 --data.name digits --data.eval_batch_size 100 --steps 2 --report.no_plot
--report.no_tensorboard
""")


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "healthy"
    run(load_config([*FLAGS, "--output_dir", str(folder)]))
    return folder


def diagnosed(folder, factor):
    """Diagnoses the evaluation of the initial parameters, with the first layer's weights multiplied by a factor."""
    config = load_config(["--config", str(folder / "config.toml")])
    built = build_run(config)
    state = fresh_state(built)
    params = {**state.params, "layers/0/kernel": state.params["layers/0/kernel"] * factor}
    return diagnosed_evaluation(built, built.plan.policy, dataclasses.replace(state, params=params))


@pytest.mark.slow
def test_an_evaluation_that_overflows_in_half_precision_only_names_the_layer_and_its_repair(healthy):
    found = diagnosed(healthy, 1e5)
    assert (found.verdict, found.path, found.direction) == ("overflow", "layers/0", "forward")
    assert (found.rules["layers/0"], found.verified) == ("float32", True)
    assert found.evidence.endswith(" With these parameters, the loss of the whole test set is 5.82e+04 in float32.")


@pytest.mark.slow
def test_an_evaluation_that_is_not_finite_in_float32_either_is_no_precision_problem(healthy):
    found = diagnosed(healthy, 1e38)
    assert (found.verdict, found.rules, found.verified) == ("not_precision", {}, False)
    said = "The loss of the whole test set is not finite in float32 either"
    assert found.evidence.endswith(f" {said}: with these parameters it is inf.")
    assert f"<h1>{said}: outside of all modules</h1>" in found.to_html()


@pytest.mark.slow
def test_a_program_that_only_the_compiler_gets_wrong_is_no_precision_problem(healthy, monkeypatch):
    miscompiled = lambda task: lambda params, stats, batch: {"loss": np.nan}  # noqa: E731
    monkeypatch.setattr("mpjax.commands.diagnose_evaluation._eval_step", miscompiled)
    found = diagnosed(healthy, 1)
    assert (found.verdict, found.rules) == ("not_precision", {})
    assert (
        "But the compiled program gives a loss that is not finite, and its operations one at a time" in found.evidence
    )
    assert "try another version of jaxlib" in found.advice[0]


@pytest.mark.slow
def test_the_evaluation_of_a_checkpoint_is_diagnosed_by_a_flag(healthy, capsys):
    found: Any = diagnose_run(Diagnose(run=str(healthy), evaluation=True))
    assert (found.verdict, {row.direction for row in found.table}) == ("healthy", {"forward"})
    out = capsys.readouterr().out
    assert out.startswith(f"evaluation after step 2 of {healthy}\nverdict: healthy\n")
    assert "Examined: the evaluation of batch 1 of 4 of the test set." in out
    assert (healthy / "diagnosis_evaluation_2.html").exists()


def test_an_evaluation_after_a_step_without_a_checkpoint_is_refused(healthy):
    with pytest.raises(UsageError, match="no checkpoint '1': wanted latest, best or one of 2"):
        diagnose_run(Diagnose(run=str(healthy), evaluation=True, step=1))


@pytest.mark.parametrize(("weights", "loss"), [(None, 1.5), ([2.0, 1.0, 1.0], 1.0)])
def test_the_mean_loss_of_a_batch_is_that_of_its_terms_without_padding(weights, loss):
    def function(model, batch, key):
        return {"loss": batch["image"] if weights is None else Mean(batch["image"], jnp.array(weights))}

    own: Any = RunObjective(function)
    batch = {"image": jnp.array([1.0, jnp.inf, 2.0]), "weight": jnp.array([1.0, 0.0, 1.0])}
    assert float(mean_loss(own, None, batch)) == loss
    assert not np.isfinite(mean_loss(own, None, {"image": batch["image"]}))


LAGGING = shlex.split("""
--data.name digits_canvas --task segmentation --model.name unet --model.width 4 --model.depth 2 --data.batch_size 8
--data.test_split test[:24] --data.eval_batch_size 12
--optimizer.warmup 0 --optimizer.schedule constant --steps 6 --optimizer.learning_rate 12 --optimizer.clip_norm 0
--report.no_plot --report.no_tensorboard
""")


@pytest.mark.slow
def test_a_run_that_ends_with_a_test_loss_of_nan_is_diagnosed_in_evaluation(tmp_path):
    with pytest.raises(Diverged) as raised:
        run(load_config([*LAGGING, "--output_dir", str(tmp_path / "run")]))
    text = str(raised.value)
    assert text.startswith("training diverged: the test loss is nan at the end\nfirst bad layer: ")
    assert "verdict: overflow in " in text
    assert "of the whole test set is " in text
    assert "the parameters change faster than the running statistics of batch norm follow" in text
    assert (tmp_path / "run" / "diagnosis_evaluation_6.json").exists()
    assert text.endswith(" --step 6 --evaluation")

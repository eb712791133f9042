"""Twenty steps on eight devices are those of one device, and a checkpoint of any mesh resumes on any other."""

import json
import os
import pathlib
import subprocess
import sys

import pytest


pytestmark = pytest.mark.slow

MODELS = ["gpt2", "resnet", "unet"]
EXACT = {"gpt2": 1e-5, "resnet": 1e-9, "unet": 1e-9}
"""Relative tolerances: in float32, and in float64, as batch norms of few examples amplify the last bits of float32."""
BAD = 6
"""The index of the step in which one example of the batch has an infinite loss."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What came of a model on each of its meshes, run once."""
    results = {}

    def of(model: str) -> dict:
        if model not in results:
            program = pathlib.Path(__file__).with_name("on_meshes.py")
            # Without XLA's optimizations, CPU devices that divide a model wait for each other for ever.
            kept = {name: text for name, text in os.environ.items() if name != "JAX_DISABLE_MOST_OPTIMIZATIONS"}
            # And with as many threads as devices, they do so when one thread is busy otherwise.
            environment = {**kept, "NPROC": "32", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
            command = [sys.executable, str(program), model, str(tmp_path_factory.mktemp(model))]
            done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
            assert done.returncode == 0, done.stderr[-2000:]
            results[model] = json.loads(done.stdout)
        return results[model]

    return of


@pytest.mark.parametrize("model", MODELS)
def test_losses_and_gradient_norms_are_those_of_one_device(trained, model):
    """With accumulation, clipping and a moving average; batch norms take their statistics from the whole batch."""
    found = trained(model)
    for mesh in found:
        for name in ("loss", "grad_norm", "accuracy"):
            one, other = ([step[name] for step in found[each]["metrics"]] for each in ("one", mesh))
            assert len(other) == 20
            del one[BAD], other[BAD]
            assert other == pytest.approx(one, rel=EXACT[model]), (mesh, name)


@pytest.mark.parametrize("model", MODELS)
def test_an_overflow_of_one_example_skips_the_step_on_all_devices(trained, model):
    for mesh, found in trained(model).items():
        assert [step["finite"] for step in found["metrics"]] == [1.0] * BAD + [0.0] + [1.0] * 13, mesh
        scales = [step["loss_scale"] for step in found["metrics"]]
        assert scales == [2.0**15] * (BAD + 1) + [2.0**14] * 13, mesh


@pytest.mark.parametrize("model", MODELS)
def test_parameters_statistics_and_moving_averages_end_alike(trained, model):
    """Adam divides by the root of its second moment, so that rounding shows more in a parameter than in the loss."""
    for mesh, found in trained(model).items():
        assert found["difference"] < 10 * EXACT[model], mesh


def test_meshes_that_divide_a_model_do_divide_it(trained):
    assert {mesh: found["divided"] for mesh, found in trained("gpt2").items()} == {
        "one": 0,
        "data": 0,
        "fsdp": 3,
        "tensor": 10,
        "all": 11,
    }


@pytest.mark.parametrize("model", MODELS)
def test_a_checkpoint_of_any_mesh_resumes_on_any_other(trained, model):
    for mesh, found in trained(model).items():
        undisturbed = [step["loss"] for step in found["metrics"][10:13]]
        for other, losses in found["resumed"].items():
            assert losses == pytest.approx(undisturbed, rel=EXACT[model] / 10), (mesh, other)

"""Twenty steps on eight devices are those of one device, and a checkpoint of any mesh resumes on any other."""

import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile

import pytest


pytestmark = pytest.mark.slow

NAMES = ("gpt2", "decoder", "modernbert", "t5", "dinov2", "swin", "clip", "siglip", "dit")
CASES = [*((name, 1) for name in NAMES), ("unet", 2)]
"""Models, and the numbers of processes that share the eight devices."""
SCORES = {"clip": "image_to_text", "siglip": "image_to_text"}
EXACT = {model: 1e-5 for model, _ in CASES} | {"unet": 1e-9}
"""Relative tolerances: in float32, and in float64, as batch norms of few examples amplify the last bits of float32."""
BAD = 6
"""The index of the step in which one example of the batch has an infinite loss."""

PROGRAM = pathlib.Path(__file__).with_name("on_meshes.py")


def trained_on_meshes(model: str, processes: int, folder: pathlib.Path) -> dict:
    """Runs `on_meshes.py` and returns what came of each mesh."""
    environment = dict(os.environ)
    kept = [word for word in environment["XLA_FLAGS"].split() if "device_count" not in word]
    environment["XLA_FLAGS"] = " ".join([*kept, f"--xla_force_host_platform_device_count={8 // processes}"])
    if model != "unet":  # without XLA's optimizations, CPU devices that divide a layer wait for each other for ever
        environment.pop("JAX_DISABLE_MOST_OPTIMIZATIONS", None)
    environment["NPROC"] = "32"  # with as many threads as devices, they do so when one thread is busy otherwise
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    with contextlib.ExitStack() as opened:
        started = []
        for process in range(processes):
            where = [str(port), str(process)] if processes > 1 else []
            command = [sys.executable, str(PROGRAM), model, str(folder), *where]
            out, err = (opened.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2))
            running = subprocess.Popen(command, env=environment, stdout=out, stderr=err)
            opened.callback(running.kill)
            started.append((running, out, err))
        for running, out, err in started:
            code = running.wait()
            out.seek(0)
            err.seek(0)
            assert code == 0, err.read()[-2000:]
        return json.loads(started[0][1].read().splitlines()[-1])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What came of a model on each of its meshes, run once."""
    results = {}

    def of(model: str, processes: int) -> dict:
        if (model, processes) not in results:
            results[model, processes] = trained_on_meshes(model, processes, tmp_path_factory.mktemp(model))
        return results[model, processes]

    return of


@pytest.mark.parametrize(("model", "processes"), CASES)
def test_losses_and_gradient_norms_are_those_of_one_device(trained, model, processes):
    """With accumulation, clipping and a moving average; batch norms take their statistics from the whole batch."""
    found = trained(model, processes)
    for mesh in found:
        for name in ("loss", "grad_norm", *(() if model == "dit" else (SCORES.get(model, "accuracy"),))):
            one, other = ([step[name] for step in found[each]["metrics"]] for each in ("one", mesh))
            assert len(other) == 20
            del one[BAD], other[BAD]
            assert other == pytest.approx(one, rel=EXACT[model]), (mesh, name)


@pytest.mark.parametrize(("model", "processes"), CASES)
def test_an_overflow_of_one_example_skips_the_step_on_all_devices(trained, model, processes):
    for mesh, found in trained(model, processes).items():
        assert [step["finite"] for step in found["metrics"]] == [1.0] * BAD + [0.0] + [1.0] * 13, mesh
        scales = [step["loss_scale"] for step in found["metrics"]]
        assert scales == [2.0**15] * (BAD + 1) + [2.0**14] * 13, mesh


@pytest.mark.parametrize(("model", "processes"), CASES)
def test_parameters_statistics_and_moving_averages_end_alike(trained, model, processes):
    """Adam divides by the root of its second moment, so that rounding shows more in a parameter than in the loss."""
    for mesh, found in trained(model, processes).items():
        assert found["difference"] < 10 * EXACT[model], mesh


def test_meshes_that_divide_a_model_do_divide_it(trained):
    assert {mesh: found["divided"] for mesh, found in trained("gpt2", 1).items()} == {
        "one": 0,
        "fsdp": 3,
        "tensor": 10,
        "all": 11,
        "sequence": 11,
    }


@pytest.mark.parametrize(("model", "processes"), CASES)
def test_a_checkpoint_of_any_mesh_resumes_on_any_other(trained, model, processes):
    found = trained(model, processes)
    checked = 0
    for written in found.values():
        undisturbed = [step["loss"] for step in written["metrics"][10:12]]
        for mesh, losses in written["resumed"].items():
            assert losses == pytest.approx(undisturbed, rel=EXACT[model] / 10), mesh
            checked += 1
    expected = (
        {model: 25 for model, _ in CASES} | dict.fromkeys(("modernbert", "swin", "clip", "siglip"), 16) | {"unet": 2}
    )
    assert checked == expected[model]

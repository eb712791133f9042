"""Runs in workers that Ray starts: they train as one process, are started again, stop together."""

import asyncio
import importlib.util
import json
import os
import pathlib
import shlex
import signal
import socket
import subprocess
import sys
import time

import pytest

from mpjax import cli
from mpjax.commands.train import run
from mpjax.commands.train_ray import Exchange, check_reachable, train_on_ray
from mpjax.config import load_config
from mpjax.config.commands import OnRay
from mpjax.errors import UsageError
from mpjax.loop.stored import complete_checkpoints
from mpjax.report import read_metrics


pytestmark = pytest.mark.filterwarnings(
    "default::DeprecationWarning",  # Ray calls what it has deprecated itself
    r"ignore:os\.fork\(\) was called:RuntimeWarning",  # and forks to start its servers; JAX runs here already
)

SMALL = shlex.split("""
--model.name mlp --model.width 8 --data.name synthetic:8x8x1:10 --data.batch_size 8 --data.eval_batch_size 6
--steps 600 --optimizer.schedule constant --optimizer.warmup 1 --optimizer.learning_rate 0.01
--loop.log_every 5 --loop.eval_every 300 --loop.save_every 40 --report.no_tensorboard --report.no_plot
--precision.policy float32
""")
SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "train_ray.py"
WITHIN = 120


@pytest.fixture(scope="module")
def cluster():
    """A Ray cluster of this process, with the variables that commands need to use it."""
    pytest.importorskip("ray", reason="pip install -e '.[ray]'")
    variables = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",  # else a token is written to the user's home
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.3",  # Ray looks after its workers every two seconds
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        import ray

        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        yield {**variables, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
        ray.shutdown()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run in this process."""
    folder = tmp_path_factory.mktemp("runs") / "alone"
    run(load_config([*SMALL, "--output_dir", str(folder)]))
    return folder


def start(cluster, folder, *flags, cwd=None):
    command = [sys.executable, str(SCRIPT), "--workers", "2", *SMALL, "--output_dir", str(folder), *flags]
    environment = {**os.environ, **cluster}
    to = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment, cwd=cwd, **to)


def losses(folder):
    return {r["step"]: r["train/loss"] for r in read_metrics(folder / "metrics.jsonl") if "train/loss" in r}


def first_worker(folder):
    """The process number of the first worker, or None before there is one."""
    file = folder / "environment.json"
    return json.loads(file.read_text())["process"] if file.exists() else None


def reach(folder, step, command, *, after=None):
    """Waits until the run has logged a step, with another first worker than `after`."""
    until = time.monotonic() + WITHIN
    while command.poll() is None and time.monotonic() < until:
        there = (folder / "metrics.jsonl").exists() and first_worker(folder) != after
        if there and max(losses(folder), default=0) >= step:
            return
        time.sleep(0.02)
    command.kill()
    pytest.fail(f"no step {step}: {command.communicate()}")


def workers_of(folder):
    """Process numbers of the workers, that of the first worker first."""
    first = first_worker(folder)
    parent = parent_of(first)
    found = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            named = (process / "cmdline").read_bytes().startswith(b"ray::RayTrainWorker")
            if named and parent_of(process.name) == parent:
                found.append(int(process.name))
        except OSError:  # it has ended
            continue
    return sorted(found, key=lambda number: number != first)


def parent_of(process):
    return pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1]


@pytest.mark.extra
def test_two_workers_train_as_one_process_and_tell_ray(cluster, alone, tmp_path):
    folder = tmp_path / "run"
    result = train_on_ray(OnRay(workers=2), load_config([*SMALL, "--output_dir", str(folder)]))
    assert losses(folder) == pytest.approx(losses(alone), rel=1e-5)
    assert result.return_value == json.loads((folder / "summary.json").read_text())
    assert result.checkpoint.path == str(folder / "checkpoints" / "600")
    assert result.metrics["step"] == 600
    assert result.metrics["test/loss"] == result.return_value["test/loss"]
    reported = {pathlib.Path(checkpoint.path).name: metrics for checkpoint, metrics in result.best_checkpoints}
    assert [(name, metrics["step"]) for name, metrics in reported.items()] == [(str(n), n) for n in range(40, 601, 40)]
    assert ["test/loss" in metrics for metrics in reported.values()] == [False] * 7 + [True] * 8
    assert complete_checkpoints(folder / "checkpoints")[-2:] == [560, 600]
    assert "resume = false" in (folder / "config.toml").read_text()


@pytest.mark.extra
def test_a_run_whose_workers_are_killed_three_times_ends_as_undisturbed(cluster, alone, tmp_path):
    folder = tmp_path / "run"
    command = start(cluster, folder)
    killed = None
    for which, step in enumerate((50, 90, 130)):
        reach(folder, step, command, after=killed)
        killed = first_worker(folder)
        os.kill(workers_of(folder)[which % 2], signal.SIGKILL)
    out, err = command.communicate(timeout=WITHIN)
    assert command.returncode == 0, err
    assert out.count("resumed from step") == 3
    assert losses(folder).keys() == losses(alone).keys()
    assert losses(folder) == pytest.approx(losses(alone), rel=1e-6)
    mine, other = (json.loads((f / "summary.json").read_text()) for f in (folder, alone))
    assert mine["test/loss"] == pytest.approx(other["test/loss"], rel=1e-6)


ONE_REFUSES = """
import os, mpjax
from flax import nnx

class Net(nnx.Module):
    def __init__(self, classes, rngs):
        with open("built", "a") as file:
            file.write("built\\n")
        try:
            os.open("refused", os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            self.head = nnx.Linear(64, classes, rngs=rngs)
        else:
            raise mpjax.UsageError("no such net")

    def __call__(self, x, train=False):
        return self.head(x.reshape(x.shape[0], -1))
"""


@pytest.mark.extra
def test_wrong_usage_that_one_worker_finds_ends_the_run_at_once_and_leaves_nothing(cluster, tmp_path):
    (tmp_path / "net.py").write_text(ONE_REFUSES)
    command = start(cluster, "run", "--model.name", "net.py:Net", "--model.width", "0", cwd=tmp_path)
    _, err = command.communicate(timeout=WITHIN)
    assert command.returncode == 2, err
    assert "error: no such net\n" in err
    assert (tmp_path / "built").read_text() == "built\nbuilt\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.extra
def test_a_signal_to_the_command_stops_all_workers_with_a_checkpoint(cluster, tmp_path):
    folder = tmp_path / "run"
    command = start(cluster, folder, "--steps", "100000", "--loop.save_every", "100000")
    reach(folder, 20, command)
    command.send_signal(signal.SIGINT)
    _, err = command.communicate(timeout=WITHIN)
    assert command.returncode == 130, err
    (last,) = complete_checkpoints(folder / "checkpoints")
    assert f"stopped at step {last}; the checkpoint is saved\n" in err


@pytest.mark.extra
@pytest.mark.slow
def test_workers_that_die_more_often_than_allowed_end_the_run(cluster, tmp_path):
    folder = tmp_path / "run"
    command = start(cluster, folder, "--restarts", "0", "--steps", "100000")
    reach(folder, 20, command)
    os.kill(workers_of(folder)[0], signal.SIGKILL)
    _, err = command.communicate(timeout=WITHIN)
    assert command.returncode == 1, err
    # Threads of Ray may have printed tracebacks of their own before.
    last = err.strip().splitlines()[-1]
    assert last.startswith("error: workers died more often than --restarts 0 allows: Ray's logs say why; --resume")


@pytest.mark.extra
def test_more_workers_than_this_machine_has_cpus_are_an_error(cluster, tmp_path, capsys):
    assert cli.train_ray(["--workers", "3", *SMALL, "--output_dir", str(tmp_path / "run")]) == 2
    assert "3 workers with 1 CPUs each need 3 CPUs, and this machine has 2: write a smaller" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


# Without Ray


def test_a_taken_folder_and_wrong_settings_are_errors_before_ray_is_started(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: pytest.fail(f"{name} is looked for"))
    (tmp_path / "file").touch()
    assert cli.train_ray(["--output_dir", str(tmp_path)]) == 2
    assert f"{tmp_path} exists: write --resume" in capsys.readouterr().err
    assert cli.train_ray(["--data.batch_size", "0"]) == 2
    assert "--data.batch_size is 0" in capsys.readouterr().err


def test_a_missing_ray_is_an_error_that_says_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"Ray is not installed: pip install -e '\.\[ray\]'"):
        train_on_ray(OnRay(), load_config([*SMALL, "--output_dir", str(tmp_path / "run")]))


def test_an_address_at_which_nobody_listens_is_an_error_at_once():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(UsageError, match=f"no Ray cluster at 127.0.0.1:{port}: Connection refused"):
        check_reachable(f"127.0.0.1:{port}")
    for other in ("", "auto", "local", f"ray://127.0.0.1:{port}"):
        check_reachable(other)


def test_the_first_error_is_the_one_that_ends_the_run():
    async def told():
        exchange = Exchange()
        await exchange.end(UsageError("first"))
        await exchange.end(UsageError("second"))
        waiting = asyncio.create_task(exchange.stopped())
        await exchange.stop(15)
        return str(await exchange.ended()), await waiting

    assert asyncio.run(told()) == ("first", 15)

"""Runs in workers that Ray starts: they train as one process, are started again, stop together."""

import asyncio
import contextlib
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
from concurrent.futures import ThreadPoolExecutor

import pytest

from mpjax import cli
from mpjax.commands import Exchange, check_reachable, run, train_on_ray
from mpjax.config import OnRay, load_config
from mpjax.errors import UsageError
from mpjax.loop import complete_checkpoints
from mpjax.report import read_metrics


pytestmark = pytest.mark.filterwarnings(
    "default::DeprecationWarning",  # Ray calls what it has deprecated itself
    r"ignore:os\.fork\(\) was called:RuntimeWarning",  # and forks to start its servers; JAX runs here already
)

SMALL = shlex.split("""
--model.name mlp --model.width 8 --data.name synthetic:8x8x1:10 --data.batch_size 8 --data.eval_batch_size 6
--steps 400 --optimizer.schedule constant --optimizer.warmup 1 --optimizer.learning_rate 0.01
--loop.log_every 5 --loop.eval_every 200 --loop.save_every 40 --report.no_tensorboard --report.no_plot
--precision.policy float32
""")
SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "train_ray.py"
WITHIN = 300


@pytest.fixture(scope="module")
def cluster():
    """A Ray cluster of this process, with the variables that commands need to use it."""
    pytest.importorskip("ray", reason="pip install -e '.[ray]'")
    variables = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",  # else a token is written to the user's home
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.3",  # Ray looks after its workers every two seconds
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # a process more for each start of the workers
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


@pytest.fixture
def start(cluster):
    """Starts the command, with a folder and further flags."""
    with contextlib.ExitStack() as opened:

        def start(folder, *flags, cwd=None):
            command = [sys.executable, str(SCRIPT), "--workers", "2", *SMALL, "--output_dir", str(folder), *flags]
            to = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            started = subprocess.Popen(command, env={**os.environ, **cluster}, cwd=cwd, **to)
            opened.callback(started.kill)
            return started

        yield start


def logged(folder):
    """What the run has logged of each training step so far."""
    file = folder / "metrics.jsonl"
    return {r["step"]: r for r in read_metrics(file) if "train/loss" in r} if file.exists() else {}


def saved(folder):
    """The position of the last complete checkpoint; 0 before there is one."""
    return max(complete_checkpoints(folder / "checkpoints"), default=0)


def losses(folder):
    return {step: record["train/loss"] for step, record in logged(folder).items()}


def first_worker(folder):
    """The process number of the first worker, or None before there is one."""
    file = folder / "environment.json"
    return json.loads(file.read_text())["process"] if file.exists() else None


def wait_until(condition):
    until = time.monotonic() + WITHIN
    while not condition():
        assert time.monotonic() < until, f"not within {WITHIN} s"
        time.sleep(0.02)


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


def kill_twice(folder):
    """Kills the first worker, then the second; returns the last checkpoint and what was logged before each."""
    before, first = [], None
    for which, step in enumerate((40, 80)):
        wait_until(lambda not_=(first, None), at=step: first_worker(folder) not in not_ and saved(folder) >= at)
        first = first_worker(folder)
        before.append((saved(folder), logged(folder)))
        os.kill(workers_of(folder)[which], signal.SIGKILL)
    return before


@pytest.fixture(scope="module")
def killed(cluster, tmp_path_factory):
    """A run whose workers were killed twice: its folder, Ray's result, what was logged before each time."""
    folder = tmp_path_factory.mktemp("runs") / "killed"
    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(kill_twice, folder)
        result = train_on_ray(OnRay(workers=2), load_config([*SMALL, "--output_dir", str(folder)]))
        return folder, result, killing.result()


@pytest.mark.extra
def test_two_workers_that_are_killed_twice_train_as_one_process(killed, alone):
    folder, result, _ = killed
    assert losses(folder) == pytest.approx(losses(alone), rel=1e-6)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["test/loss"] == pytest.approx(
        json.loads((alone / "summary.json").read_text())["test/loss"], rel=1e-6
    )
    assert result.return_value == summary
    assert "resume = false" in (folder / "config.toml").read_text()


@pytest.mark.extra
def test_workers_that_are_started_again_go_on_from_the_last_checkpoint(killed):
    """What was logged up to it stays, with its times."""
    folder, _, before = killed
    last = logged(folder)
    for position, then in before:
        assert all(last[step] == then[step] for step in range(5, position + 1, 5))


@pytest.mark.extra
def test_ray_is_told_of_the_checkpoints_with_the_metrics_so_far(killed):
    folder, result, _ = killed
    assert result.checkpoint.path == str(folder / "checkpoints" / "400")
    assert result.metrics["step"] == 400
    assert result.metrics["test/loss"] == result.return_value["test/loss"]
    reported = {pathlib.Path(checkpoint.path).name: metrics for checkpoint, metrics in result.best_checkpoints}
    steps = [int(name) for name in reported]
    assert steps == sorted(steps)
    # Ray may not have been told of those saved just before a worker was killed.
    assert set(range(120, 401, 40)) <= set(steps) <= set(range(40, 401, 40))
    for name, metrics in reported.items():
        assert metrics["step"] == int(name)
        assert ("test/loss" in metrics) == (int(name) >= 200)
    assert complete_checkpoints(folder / "checkpoints")[-2:] == [360, 400]


ONE_REFUSES = """
import os, mpjax
from flax import nnx

class Net(nnx.Module):
    def __init__(self, fields, rngs):
        with open("built", "a") as file:
            file.write("built\\n")
        try:
            os.open("refused", os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            self.head = nnx.Linear(64, 10, rngs=rngs)
        else:
            raise mpjax.UsageError("no such net")

    def __call__(self, x, train=False):
        return self.head(x.reshape(x.shape[0], -1))
"""


@pytest.mark.extra
def test_wrong_usage_that_one_worker_finds_ends_the_run_at_once_and_leaves_nothing(start, tmp_path):
    (tmp_path / "net.py").write_text(ONE_REFUSES)
    command = start("run", "--model.name", "net.py:Net", "--model.width", "0", cwd=tmp_path)
    _, err = command.communicate(timeout=WITHIN)
    assert command.returncode == 2, err
    assert "error: no such net\n" in err
    assert (tmp_path / "built").read_text() == "built\nbuilt\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.extra
def test_a_signal_to_the_command_stops_all_workers_with_a_checkpoint(start, tmp_path):
    folder = tmp_path / "run"
    command = start(folder, "--steps", "100000", "--loop.save_every", "100000")
    wait_until(lambda: max(logged(folder), default=0) >= 20)
    command.send_signal(signal.SIGINT)
    _, err = command.communicate(timeout=WITHIN)
    assert command.returncode == 130, err
    (last,) = complete_checkpoints(folder / "checkpoints")
    assert f"stopped at step {last}; the checkpoint is saved\n" in err


@pytest.mark.extra
@pytest.mark.slow
def test_workers_that_die_more_often_than_allowed_end_the_run(start, tmp_path):
    folder = tmp_path / "run"
    command = start(folder, "--restarts", "0", "--steps", "100000")
    wait_until(lambda: max(logged(folder), default=0) >= 20)
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
    assert f"{tmp_path} exists and holds no run to resume: write another --output_dir" in capsys.readouterr().err
    assert cli.train_ray(["--data.batch_size", "0"]) == 2
    assert "wanted auto or a whole number from 1 on, got 0" in capsys.readouterr().err


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

"""One run over two processes with two devices each: the same numbers, one that writes, one end for all."""

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np
import pytest

from mpjax import cli
from mpjax.commands import run
from mpjax.config import load_config, to_toml
from mpjax.errors import UsageError
from mpjax.loop import complete_checkpoints, read_checkpoint
from mpjax.report import read_metrics


SMALL = shlex.split("""
--model.name mlp --model.width 8 --data.name synthetic:8x8x1:10 --data.batch_size 8 --data.eval_batch_size 6
--steps 8 --optimizer.schedule constant --optimizer.warmup 1 --optimizer.learning_rate 0.01 --loop.keep 9
--loop.log_every 1 --loop.eval_every 0 --loop.save_every 4 --report.no_tensorboard --report.no_plot
--precision.policy float32
""")
WITHIN = 60


def free_port():
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def place(process, port, processes=2):
    where = {"coordinator": f"127.0.0.1:{port}", "processes": processes, "process": process}
    return [f"--distributed.{name}={value}" for name, value in where.items()]


def start(*flags, devices, program=("-m", "scripts.train"), **variables):
    flag = f"--xla_force_host_platform_device_count={devices}"
    kept = [word for word in os.environ["XLA_FLAGS"].split() if "device_count" not in word]
    command = [sys.executable, *program, *flags]
    environment = {**os.environ, "XLA_FLAGS": " ".join([*kept, flag]), **variables}
    out, err = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # noqa: SIM115
    return subprocess.Popen(command, env=environment, stdout=out, stderr=err), out, err


def start_both(*flags, **how):
    port = free_port()
    return [start(*flags, *place(process, port), devices=2, **how) for process in range(2)]


def ends(started, within=WITHIN):
    """Exit code, output and errors of each."""
    until = time.monotonic() + within
    found = []
    try:
        for process, _, _ in started:
            process.wait(max(0, until - time.monotonic()))
    finally:
        for process, out, err in started:
            process.kill()
            process.wait()
            for file in (out, err):
                file.seek(0)
            found.append((process.returncode, out.read(), err.read()))
            out.close()
            err.close()
    return found


def losses(folder):
    return {r["step"]: r["train/loss"] for r in read_metrics(folder / "metrics.jsonl") if "train/loss" in r}


def reach(folder, step, started):
    """Waits until the run has logged a step."""
    until = time.monotonic() + WITHIN
    while time.monotonic() < until and all(process.poll() is None for process, _, _ in started):
        if (folder / "metrics.jsonl").exists() and max(losses(folder), default=0) >= step:
            return
        time.sleep(0.05)
    for process, _, _ in started:
        process.kill()
    pytest.fail(f"no step {step}: {ends(started)}")


def cut(folder, other):
    """The run as it was after step 4."""
    shutil.copytree(folder, other)
    shutil.rmtree(other / "checkpoints" / "8")
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (other / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] <= 4))
    return other


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Eight steps in this process with its two devices."""
    folder = tmp_path_factory.mktemp("runs") / "alone"
    run(load_config([*SMALL, "--output_dir", str(folder)]))
    return folder


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """The same in two processes with two devices each, and what they printed."""
    folder = tmp_path_factory.mktemp("runs") / "together"
    found = ends(start_both(*SMALL, "--output_dir", str(folder)))
    assert [code for code, _, _ in found] == [0, 0], found
    return folder, found


def test_two_processes_train_as_one(alone, together):
    folder, _ = together
    assert list(losses(folder)) == list(range(1, 9))
    assert losses(folder) == pytest.approx(losses(alone), rel=1e-5)
    mine, other = (json.loads((f / "summary.json").read_text())["test/loss"] for f in (folder, alone))
    assert mine == pytest.approx(other, rel=1e-5)


def test_one_prints_and_writes(together):
    folder, ((_, out, _), (_, other, _)) = together
    assert "run folder" in out
    assert "step" in out
    # Gloo's threads write a message and its newline apart, so that two messages may share a line.
    assert [line for line in other.splitlines() if line and "Gloo" not in line] == []
    files = {"config.toml", "environment.json", "history.jsonl", "metrics.jsonl", "receipt.json", "summary.json"}
    assert {path.name for path in folder.iterdir()} == {*files, "checkpoints"}
    assert complete_checkpoints(folder / "checkpoints") == [4, 8]
    assert (folder / "config.toml").read_text() == to_toml(load_config([*SMALL, "--output_dir", str(folder)]))


@pytest.mark.slow
def test_a_run_of_two_goes_on_alone(together, tmp_path):
    folder = cut(together[0], tmp_path / "alone")
    run(load_config(["--resume", "--output_dir", str(folder)]))
    assert losses(folder) == pytest.approx(losses(together[0]), rel=1e-5)
    assert 'coordinator = ""' in read_checkpoint(together[0] / "checkpoints", "8")[2]["config"]


@pytest.mark.slow
def test_a_run_alone_goes_on_in_two_until_one_is_asked_to_stop(alone, tmp_path):
    """The parameters divided among all four devices; both stop after the same step."""
    folder = cut(alone, tmp_path / "two")
    flags = ["--resume", "--output_dir", str(folder), "--steps", "100000", "--mesh.data", "1", "--mesh.fsdp", "4"]
    processes = start_both(*flags)
    reach(folder, 8, processes)
    processes[1][0].send_signal(signal.SIGTERM)
    (code, _, err), (other_code, _, other_err) = ends(processes)
    assert (code, other_code) == (143, 143), err + other_err
    last = complete_checkpoints(folder / "checkpoints")[-1]
    assert last > 8
    assert f"stopped at step {last}; the checkpoint is saved" in err
    assert f"stopped at step {last}; the checkpoint is saved" in other_err
    position, arrays, _ = read_checkpoint(folder / "checkpoints")
    assert (position, int(arrays["step"])) == (last, last)
    found = losses(folder)
    assert {step: found[step] for step in range(1, 9)} == pytest.approx(losses(alone), rel=1e-5)


@pytest.mark.slow
def test_the_death_of_the_first_ends_the_other(alone, tmp_path):
    folder = cut(alone, tmp_path / "killed")
    processes = start_both("--resume", "--output_dir", str(folder), "--steps", "100000")
    reach(folder, 6, processes)
    processes[0][0].kill()
    began = time.monotonic()
    code, _, err = ends(processes)[1]
    assert time.monotonic() - began < 30
    if code == -signal.SIGABRT:  # Gloo, the sums of CPUs, may abort in the same instant
        assert "gloo" in err
        return
    assert code == 1, err
    assert "error: process 0 has ended without a word: it was killed" in err


IMPATIENT = """
import sys
from mpjax import cli
from mpjax.loop import company, join  # which gives JAX twice the time that it finds

company.BEAT, company.SILENCE = 0.5, 4.0
sys.exit(cli.train(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_first_that_is_stopped_for_ever_ends_the_other_which_says_so(alone, tmp_path):
    """Four seconds in place of sixty; a shorter stop is waited for."""
    folder = cut(alone, tmp_path / "stopped")
    flags = ["--resume", "--output_dir", str(folder), "--steps", "100000"]
    processes = start_both(*flags, program=("-c", IMPATIENT))
    reach(folder, 6, processes)
    processes[0][0].send_signal(signal.SIGSTOP)
    time.sleep(1.5)
    processes[0][0].send_signal(signal.SIGCONT)
    reach(folder, max(losses(folder)) + 5, processes)
    processes[0][0].send_signal(signal.SIGSTOP)
    processes[1][0].wait(WITHIN)
    processes[0][0].kill()
    code, _, err = ends(processes)[1]
    assert code == 1, err
    assert f"error: process 0 on {socket.gethostname()} has not answered for 4 s: it is stopped" in err
    assert "--resume continues from the last checkpoint" in err


FORTY = ["--steps", "40", "--loop.save_every", "2"]
KILLS = int(os.environ.get("MPJAX_TEST_KILLS", "1"))


@pytest.fixture(scope="module")
def undisturbed(alone, tmp_path_factory):
    """The losses of forty steps in one process."""
    folder = shutil.copytree(alone, tmp_path_factory.mktemp("runs") / "undisturbed")
    run(load_config(["--resume", "--output_dir", str(folder), *FORTY]))
    return losses(folder)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(KILLS))
def test_a_run_killed_at_a_random_moment_ends_and_goes_on_as_undisturbed(undisturbed, tmp_path, seed):
    """MPJAX_TEST_KILLS=10 tries ten moments, between the first import and the last checkpoint."""
    random = np.random.default_rng(seed)
    killed, seconds = int(random.integers(2)), random.uniform(0, 8)
    folder = tmp_path / "killed"
    flags = [*SMALL, *FORTY, "--output_dir", str(folder)]
    # One that is killed before it has come is waited for.
    processes = start_both(*flags, "--distributed.timeout", "8")
    with contextlib.suppress(subprocess.TimeoutExpired):
        processes[killed][0].wait(seconds)
    processes[killed][0].kill()
    code, _, err = ends(processes)[1 - killed]
    print(f"killed process {killed} after {seconds:.1f} s: the other ended with {code}: {err.strip()[-200:]}")
    if code:
        reasons = "has ended without a word", "did not come within 8 seconds", "did not reach process 0", "gloo"
        assert any(reason in err for reason in reasons), err
    else:
        assert (folder / "summary.json").exists()  # it was done before
    if (folder / "config.toml").exists():
        flags = ["--resume", *flags]
    flags += ["--distributed.timeout", "30"]
    assert [code for code, _, _ in ends(start_both(*flags))] == [0, 0]
    assert losses(folder) == pytest.approx(undisturbed, rel=1e-5)


@pytest.mark.slow
def test_what_stops_one_is_told_by_the_other(tmp_path):
    """One that fails alone, after it has joined."""
    port, flags = free_port(), [*SMALL, "--output_dir", str(tmp_path / "run")]
    one = start(*flags, *place(0, port), devices=2)
    other = start(*flags, *place(1, port), devices=2, MPJAX_CACHE="/dev/null/cache")
    (code, _, err), (other_code, _, other_err) = ends([one, other])
    assert (code, other_code) == (2, 2), err + other_err
    assert "error: cannot make folder /dev/null/cache" in other_err
    assert "error: process 1 has ended: cannot make folder /dev/null/cache" in err


OWN = """
import os
import numpy as np
from flax import nnx

def rows():
    values = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
    split = {"image": (values * float(os.environ["OF_DATA"]))[..., None, None], "label": np.arange(40) % 3}
    return split, split

class Net(nnx.Module):
    def __init__(self, fields, *, rngs):
        self.head = nnx.Linear(4, 3, rngs=rngs)
    def __call__(self, x):
        x = self.head(x.reshape(len(x), 4))
        return nnx.relu(x) if os.environ["OF_MODEL"] == "relu" else x
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("other", "what"),
    [({"OF_DATA": "2"}, "the training data"), ({"OF_MODEL": "none"}, "the program of the training step")],
    ids=["data", "model"],
)
def test_processes_that_would_not_train_the_same_are_refused(tmp_path, other, what):
    """Their settings, versions and files are the same; what they read from elsewhere is not."""
    (tmp_path / "own.py").write_text(OWN)
    flags = [*SMALL, "--data.name", f"{tmp_path}/own.py:rows", "--model.name", f"{tmp_path}/own.py:Net"]
    flags += ["--model.width", "0"]  # a model of the user has no settings
    flags += ["--data.num_classes", "3", "--data.crop_padding", "0", "--output_dir", str(tmp_path / "run")]
    port, same = free_port(), {"OF_DATA": "1", "OF_MODEL": "relu"}
    started = [
        start(*flags, *place(process, port), devices=2, **same | more) for process, more in enumerate(({}, other))
    ]
    for code, _, err in ends(started):
        assert code == 2, err
        assert f"{what} of processes 0 and of 1 differ" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over_by_all(alone, tmp_path):
    folder = shutil.copytree(alone, tmp_path / "damaged")
    for file in (folder / "checkpoints" / "8" / "state" / "d").iterdir():
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 8
        file.write_bytes(content)
    (code, _, err), (other_code, _, other_err) = ends(start_both("--resume", "--output_dir", str(folder)))
    assert (code, other_code) == (0, 0), err + other_err
    assert "checkpoints/8 is damaged" in err
    assert "checkpoints/4 instead" in err
    assert "damaged" not in other_err, other_err
    assert losses(folder) == pytest.approx(losses(alone), rel=1e-5)


# Before JAX is started


def test_a_process_that_never_comes_is_named(tmp_path, capsys):
    flags = [*SMALL, "--output_dir", str(tmp_path / "run"), *place(0, free_port(), 3), "--distributed.timeout", "0.3"]
    assert cli.train(flags) == 2
    assert "processes 1, 2 of 3 did not come within 0.3 seconds" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_other_settings_are_rejected_by_name_in_both(tmp_path):
    port, said = free_port(), {}
    flags = [[], ["--seed", "3", "--optimizer.momentum", "0.5", "--cache_dir", "x"]]
    settings = [
        load_config([*SMALL, "--output_dir", str(tmp_path / "run"), *place(process, port), *flags[process]])
        for process in range(2)
    ]

    def train(process):
        with pytest.raises(UsageError) as raised:
            run(settings[process])
        said[process] = str(raised.value)

    threads = [threading.Thread(target=train, args=(process,)) for process in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WITHIN)
    differ = "the processes differ, and have to be started with the same settings and code:\n"
    differ += "  optimizer.momentum: 0.9 on process 0, 0.5 on process 1\n  seed: 0 on process 0, 3 on process 1"
    assert said == {0: differ, 1: differ}


MASKS = """
import numpy as np

def some(seed, count):
    images = np.random.default_rng(seed).integers(256, size=(count, 8, 8, 1), dtype=np.uint8)
    return {"image": images, "mask": images[..., 0] // 128}

def one():
    return some(0, 20), some(1, 7)

def two():
    return {"train": some(2, 5)}
"""


@pytest.mark.slow
def test_a_mixture_is_the_same_in_two_processes_which_draw_each_picture_once(tmp_path):
    file = tmp_path / "masks.py"
    file.write_text(MASKS)
    flags = shlex.split(f"""
    --task segmentation --model.name unet --model.width 2 --model.depth 1 --training.label_smoothing 0
    --data.num_classes 2 --data.name {file}:one --data.mix {file}:two 0.25
    --mesh.data 2 --mesh.fsdp 2 --report.tensorboard --report.images 3
    """)
    alone, two = tmp_path / "alone", tmp_path / "two"
    found = ends([start(*SMALL, *flags, "--output_dir", str(alone), devices=4)])
    found += ends(start_both(*SMALL, *flags, "--output_dir", str(two)))
    assert [code for code, _, _ in found] == [0, 0, 0], found
    assert losses(two) == pytest.approx(losses(alone), rel=1e-5)
    for folder in (alone, two):
        (events,) = (folder / "tensorboard").iterdir()
        assert [events.read_bytes().count(f"masks/{example}".encode()) for example in (0, 2, 4)] == [1, 1, 1]

"""Elastic runs of real processes: one is killed, the others go on, it is taken in again, and the numbers stay."""

import contextlib
import itertools
import json
import os
import pathlib
import shlex
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from mpjax import cli
from mpjax.commands import run
from mpjax.config import load_config
from mpjax.errors import UsageError
from mpjax.loop import complete_checkpoints


SMALL = shlex.split("""
--model.name mlp --model.width 8 --data.name synthetic:8x8x1:10 --data.batch_size 24 --data.eval_batch_size 6
--optimizer.schedule constant --optimizer.warmup 1 --optimizer.learning_rate 0.01 --loop.keep 9 --loop.log_every 1
--loop.eval_every 0 --report.no_tensorboard --report.no_plot --precision.policy float32
""")
WITHIN = float(os.environ.get("MPJAX_TEST_WITHIN", "120"))
KILLS = int(os.environ.get("MPJAX_TEST_KILLS", "2"))

HOLD = """
import os, pathlib, signal, time

class Hold:
    def logged(self, step, metrics):
        '''Every hundred steps, the run waits for the test.'''
        gate = pathlib.Path(os.environ["OF_TEST"], f"go{-(-step // 100)}")
        while step % 100 == 95 and not gate.exists():
            time.sleep(0.05)
        time.sleep(0.01)

class Die:
    def logged(self, step, metrics):
        if step >= 3 and os.environ.get("OF_TEST") == "dies":
            os.kill(os.getpid(), signal.SIGSEGV)

class Fail:
    def logged(self, step, metrics):
        if step >= 3:
            raise RuntimeError("out of luck")
"""


def free_port():
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


class Company:
    """The commands of a run of several processes, and what they print."""

    def __init__(self, folder, *flags, processes=4, program=("-m", "scripts.train")):
        self.folder, self.flags, self.program, self.port = folder, flags, program, free_port()
        self.output = folder.parent / f"{folder.name}.output"
        self.output.mkdir()
        self.running = [self.start(process, processes) for process in range(processes)]

    def start(self, process, processes=4, *more, **variables):
        place = {"coordinator": f"127.0.0.1:{self.port}", "processes": processes, "process": process}
        flags = [f"--distributed.{name}={value}" for name, value in place.items()]
        flags += ["--distributed.elastic", "--output_dir", str(self.folder)]
        kept = [word for word in os.environ["XLA_FLAGS"].split() if "device_count" not in word]
        environment = {**os.environ, "XLA_FLAGS": " ".join([*kept, "--xla_force_host_platform_device_count=1"])}
        with (self.output / str(process)).open("a") as file:
            return subprocess.Popen(
                [sys.executable, *self.program, *self.flags, *flags, *more],
                env=environment | {"OF_TEST": str(self.output)} | variables,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def printed(self, process=0):
        return (self.output / str(process)).read_text()

    def wait_for(self, condition):
        until = time.monotonic() + WITHIN
        while not condition():
            if time.monotonic() > until:
                pytest.fail("\n".join(self.printed(process)[-2000:] for process in range(len(self.running))))
            time.sleep(0.05)

    def wait_for_more(self, text, before):
        """Waits until process 0 has printed a text more often than `before`."""
        self.wait_for(lambda: self.printed().count(text) > before)

    def beginnings(self):
        """The number of terms in which process 0 has come to the first step."""
        return sum(map(self.printed().count, ("\nresumed from step", "\nno checkpoint to resume from")))

    def kill(self, process, *, whole):
        """Kills a worker, and its command if `whole`; returns when the worker has ended."""
        worker = self.worker_of(process)
        if whole:
            self.running[process].kill()
            self.running[process].wait()
        else:
            os.kill(worker, signal.SIGKILL)
        self.wait_for(lambda: not is_there(worker))

    def reach(self, step):
        self.wait_for(lambda: max(curve(self.folder), default=0) >= step)

    def worker_of(self, process):
        """The number of the worker's process: the one child of a supervisor."""
        pid = self.running[process].pid
        (child,) = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(child)

    def ends(self):
        until = time.monotonic() + WITHIN
        return [each.wait(max(0.1, until - time.monotonic())) for each in self.running]

    def close(self):
        for each in self.running:
            each.kill()
            each.wait()


@contextlib.contextmanager
def company(folder, *flags, **how):
    started = Company(folder, *flags, **how)
    try:
        yield started
    finally:
        started.close()


def curve(folder):
    """Loss and accuracy of each step; the accuracy is a number of examples of 24, and so exact."""
    if not (folder / "metrics.jsonl").exists():
        return {}
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    with contextlib.suppress(json.JSONDecodeError):  # the last may be half written
        return {r["step"]: (r["train/loss"], r["train/accuracy"]) for r in map(json.loads, lines) if "train/loss" in r}
    return {}


def require_same_curve(folder, other):
    mine, wanted = curve(folder), curve(other)
    assert list(mine) == list(wanted)
    assert {step: loss for step, (loss, _) in mine.items()} == pytest.approx(
        {step: loss for step, (loss, _) in wanted.items()}, rel=1e-5
    )
    assert [accuracy for _, accuracy in mine.values()] == pytest.approx([acc for _, acc in wanted.values()], abs=1e-6)


def is_there(pid):
    """True if a process runs; one that has ended and waits for its parent does not."""
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    file = tmp_path_factory.mktemp("own") / "own.py"
    file.write_text(HOLD)
    return file


def when_it_goes_on(started, before):
    """Waits until a term has come to its first step after `before` terms have; returns when."""
    started.wait_for(lambda: started.beginnings() > before)
    return time.monotonic()


def undisturbed(tmp_path, *flags):
    run(load_config([*SMALL, *flags, "--output_dir", str(tmp_path / "undisturbed")]))
    return tmp_path / "undisturbed"


@pytest.mark.slow
def test_killed_again_and_again_it_goes_on_takes_the_lost_one_in_and_trains_as_undisturbed(tmp_path, own):
    """MPJAX_TEST_KILLS=10 kills ten times: every second time the worker alone, else its command too."""
    random = np.random.default_rng(int(os.environ.get("MPJAX_TEST_SEED", "0")))
    flags = ["--steps", str(100 * KILLS + 20), "--loop.save_every", "30"]
    wanted = undisturbed(tmp_path, *flags)
    with company(tmp_path / "run", *SMALL, *flags, "--loop.callbacks", f"{own}:Hold") as started:
        for number in range(KILLS):
            whole, moment = number % 2 == 0, 100 * number + int(random.integers(2, 94))
            process = int(random.integers(1, 4)) if whole else int(random.integers(4))
            started.reach(moment)
            before, began = started.beginnings(), time.monotonic()
            started.kill(process, whole=whole)
            waited = [began, when_it_goes_on(started, before)]
            if whole:
                back = started.printed().count(" is there again")
                started.running[process] = started.start(process)
                started.wait_for_more(" is there again", back)
            (started.output / f"go{number + 1}").touch()
            if whole:
                before += 1
                waited.append(when_it_goes_on(started, before))
            line = [line for line in started.printed().splitlines() if " died after " in line][number]
            seconds = " and ".join(f"{end - start:.0f} s" for start, end in itertools.pairwise(waited))
            print(f"kill {number + 1}: {'command' if whole else 'worker'} {process}: {line}: {seconds}")
        (started.output / f"go{KILLS + 1}").touch()
        assert started.ends() == [0] * 4
    require_same_curve(started.folder, wanted)
    losses = [loss for loss, _ in curve(started.folder).values()]
    assert np.mean(np.abs(np.diff(losses)) > 1e-4) > 0.9  # another batch, or another order, would show


@pytest.mark.slow
def test_sigterm_to_one_costs_no_step_and_ctrl_c_ends_all_without_a_worker_left(tmp_path):
    flags = ["--steps", "1000000", "--loop.save_every", "0"]
    with company(tmp_path / "run", *SMALL, *flags) as started:
        started.reach(5)
        started.running[2].terminate()
        assert started.running[2].wait(WITHIN) == 143
        last = complete_checkpoints(started.folder / "checkpoints")[-1]
        assert last >= 5
        started.wait_for(lambda: f"\nresumed from step {last}\n" in started.printed())
        assert f"3 of 4 processes go on from the checkpoint of step {last}" in started.printed()
        started.reach(last + 5)
        workers = [started.worker_of(process) for process in (0, 1, 3)]
        for process in (0, 1, 3):
            started.running[process].send_signal(signal.SIGINT)
        assert started.ends() == [130, 130, 143, 130]
        started.wait_for(lambda: not any(map(is_there, workers)))
        saved = complete_checkpoints(started.folder / "checkpoints")[-1]
        assert saved > last
        assert f"stopped; the checkpoint of step {saved} is saved" in started.printed(1)


@pytest.mark.slow
def test_without_process_0_the_others_wait_until_it_is_back(tmp_path):
    flags = ["--steps", "1000000", "--loop.save_every", "10"]
    with company(tmp_path / "run", *SMALL, *flags) as started:
        started.reach(25)
        workers = [started.worker_of(process) for process in range(4)]
        started.running[0].kill()
        started.running[0].wait()
        started.wait_for(lambda: not any(map(is_there, workers)))
        started.wait_for(lambda: "process 0 does not answer: waiting up to 300 s" in started.printed(3))
        last = complete_checkpoints(started.folder / "checkpoints")[-1]
        started.running[0] = started.start(0, 4, "--resume")
        started.wait_for(lambda: f"\nresumed from step {last}\n" in started.printed())
        started.reach(last + 5)
        started.running[0].terminate()
        assert started.ends() == [143] * 4


IMPATIENT = """
import sys
from mpjax import cli
from mpjax.loop import terms

terms.DEATHS = 2
sys.exit(cli.train(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("callback", "code", "text"),
    [
        ("Fail", 1, "error: callback 'own.py:Fail' failed"),
        ("Die", 1, "error: workers died 2 times in a row before a new checkpoint was complete"),
    ],
)
def test_an_error_ends_the_run_at_once_and_deaths_after_some(tmp_path, own, callback, code, text):
    flags = ["--steps", "50", "--loop.save_every", "0", "--loop.callbacks", f"{own}:{callback}"]
    with company(tmp_path / "run", *SMALL, *flags, processes=0, program=("-c", IMPATIENT)) as started:
        started.running = [started.start(process, 2, OF_TEST="dies" if process else "") for process in range(2)]
        assert started.ends() == [code, code]
        for process in range(2):
            lines = [line for line in started.printed(process).splitlines() if line.startswith("error")]
            assert len(lines) == 1, lines
            assert lines[0].startswith(text) or "out of luck" in lines[0], lines


@pytest.mark.slow
def test_a_process_that_comes_back_with_other_settings_is_refused_and_the_others_go_on(tmp_path):
    flags = ["--steps", "1000000", "--loop.save_every", "10"]
    with company(tmp_path / "run", *SMALL, *flags, processes=2) as started:
        started.reach(12)
        started.running[1].kill()
        started.running[1].wait()
        other = started.start(1, 2, "--seed", "3")
        assert other.wait(WITHIN) == 2
        assert "seed: 0 on process 0, 3 on process 1" in started.printed(1)
        started.wait_for(lambda: "1 of 2 processes go on" in started.printed())
        started.reach(max(curve(started.folder)) + 5)
        started.running[0].terminate()
        assert started.running[0].wait(WITHIN) == 143


@pytest.mark.slow
def test_an_error_in_process_0_alone_ends_the_run_with_its_code_and_workers_import_what_the_command_does(
    tmp_path, monkeypatch
):
    (tmp_path / "queue.py").write_text("raise RuntimeError('of the working folder')")
    (tmp_path / "own.py").write_text(
        "import os\nclass Fail:\n    def __init__(self):\n        if os.environ['OF_TEST'] == 'fails':\n"
        "            raise RuntimeError('out of luck')\n    def ended(self, *_):\n        pass\n"
    )
    monkeypatch.chdir(tmp_path)
    flags = ["--steps", "5", "--loop.callbacks", f"{tmp_path}/own.py:Fail"]
    program = (str(pathlib.Path(__file__).parents[2] / "scripts" / "train.py"),)
    with company(tmp_path / "run", *SMALL, *flags, processes=0, program=program) as started:
        started.running = [started.start(process, 2, OF_TEST="" if process else "fails") for process in range(2)]
        assert started.ends() == [2, 2]
        for process in range(2):
            assert "error: process 0: --loop.callbacks" in started.printed(process)
        assert "go on" not in started.printed()
    (tmp_path / "own.py").write_text("class Fail:\n    def ended(self, *_):\n        pass\n")
    with company(tmp_path / "other", *SMALL, *flags, processes=0, program=program) as started:
        started.running = [started.start(process, 2) for process in range(2)]
        assert started.ends() == [0, 0]


# Settings

PLACE = ["--distributed.coordinator", "127.0.0.1:1", "--distributed.processes", "2", "--distributed.process", "0"]


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        ([], "--distributed.elastic is for a run of several processes: write --distributed.coordinator HOST:PORT"),
        ([*PLACE, "--seeds", "1", "2"], "--distributed.elastic with --seeds: train one seed per run"),
        ([*PLACE, "--profile"], "--distributed.elastic with --profile"),
        ([*PLACE, "--data.batch_size", "auto"], "--distributed.elastic with --data.batch_size auto"),
        ([*PLACE, "--mesh.data", "2"], "--distributed.elastic needs an axis of the mesh that follows the number"),
        ([*PLACE, "--mesh.data", "1", "--mesh.tensor", "-1"], "number of devices: --mesh.data -1 or --mesh.fsdp -1"),
    ],
    ids=["alone", "seeds", "profile", "batch", "mesh", "tensor"],
)
def test_settings_that_an_elastic_run_cannot_have_are_refused(flags, fault, capsys, tmp_path):
    assert cli.train(["--distributed.elastic", "--output_dir", str(tmp_path / "run"), *flags]) == 2
    assert fault in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_run_in_this_process_is_not_elastic(tmp_path):
    config = load_config([*PLACE, "--distributed.elastic", "--output_dir", str(tmp_path / "run")])
    with pytest.raises(UsageError, match="mpjax.run trains in this process"):
        run(config)

"""What a run of two hosts does when its network fails: what the user reads, the seconds until it ends or goes on.

It needs Linux and root (benchmarks/hosts.py). Each fault has a time limit and has to leave no process behind. Losses
have to be those of an undisturbed run, step by step, also where the run was started again.

python benchmarks/network_faults.py --output benchmarks/results/network_faults_cpu.json    # 20 minutes
python benchmarks/network_faults.py --only cable_for_5_seconds --only reboot
python benchmarks/network_faults.py --table benchmarks/results/network_faults_cpu.json     # as in docs/cluster.md
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable


sys.path.insert(0, str(pathlib.Path(__file__).parent))

from hosts import Host, Network, lacking, network
from machine import describe


STEPS, SAVED = 3000, 200
SMALL = shlex.split(f"""
--model.name mlp --model.width 8 --data.name synthetic:8x8x1:10 --data.batch_size 8 --data.eval_batch_size 6
--optimizer.schedule constant --optimizer.warmup 1 --optimizer.learning_rate 0.01 --precision.policy float32
--loop.log_every 1 --loop.eval_every 0 --loop.save_every {SAVED} --report.no_tensorboard --report.no_plot
""")
LIMIT = 200.0
"""Seconds after which a command counts as hanging."""


class Run:
    """One run: the same command on each host, as a user types it, and what it printed there."""

    def __init__(self, hosts: list[Host], folder: pathlib.Path, *flags: str, steps: int = STEPS, **how: str):
        self.hosts, self.folder, self.flags, self.steps = hosts, folder, flags, steps
        self.coordinator = how.pop("coordinator", f"{hosts[0].address}:1234")
        self.environment = {**os.environ, "JAX_PLATFORMS": "cpu", "MPJAX_SECRET": "of this run", **how}
        self.started: dict[int, tuple[subprocess.Popen, pathlib.Path]] = {}
        self.began, self.hangs = time.monotonic(), False

    def start(self, *numbers: int, coordinator: str = "", resume: bool = False) -> None:
        """Starts the command on these hosts, on all without a number."""
        self.began = time.monotonic()
        for number in numbers or range(len(self.hosts)):
            where = {"coordinator": coordinator or self.coordinator, "processes": len(self.hosts), "process": number}
            words = [*SMALL, "--steps", str(self.steps), *self.flags, "--output_dir", str(self.folder)]
            words += [f"--distributed.{name}={value}" for name, value in where.items()] + ["--resume"] * resume
            output = self.folder.with_suffix(f".{number}.{time.monotonic_ns()}")
            command = self.hosts[number].command(sys.executable, "scripts/train.py", *words)
            with output.open("w") as file:
                process = subprocess.Popen(command, env=self.environment, stdout=file, stderr=file)
            self.started[number] = process, output

    def losses(self) -> dict[int, float]:
        """The training loss of each step that is logged."""
        with contextlib.suppress(FileNotFoundError):
            lines = (self.folder / "metrics.jsonl").read_text().splitlines()
            rows = [json.loads(line) for line in lines if line.endswith("}")]
            return {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}
        return {}

    def reach(self, step: int, within: float = LIMIT) -> float:
        """Waits until a step is logged, and returns the seconds since `began`, the last start of a process."""
        began = time.monotonic()
        while max(self.losses(), default=0) < step:
            if time.monotonic() - began > within or all(p.poll() is not None for p, _ in self.started.values()):
                raise TimeoutError(f"no step {step}: {self.read()}")
            time.sleep(0.02)
        return time.monotonic() - self.began

    def ended(self, within: float = LIMIT) -> dict[int, int]:
        """Waits for the end on each host: exit codes. Those that hang are killed, and have the code -9."""
        until = time.monotonic() + within
        for number, (process, _) in self.started.items():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
            if process.poll() is None:
                self.hangs = True
                self.hosts[number].signal(signal.SIGKILL)
                process.wait(30)
        return {number: process.returncode for number, (process, _) in self.started.items()}

    def read(self) -> dict[int, str]:
        """What the user reads on each host, but for the lines of undisturbed training."""
        usual = re.compile(
            r"resum|(step|test) |\[Gloo\]|\d+ is connected|run folder|compiling|float32 as asked|\d+ of \d+ steps|"
            r"(policy|parameters|steps|time|throughput|loss scale|train \w+|test \w+|folder) +\S"
        )
        texts = {number: output.read_text() for number, (_, output) in self.started.items()}
        return {i: "\n".join(x for x in t.splitlines() if x and not usual.match(x)) for i, t in texts.items()}

    def left_behind(self) -> int:
        """The number of processes on the hosts, which have to be none after the end."""
        time.sleep(0.5)
        return sum(len(host.processes()) for host in self.hosts)


@dataclasses.dataclass
class Row:
    """What came of a fault; `read` is by host."""

    fault: str
    read: dict[int, str]
    codes: dict[int, int]
    seconds: float
    outcome: str
    steps_lost: int = 0
    left_behind: int = 0
    same_losses: bool | None = None


def undisturbed(folder: pathlib.Path, steps: int = STEPS) -> dict[int, float]:
    """The losses of a run that nothing disturbs."""
    with network(2) as joined:
        run = Run(joined.hosts, folder / "undisturbed", steps=steps)
        run.start()
        codes = run.ended()
        if codes != {0: 0, 1: 0}:
            raise RuntimeError(f"the undisturbed run ended with {codes}: {run.read()}")
        return run.losses()


def finished(run: Run, fault: str, expected: dict[int, float], *, lost: int = 0, seconds: float | None = None) -> Row:
    """Waits for the end of a run that goes on."""
    codes = run.ended()
    whole = {step: expected[step] for step in expected if step <= run.steps}
    took = time.monotonic() - run.began if seconds is None else seconds
    outcome = "trains" if set(codes.values()) == {0} else "ENDED"
    return Row(fault, run.read(), codes, took, outcome, lost, run.left_behind(), run.losses() == whole)


def refused(run: Run, fault: str) -> Row:
    """Waits for the end of a run that cannot start."""
    codes = run.ended()
    outcome = "HANGS" if run.hangs else "ends" if 0 not in codes.values() else "TRAINS"
    return Row(fault, run.read(), codes, time.monotonic() - run.began, outcome, 0, run.left_behind())


def after_an_end(run: Run, fault: str, expected: dict[int, float], since: float) -> Row:
    """Waits for the end of a run that a fault ends, starts it again, and counts the steps that are done twice."""
    codes = run.ended()
    seconds, read, left = time.monotonic() - since, run.read(), run.left_behind()
    reached = max(run.losses())
    last = max(int(entry.name) for entry in (run.folder / "checkpoints").iterdir() if entry.name.isdigit())
    for host in run.hosts:
        host.plug()
    run.start(resume=True)
    again = finished(run, fault, expected)
    outcome = "HANGS" if run.hangs else "ends" if again.outcome == "trains" else f"DOES NOT GO ON: {again.read}"
    lost = reached - last
    return Row(fault, read, codes, seconds, outcome, lost, left + again.left_behind, again.same_losses)


# The faults


Fault = Callable[[pathlib.Path, dict[int, float]], list[Row]]


def started_in_any_order(folder: pathlib.Path, expected: dict[int, float]) -> list[Row]:
    rows = []
    for first, second in ((0, 1), (1, 0)):
        with network(2) as joined:
            run = Run(joined.hosts, folder / f"order{first}", steps=200)
            run.start(first)
            time.sleep(10)
            run.start(second)
            seconds = run.reach(1)
            rows.append(finished(run, f"process {second} 10 s later", expected, seconds=seconds))
    return rows


def names(folder: pathlib.Path, expected: dict[int, float]) -> list[Row]:
    """Host names that are of no use to the others."""

    def debian(joined: Network) -> str:
        joined.hosts[0].know(host0="127.0.1.1")
        joined.hosts[1].know(host1="127.0.1.1", host0="10.77.0.1")
        return "host0:1234"

    def elsewhere(joined: Network) -> str:
        joined.hosts[1].other_network("10.66.1.1/24")
        joined.hosts[1].know(host1="10.66.1.1")
        return "10.77.0.1:1234"

    def unknown(joined: Network) -> str:
        for host in joined.hosts:
            host.know()
        return "10.77.0.1:1234"

    def ipv6(joined: Network) -> str:
        for host in joined.hosts:
            host.do(f"ip address del {host.address}/24 dev eth0")
            host.know()
        return "[fd77::1]:1234"

    rows = []
    for fault, prepare in {
        "/etc/hosts gives a host's own name 127.0.1.1": debian,
        "a host's name is of an interface that leads nowhere": elsewhere,
        "host names are unknown": unknown,
        "IPv6 only, host names unknown": ipv6,
    }.items():
        with network(2) as joined:
            run = Run(joined.hosts, folder / prepare.__name__, coordinator=prepare(joined), steps=200)
            run.start()
            rows.append(finished(run, fault, expected, seconds=run.reach(1)))
    return rows


def wrong_address(folder: pathlib.Path, expected: dict[int, float]) -> list[Row]:
    rows, patient = [], ("--distributed.timeout", "15")
    with network(2) as joined:
        run = Run(joined.hosts, folder / "unreachable", *patient, coordinator="10.99.0.1:1234")
        run.start()
        rows.append(refused(run, "the address of process 0 is of no host"))
    with network(2) as joined:
        joined.hosts[0].other_network("10.66.1.1/24")
        joined.hosts[0].know(host0="10.66.1.1")
        run = Run(joined.hosts, folder / "interface", *patient, coordinator="host0:1234")
        run.start()
        rows.append(refused(run, "process 0 knows its own name as the address of an interface that leads nowhere"))
    return rows


def ports(folder: pathlib.Path, expected: dict[int, float]) -> list[Row]:
    rows, patient = [], ("--distributed.timeout", "15")
    for fault, blocked in {"a firewall drops the port": "1234", "a firewall drops all ports but this one": ""}.items():
        with network(2) as joined:
            for host in joined.hosts:
                host.block(*([blocked] if blocked else ["1-1233", "1235-65534"]))
            run = Run(joined.hosts, folder / f"port{blocked}", *patient)
            run.start()
            rows.append(refused(run, fault))
    return rows


def cable_for_5_seconds(folder: pathlib.Path, expected: dict[int, float]) -> list[Row]:
    with network(2) as joined:
        run = Run(joined.hosts, folder / "cable5")
        run.start()
        run.reach(STEPS // 3)
        joined.hosts[1].pull()
        time.sleep(5)
        joined.hosts[1].plug()
        back = time.monotonic()
        before = max(run.losses())
        run.reach(before + 1)
        return [finished(run, "the cable of a host pulled for 5 s", expected, seconds=time.monotonic() - back)]


def ended(
    folder: pathlib.Path, expected: dict[int, float], fault: str, do: Callable[[Network, int], None]
) -> list[Row]:
    """Runs that end by what `do` does to the host of a process, each in turn; `fault` has a place for its number."""
    rows = []
    for number in range(2):
        with network(2) as joined:
            run = Run(joined.hosts, folder / f"{do.__name__}{number}")
            run.start()
            run.reach(STEPS // 3)
            since = time.monotonic()
            do(joined, number)
            rows.append(after_an_end(run, fault.format(number), expected, since))
    return rows


def cable_for_60_seconds(folder: pathlib.Path, expected: dict[int, float]) -> list[Row]:
    def pull(joined: Network, number: int) -> None:
        joined.hosts[number].pull()

    return ended(folder, expected, "the cable of process {} pulled for 60 s", pull)


def cable_before_the_start(folder: pathlib.Path, expected: dict[int, float]) -> list[Row]:
    with network(2) as joined:
        run = Run(joined.hosts, folder / "plugged", steps=200)
        joined.hosts[1].pull()
        run.start()
        time.sleep(20)
        joined.hosts[1].plug()
        return [finished(run, "a cable that is plugged in 20 s after the start", expected, seconds=run.reach(1))]


def reboot(folder: pathlib.Path, expected: dict[int, float]) -> list[Row]:
    return ended(folder, expected, "the host of process {} reboots", Network.reboot)


def two_runs(folder: pathlib.Path, expected: dict[int, float]) -> list[Row]:
    rows = []
    with network(2) as joined:
        both = [Run(joined.hosts, folder / f"side{i}", coordinator=f"10.77.0.1:{1234 + i}", steps=200) for i in (0, 1)]
        for run in both:
            run.start()
        seconds = max(run.reach(1) for run in both)
        rows.append(finished(both[1], "two runs, each with its port", expected, seconds=seconds))
        rows[0].same_losses = finished(both[0], "", expected).same_losses and rows[0].same_losses
        rows[0].left_behind = both[0].left_behind()
    with network(3) as joined:
        patient = ("--distributed.timeout", "20")
        one = Run(joined.hosts[:2], folder / "one", *patient, steps=200)
        other = Run([joined.hosts[0], joined.hosts[2]], folder / "two", *patient, MPJAX_SECRET="of another")
        one.start(0)
        time.sleep(5)
        other.start()
        time.sleep(5)
        one.start(1)
        rows.append(refused(other, "another run at the same address and port, with another secret"))
        first = finished(one, "", expected)
        rows[-1].same_losses, rows[-1].left_behind = first.same_losses, first.left_behind
    with network(3) as joined:
        one = Run(joined.hosts[:2], folder / "one_more", *patient, steps=200)
        other = Run([joined.hosts[0], joined.hosts[2]], folder / "two_more", *patient)
        one.start(0)
        time.sleep(5)
        other.start()
        time.sleep(5)
        one.start(1)
        rows.append(refused(other, "another run at the same address and port, with the same secret"))
        first = refused(one, "")
        rows[-1].read |= {number + 2: text for number, text in first.read.items()}
        rows[-1].codes |= {number + 2: code for number, code in first.codes.items()}
        rows[-1].left_behind = one.left_behind()
    return rows


def poor_lines(folder: pathlib.Path, expected: dict[int, float]) -> list[Row]:
    rows = []
    for fault, line in {
        "50 ms each way": {"delay": 0.05},
        "1 % of frames lost": {"loss": 0.01},
        "10 % of frames lost": {"loss": 0.1},
    }.items():
        with network(2, **line) as joined:
            run = Run(joined.hosts, folder / f"line{len(rows)}", steps=100)
            run.start()
            seconds = run.reach(1)
            rows.append(finished(run, fault, expected, seconds=seconds))
    return rows


FAULTS: dict[str, Fault] = {
    function.__name__: function
    for function in (
        started_in_any_order,
        names,
        wrong_address,
        ports,
        cable_before_the_start,
        cable_for_5_seconds,
        cable_for_60_seconds,
        reboot,
        two_runs,
        poor_lines,
    )
}


def table(rows: list[dict]) -> str:
    """The rows as a table of Markdown."""
    lines = ["| fault | it | seconds | steps lost | what the user read |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        read = {text: [] for text in row["read"].values()}
        for number, text in row["read"].items():
            read[text].append(number)
        texts = [f"{'both' if len(who) > 1 else f'host {who[0]}'}: {text}" for text, who in read.items() if text]
        shown = "<br>".join(texts).replace("|", "\\|").replace("\n", " ") or "nothing unusual"
        lines.append(f"| {row['fault']} | {row['outcome']} | {row['seconds']:.0f} | {row['steps_lost']} | {shown} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=pathlib.Path)
    parser.add_argument("--only", action="append", choices=FAULTS, help="may be repeated; all without it")
    parser.add_argument("--table", type=pathlib.Path, help="print the table of this file, and run nothing")
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.table.read_text())["faults"]))
        return
    if reason := lacking():
        sys.exit(f"error: {reason}")
    rows: list[dict] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("MPJAX_CACHE", f"{folder}/cache")
        expected = undisturbed(pathlib.Path(folder))
        for name in options.only or FAULTS:
            for row in FAULTS[name](pathlib.Path(folder), expected):
                rows.append(dataclasses.asdict(row))
                print(json.dumps(rows[-1], indent=1), flush=True)
    print(table(rows))
    if options.output:
        options.output.write_text(json.dumps({**describe(), "faults": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

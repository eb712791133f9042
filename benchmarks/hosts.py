"""Hosts for tests of networks, on one Linux machine: each with its own addresses, name, processes and cable.

A host is a process in namespaces of its own (network, name, mounts, processes), joined to the others by a veth pair and
a bridge. The kernel removes all of it when that process ends, and it ends with the program that made it, however that
ends. It needs root and the programs `ip` (iproute2), `setpriv`, `unshare`, `nsenter` and `mount`; `lacking` says what
is missing.

The bridge may be a program instead, which delays frames and loses some: it needs no traffic control of the kernel.
"""

import argparse
import contextlib
import heapq
import os
import pathlib
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator


ROOT = pathlib.Path(__file__).parent.parent
ENDS_WITH_US = ("setpriv", "--pdeathsig", "KILL")
"""Has the kernel kill a program when its parent ends, however that ends."""
NEW = ("unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")


def lacking() -> str:
    """Why this machine cannot have such hosts; "" if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "namespaces need Linux and root"
    for program in ("ip", "unshare", "nsenter", "mount", "setpriv"):
        if shutil.which(program) is None:
            return f"the program {program} is missing"
    trial = "ip link add v0 type veth peer name v1 && ip link add v2 type bridge && ip link set lo up"
    tried = subprocess.run([*NEW, "sh", "-c", trial], check=False, capture_output=True, text=True)
    return f"no namespaces here: {tried.stderr.strip()[-200:]}" if tried.returncode else ""


class Namespace:
    """Namespaces that last as long as a sleeping process in them, which is number 1 there."""

    def __init__(self, name: str):
        self.name = name
        self._holder = subprocess.Popen(
            [*ENDS_WITH_US, *NEW, "sleep", "infinity"], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.first = 0
        while not self.first:
            time.sleep(0.01)
            children = pathlib.Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text().split()
            if children and pathlib.Path(f"/proc/{children[0]}/comm").read_text() == "sleep\n":
                self.first = int(children[0])
        self.do(f"hostname {name} && ip link set lo up")

    def command(self, *words: str | os.PathLike) -> list[str]:
        """The command line that runs `words` in here, in the repository's folder."""
        return [
            "nsenter",
            f"--target={self.first}",
            "--net",
            "--uts",
            "--mount",
            "--pid",
            f"--wd={ROOT}",
            *map(str, words),
        ]

    def do(self, script: str) -> str:
        """Runs a script of `sh`, and returns what it prints."""
        command = self.command("sh", "-c", script)
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
        if done.returncode:
            raise RuntimeError(f"{self.name}: {script}: {done.stderr}")
        return done.stdout

    def processes(self) -> list[int]:
        """The processes in here that run, but for the first; zombies are none."""
        mine, found = os.readlink(f"/proc/{self.first}/ns/pid"), []
        for entry in pathlib.Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and os.readlink(entry / "ns/pid") == mine and int(entry.name) != self.first:
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                    found += [int(entry.name)] if state != "Z" else []
        return found

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to all processes in here."""
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)

    def end(self) -> None:
        """Kills all processes in here, and with them all that is in here."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.first, signal.SIGKILL)
        self._holder.wait(30)


class Host(Namespace):
    """A host number `number` with one cable to `switch`, and addresses 10.77.0.(number + 1) and fd77::(number + 1)."""

    def __init__(self, number: int, switch: Namespace, file: pathlib.Path, *, bridged: bool):
        super().__init__(f"host{number}")
        self.number, self.switch, self.port = number, switch, f"p{number}"
        self.address, self.address6 = f"10.77.0.{number + 1}", f"fd77::{number + 1}"
        self._file, self._bridged = file, bridged
        pair = f"ip link add {self.port} netns {switch.first} type veth peer name eth0 netns {self.first}"
        subprocess.run(pair.split(), check=True)
        switch.do(f"ip link set {self.port} up {'master bridge' if bridged else ''}")
        # Frames of one segment each, with their checksums: what passes a program passes a cable.
        self.do(
            "ip link set eth0 gso_max_segs 1 gro_max_size 1500; ip link set eth0 up; "
            f"ip address add {self.address}/24 dev eth0; ip address add {self.address6}/64 dev eth0 nodad"
        )

    def know(self, **names: str) -> None:
        """Writes the host's /etc/hosts: names, besides localhost and what is below, and their addresses."""
        lines = ["127.0.0.1 localhost", "::1 localhost", *(f"{address} {name}" for name, address in names.items())]
        self._file.write_text("\n".join(lines) + "\n")
        self.do(f"mount --bind {self._file} /etc/hosts")

    def pull(self) -> None:
        """Pulls the cable."""
        self.switch.do(f"ip link set {self.port} down")

    def plug(self) -> None:
        """Puts the cable back."""
        self.switch.do(f"ip link set {self.port} up {'master bridge' if self._bridged else ''}")

    def block(self, *ports: str) -> None:
        """Drops what others send to TCP ports of this host (one, or some as 1-99), as a firewall does.

        Answers from their port 1234 pass.
        """
        for ip in ("ip -4 rule", "ip -6 rule"):  # the rule of local addresses is the first, and has to come later
            drop = [f"{ip} add pref 2 iif eth0 ipproto tcp dport {port} blackhole" for port in ports]
            answers = f"{ip} add pref 1 iif eth0 ipproto tcp sport 1234 lookup local"
            self.do("; ".join([f"{ip} add pref 3 lookup local", *drop, answers, f"{ip} del pref 0"]))

    def other_network(self, address: str) -> None:
        """Adds an interface eth1 that leads nowhere."""
        self.do(
            "ip link add eth1 type veth peer name nowhere && ip link set eth1 up && ip link set nowhere up && "
            f"ip address add {address} dev eth1"
        )


class Network:
    """Hosts on one network; with a delay (seconds each way) or a loss (share of frames) a program joins two of them."""

    def __init__(self, count: int, folder: pathlib.Path, *, delay: float = 0.0, loss: float = 0.0):
        self.folder, self._relay = folder, None
        self.hosts: list[Host] = []
        self.switch = Namespace("switch")
        self._slow = bool(delay or loss)
        if not self._slow:
            self.switch.do("ip link add bridge type bridge && ip link set bridge up")
        for number in range(count):
            self.hosts.append(self._host(number))
        if self._slow:
            ports = [host.port for host in self.hosts]
            relay = [sys.executable, __file__, "--delay", str(delay), "--loss", str(loss), *ports]
            self._relay = subprocess.Popen(self.switch.command(*relay), stdin=subprocess.DEVNULL)
            time.sleep(0.5)

    def _host(self, number: int) -> Host:
        host = Host(number, self.switch, self.folder / f"hosts{number}", bridged=not self._slow)
        host.know(**{f"host{i}": f"10.77.0.{i + 1}" for i in range(10)})
        return host

    def reboot(self, number: int) -> None:
        """Kills all of a host at once, as a power cut does; its cable is dead for two seconds, then it is back."""
        self.hosts[number].end()
        time.sleep(2)
        self.hosts[number] = self._host(number)

    def end(self) -> None:
        """Ends all hosts."""
        for namespace in (*self.hosts, self.switch):
            namespace.end()
        if self._relay:
            self._relay.wait(30)


@contextlib.contextmanager
def network(count: int, *, delay: float = 0.0, loss: float = 0.0) -> Iterator[Network]:
    """A context with `count` hosts on one network, which are gone after it."""
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder:
        joined = Network(count, pathlib.Path(folder), delay=delay, loss=loss)
        try:
            yield joined
        finally:
            joined.end()


def relay(ports: list[str], delay: float, loss: float, seed: int = 0) -> None:
    """Carries frames between network interfaces until it is killed: each is late by `delay`, and lost with `loss`.

    Headers of virtio stand before the frames, so that a checksum that the sender has left to its device stays so.
    """
    packet, header = 263, 15  # SOL_PACKET, PACKET_VNET_HDR
    lines = []
    for port in ports:
        line = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
        line.setsockopt(packet, header, 1)
        line.setsockopt(packet, 23, 1)  # PACKET_IGNORE_OUTGOING
        line.bind((port, 3))  # ETH_P_ALL
        line.setblocking(False)
        lines.append(line)
    waiting: list[tuple[float, int, int, bytes]] = []
    draw, count = random.Random(seed), 0
    while True:
        left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for line in select.select(lines, [], [], left)[0]:
            with contextlib.suppress(OSError):  # nothing is left, or the cable is pulled
                while True:
                    frame = line.recv(2**17)
                    if draw.random() >= loss:
                        count += 1
                        heapq.heappush(waiting, (time.monotonic() + delay, count, lines.index(line), frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, source, frame = heapq.heappop(waiting)
            for number, line in enumerate(lines):
                if number != source:
                    with contextlib.suppress(OSError):  # a full queue loses a frame, and so does a cable that is pulled
                        line.send(frame)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=relay.__doc__)
    parser.add_argument("ports", nargs="+")
    parser.add_argument("--delay", type=float, required=True, help="seconds")
    parser.add_argument("--loss", type=float, required=True, help="share of frames")
    options = parser.parse_args()
    relay(options.ports, options.delay, options.loss)

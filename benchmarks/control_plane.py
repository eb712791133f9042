"""The control plane of a run of many processes, without devices: start-up time, memory and messages of process 0.

Process 0 is a process of its own, as in a run. The other members are in several processes, each with many: every member
enters through the door, has a client of JAX's coordination service, and gathers and beats as in a run.

python benchmarks/control_plane.py --members 1024 --output benchmarks/results/control_plane_cpu.json
"""

import argparse
import asyncio
import concurrent.futures
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import threading
import time


sys.path.insert(0, str(pathlib.Path(__file__).parent))

FEW = 64
"""Members in one process."""


def memory() -> dict[str, float]:
    """The resident memory of this process and its most, in MB."""
    lines = dict(line.split(":", 1) for line in pathlib.Path("/proc/self/status").read_text().splitlines())
    return {name: int(lines[key].split()[0]) / 1000 for name, key in (("now", "VmRSS"), ("most", "VmHWM"))}


class Counted:
    """Counts the messages and the bytes that process 0 sends and passes on, through all its streams."""

    def __init__(self):
        self.messages = self.bytes = 0
        write = asyncio.StreamWriter.write

        def counted(writer: asyncio.StreamWriter, content: bytes) -> None:
            self.messages, self.bytes = self.messages + 1, self.bytes + len(content)
            write(writer, content)

        asyncio.StreamWriter.write = counted  # pyright: ignore[reportAttributeAccessIssue]

    def since(self, before: tuple[int, int] = (0, 0)) -> dict[str, int]:
        return {"messages": self.messages - before[0], "bytes": self.bytes - before[1]}


def first(members: int, port: int, idle: float) -> dict:
    """Process 0: what it takes."""
    import mpjax.loop.join
    from mpjax.loop import Company, Seat

    found: dict = {"memory": {"mpjax.loop imported": memory()}}
    import jax

    found["memory"]["jax imported"] = memory()
    counted, began = Counted(), time.monotonic()
    seat, company = Seat(f"127.0.0.1:{port}", members, 0), Company(0, members)
    with tempfile.TemporaryDirectory(prefix="mpjax-") as folder:
        address = mpjax.loop.join.enter(company, seat, {"about": "x" * 2000}, b"secret", f"{folder}/jax", timeout=300)
        found["seconds until all have entered"] = time.monotonic() - began
        found["memory"]["all entered"] = memory()
        mpjax.loop.join.start_jax(company, seat, f"{folder}/jax", address)
    found["seconds until all have gathered"] = time.monotonic() - began
    found["memory"]["all gathered"] = memory()
    found["start"] = counted.since()
    before = counted.messages, counted.bytes
    time.sleep(idle)
    found[f"idle for {idle:g} s"] = counted.since(before)
    before, began = (counted.messages, counted.bytes), time.monotonic()
    company.gather(0)
    found["one gather"] = counted.since(before) | {"seconds": time.monotonic() - began}
    found["memory"]["after that"] = memory()
    found["threads"] = threading.active_count(), len(os.listdir("/proc/self/task"))
    found["files"] = len(os.listdir("/proc/self/fd"))
    print(json.dumps(found), flush=True)
    del jax
    os._exit(0)


def others(members: int, port: int, mine: range, idle: float) -> None:
    """Some of the other members, each in threads of its own."""
    # `jax.distributed.initialize` serves one member of a process.
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    import mpjax.loop.join
    from mpjax.loop import Company, Seat

    clients = []

    def join(process: int) -> None:
        seat, company = Seat(f"127.0.0.1:{port}", members, process), Company(process, members)
        company.lost = lambda process, text="": None
        with tempfile.TemporaryDirectory(prefix="mpjax-") as folder:
            about = {"about": "x" * 2000}
            mpjax.loop.join.enter(company, seat, about, b"secret", f"{folder}/jax", timeout=300)
            client = _jax.get_distributed_runtime_client(
                f"unix:{folder}/jax", process, init_timeout=300, use_compression=True, heartbeat_timeout=120
            )
            clients.append(client)
            client.connect()
        company.begin(client)
        time.sleep(idle)
        company.gather(0)

    with concurrent.futures.ThreadPoolExecutor(len(mine)) as pool:
        for joining in [pool.submit(join, process) for process in mine]:
            joining.result()
    time.sleep(300)  # process 0 ends first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=1024)
    parser.add_argument("--idle", type=float, default=30.0, help="seconds for which messages are counted")
    parser.add_argument("--output", type=pathlib.Path)
    parser.add_argument("--part", type=int, nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        port, begin, end = options.part
        first(options.members, port, options.idle) if begin == 0 else others(
            options.members, port, range(begin, end), options.idle
        )
        return
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    groups = [(0, 1), *((i, min(i + FEW, options.members)) for i in range(1, options.members, FEW))]
    command = [sys.executable, __file__, "--members", str(options.members), "--idle", str(options.idle), "--part"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    started = [
        subprocess.Popen(
            [*command, *map(str, (port, *group))], env=environment, stdout=subprocess.PIPE if i == 0 else None
        )
        for i, group in enumerate(groups)
    ]
    try:
        text, _ = started[0].communicate(timeout=400)
    finally:
        for process in started:
            process.kill()
            process.wait()
    found = json.loads(text)
    print(json.dumps(found, indent=1))
    if options.output:
        from machine import describe

        options.output.write_text(json.dumps({**describe(), "members": options.members, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()

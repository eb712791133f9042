"""The one port of a run: processes that know its secret enter, and process 0 sees who is there and who has died.

JAX's coordination service can do neither (docs/design.md). It listens in a private folder, and is reached through here.
"""

import asyncio
import contextlib
import math
import secrets
import socket
import threading
from collections.abc import Callable, Mapping

from mpjax.loop.cluster import Seat
from mpjax.loop.secret import opened, sealed


class Door:
    """Process 0's end of all connections: what each process said in `knock` is in `abouts`, who is connected `inside`.

    It listens until `verdict` is set: to a fault, for which all are refused, or to "" and the socket that they get to.
    `address` is the one of this machine that they have reached: not of the loopback, unless all came over that.
    """

    def __init__(self, listener: socket.socket, seat: Seat, about: Mapping, key: bytes, lost: Callable[[int], None]):
        self.abouts, self.inside, self._seat, self._key, self._lost = {0: about}, set[int](), seat, key, lost
        self.verdict: tuple[str, str] | None = None
        self.address = ""
        self._tasks: list[asyncio.Task | None] = []  # an event loop does not keep tasks from being collected
        threading.Thread(target=asyncio.run, args=(self._serve(listener),), daemon=True).start()

    async def _serve(self, listener: socket.socket) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # tasks that wait when the program ends
        server = await asyncio.start_server(self._meet, sock=listener, limit=2**20, backlog=4096)
        while not self.verdict:
            await asyncio.sleep(0.05)
        server.close()
        await asyncio.sleep(5 if self.verdict[0] else math.inf)

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(Exception):  # a stranger may send and do anything
            writer.write(f"{(nonce := secrets.token_hex(16))}\n".encode())
            hello = opened(self._key, nonce, await asyncio.wait_for(reader.readline(), 5))
            process, path, fault = hello["process"], "", self._no_seat(hello["process"], hello["processes"])
            if not fault:
                about = {name: value + "" for name, value in hello["about"].items()}
                if not self.address or is_loopback(self.address):
                    self.address = address_of(writer.get_extra_info("socket"))
                self.abouts[process] = self.abouts[0] if about == self.abouts[0] else about  # held once
                while not self.verdict:
                    await asyncio.sleep(0.05)
                    if reader.at_eof() and not self.verdict:
                        raise EOFError(self.abouts.pop(process))  # it has ended; another may come in its place
                fault, path = self.verdict
            writer.write(sealed(self._key, hello["nonce"], {"fault": fault, "address": self.address}))
            if not fault:
                self._tasks.append(asyncio.current_task())
                self.inside.add(process)
                await _carry((reader, writer), service := await _opened_at(path))
                service[1].close()
                self.inside.remove(process)
                self._lost(process)
        writer.close()

    def _no_seat(self, process: int, processes: int) -> str:
        if processes != self._seat.processes:
            return (
                f"--distributed.processes is {self._seat.processes} on process 0 and {processes} on process {process}"
            )
        twice = process in self.abouts or process not in range(processes)
        return f"there are two processes with --distributed.process {process}: number them 0 to {processes - 1}" * twice


def knock(connection: socket.socket, seat: Seat, about: Mapping, key: bytes) -> tuple[str, str]:
    """Enters; returns why process 0 refuses ("" if it does not), and the address at which others reach this process.

    That is the end of `connection` here. A process that came over the loopback is on the machine of process 0, which
    knows how others reach it.

    Raises:
      OSError, ValueError: what listens is not process 0.
    """
    with connection.makefile("rb", buffering=0) as lines:
        nonce, mine = lines.readline(100).decode().strip(), secrets.token_hex(16)
        about = {"process": seat.process, "processes": seat.processes, "about": dict(about), "nonce": mine}
        connection.sendall(sealed(key, nonce, about))
        answer = opened(key, mine, lines.readline(2**20))
        here = address_of(connection)
        return answer["fault"], answer.get("address", here) if is_loopback(here) else here


def address_of(connection: socket.socket) -> str:
    """The address of this machine at which a connection ends: of IPv4 also where the socket is one of IPv6."""
    return str(connection.getsockname()[0]).removeprefix("::ffff:")


def is_loopback(address: str) -> bool:
    """True if only processes of the same machine reach the address."""
    return address.startswith("127.") or address == "::1"


def open_at(path: str, connection: socket.socket, lost: Callable[[int], None]) -> None:
    """Joins `connection` to the first that connects to the Unix socket `path`; calls `lost(0)` once it breaks."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    listener.setblocking(False)
    threading.Thread(target=asyncio.run, args=(_join(listener, connection, lost),), daemon=True).start()


async def _join(listener: socket.socket, connection: socket.socket, lost: Callable[[int], None]) -> None:
    (loop := asyncio.get_running_loop()).set_exception_handler(lambda *_: None)
    with listener:
        here = await asyncio.open_connection(sock=(await loop.sock_accept(listener))[0])
    await _carry(await asyncio.open_connection(sock=connection), here)
    lost(0)
    if not here[0].at_eof():
        await asyncio.sleep(math.inf)  # JAX would end this process, with a stack trace, if its side were closed
    here[1].close()


async def _opened_at(path: str) -> tuple:
    while True:
        with contextlib.suppress(OSError):  # JAX's service is about to start
            return await asyncio.open_unix_connection(path)
        await asyncio.sleep(0.05)


async def _carry(near: tuple, far: tuple) -> None:
    """Copies both ways between two pairs of streams until `near` has ended, which it does if `far` ends."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while content := await reader.read(2**18):
                writer.write(content)
                await writer.drain()

    back = asyncio.ensure_future(copy(far[0], near[1]))
    back.add_done_callback(lambda _: near[1].close())
    await copy(near[0], far[1])
    near[1].close()

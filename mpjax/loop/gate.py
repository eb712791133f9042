"""The port of an elastic run, open to its processes as long as it lasts: they come, and come again."""

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Mapping

from mpjax.loop.cluster import Seat
from mpjax.loop.join import difference
from mpjax.loop.links import Events, Link
from mpjax.loop.port import connect
from mpjax.loop.secret import opened, sealed


STRANGERS = 200
"""Connections that may be open before they have shown the secret. Of more, the oldest ends: a process comes again."""

PATIENCE = 5.0
"""Seconds in which a connection has to show the secret."""


def open_gate(
    listener: socket.socket, seat: Seat, about: Mapping[str, str], key: bytes, events: Events, links: dict[int, Link]
) -> None:
    """Lets processes in that know the secret, in threads: each gets a link in `links`, and an event "door".

    A process with other settings or code than process 0, `about`, is refused and told so. One whose number is taken is
    not answered: the connection that has it may be of a machine that is gone, which the system notices in 30 seconds.
    """
    changing = threading.Lock()
    strangers: dict[socket.socket, None] = {}  # in the order in which they came

    def meet(connection: socket.socket) -> None:
        connection.settimeout(PATIENCE)
        entered = False
        with contextlib.suppress(OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
            entered = enters(connection)
        with changing:
            strangers.pop(connection, None)
        if not entered:
            connection.close()

    def enters(connection: socket.socket) -> bool:
        nonce = secrets.token_hex(16)
        connection.sendall(f"{nonce}\n".encode())
        hello = opened(key, nonce, _line(connection))
        process, theirs = hello["process"], dict(hello["about"])
        host = str(theirs.pop("host"))
        fault = difference({0: about, process: theirs}) if process else ""
        if hello["processes"] != seat.processes:
            fault = f"--distributed.processes is {seat.processes} on process 0, {hello['processes']} on {process}"
        if fault:
            connection.sendall(sealed(key, hello["nonce"], {"fault": fault}))
            return False
        with changing:
            if process in links or process not in range(seat.processes) or connection not in strangers:
                return False
            connection.sendall(sealed(key, hello["nonce"], {"fault": ""}))
            connection.settimeout(None)
            links[process] = Link(connection, events, process)
        events.put(("door", {"process": process, "host": host}))
        return True

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # it has ended already, or this process has too many files open
                time.sleep(0.05)
                continue
            with changing:
                strangers[connection] = None
                if len(strangers) > STRANGERS:
                    oldest = next(iter(strangers))
                    del strangers[oldest]
                    with contextlib.suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)  # its thread then closes it
            threading.Thread(target=meet, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()


def _line(connection: socket.socket) -> bytes:
    """Reads the line that a process sends first, and nothing follows; TimeoutError if it is not there in `PATIENCE`."""
    ends, line = time.monotonic() + PATIENCE, b""
    while not line.endswith(b"\n") and len(line) < 2**20:
        if (left := ends - time.monotonic()) <= 0:
            raise TimeoutError
        connection.settimeout(left)
        if not (piece := connection.recv(2**16)):
            break
        line += piece
    return line


def reach(seat: Seat, about: Mapping[str, str], key: bytes, timeout: float) -> socket.socket:
    """Connects to the gate of process 0 within `timeout` seconds, and returns the connection.

    Raises:
      UsageError: process 0 cannot be reached, or refuses this process.
    """
    stranger = (
        "what listens there is not process 0 of this run, has another secret, has ended, or has a process "
        f"{seat.process} already"
    )
    about = {**about, "host": socket.gethostname()}
    connection, _ = connect(seat, about, key, timeout=timeout, answer=10.0, stranger=stranger)
    return connection

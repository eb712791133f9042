"""Sends and receives messages between the processes of a run: JSON objects over TCP, one on each line."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

from mpjax import strict_json


LONGEST = 2**26
"""Bytes of the longest message that is read; a program that sends a longer one is no process of a run."""

Message = dict[str, Any]


class Connection:
    """A TCP connection to another process. Any thread may send; only one may receive."""

    def __init__(self, connection: socket.socket):
        self._socket = connection
        self._file = connection.makefile("rb")
        self._sending = threading.Lock()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _notice_a_dead_machine(connection)

    def send(self, message: Message) -> bool:
        """Sends a message; returns False if the other end is gone. Another thread's message is finished first."""
        try:
            with self._sending:
                self._socket.sendall(strict_json.encode(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self, seconds: float | None = None) -> Message | None:
        """Waits for a message; None if the other end is gone, is silent for `seconds`, or sends no JSON object.

        Without `seconds`, it waits as long as the connection lasts. A message longer than `LONGEST` is no JSON object.
        """
        with contextlib.suppress(OSError, ValueError, RecursionError):
            self._socket.settimeout(seconds)
            text = self._file.readline(LONGEST)
            self._socket.settimeout(None)
            message = strict_json.decode(text.decode())
            return message if isinstance(message, dict) else None
        return None

    def messages(self) -> Iterator[Message]:
        """Waits for messages and yields them, until the other end is gone or sends no JSON object."""
        while (message := self.receive()) is not None:
            yield message

    def close(self) -> None:
        """Closes the connection, even if the other end is gone; a thread that waits in `receive` gets None."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._file.close()
        self._socket.close()


def _notice_a_dead_machine(connection: socket.socket) -> None:
    """Makes the system end the connection after 30 seconds without an answer from the other machine.

    It does nothing for options that the system lacks.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 30_000)):
        if hasattr(socket, option):  # Linux has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

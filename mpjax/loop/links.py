"""Connections over which the parts of an elastic run tell each other values, one line of JSON each."""

import contextlib
import queue
import socket
import threading
from collections.abc import Mapping
from typing import Any

from mpjax import strict_json


Events = queue.SimpleQueue[tuple[Any, dict[str, Any]]]
"""What arrives, with the name of the link that it came by; `GONE` once the other end has closed the link."""

GONE: dict[str, Any] = {"kind": "gone"}

_LONGEST = 2**20


class Link:
    """One end of a connection. A thread puts what arrives into `events`, until the other end closes it.

    Args:
      connection: the connected socket, of which nothing has been read that is not used.
      events: where (`name`, message) is put, and at the end (`name`, GONE).
      name: what the events are put under.
    """

    def __init__(self, connection: socket.socket, events: Events, name: Any):
        self._connection, self._events, self._name = connection, events, name
        self._sending, self._closed = threading.Lock(), False
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, **message: Any) -> None:
        """Sends a message. If the other end has gone, nothing is sent: the event of its end is on the way."""
        with self._sending, contextlib.suppress(OSError):
            self._connection.sendall(f"{strict_json.encode(message)}\n".encode())

    def close(self) -> None:
        """Ends the connection at both ends, without an event here."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        # Whoever is at the other end has shown the secret, or is a process of this run on this machine.
        with contextlib.suppress(OSError, ValueError, RecursionError), self._connection.makefile("rb") as lines:
            while line := lines.readline(_LONGEST):
                message = strict_json.decode(line.decode())
                if isinstance(message, Mapping):
                    self._events.put((self._name, dict(message)))
        if not self._closed:
            self.close()
            self._events.put((self._name, GONE))
        self._connection.close()

"""Connects the processes of a run: they gather values, stop after the same step, and all end if one fails."""

import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, NoReturn

from mpjax.errors import printable
from mpjax.loop.messages import Connection, Message
from mpjax.loop.signals import StopRequest


GRACE = 3.0
"""Seconds that a process waits after the error of another before it ends.

Most errors occur in all processes at about the same time, and each then reports its own.
"""

BEAT = 5.0
"""Seconds between heartbeats."""

SILENCE = 60.0
"""Seconds without a message after which a process counts as lost: it is stopped, or its machine hangs."""

_NOWHERE = -1


class Alone:
    """Takes the place of `Company` in a run of one process."""

    first, process, processes = True, 0, 1

    def __init__(self):
        self.stop = StopRequest()

    def gather(self, value: Any) -> list:
        """Puts `value` in a list: the values of all processes, of which there is one."""
        return [value]


class Company:
    """The processes of one run. Each is connected to process 0, which forwards the messages that are for all.

    Creating it starts daemon threads. One for each connection receives messages, and ends this process, with a message
    on stderr, if the process at the other end has died: without it, this process may wait forever in a collective. One
    more sends heartbeats, and ends this process if another sends no message for `SILENCE` seconds.

    Attributes:
      process: the number of this process, from 0.
      processes: the number of processes.
      signal_number: the signal for which all processes stop; None before a request.

    Args:
      process: the number of this process.
      processes: the number of processes.
      lines: the connections by process, from `call_roll`: on process 0 to all others, elsewhere to process 0 only.
    """

    def __init__(self, process: int, processes: int, lines: Mapping[int, Connection]):
        self.process, self.processes = process, processes
        self._lines = lines
        self._changed = threading.Condition()  # its lock is reentrant
        # The values of complete gathers by number; on process 0 also those received so far, by process
        self._gathered: dict[int, list] = {}
        self._coming: dict[int, dict[int, Any]] = {}
        self._number = 0
        # Stopping together
        self._position = _NOWHERE
        self.signal_number: int | None = None
        self._positions: dict[int, int] = {}
        self._stop_after: int | None = None
        # Ending
        self._over = False
        self._failed = False
        self._explained: set[int] = set()  # processes that have said why they end
        self._silent: dict[int, float] = dict.fromkeys(lines, 0.0)  # seconds since the last message
        self._hosts: dict[int, str] = {}
        self._requests: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._listeners = [
            threading.Thread(target=self._listen, args=item, daemon=True, name=f"process {item[0]}")
            for item in lines.items()
        ]
        others = [threading.Thread(target=work, daemon=True) for work in (self._pass_on_requests, self._beat)]
        for thread in [*self._listeners, *others]:
            thread.start()
        self._give_sign()

    @property
    def first(self) -> bool:
        """True for process 0, which prints and writes files for all."""
        return self.process == 0

    def gather(self, value: Any) -> list:
        """Waits until all processes have called it, and returns their values, in the order of processes.

        Every process has to make the same calls in the same order. The value has to be JSON.
        """
        return self._gather(value, last=False)

    def disband(self) -> None:
        """Waits until all processes have called it. Afterwards, the end of one does not end the others."""
        self._gather(None, last=True)

    def _gather(self, value: Any, *, last: bool) -> list:
        number, self._number = self._number, self._number + 1
        self._tell_first({"kind": "value", "number": number, "value": value, "last": last})
        with self._changed:
            self._changed.wait_for(lambda: number in self._gathered)
            return self._gathered.pop(number)

    @property
    def stop(self) -> "Company":
        """This object itself, as the request to stop (a `signals.Stop`) that all processes share."""
        return self

    def ask(self, signal_number: int) -> None:
        """Asks all processes to stop after the same step, and returns at once; a signal handler may call it.

        The first request of any process counts.
        """
        self._requests.put(signal_number)  # not sent here: the interrupted code may hold the lock

    def due(self, position: int) -> bool:
        """True if all processes stop after step number `position`; after a request, first waits for their agreement.

        Every process calls it with the same increasing positions. After a request, each process sends the position of
        its last call, and waits for the largest of all. All stop at the first position beyond the largest. Without a
        request, nothing is sent. The devices are never waited for.
        """
        with self._changed:
            if self.signal_number is not None:
                self._changed.wait_for(lambda: self._stop_after is not None)
            self._position = position
            return self._stop_after is not None and position > self._stop_after

    def fail(self, text: str, code: int) -> None:
        """Tells the others the error with which this process is about to end: its message and its exit code.

        `GRACE` seconds later, they print the message and end with the same exit code.
        """
        self._failed = True
        self._tell_first({"kind": "failed", "process": self.process, "text": text, "code": code})

    def end(self, code: int) -> NoReturn:
        """Flushes the output and ends this process by `os._exit`: JAX's shutdown would wait for dead processes.

        Process 0 first waits up to 2 * `GRACE` seconds for the others to end.
        """
        flushing = threading.Thread(target=_flush, daemon=True)
        flushing.start()
        flushing.join(1.0)  # a reader that has stopped would block the flush
        if self.first:  # JAX ends the others with a stack trace once its service, in this process, is gone
            ends = time.monotonic() + 2 * GRACE
            for thread in self._listeners:
                if thread is not threading.current_thread():
                    thread.join(max(0.0, ends - time.monotonic()))
        os._exit(code)

    # Listening

    def _listen(self, process: int, line: Connection) -> None:
        for message in line.messages():
            self._silent[process] = 0.0
            if message["kind"] == "alive":
                self._hosts[process] = message["host"]
            else:
                self._from_member(process, message) if self.first else self._from_first(message)
        self._lose(process, "has ended without a word: it was killed, or its machine is gone")

    def _beat(self) -> None:
        """Sends heartbeats in a loop, and ends the run if another process sends no message for `SILENCE` seconds.

        It adds up the seconds between its own heartbeats, which pause while this process is suspended. So processes
        that are suspended and continued together go on.
        """
        while not self._over:
            time.sleep(BEAT)
            self._give_sign()
            for process in self._lines:
                self._silent[process] += BEAT
                if self._silent[process] > SILENCE:
                    where = self._hosts.get(process, "an unknown host")
                    reason = "it is stopped, or its host hangs; end it there"
                    self._lose(process, f"on {where} has not answered for {SILENCE:g} s: {reason}")

    def _give_sign(self) -> None:
        for line in self._lines.values():
            line.send({"kind": "alive", "host": socket.gethostname()})

    def _lose(self, process: int, text: str) -> None:
        """Ends the run because `process` is dead or silent, as `text` says.

        It does nothing if the run is over, if this process has failed, or if `process` has said why it ends.
        """
        with self._changed:
            if not (self._over or self._failed or process in self._explained):
                self._from_first({"kind": "lost", "process": process, "text": text, "code": 1})

    def _pass_on_requests(self) -> None:
        while True:
            self._tell_first({"kind": "stop", "signal": self._requests.get()})

    def _tell_first(self, message: Message) -> None:
        if self.first:
            self._from_member(0, message)
        else:
            self._lines[0].send(message)

    def _tell_all(self, message: Message) -> None:
        for line in self._lines.values():
            line.send(message)
        self._from_first(message)

    def _from_member(self, process: int, message: Message) -> None:
        """Handles a message from process number `process`; runs on process 0 only.

        It collects values and positions until all processes have sent theirs, and then sends the result to all. It
        forwards errors, and the first request to stop.
        """
        with self._changed:
            match message["kind"]:
                case "value":
                    number = message["number"]
                    values = self._coming.setdefault(number, {})
                    values[process] = message["value"]
                    if len(values) == self.processes:
                        ordered = [values[index] for index in range(self.processes)]
                        del self._coming[number]
                        self._tell_all({"kind": "values", "number": number, "values": ordered, "last": message["last"]})
                case "stop" if self.signal_number is None:
                    self._tell_all({"kind": "where", "signal": message["signal"]})
                case "at":
                    self._positions[process] = message["position"]
                    if len(self._positions) == self.processes:
                        self._tell_all({"kind": "stop", "after": max(self._positions.values())})
                case "failed":
                    self._tell_all(message)

    def _from_first(self, message: Message) -> None:
        """Handles a message from process 0 to all: gathered values, a request to stop, the last step, or an error."""
        with self._changed:
            match message["kind"]:
                case "values":
                    self._gathered[message["number"]] = message["values"]
                    self._over = self._over or message["last"]
                case "where":
                    self.signal_number = message["signal"]
                    self._tell_first({"kind": "at", "position": self._position})
                case "stop":
                    self._stop_after = message["after"]
                case "failed" | "lost" if message["process"] != self.process:
                    # Process 0 forwards the messages of others and ends last: its own end needs no report.
                    self._explained |= {message["process"], 0}
                    threading.Thread(target=self._follow, args=(message,), daemon=True).start()
            self._changed.notify_all()

    def _follow(self, message: Message) -> None:
        """Prints why another process has ended, and ends this process; does nothing if this one has failed itself.

        After the error of another process it first waits `GRACE` seconds. If another process is lost, process 0 first
        reports that to the rest.
        """
        process = message["process"]
        if message["kind"] == "failed":
            time.sleep(GRACE)
            text = f"process {process} has ended: {message['text']}"
        else:
            if self.first:  # the others have no connection to it
                for other, line in self._lines.items():
                    if other != process:
                        line.send(message)
            text = f"process {process} {message['text']}; --resume continues from the last checkpoint"
        if not self._failed:
            self._failed = True
            print(printable(f"error: {text}"), file=sys.stderr, flush=True)
            self.end(message["code"])


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()

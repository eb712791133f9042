"""The processes of a run, over JAX's coordination service: they gather values, stop together, and end if one fails."""

import contextlib
import os
import queue
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from mpjax import strict_json
from mpjax.errors import printable, reason_of
from mpjax.loop.signals import StopRequest


GRACE = 3.0
"""Seconds that a process waits after the error of another before it ends.

Most errors occur in all processes at about the same time, and each then reports its own.
"""

BEAT = 10.0
"""Seconds between heartbeats."""

SILENCE = 60.0
"""Seconds without a heartbeat after which a process counts as lost: it is stopped, or its machine hangs."""

_DAY = 24 * 60 * 60 * 1000
"""Milliseconds."""

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
    """The processes of one run, which share the key-value store of JAX's coordination service.

    Values that are gathered have a key for each process; process 0 puts the list of all under one more. What is for all
    comes in numbered entries of a log, for which a daemon thread of each process waits: a request to stop, the last
    step, an error, a death. One more sends heartbeats, and one follows those of others. `lost` ends this process, with
    a message on stderr, if another has died: without it, this process may wait forever in a collective.

    Attributes:
      process: the number of this process, from 0.
      processes: the number of processes.
      signal_number: the signal for which all processes stop; None before a request.
      advice: what the message about a lost process ends with; the worker of an elastic run has another.

    Args:
      process: the number of this process.
      processes: the number of processes.
    """

    advice = "--resume continues from the last checkpoint"

    def __init__(self, process: int, processes: int):
        self.process, self.processes = process, processes
        self.inside: set[int] = set()  # the other processes that are connected; known to process 0 alone
        self._store: Any = None
        self._number = self._read = 0  # gathers begun, and entries of the log read
        self._kinds: set[str] = set()  # of these entries
        self._threads: list[threading.Thread] = []
        # Stopping together
        self._changed = threading.Condition()  # its lock is reentrant
        self._position = _NOWHERE
        self.signal_number: int | None = None
        self._stop_after: int | None = None
        self._requests: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        # Ending
        self._over = self._failed = self._ending = False
        self._ended = threading.Event()
        others = range(1, processes) if process == 0 else [0]  # those whose heartbeats this process follows
        self._silent: dict[int, float] = dict.fromkeys(others, 0.0)  # seconds since the last heartbeat
        self._beats: dict[int, bytes] = {}
        self._hosts: list[str] = []

    def begin(self, store: Any) -> None:
        """Starts the threads, once JAX has connected the processes; `store` is the client of JAX's service."""
        self._store = store
        works = self._follow_log, self._beat, self._watch
        self._threads = [threading.Thread(target=self._run, args=(work,), daemon=True) for work in works]
        for thread in self._threads:
            thread.start()
        self._hosts = self.gather(socket.gethostname())

    @property
    def first(self) -> bool:
        """True for process 0, which prints and writes files for all."""
        return self.process == 0

    # The store

    def _put(self, key: str, value: Any, *, replace: bool = False) -> None:
        # Compressed: values of processes are much alike, and all read the list of all.
        text = zlib.compress(strict_json.encode({"value": value}).encode(), 1)
        self._store.key_value_set_bytes(f"mpjax/{key}", text, replace)

    def _get(self, key: str) -> Any:
        """Waits for a value as long as it takes, and lets no signal be handled meanwhile.

        The service keeps 36 KB for each wait that ends without a value, until there is one: so no wait may end.
        """
        while True:
            try:
                found = self._store.blocking_key_value_get_bytes(f"mpjax/{key}", _DAY)
            except RuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            else:
                return strict_json.decode(zlib.decompress(found).decode())["value"]

    def _wait(self, *keys: str) -> list:
        """Waits for values, in a thread of their own, so that signals are handled."""
        answer: queue.SimpleQueue[list | Exception] = queue.SimpleQueue()

        def get() -> None:
            try:
                answer.put([self._get(key) for key in keys])
            except Exception as error:
                answer.put(error)

        threading.Thread(target=get, daemon=True).start()
        if isinstance(found := answer.get(), Exception):
            raise found
        return found

    def _tell(self, entry: Mapping[str, Any]) -> None:
        """Adds an entry to the log, unless the log has one of the same effect: the first counts."""
        number = self._read
        if entry["kind"] in self._kinds:
            return None
        while True:
            try:
                return self._put(f"log/{number}", entry)
            except RuntimeError as error:
                if "ALREADY_EXISTS" not in str(error):
                    raise
            if self._get(f"log/{number}")["kind"] == entry["kind"]:
                return None
            number += 1

    # Gathering

    def gather(self, value: Any) -> list:
        """Waits until all processes have called it, and returns their values, in the order of processes.

        Every process has to make the same calls in the same order. The value has to be JSON.
        """
        number, self._number = self._number, self._number + 1
        self._put(f"values/{number}/{self.process}", value)
        if self.first:
            self._put(f"values/{number}/all", self._wait(*(f"values/{number}/{i}" for i in range(self.processes))))
            self._store.key_value_delete(f"mpjax/values/{number - 1}")  # all have read it
        return self._wait(f"values/{number}/all")[0]

    def disband(self) -> None:
        """Waits until all processes have called it. Afterwards, the end of one does not end the others."""
        self.gather(None)
        if self.first:
            self._tell({"kind": "over"})
        for thread in self._threads:
            thread.join()

    # Stopping together

    @property
    def stop(self) -> "Company":
        """This object itself, as the request to stop (a `signals.Stop`) that all processes share."""
        return self

    def ask(self, signal_number: int) -> None:
        """Asks all processes to stop after the same step, and returns at once; a signal handler may call it.

        The first request of any process counts.
        """
        self._requests.put(signal_number)  # a thread passes it on

    def due(self, position: int) -> bool:
        """True if all processes stop after step number `position`; after a request, first waits for their agreement.

        Every process calls it with the same increasing positions. After a request, each process puts the position of
        its last call into the store, and waits for the largest of all. All stop at the first position beyond the
        largest. Without a request, nothing is sent. The devices are never waited for.
        """
        with self._changed:
            if self.signal_number is not None:
                self._changed.wait_for(lambda: self._stop_after is not None)
            self._position = position
            return self._stop_after is not None and position > self._stop_after

    # Ending

    def fail(self, text: str, code: int) -> None:
        """Tells the others the error with which this process is about to end: its message and its exit code.

        `GRACE` seconds later, they print the message and end with the same exit code.
        """
        self._failed = True
        said = {"process": self.process, "text": f"has ended: {text}", "code": code}
        telling = threading.Thread(target=self._tell_end, args=({"kind": "end", "failed": True, **said},), daemon=True)
        telling.start()
        telling.join(GRACE)  # process 0 may be stopped

    def lost(self, process: int, text: str = "has ended without a word: it was killed, or its machine is gone") -> None:
        """Ends the run, in a thread of its own, because `process` is dead or silent, as `text` says.

        It does nothing if the run is over, if this process has failed, or if another has said why it ends.
        """
        if self._over:
            return
        text += f"; {self.advice}"
        entry = {"kind": "end", "process": process, "text": text, "code": 1, "failed": False}
        threading.Thread(target=self._lose, args=(entry,), daemon=True).start()

    def _lose(self, entry: Mapping[str, Any]) -> None:
        time.sleep(0.3)  # what it said last may be on its way
        if self._over or self._failed or self._ending:
            return
        if self.first:
            self._tell_end(entry)
        self._end_after(entry)

    def _tell_end(self, entry: Mapping[str, Any]) -> None:
        with contextlib.suppress(RuntimeError):  # JAX's service may have ended
            if self._store is not None:
                self._tell(entry)

    def _end_after(self, entry: Mapping[str, Any]) -> None:
        """Prints why another process has ended, and ends this process; does nothing if this one has failed itself.

        After the error of another process it first waits `GRACE` seconds.
        """
        self._ending = True
        if entry["failed"]:
            time.sleep(GRACE)
        with self._changed:
            failed, self._failed = self._failed, True
        if not failed:
            print(printable(f"error: process {entry['process']} {entry['text']}"), file=sys.stderr, flush=True)
            self.end(entry["code"])

    def end(self, code: int) -> NoReturn:
        """Flushes the output and ends this process by `os._exit`: JAX's shutdown would wait for dead processes.

        Process 0 first waits up to 2 * `GRACE` seconds for the others to end.
        """
        flushing = threading.Thread(target=_flush, daemon=True)
        flushing.start()
        flushing.join(1.0)  # a reader that has stopped would block the flush
        ends = time.monotonic() + 2 * GRACE
        while self.inside and time.monotonic() < ends:  # they still have to hear why
            time.sleep(0.05)
        os._exit(code)

    # Threads

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except RuntimeError as error:  # without this thread, the process might wait for ever
            self.lost(0, f"does not answer: {reason_of(error)}")

    def _follow_log(self) -> None:
        """Reads the log in a loop."""
        while not self._over:
            entry = self._get(f"log/{self._read}")
            self._kinds.add(entry["kind"])
            self._read += 1
            self._handle(entry)

    def _watch(self) -> None:
        """Ends the run if another process has sent no heartbeat for `SILENCE` seconds. It never waits for the store.

        It adds up the seconds that it waits, which pause while this process is suspended. So processes that are
        suspended and continued together go on.
        """
        while not self._ended.wait(BEAT):
            for process in self._silent:
                self._silent[process] += BEAT
                if self._silent[process] > SILENCE:
                    reason = "it is stopped, or its host hangs; end it there"
                    where = self._hosts[process] if self._hosts else "an unknown host"
                    self.lost(process, f"on {where} has not answered for {SILENCE:g} s: {reason}")

    def _handle(self, entry: Mapping[str, Any]) -> None:
        with self._changed:
            match entry["kind"]:
                case "stop":
                    self.signal_number = entry["signal"]
                    self._put(f"at/{self.process}", self._position)
                    if self.first:
                        threading.Thread(target=self._choose_last_step, daemon=True).start()
                case "last step":
                    self._stop_after = entry["after"]
                case "end" if entry["process"] != self.process:
                    self._ending = True
                    threading.Thread(target=self._end_after, args=(entry,), daemon=True).start()
                case "over":
                    self._over = True
                    self._ended.set()
                    self._requests.put(None)  # the other thread waits for it
            self._changed.notify_all()

    def _choose_last_step(self) -> None:
        self._tell({"kind": "last step", "after": max(self._get(f"at/{i}") for i in range(self.processes))})

    def _beat(self) -> None:
        """Sends heartbeats, follows those of others, and passes on requests to stop, in a loop."""
        count = 0
        while not self._over:
            self._put(f"beats/{self.process}", count := count + 1, replace=True)
            if not self.first:
                self._silent[0] = 0.0  # process 0 has answered
            for key, beat in self._store.key_value_dir_get_bytes("mpjax/beats") if self.first else ():
                process = int(key.split("/")[2])
                if process in self._silent and self._beats.get(process) != beat:
                    self._beats[process], self._silent[process] = beat, 0.0
            with contextlib.suppress(queue.Empty):
                if (signal_number := self._requests.get(timeout=BEAT)) is not None:
                    self._tell({"kind": "stop", "signal": signal_number})


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()

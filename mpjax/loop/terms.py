"""The terms of an elastic run: process 0 says who trains, sees who dies or comes back, and starts the next term."""

import pathlib
import queue
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from mpjax.config.load import CONFIG_FILE
from mpjax.config.schema import Config
from mpjax.loop.join import numbers
from mpjax.loop.links import Events
from mpjax.loop.shares import examples_at_once, sharing
from mpjax.loop.term import Term


DEATHS = 5
"""Terms that may end by a death in a row without a new checkpoint between them."""

SETTLING = 3.0
"""Seconds to wait, after a worker has ended, for what the others say: the cause may be a death."""

ANSWER = 15.0
"""Seconds in which a process has to have ended its worker; after that it counts as lost."""

KILLED = -signal.SIGKILL


class ElasticTerms:
    """Process 0's decisions about an elastic run, in a thread of its own.

    Args:
      config: the settings of the run, with its folder.
      host: the address of process 0, as the others reach it.
      processes: the number of processes of the run.
      events: what the processes say: ("door", {"process", "host"}) for a new link in `links`, (number, message), or
        (number, GONE) for a link that has ended.
      links: the connected processes, by number; the door adds to it.
      say: prints a line for the user.
    """

    def __init__(
        self,
        config: Config,
        host: str,
        processes: int,
        events: Events,
        links: dict[int, Any],
        say: Callable[[str], None],
    ):
        self._config, self._host, self._processes = config, host, processes
        self._events, self._links, self._say = events, links, say
        self._folder = pathlib.Path(config.output_dir)
        self._there: set[int] = set()  # the processes that have come through the door, and have not gone
        self._hosts: dict[int, str] = {}
        self._devices: dict[int, int] = {}
        self._leaving: set[int] = set()
        self._stopping: int | None = None  # the signal that ends the run
        self._step = 0
        self._term: Term | None = None

    def run(self) -> None:
        """Runs terms until the training is done, fails or is stopped, and tells all processes the end."""
        self._end(*self._terms())

    def _terms(self) -> tuple[int, str]:
        """Returns the exit code of the run and its error."""
        if fault := self._assemble():
            return 2, fault
        members = tuple(range(self._processes))
        deaths, reached, number = 0, self._checkpoint(), 0
        while True:
            if self._stopping:
                return self._stopped()
            if not members:
                return 1, f"no number of the processes that are left divides {self._config.data.batch_size} examples"
            number += 1
            term = self._train(Term(number, members))
            codes = [term.ended.get(member, KILLED) for member in members]
            if not any(codes):
                return 0, ""
            if self._stopping:
                return self._stopped()
            if failure := self._failure(term):
                return failure
            if term.first is not None:
                deaths, reached = (1 if self._checkpoint() > reached else deaths + 1), self._checkpoint()
                if deaths >= DEATHS:
                    return 1, (
                        f"workers died {deaths} times in a row before a new checkpoint was complete; see what they "
                        "printed, or save more often (--loop.save_every)"
                    )
            self._dismiss()
            members = self._wait_for_share()
            self._tell(term, members)

    def _failure(self, term: Term) -> tuple[int, str] | None:
        """The exit code and the message of an error of the program; None if the term ended because of a death."""
        who = term.first if term.first in term.failures or term.died else term.cause
        if who is None or who not in term.failures:
            return None
        code, text = term.failures[who]
        if code == 1 and term.died:  # an exchange with the dead failed
            return None
        return code, (f"process {who}: " if len(term.failures) == 1 < len(term.members) else "") + text

    def _assemble(self) -> str:
        """Waits until all processes are there; returns why not."""
        ends = time.monotonic() + self._config.distributed.timeout
        while len(self._there) < self._processes and not self._stopping:
            if (left := ends - time.monotonic()) <= 0:
                missing = sorted(set(range(self._processes)) - self._there)
                which = f"process {missing[0]}" if len(missing) == 1 else f"processes {numbers(missing)}"
                return (
                    f"{which} of {self._processes} did not come within {self._config.distributed.timeout:g} seconds: "
                    "see what they printed, or wait longer with --distributed.timeout"
                )
            self._next(left)
        return ""

    def _wait_for_share(self) -> tuple[int, ...]:
        """The processes that train next: those that are there, or that come back in time if these are too few."""
        ends = time.monotonic() + self._config.distributed.timeout
        while not self._stopping:
            there = sorted(self._there)
            if len(there) == self._processes:
                return tuple(there)
            if self._devices.keys() >= set(range(self._processes)):
                devices = {member: self._devices[member] for member in there}
                if members := sharing(self._config, devices):
                    return members
            if (left := ends - time.monotonic()) <= 0:
                break
            self._next(left)
        return ()

    def _train(self, term: Term) -> Term:
        """Starts the workers of a term, and returns once all have ended or are lost."""
        self._term, members, self._step = term, term.members, self._checkpoint()
        with socket.create_server(("", 0)) as server:
            port = server.getsockname()[1]  # the workers meet there; the port of the run stays with the supervisors
        for place, member in enumerate(members):
            self._send(
                member,
                kind="start",
                term=term.number,
                coordinator=f"{self._host}:{port}",
                processes=len(members),
                process=place,
                output_dir=self._config.output_dir,
                resume=self._config.resume or (self._folder / CONFIG_FILE).exists(),
            )
        for member in set(members) - self._there:  # meanwhile
            self._forget(member)
        while term.left:
            wait = None if term.until is None else term.until - time.monotonic()
            if wait is not None and wait <= 0:
                self._give_up(term)
                continue
            self._next(wait)
            if term.lost or any(code < 0 for code in term.ended.values()):
                self._kill(term)
        return term

    def _give_up(self, term: Term) -> None:
        """Kills the workers that are left, or counts their processes as lost if that was done before."""
        if not term.killed:
            if not term.failures:  # those that have ended say that another is lost
                term.hung = term.left
                term.died |= term.hung
            self._kill(term)
            return
        for member in term.left:
            if link := self._links.pop(member, None):
                link.close()
            self._there.discard(member)
            term.lost.add(member)
            term.died.add(member)

    def _kill(self, term: Term) -> None:
        if not term.killed:
            term.killed, term.until = True, time.monotonic() + ANSWER
            for member in term.left:
                self._send(member, kind="kill", term=term.number)

    # What the processes say

    def _next(self, seconds: float | None) -> None:
        try:
            who, message = self._events.get(timeout=seconds)
        except queue.Empty:
            return
        if who == "door":
            self._there.add(message["process"])
            self._hosts[message["process"]] = message["host"]
            self._take_in(message["process"])
        elif message["kind"] == "gone":
            self._forget(who)
        elif message["kind"] == "leave":
            self._leave(who, message["signal"])
        elif self._term and message.get("term") == self._term.number:
            self._heard(self._term, who, message)

    def _heard(self, term: Term, who: int, message: dict[str, Any]) -> None:
        match message["kind"]:
            case "running":
                self._devices[who] = message["devices"]
                if who == 0:
                    term.running = True
                    if self._grows(term):
                        self._ask(term, signal.SIGTERM)
            case "at":
                self._step = message["step"]
            case "failed":
                term.failures[who] = message["code"], message["text"]
                if term.first is None and term.cause is None:
                    term.cause = who
            case "ended":
                term.ended[who] = message["code"]
                stopped = term.asked and message["code"] > 128
                if message["code"] and not stopped and not term.killed:
                    term.first = who if term.first is None else term.first
                    term.until = term.until or time.monotonic() + SETTLING
                    term.died |= {who} if message["code"] < 0 else set()

    def _forget(self, who: int) -> None:
        self._links.pop(who, None)
        self._there.discard(who)
        self._leaving.discard(who)
        if self._term and who in self._term.left:
            self._term.lost.add(who)
            self._term.died.add(who)
            self._term.first = who if self._term.first is None else self._term.first

    def _take_in(self, who: int) -> None:
        if self._term is None:
            return
        self._say(f"process {who} of {self._processes} ({self._hosts[who]}) is there again")
        if self._term.left and self._term.running and self._grows(self._term):
            self._ask(self._term, signal.SIGTERM)

    def _grows(self, term: Term) -> bool:
        """True if more processes could train than do."""
        if len(self._there) == self._processes:
            return len(term.members) < self._processes
        if not self._devices.keys() >= set(range(self._processes)):
            return False
        members = sharing(self._config, {member: self._devices[member] for member in self._there})
        return len(members) > len(term.members)

    def _leave(self, who: int, signal_number: int) -> None:
        """Answers SIGTERM or Ctrl-C to one process: a checkpoint, then without it; without process 0, the end."""
        if signal_number == signal.SIGINT or who == 0:
            self._stopping = self._stopping or signal_number
        else:
            self._leaving.add(who)
            self._say(f"process {who} of {self._processes} ({self._hosts[who]}) received SIGTERM and leaves the run")
        term = self._term
        if term is None or not (term.left if self._stopping else who in term.left):
            self._dismiss()  # nothing has to be saved for it
        elif term.running:
            self._ask(term, signal_number)
        else:
            self._kill(term)

    def _ask(self, term: Term, signal_number: int) -> None:
        """Asks the workers to save a checkpoint after the same step, and to end."""
        if not term.asked:
            term.asked = True
            self._send(0, kind="ask", term=term.number, signal=int(signal_number))

    def _dismiss(self) -> None:
        """Lets the processes go that have received SIGTERM."""
        for who in sorted(self._leaving & self._there):
            self._send(who, kind="end", code=128 + signal.SIGTERM, text="left the run; the others go on")
            if link := self._links.pop(who, None):
                link.close()  # its end must not be taken for that of the process that may come in its place
            self._there.discard(who)
        self._leaving.clear()

    # What the user reads

    def _tell(self, term: Term, members: tuple[int, ...]) -> None:
        if not members:
            return
        lines = []
        if term.first is not None:
            which = sorted(term.died or {term.first})
            who = f"process {which[0]}" if len(which) == 1 else f"processes {numbers(which)}"
            where = ", ".join(dict.fromkeys(self._hosts[member] for member in which))
            how = "did not answer" if set(which) <= term.hung else "died"
            lines.append(f"{who} of {self._processes} ({where}) {how} after step {self._step}")
        step = self._checkpoint()
        from_where = f"from the checkpoint of step {step}" if step else "from the start: there is no checkpoint yet"
        count = len(members)
        who = f"all {count}" if count == self._processes else f"{count} of {self._processes} processes"
        before, now = (
            examples_at_once(self._config, sum(self._devices.get(member, 0) for member in which))
            for which in (term.members, members)
        )
        examples = f", with {now} examples per device at once in place of {before}" if before != now else ""
        lines.append(f"{who} go on {from_where}{examples}")
        if idle := sorted(self._there - set(members)):
            who = f"process {idle[0]} waits" if len(idle) == 1 else f"processes {numbers(idle)} wait"
            lines.append(f"{who}, as {self._config.data.batch_size} examples do not divide")
        self._say("; ".join(lines))

    def _checkpoint(self) -> int:
        """The step of the last complete checkpoint; 0 without one. Those being written have other names."""
        folder = self._folder / "checkpoints"
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        return max((int(name) for name in names if name.isdecimal()), default=0)

    def _stopped(self) -> tuple[int, str]:
        assert self._stopping is not None
        step = self._checkpoint()
        saved = f"the checkpoint of step {step} is saved" if step else "there is no checkpoint yet"
        return 128 + self._stopping, f"stopped; {saved}; --resume continues in {self._folder}"

    def _send(self, member: int, **message: Any) -> None:
        if member in self._links:
            self._links[member].send(**message)

    def _end(self, code: int, text: str) -> None:
        for member in sorted(self._links, reverse=True):  # process 0, which is here, last
            self._send(member, kind="end", code=code, text=text)

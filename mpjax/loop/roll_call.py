"""Connects the processes of a run, and compares their settings and their code.

This comes before JAX's own start, which ends the whole program, with a stack trace, if a process is missing.
"""

import contextlib
import errno
import socket
import time
from collections.abc import Mapping

from mpjax.errors import UsageError
from mpjax.loop.cluster import Seat
from mpjax.loop.messages import Connection


_HELLO = "mpjax"
_EACH = 5.0
"""Seconds in which a new connection has to send its first message."""


def call_roll(seat: Seat, about: Mapping[str, str], *, timeout: float) -> dict[int, Connection]:
    """Connects the processes: process 0 to all others, the others to process 0. Returns the connections by process.

    Process 0 listens at the port of `seat.coordinator`, on all network addresses. The others try to reach it until the
    time is over.

    Args:
      seat: which process this is, and the address of process 0.
      about: values that have to be equal in all processes, by name.
      timeout: the seconds to wait for the others.

    Raises:
      UsageError: processes are missing or differ (in all connected processes), or process 0 cannot be reached, cannot
        listen, or refuses this process (in this one).
    """
    if seat.process == 0:
        return _wait_for_others(seat, about, timeout)
    return {0: _answer(seat, about, timeout)}


def _wait_for_others(seat: Seat, about: Mapping[str, str], timeout: float) -> dict[int, Connection]:
    """Accepts all other processes, on process 0, and tells them whether the run is complete and all agree.

    Raises:
      UsageError: processes are missing after `timeout` seconds, or differ in `about`; or this process cannot listen.
    """
    ends = time.monotonic() + timeout
    lines: dict[int, Connection] = {}
    descriptions: dict[int, Mapping[str, str]] = {0: about}
    with _listen(seat) as listener:
        while len(descriptions) < seat.processes and (left := ends - time.monotonic()) > 0:
            listener.settimeout(left)
            try:
                line = Connection(listener.accept()[0])
            except TimeoutError:
                break
            message = line.receive(min(_EACH, max(0.1, ends - time.monotonic()))) or {}
            if not _is_hello(message):
                line.close()  # a scanner of ports
                continue
            process = message["process"]
            if fault := _no_seat(message, seat, descriptions):
                line.send({"kind": "refused", "text": fault})
                line.close()
                continue
            lines[process], descriptions[process] = line, message["about"]
    missing = sorted(set(range(seat.processes)) - descriptions.keys())
    fault = _absence(missing, seat, timeout) if missing else _difference(descriptions)
    for line in lines.values():
        line.send({"kind": "refused", "text": fault} if fault else {"kind": "complete"})
    if fault:
        for line in lines.values():
            line.close()
        raise UsageError(fault)
    return lines


def _is_hello(message: Mapping) -> bool:
    """True if a message has the form of the first message of `_answer`; any program may connect to an open port."""
    process, processes, about = (message.get(name) for name in ("process", "processes", "about"))
    if message.get("kind") != _HELLO or type(process) is not int or type(processes) is not int:
        return False
    texts = isinstance(about, dict) and all(isinstance(value, str) for value in about.values())
    return texts and 0 < process < processes


def _listen(seat: Seat) -> socket.socket:
    """Opens the socket of process 0; UsageError if the port is in use or not allowed."""
    port = int(seat.coordinator.rpartition(":")[2])
    try:
        # All addresses, as JAX does: the name by which the others reach this machine may not be one of its own.
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
        return socket.create_server(("", port), backlog=1024)
    except OSError as error:
        used = error.errno == errno.EADDRINUSE
        reason = "another program uses it" if used else error.strerror
        raise UsageError(
            f"process 0 cannot listen at port {port}: {reason}; write another free port in --distributed.coordinator "
            "of all processes"
        ) from error


def _no_seat(message: Mapping, seat: Seat, accepted: Mapping) -> str | None:
    """The reason to refuse a process by its first message; None to accept it.

    It is refused if it has another number of processes, or the number of a process that was accepted before: a key of
    `accepted`.
    """
    process, processes = message["process"], message["processes"]
    if processes != seat.processes:
        return f"--distributed.processes is {seat.processes} on process 0 and {processes} on process {process}"
    if process in accepted:
        return f"there are two processes with --distributed.process {process}: number them 0 to {processes - 1}"
    return None


def _absence(missing: list[int], seat: Seat, timeout: float) -> str:
    which = f"process {missing[0]}" if len(missing) == 1 else f"processes {numbers(missing)}"
    return (
        f"{which} of {seat.processes} did not come within {timeout:g} seconds: see what they printed, start them with "
        f"--distributed.coordinator {seat.coordinator}, or wait longer with --distributed.timeout"
    )


def _difference(values: Mapping[int, Mapping[str, str]]) -> str | None:
    """Formats the values that differ between processes as a message, the first 20 by name; None if all agree.

    `values` has the values of each process, by number of process and name.
    """
    lines = []
    for name in sorted(set().union(*values.values())):
        who_says = by_value({process: values[process].get(name, "not there") for process in sorted(values)})
        if len(who_says) > 1:
            lines.append(f"  {name}: " + ", ".join(f"{v} on process {numbers(who)}" for v, who in who_says.items()))
    if not lines:
        return None
    shown = "\n".join(lines[:20] + ([f"  and {len(lines) - 20} more"] if lines[20:] else []))
    return f"the processes differ, and have to be started with the same settings and code:\n{shown}"


def by_value(values: Mapping[int, str]) -> dict[str, list[int]]:
    """Groups the keys of a dict (numbers of processes) by their values, in order.

    >>> by_value({0: "a", 1: "b", 2: "a"})
    {'a': [0, 2], 'b': [1]}
    """
    processes_of: dict[str, list[int]] = {}
    for process, value in values.items():
        processes_of.setdefault(value, []).append(process)
    return processes_of


def numbers(which: list[int]) -> str:
    """Formats ascending numbers as text, three or more in a row as a range.

    >>> numbers([0, 2, 3, 4, 7])
    '0, 2-4, 7'
    """
    groups: list[list[int]] = []
    for number in which:
        if groups and groups[-1][-1] == number - 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    return ", ".join(f"{g[0]}-{g[-1]}" if len(g) > 2 else ", ".join(map(str, g)) for g in groups)


def _answer(seat: Seat, about: Mapping[str, str], timeout: float) -> Connection:
    """Connects this process to process 0, and returns once process 0 has accepted all processes.

    It tries again if process 0 cannot be reached yet.

    Raises:
      UsageError: process 0 cannot be reached within `timeout` seconds, or refuses this process; the message has its
        reason.
    """
    host, _, port = seat.coordinator.rpartition(":")
    ends = time.monotonic() + timeout
    reason = "nobody listens there"
    while (left := ends - time.monotonic()) > 0:
        try:
            line = Connection(socket.create_connection((host.strip("[]"), int(port)), timeout=min(10.0, left)))
        except OSError as error:  # not started yet, or its name is not known yet
            reason = error.strerror or str(error)
            time.sleep(min(0.2, left))
            continue
        line.send({"kind": _HELLO, "process": seat.process, "processes": seat.processes, "about": dict(about)})
        # Process 0 may have started later, and waits as long for the others.
        answer = line.receive(timeout + _EACH) or {}
        if answer.get("kind") == "complete":
            return line
        with contextlib.suppress(OSError):
            line.close()
        if answer.get("kind") == "refused":
            raise UsageError(str(answer.get("text")))
        reason = "what listens there is not process 0 of this run, or it has ended"
        time.sleep(min(0.2, left))
    raise UsageError(
        f"process {seat.process} did not reach process 0 at {seat.coordinator} within {timeout:g} seconds: {reason}; "
        "write the address at which process 0 can be reached from here, and let its port through the firewall"
    )

"""The port of process 0: opened there, and reached by the other processes."""

import contextlib
import errno
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from mpjax.errors import UsageError
from mpjax.loop.cluster import Seat
from mpjax.loop.door import knock


def listen(seat: Seat) -> socket.socket:
    """Opens the socket of process 0 for all processes; UsageError if the port is in use or not allowed."""
    host, _, port = seat.coordinator.rpartition(":")
    address = own_address(host.strip("[]"))
    _allow_connections(seat.processes)
    try:
        if address is None and socket.has_dualstack_ipv6():
            listener = socket.create_server(("", int(port)), family=socket.AF_INET6, dualstack_ipv6=True)
        else:
            family = socket.AF_INET6 if ":" in (address or "") else socket.AF_INET
            listener = socket.create_server((address or "", int(port)), family=family)
    except OSError as error:
        used = error.errno == errno.EADDRINUSE
        reason = "another program uses it" if used else error.strerror
        raise UsageError(
            f"process 0 cannot listen at port {port}: {reason}; write another free port in --distributed.coordinator "
            "of all processes"
        ) from error
    notice_a_dead_machine(listener)  # which connections inherit
    return listener


def connect(
    seat: Seat, about: Mapping[str, Any], key: bytes, *, timeout: float, answer: float, stranger: str
) -> tuple[socket.socket, str]:
    """Connects to process 0, which may start later, and knocks at its door, within `timeout` seconds.

    Args:
      seat: which process this is, and the address of process 0.
      about: what process 0 is told.
      key: the secret of the run.
      timeout: the seconds to try.
      answer: the seconds in which process 0 has to answer a knock.
      stranger: why what listens there may not answer as process 0 does, for the message.

    Returns:
      The connection, and the address of this machine at which others reach it.

    Raises:
      UsageError: process 0 cannot be reached, or refuses this process.
    """
    host, _, port = seat.coordinator.rpartition(":")
    ends = time.monotonic() + timeout
    reason, met = "nobody listens there", False
    while (left := ends - time.monotonic()) > 0:
        try:
            connection = socket.create_connection((host.strip("[]"), int(port)), timeout=min(10.0, left))
        except OSError as error:  # not started yet, or its name is not known yet
            reason = error.strerror or str(error)
        else:
            fault = ""
            try:
                notice_a_dead_machine(connection)
                connection.settimeout(answer)
                fault, address = knock(connection, seat, about, key)
                if not fault:
                    connection.settimeout(None)
                    return connection, address
            except (OSError, ValueError):
                reason, met = stranger, True
            connection.close()
            if fault:
                raise UsageError(fault)
        time.sleep(max(0.0, min(0.2, ends - time.monotonic())))
    reason = stranger + f", and then: {reason}" * (reason != stranger) if met else reason
    raise UsageError(
        f"process {seat.process} did not reach process 0 at {seat.coordinator} within {timeout:g} seconds: {reason}; "
        "write the address at which process 0 can be reached from here, and let its port through the firewall"
    )


def own_address(host: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """The address of this machine that `host` names; None if it is not certain, and process 0 listens at all of them.

    It is not certain if the others may reach this machine under the name in another way: if the name has several
    addresses, or one that is not of this machine (a service of Kubernetes, a port that is passed on), or only here that
    of the loopback (Debian gives 127.0.1.1 to a machine's own name), unless SLURM says that there is one machine.
    """
    with contextlib.suppress(OSError):
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
        loopback = all(address.startswith("127.") or address == "::1" for address in found)
        alone = host in found or host == "localhost" or environment.get("SLURM_STEP_NUM_NODES") == "1"
        if alone if loopback else len(found) == 1:
            address = min(found, key=lambda address: ":" in address)
            with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as trial:
                trial.bind((address, 0))
            return address
    return None


def notice_a_dead_machine(connection: socket.socket) -> None:
    """Makes the system end a connection after 30 s without an answer, by the options for that which the system has."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 30_000)):
        if hasattr(socket, option):  # Linux has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _allow_connections(processes: int) -> None:
    """Raises this process's limit of open files, as far as it may, to what the connections of a run need."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource  # which Windows lacks

        files, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # Linux allows 1,024, and each process takes three
        wanted = 500 + 4 * processes
        if files != resource.RLIM_INFINITY and files < wanted:
            resource.setrlimit(
                resource.RLIMIT_NOFILE, (wanted if most == resource.RLIM_INFINITY else min(most, wanted), most)
            )

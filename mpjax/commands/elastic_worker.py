"""The worker of an elastic run: trains as one process of a term, and tells its supervisor how it goes."""

import contextlib
import ctypes
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

from mpjax.errors import CallbackError, Diverged, Interrupted, UsageError, exit_code_of
from mpjax.extend import Writer
from mpjax.loop.links import Events, Link
from mpjax.loop.signals import Stop


LONGEST_TEXT = 100_000
"""Characters of an error's message that are told: a line of a `Link` has an end."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Trains with the settings that the supervisor sends; the arguments are a socket to it and its process number.

    It ends with the codes of `mpjax train`. It is killed with its supervisor.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[2]):
        os._exit(1)  # the supervisor was gone before
    # A scheduler may signal all processes of a job. What happens then is the supervisor's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    size = int.from_bytes(connection.recv(8, socket.MSG_WAITALL))
    term, config = pickle.loads(connection.recv(size, socket.MSG_WAITALL))
    events: Events = queue.SimpleQueue()
    sys.exit(train(config, ToSupervisor(Link(connection, events, "supervisor"), term), events))


class ToSupervisor(Writer):
    """Tells the supervisor the last step whose metrics were written, and other messages about a term."""

    def __init__(self, link: Link, term: int):
        self._link, self._term = link, term

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Tells the last step whose metrics are there."""
        self.tell("at", step=step)

    def tell(self, kind: str, **values: Any) -> None:
        """Sends a message of this kind."""
        self._link.send(kind=kind, term=self._term, **values)


def train(config: Any, report: ToSupervisor, events: Events) -> int:
    """Trains, tells an error to the supervisor, which prints it once for all, and returns the exit code."""
    import logging
    import warnings

    from mpjax.commands.host_memory import keep_freed_memory
    from mpjax.errors import show_warning

    logging.getLogger("absl").setLevel(logging.ERROR)
    warnings.showwarning = show_warning
    keep_freed_memory()

    @contextlib.contextmanager
    def stopping(stop: Stop) -> Iterator[None]:
        """Context of the training loop: from here on, the supervisor may ask for a stop."""
        import jax

        def listen() -> None:
            while "signal" in (message := events.get()[1]):
                stop.ask(message["signal"])

        report.tell("running", devices=jax.local_device_count())
        threading.Thread(target=listen, daemon=True).start()
        yield

    from mpjax.commands.train import run
    from mpjax.loop.company import Company

    Company.advice = "those that are there start again from the last checkpoint"
    try:
        run(config, writers=[report], stopping=stopping)
    except Interrupted as error:  # asked for, and told by process 0
        return exit_code_of(error)
    except Exception as error:
        if not isinstance(error, (UsageError, Diverged, CallbackError, OSError)):
            traceback.print_exc()
        report.tell("failed", code=exit_code_of(error), text=(str(error) or type(error).__name__)[:LONGEST_TEXT])
        return exit_code_of(error)
    return 0

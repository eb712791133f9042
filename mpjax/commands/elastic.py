"""The supervisor of a process of an elastic run: starts its worker, and another one when the company has changed."""

import contextlib
import dataclasses
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

from mpjax.config.choices import AUTO
from mpjax.config.folders import check_run_folder
from mpjax.config.limits import check, is_auto, require_types
from mpjax.config.save import shared_settings
from mpjax.config.schema import Config, Distributed
from mpjax.config.user_code import code_of, is_passed_in_python
from mpjax.ctrl_c import answered
from mpjax.errors import Diverged, Interrupted, UsageError, printable
from mpjax.loop.cluster import Seat, seat_of
from mpjax.loop.gate import open_gate, reach
from mpjax.loop.join import code_of_process
from mpjax.loop.links import Events, Link
from mpjax.loop.port import listen
from mpjax.loop.secret import shared_key
from mpjax.loop.signals import as_usual, handled
from mpjax.loop.terms import ElasticTerms


def supervise(config: Config) -> None:
    """Trains the run that `config` describes as one of its processes, in a child process, until the run has ended.

    If a child of any process dies, all are started again from the last checkpoint: with those processes that are there.
    Only the main thread of a program may call it. It imports no JAX but to compare versions, and starts no device.

    Raises:
      UsageError: as `mpjax.run`; or the settings are not for an elastic run, or process 0 cannot be reached or refuses.
      Diverged: as `mpjax.run`.
      Interrupted: SIGINT or SIGTERM arrived here or in process 0, or SIGINT in any; a checkpoint was saved.
      OSError: the training failed in any other way, or workers died too often.
    """
    require_types(config)
    seat = _elastic_seat(config)
    if not is_auto(config):
        check(config)
    key = shared_key(detected=not config.distributed.processes)
    about = _about(config)
    events: Events = queue.SimpleQueue()
    if seat.process == 0:
        config = dataclasses.replace(config, output_dir=str(check_run_folder(config)))
        link = _become_first(config, seat, about, key, events)
    else:
        link = Link(reach(seat, about, key, config.distributed.timeout), events, "first")
    with _signals_put_into(events), contextlib.closing(_Child(config, seat, key, events)) as child:
        while True:
            who, message = events.get()
            match who, message["kind"]:
                case "first", "gone":  # process 0 has ended
                    child.kill()
                    child.term = 0  # the terms of another process 0 have the same numbers
                    _say(f"process 0 does not answer: waiting up to {config.distributed.timeout:g} s until it is back")
                    with as_usual():
                        link = Link(reach(seat, about, key, config.distributed.timeout), events, "first")
                case "first", "start":
                    child.start(message)
                case "first", "kill":
                    child.kill()
                case "first", "ask":
                    child.ask(message["signal"])
                case "first", "end":
                    child.close()
                    return _ended(message["code"], message["text"])
                case "signal", _:
                    link.send(kind="leave", signal=message["signal"])
                case "child", kind if kind != "gone" and message["term"] == child.term:  # it is told how it ended
                    link.send(**message)


def _elastic_seat(config: Config) -> Seat:
    """Which process this is. Raises UsageError if the settings are not those of an elastic run."""
    flag = "--distributed.elastic"
    if sys.platform != "linux":
        raise UsageError(f"{flag} needs Linux, which ends the children of a process that was killed")
    if config.seeds:
        raise UsageError(f"{flag} with --seeds: train one seed per run, or leave out {flag}")
    if config.profile:
        raise UsageError(f"{flag} with --profile: profile a run without {flag}")
    if config.data.batch_size == AUTO:
        raise UsageError(
            f"{flag} with --data.batch_size auto: other processes would find another batch; write a number"
        )
    if -1 not in (config.mesh.data, config.mesh.fsdp):
        raise UsageError(
            f"{flag} needs an axis of the mesh that follows the number of devices: --mesh.data -1 or --mesh.fsdp -1"
        )
    if any(map(is_passed_in_python, (spec for specs in code_of(config).values() for spec in specs))):
        raise UsageError(f"{flag}: parts that are passed in Python cannot be handed to another process; name them")
    seat = seat_of(config.distributed)
    if seat is None:
        raise UsageError(
            f"{flag} is for a run of several processes: write --distributed.coordinator HOST:PORT "
            f"--distributed.processes N --distributed.process I, or leave out {flag}"
        )
    return seat


def _about(config: Config) -> dict[str, str]:
    """What has to be equal in all processes; a process that comes back has the folder and `resume` of its command."""
    return shared_settings(dataclasses.replace(config, output_dir="", resume=False)) | code_of_process(config)


def _become_first(config: Config, seat: Seat, about: Mapping[str, str], key: bytes, events: Events) -> Link:
    """Opens the gate of the run and starts the thread that decides; returns this process's own link to it."""
    here, there = socket.socketpair()
    decisions: Events = queue.SimpleQueue()
    links = {0: Link(there, decisions, 0)}
    open_gate(listen(seat), seat, about, key, decisions, links)
    decisions.put(("door", {"process": 0, "host": socket.gethostname()}))
    terms = ElasticTerms(config, seat.coordinator.rpartition(":")[0], seat.processes, decisions, links, _say)

    def decide() -> None:
        try:
            terms.run()
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # all would wait for ever

    threading.Thread(target=decide, daemon=True).start()
    return Link(here, events, "first")


class _Child:
    """The worker of this process, of which there is at most one, and none before `start`."""

    def __init__(self, config: Config, seat: Seat, key: bytes, events: Events):
        self._config, self._seat, self._key, self._events = config, seat, key, events
        self._running: subprocess.Popen | None = None
        self._link: Link | None = None
        self.term = 0

    def start(self, message: Mapping[str, Any]) -> None:
        """Starts the worker of a term, as process 0 describes it."""
        self.kill()
        self.term = message["term"]
        here, there = socket.socketpair()
        with there:
            command = [sys.executable, "-P", "-c", "from mpjax.commands.elastic_worker import main; main()"]
            self._running = subprocess.Popen(
                [*command, str(there.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=[there.fileno()],
                env=self._environment(),
                start_new_session=True,  # Ctrl-C reaches this process alone, which passes it on
            )
        # Not TOML, which would lose the marks of what a stored run must not do (`Stored`). Nobody else has this socket.
        settings = pickle.dumps((self.term, self._settings(message)))
        with contextlib.suppress(OSError):  # it may be dead already
            here.sendall(len(settings).to_bytes(8) + settings)
        self._link = Link(here, self._events, "child")
        threading.Thread(target=self._wait, args=(self._running, self.term), daemon=True).start()

    def _settings(self, message: Mapping[str, Any]) -> Config:
        place = {name: message[name] for name in ("coordinator", "processes", "process")}
        if place["processes"] == 1:
            place["coordinator"] = ""
        return dataclasses.replace(
            self._config,
            output_dir=message["output_dir"],
            resume=message["resume"],
            distributed=Distributed(**place, timeout=self._config.distributed.timeout),
        )

    def _environment(self) -> dict[str, str]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        if not environment.get("MPJAX_SECRET_FILE"):
            environment["MPJAX_SECRET"] = os.fsdecode(self._key)
        if self._seat.gpus is not None:  # the worker is told its place, and does not look for it
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
            names = visible.split(",") if visible else list(map(str, range(max(self._seat.gpus) + 1)))
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(names[gpu] for gpu in self._seat.gpus)
        return environment

    def _wait(self, running: subprocess.Popen, term: int) -> None:
        code = running.wait()
        with contextlib.suppress(OSError):  # what it has started
            os.killpg(running.pid, signal.SIGKILL)
        self._events.put(("child", {"kind": "ended", "term": term, "code": code}))

    def ask(self, signal_number: int) -> None:
        """Asks the worker, and through it those of all processes, to save a checkpoint and to end."""
        if self._link:
            self._link.send(signal=signal_number)

    def kill(self) -> None:
        """Ends the worker and what it has started at once."""
        if self._running:
            if self._running.poll() is None:
                with contextlib.suppress(OSError):  # it ends in this moment
                    os.killpg(self._running.pid, signal.SIGKILL)
            self._running.wait()

    def close(self) -> None:
        """The end of this object: no worker is left."""
        self.kill()


@contextlib.contextmanager
def _signals_put_into(events: Events) -> Iterator[None]:
    """Context in which SIGINT and SIGTERM are events; a second SIGINT ends this process at once, and so its worker."""
    count = 0

    def record(number: int, frame) -> None:
        nonlocal count
        if number == signal.SIGINT:
            answered()
            count += 1
        if count > 1:
            os._exit(128 + number)
        events.put(("signal", {"kind": "signal", "signal": int(number)}))

    with handled(dict.fromkeys((signal.SIGINT, signal.SIGTERM), record)):
        yield


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it any more; that must not end the decisions for all
        print(printable(line), flush=True)


def _ended(code: int, text: str) -> None:
    """Ends as the run did: returns for code 0, and else raises the error of this code."""
    if code > 128:
        raise Interrupted(text, code - 128)
    if code:
        raise {2: UsageError, 3: Diverged}.get(code, OSError)(text)

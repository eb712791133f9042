"""The gate of an elastic run: who enters, who is refused, who is not answered."""

import contextlib
import queue
import socket
import threading
import time

import pytest

from mpjax.errors import UsageError
from mpjax.loop import GONE, Seat, open_gate, reach
from mpjax.loop import gate as gate_module


KEY, ABOUT = b"long and random", {"seed": "0", "optimizer.momentum": "0.9"}


@pytest.fixture
def gate():
    """Three processes: the port of process 0, its links and what it hears."""
    listener = socket.create_server(("127.0.0.1", 0))
    port, events, links = listener.getsockname()[1], queue.SimpleQueue(), {}
    open_gate(listener, Seat(f"127.0.0.1:{port}", 3, 0), ABOUT, KEY, events, links)
    yield port, links, events
    for link in links.values():
        link.close()


def come(port, process=1, *, processes=3, about=ABOUT, key=KEY, timeout=10.0):
    return reach(Seat(f"127.0.0.1:{port}", processes, process), about, key, timeout)


def test_who_knows_the_secret_enters_at_any_time_and_is_heard(gate):
    port, links, events = gate
    for process in (2, 1):
        connection = come(port, process)
        assert events.get(timeout=10) == ("door", {"process": process, "host": socket.gethostname()})
        connection.sendall(b'{"kind": "leave", "signal": 15}\n')
        assert events.get(timeout=10) == (process, {"kind": "leave", "signal": 15})
        links[process].send(kind="end", code=0)
        assert connection.recv(100) == b'{"kind": "end", "code": 0}\n'
        connection.close()
        assert events.get(timeout=10) == (process, GONE)
        del links[process]


def test_who_does_not_know_it_is_not_answered(gate):
    with pytest.raises(UsageError, match="what listens there is not process 0 of this run, has another secret"):
        come(gate[0], key=b"guessed", timeout=0.5)
    assert gate[1] == {}


def test_strangers_hold_nobody_up(gate):
    strangers = [socket.create_connection(("127.0.0.1", gate[0])) for _ in range(20)]
    texts = b"", b"\n", b"GET / HTTP/1.0\r\n\r\n", b"0 {}\n", b"\xff" * 5000
    for stranger, text in zip(strangers, texts, strict=False):
        stranger.sendall(text)
    began = time.monotonic()
    come(gate[0]).close()
    assert time.monotonic() - began < 4
    for stranger in strangers:
        stranger.close()


def test_a_stranger_has_five_seconds_however_slowly_it_sends(gate, monkeypatch):
    monkeypatch.setattr(gate_module, "PATIENCE", 0.5)
    with socket.create_connection(("127.0.0.1", gate[0]), timeout=5) as stranger:
        assert len(stranger.recv(100)) == 33
        began = time.monotonic()
        with contextlib.suppress(OSError):  # once it is closed
            while time.monotonic() - began < 5:
                stranger.sendall(b"0")
                time.sleep(0.05)
        assert time.monotonic() - began < 3


def test_of_too_many_strangers_the_oldest_goes(gate, monkeypatch):
    monkeypatch.setattr(gate_module, "STRANGERS", 3)
    strangers = [socket.create_connection(("127.0.0.1", gate[0]), timeout=5) for _ in range(4)]
    assert [len(stranger.recv(100)) for stranger in strangers] == [33] * 4
    assert strangers[0].recv(100) == b""
    come(gate[0]).close()
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize(
    ("other", "fault"),
    [
        ({"about": {**ABOUT, "seed": "3"}}, "seed: 0 on process 0, 3 on process 1"),
        ({"about": {"seed": "0"}}, "optimizer.momentum: 0.9 on process 0, not there on process 1"),
        ({"processes": 4}, "--distributed.processes is 3 on process 0, 4 on 1"),
    ],
)
def test_one_that_would_train_something_else_is_refused_and_told_why(gate, other, fault):
    with pytest.raises(UsageError, match=fault):
        come(gate[0], **other)
    assert gate[1] == {}


def test_a_number_that_is_taken_is_free_once_its_connection_has_ended(gate):
    port, links, events = gate
    first = come(port)
    assert events.get(timeout=10)[0] == "door"
    with pytest.raises(UsageError, match="has a process 1 already"):
        come(port, timeout=0.8)
    again: list = []
    coming = threading.Thread(target=lambda: again.append(come(port)))
    coming.start()
    first.close()
    assert events.get(timeout=10) == (1, GONE)
    del links[1]
    coming.join(10)
    (connection,) = again
    connection.close()

"""Who is there, and whether all are about to do the same."""

import concurrent.futures
import contextlib
import json
import socket
import threading
import time

import pytest

from mpjax.errors import UsageError
from mpjax.loop.cluster import Seat
from mpjax.loop.roll_call import call_roll, numbers


def free_port():
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def call(abouts, *, port=None, processes=None, timeout=5.0, delays=None):
    """What each process, in a thread of its own, gets or says; `abouts` by its number."""
    port, found = port or free_port(), {}

    def answer(process, about):
        seat = Seat(f"127.0.0.1:{port}", processes or len(abouts), process)
        time.sleep((delays or {}).get(process, 0))
        try:
            found[process] = call_roll(seat, about, timeout=timeout)
        except UsageError as error:
            found[process] = str(error)

    threads = [threading.Thread(target=answer, args=item) for item in abouts.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


@pytest.mark.parametrize("late", [0, 2])
def test_process_0_is_connected_to_all_whoever_comes_first(late):
    found = call({process: {"seed": "0"} for process in range(3)}, delays={late: 0.5})
    assert {process: sorted(lines) for process, lines in found.items()} == {0: [1, 2], 1: [0], 2: [0]}
    found[0][2].send({"text": "to the last"})
    assert found[2][0].receive(5) == {"text": "to the last"}
    for lines in found.values():
        for line in lines.values():
            line.close()


def test_differences_are_told_to_all_by_name_with_values():
    same = {"seed": "0", "mpjax": "1.0"}
    found = call({0: same, 1: {"seed": "0", "mpjax": "1.1"}, 2: same | {"mesh.fsdp": "2"}, 3: same})
    assert set(found.values()) == {
        "the processes differ, and have to be started with the same settings and code:\n"
        "  mesh.fsdp: not there on process 0, 1, 3, 2 on process 2\n"
        "  mpjax: 1.0 on process 0, 2, 3, 1.1 on process 1"
    }
    assert len(found) == 4


def test_who_is_missing_is_told_to_those_who_came():
    found = call({0: {}, 2: {}}, processes=5, timeout=0.5)
    assert len(found) == 2
    for said in found.values():
        assert said.startswith("processes 1, 3, 4 of 5 did not come within 0.5 seconds: see what they printed")


def test_one_who_came_twice_or_counts_otherwise_is_rejected():
    port, said = free_port(), []

    def another(process, processes):
        try:
            call_roll(Seat(f"127.0.0.1:{port}", processes, process), {}, timeout=1)
        except UsageError as error:
            said.append(str(error))

    others = [threading.Thread(target=another, args=place) for place in ((0 + 1, 3), (1, 2))]
    first = threading.Thread(target=another, args=(0, 3))
    for thread in (first, *others):
        thread.start()
    for thread in (first, *others):
        thread.join(20)
    assert "--distributed.processes is 3 on process 0 and 2 on process 1" in said
    assert sum("process 2 of 3 did not come" in text for text in said) == 2


def test_a_port_in_use_is_an_error():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(UsageError, match=f"cannot listen at port {port}: another program uses it; write another"):
            call_roll(Seat(f"127.0.0.1:{port}", 2, 0), {}, timeout=0.2)


def test_a_process_0_that_cannot_be_reached_is_an_error_with_its_reason():
    says = "process 1 did not reach process 0 at 127.0.0.1:.* within 0.3 seconds: Connection refused; write the address"
    with pytest.raises(UsageError, match=says):
        call_roll(Seat(f"127.0.0.1:{free_port()}", 2, 1), {}, timeout=0.3)


STRANGERS = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"\0\xff\n",
    b"[" * 100_000 + b"\n",
    b"[1]\n",
    b"3\n",
    b"null\n",
    b'{"kind": ["mpjax"]}\n',
    *(
        json.dumps({"kind": "mpjax"} | besides).encode() + b"\n"
        for besides in (
            {},
            {"process": 1},
            {"process": "one", "processes": 2, "about": {}},
            {"process": None, "processes": 2, "about": {}},
            {"process": [1], "processes": 2, "about": {}},
            {"process": True, "processes": 2, "about": {}},
            {"process": 1.5, "processes": 2, "about": {}},
            {"process": 7, "processes": 2, "about": {}},
            {"process": -1, "processes": 2, "about": {}},
            {"process": 0, "processes": 2, "about": {}},
            {"process": 1, "processes": 2, "about": None},
            {"process": 1, "processes": 2, "about": {"seed": [0]}},
        )
    ),
]


def answer_to(words, port):
    """What process 0 says, once it listens; None if it listens no more."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        refused = contextlib.suppress(ConnectionRefusedError)
        with refused, socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(words)
            with contextlib.suppress(ConnectionResetError):
                return connection.recv(10)
            return b""
    return None


def test_strangers_are_passed_over():
    port = free_port()
    first, other = (Seat(f"127.0.0.1:{port}", 2, process) for process in range(2))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(call_roll, first, {}, timeout=30)
        assert {words: answer_to(words, port) for words in STRANGERS} == dict.fromkeys(STRANGERS, b"")
        lines = [call_roll(other, {}, timeout=5), waiting.result()]
    assert [list(line) for line in lines] == [[0], [1]]
    for line in lines:
        for connection in line.values():
            connection.close()


def test_numbers_are_shortened():
    assert numbers([3]) == "3"
    assert numbers([0, 1, 3, 4, 5, 9]) == "0, 1, 3-5, 9"

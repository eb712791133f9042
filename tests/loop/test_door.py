"""Who is there, who knows the secret, and whether all are about to do the same."""

import concurrent.futures
import contextlib
import hmac
import json
import os
import socket
import sys
import threading
import time

import pytest

from mpjax.errors import UsageError
from mpjax.loop import Seat, enter, knock, notice_a_dead_machine, numbers, own_address, shared_key


def free_port():
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


class Lost(list):
    """Stands for a company: keeps who is lost."""

    inside = ()

    def lost(self, process):
        self.append(process)


def enter_as(process, processes, port, path, *, about=None, key=b"", timeout=5.0):
    """Enters in this process; returns what is lost afterwards, as it comes, or the error."""
    company = Lost()
    try:
        enter(company, Seat(f"127.0.0.1:{port}", processes, process), about or {}, key, str(path), timeout=timeout)
    except UsageError as error:
        return str(error)
    return company


def enter_all(abouts, folder, *, processes=None, timeout=5.0, delays=None, keys=None):
    """What each process, in a thread of its own, gets or says; `abouts` by its number."""
    port, found = free_port(), {}

    def come(process, about):
        time.sleep((delays or {}).get(process, 0))
        how = {"about": about, "timeout": timeout, "key": (keys or {}).get(process, b"")}
        found[process] = enter_as(process, processes or len(abouts), port, folder / str(process), **how)

    threads = [threading.Thread(target=come, args=item) for item in abouts.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


@contextlib.contextmanager
def service(path):
    """A service at a Unix socket that sends back what it gets."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    connection = server.accept()[0]
                    threading.Thread(target=echo, args=(connection,), daemon=True).start()

        def echo(connection):
            with connection:
                while content := connection.recv(2**16):
                    connection.sendall(content)

        threading.Thread(target=serve, daemon=True).start()
        yield


def sent_and_back(path, content):
    """What comes back over a Unix socket, and the socket."""
    line = socket.socket(socket.AF_UNIX)
    line.settimeout(20)
    line.connect(str(path))
    threading.Thread(target=line.sendall, args=(content,)).start()
    back = b""
    while len(back) < len(content):
        back += line.recv(2**16)
    return back, line


@pytest.mark.parametrize("late", [0, 2])
def test_all_reach_what_listens_at_process_0_whoever_comes_first(tmp_path, late):
    with service(tmp_path / "0"):
        found = enter_all({process: {"seed": "0"} for process in range(3)}, tmp_path, delays={late: 0.5})
        assert found == {0: [], 1: [], 2: []}
        content = bytes(range(256)) * 10_000
        lines = [sent_and_back(tmp_path / str(process), content) for process in (1, 2)]
        assert [back == content for back, _ in lines] == [True, True]
        assert found[0].inside == {1, 2}
        lines[1][1].close()
        with lines[0][1]:
            until = time.monotonic() + 10
            while not (found[0] and found[2]) and time.monotonic() < until:
                time.sleep(0.01)
            assert found == {0: [2], 1: [], 2: [0]}  # each end sees that the other is gone


@pytest.mark.parametrize("reached", ["127.0.0.1", "::1", "127.0.0.2"])
def test_each_learns_the_address_at_which_the_others_reach_it(tmp_path, monkeypatch, reached):
    """Process 2 reaches process 0 at `reached`, of which 127.0.0.2 stands for an address of a network."""
    monkeypatch.setattr("mpjax.loop.door.is_loopback", lambda address: address in ("127.0.0.1", "::1"))
    port, found = free_port(), {}
    monkeypatch.setattr("mpjax.loop.port.own_address", lambda _: None)
    written = f"[{reached}]" if ":" in reached else reached
    hosts = {0: written, 1: written if ":" in reached else "127.0.0.1", 2: written}

    def come(process):
        seat = Seat(f"{hosts[process]}:{port}", 3, process)
        found[process] = enter(Lost(), seat, {}, b"", str(tmp_path / str(process)), timeout=10)

    threads = [threading.Thread(target=come, args=(process,)) for process in hosts]
    with service(tmp_path / "0"):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert found == {0: reached, 1: reached, 2: reached}


def test_nobody_listens_once_all_are_there(tmp_path):
    port = free_port()
    with service(tmp_path / "0"), concurrent.futures.ThreadPoolExecutor(2) as pool:
        entering = [pool.submit(enter_as, process, 2, port, tmp_path / str(process)) for process in range(2)]
        assert [future.result() for future in entering] == [[], []]
        time.sleep(0.2)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))


def test_differences_are_told_to_all_by_name_with_values(tmp_path):
    same = {"seed": "0", "mpjax": "1.0"}
    found = enter_all({0: same, 1: {"seed": "0", "mpjax": "1.1"}, 2: same | {"mesh.fsdp": "2"}, 3: same}, tmp_path)
    assert set(found.values()) == {
        "the processes differ, and have to be started with the same settings and code:\n"
        "  mesh.fsdp: not there on process 0, 1, 3, 2 on process 2\n"
        "  mpjax: 1.0 on process 0, 2, 3, 1.1 on process 1"
    }
    assert len(found) == 4


def test_who_is_missing_is_told_to_those_who_came(tmp_path):
    found = enter_all({0: {}, 2: {}}, tmp_path, processes=5, timeout=1.5)
    assert len(found) == 2
    for said in found.values():
        assert said.startswith("processes 1, 3, 4 of 5 did not come within 1.5 seconds: see what they printed")


def test_one_who_came_twice_or_counts_otherwise_is_rejected(tmp_path):
    port, said = free_port(), []

    def another(process, processes):
        said.append(enter_as(process, processes, port, tmp_path / "none", timeout=1))

    threads = [threading.Thread(target=another, args=place) for place in ((0, 3), (1, 3), (1, 2), (1, 3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert "--distributed.processes is 3 on process 0 and 2 on process 1" in said
    assert "there are two processes with --distributed.process 1: number them 0 to 2" in said
    assert sum("process 2 of 3 did not come" in text for text in said) == 2


def test_one_that_ends_while_it_waits_may_come_again(tmp_path):
    port = free_port()

    def come(process):
        return pool.submit(enter_as, process, 4, port, tmp_path / str(process), timeout=20)

    with service(tmp_path / "0"), concurrent.futures.ThreadPoolExecutor(5) as pool:
        coming = [come(0), come(1)]
        time.sleep(0.5)
        with socket.create_connection(("127.0.0.1", port)) as connection:
            ended = pool.submit(knock, connection, Seat("", 4, 2), {}, b"")
            time.sleep(0.5)
            connection.shutdown(socket.SHUT_RDWR)
            with pytest.raises((OSError, ValueError)):
                ended.result()
        time.sleep(0.5)
        coming += [come(2), come(3)]
        assert [future.result() for future in coming] == [[], [], [], []]


@pytest.mark.parametrize("other", [b"", b"another"])
def test_who_does_not_know_the_secret_does_not_enter(tmp_path, other):
    found = enter_all({0: {}, 1: {}}, tmp_path, timeout=3.0, keys={0: b"ours", 1: other})
    assert found[0].startswith("process 1 of 2 did not come within 3 seconds")
    assert "within 3 seconds: what listens there is not process 0 of this run, has another secret, or has" in found[1]


def test_the_secret_is_of_the_user_or_of_the_scheduler(tmp_path):
    file = tmp_path / "secret"
    file.write_text("long and random\n")
    job = {"SLURM_JOB_ID": "17"}
    assert shared_key(detected=False, environment=job | {"MPJAX_SECRET_FILE": str(file)}) == b"long and random"
    assert shared_key(detected=True, environment=job | {"MPJAX_SECRET": "word"}) == b"word"
    assert shared_key(detected=True, environment={"MPJAX_SECRET": os.fsdecode(b"w\xff\n")}) == b"w\xff\n"
    assert shared_key(detected=True, environment=job) == b"17"
    assert shared_key(detected=False, environment=job) == b""  # the flags may join processes of several jobs
    with pytest.raises(UsageError, match=r"cannot read \$MPJAX_SECRET_FILE, .*none: No such file"):
        shared_key(detected=False, environment={"MPJAX_SECRET_FILE": str(tmp_path / "none")})
    file.write_text("\n")
    with pytest.raises(UsageError, match="is empty: write a long random text into it"):
        shared_key(detected=False, environment={"MPJAX_SECRET_FILE": str(file)})


def test_a_port_in_use_is_an_error(tmp_path):
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        said = enter_as(0, 2, port, tmp_path / "0", timeout=0.2)
    assert said.startswith(f"process 0 cannot listen at port {port}: another program uses it; write another free port")


def test_a_process_0_that_cannot_be_reached_is_an_error_with_its_reason(tmp_path):
    said = enter_as(1, 2, free_port(), tmp_path / "1", timeout=0.3)
    assert said.startswith("process 1 did not reach process 0 at 127.0.0.1:")
    assert "within 0.3 seconds: Connection refused; write the address" in said


def test_one_machine_listens_at_its_loopback_alone(monkeypatch):
    assert own_address("127.0.0.1") == own_address("localhost") == "127.0.0.1"
    assert own_address("no-such-host.invalid") is None
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(2, 1, 6, "", ("127.0.1.1", 0))])
    assert own_address("node01") is None  # so does Debian; the others know node01 by another address
    assert own_address("node01", {"SLURM_STEP_NUM_NODES": "1"}) == "127.0.1.1"
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(2, 1, 6, "", ("192.0.2.1", 0))])
    assert own_address("service") is None  # an address of another machine


@pytest.mark.skipif(sys.platform != "linux", reason="other systems lack the options")
def test_both_ends_notice_a_machine_that_is_gone_after_30_seconds():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        notice_a_dead_machine(listener)
        with socket.create_connection(listener.getsockname()) as other, listener.accept()[0] as connection:
            notice_a_dead_machine(other)
            for end in (connection, other):
                assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 10
                assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 5
                assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 4
                assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000


STRANGERS = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"\0\xff\n",
    b"[" * 100_000 + b"\n",
    b"[1]\n",
    b"3\n",
    b"null\n",
    b'{"process": ["mpjax"]}\n',
]
KNOWING = [
    {},
    {"process": 1},
    {"process": "one", "processes": 2, "about": {}},
    {"process": None, "processes": 2, "about": {}},
    {"process": [1], "processes": 2, "about": {}},
    {"process": True, "processes": 2, "about": []},
    {"process": 1.5, "processes": 2, "about": {}},
    {"process": 7, "processes": 2, "about": {}},
    {"process": -1, "processes": 2, "about": {}},
    {"process": 0, "processes": 2, "about": {}},
    {"process": 1, "processes": 2, "about": None},
    {"process": 1, "processes": 2, "about": {"seed": [0]}},
]


def answer_to(words, port):
    """What process 0 says after its first line, once it listens; `words` are sealed with the empty key if a dict."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        refused = contextlib.suppress(ConnectionRefusedError)
        with refused, socket.create_connection(("127.0.0.1", port)) as connection:
            nonce = connection.makefile("rb", buffering=0).readline().strip()
            if isinstance(words, dict):
                text = json.dumps(words | {"nonce": ""}).encode()
                words = hmac.digest(b"", nonce + text, "sha256").hex().encode() + b" " + text + b"\n"
            connection.sendall(words)
            with contextlib.suppress(ConnectionResetError):
                return connection.recv(10)
            return b""
    return None


def test_strangers_are_passed_over(tmp_path):
    """Without a secret, anyone who knows the form may enter; what has another form is passed over all the same."""
    port = free_port()
    with service(tmp_path / "0"), concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(enter_as, 0, 2, port, tmp_path / "0", timeout=30)
        assert {words: answer_to(words, port) for words in STRANGERS} == dict.fromkeys(STRANGERS, b"")
        assert None not in [answer_to(words, port) for words in KNOWING]
        assert enter_as(1, 2, port, tmp_path / "1") == []
        assert waiting.result() == []


def test_a_stranger_who_says_nothing_does_not_hold_the_start(tmp_path):
    port = free_port()
    with service(tmp_path / "0"), concurrent.futures.ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as opened:
        waiting = pool.submit(enter_as, 0, 2, port, tmp_path / "0", timeout=30)
        time.sleep(0.5)
        for _ in range(50):
            opened.enter_context(socket.create_connection(("127.0.0.1", port)))
        began = time.monotonic()
        assert enter_as(1, 2, port, tmp_path / "1") == []
        assert waiting.result() == []
        assert time.monotonic() - began < 4


def test_numbers_are_shortened():
    assert numbers([3]) == "3"
    assert numbers([0, 1, 3, 4, 5, 9]) == "0, 1, 3-5, 9"

"""What the processes of a run tell each other; here all of them are in one, each with a thread."""

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from mpjax.loop import Alone, Company


class Store:
    """Stands for JAX's key-value store: as much of it as a company uses."""

    def __init__(self):
        self._values, self._changed = {}, threading.Condition()
        self.longest_waits: list[float] = []  # seconds

    def key_value_set_bytes(self, key, value, allow_overwrite=False):
        with self._changed:
            if key in self._values and not allow_overwrite:
                raise RuntimeError(f"ALREADY_EXISTS: {key}")
            self._values[key] = value
            self._changed.notify_all()

    def blocking_key_value_get_bytes(self, key, milliseconds):
        with self._changed:
            self.longest_waits.append(milliseconds / 1000)
            if not self._changed.wait_for(lambda: key in self._values, milliseconds / 1000):
                raise RuntimeError(f"DEADLINE_EXCEEDED: {key}")
            return self._values[key]

    def key_value_dir_get_bytes(self, key):
        with self._changed:
            return [item for item in self._values.items() if item[0].startswith(key + "/")]

    def key_value_delete(self, key):
        with self._changed:
            for each in [each for each in self._values if each.startswith(key + "/")]:
                del self._values[each]


@contextlib.contextmanager
def company_of(count):
    store, members = Store(), [Company(process, count) for process in range(count)]
    run_all(members, lambda member: member.begin(store))
    try:
        yield members
    finally:
        run_all(members, lambda member: member.disband())


def run_all(members, function):
    """Calls a function of each member in a thread of its own; returns the results in their order."""
    found = {}
    threads = [
        threading.Thread(target=lambda number=number, member=member: found.update({number: function(member)}))
        for number, member in enumerate(members)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [found.get(number) for number in range(len(members))]


def test_all_get_the_values_of_all_in_order():
    with company_of(3) as members:
        assert [member.first for member in members] == [True, False, False]
        for turn in ("a", {"b": [1]}):
            found = run_all(members, lambda member, turn=turn: member.gather([member.process, turn]))
            assert found == [[[0, turn], [1, turn], [2, turn]]] * 3


def test_no_wait_ends_without_a_value():
    """JAX's service keeps 36 KB for each that does: with a wait of 10 s, two processes took 600 MB a day."""
    store, members = Store(), [Company(process, 2) for process in range(2)]
    run_all(members, lambda member: member.begin(store))
    run_all(members, lambda member: member.disband())
    assert len(store.longest_waits) > 4
    assert set(store.longest_waits) == {86400}


def steps_until_due(member, *, most=2000, at=None, pause=0.0):
    """The step after which a member stops; it asks for it at step `at`."""
    for position in range(1, most):
        time.sleep(pause)
        if position == at:
            member.ask(signal.SIGTERM)
        if member.due(position):
            return position
    return None


@pytest.mark.parametrize("asker", [0, 2])
def test_all_stop_after_the_same_step_whoever_is_ahead(asker):
    with company_of(3) as members:

        def steps(member):
            at = 20 if member.process == asker else None
            return steps_until_due(member, at=at, pause=0.001 * (1 + member.process))

        found = run_all(members, steps)
        assert found[0] is not None
        assert found[0] >= 20
        assert len(set(found)) == 1
        assert [member.signal_number for member in members] == [signal.SIGTERM] * 3


def test_later_requests_change_nothing():
    with company_of(3) as members:
        for member in members:
            member.ask(signal.SIGINT if member.first else signal.SIGTERM)
            while None in [each.signal_number for each in members]:
                time.sleep(0.01)
        assert run_all(members, lambda member: steps_until_due(member, pause=0.01)) == [1] * 3
        assert [member.signal_number for member in members] == [signal.SIGINT] * 3
        time.sleep(0.3)
        assert run_all(members, lambda member: member.gather(member.process)) == [[0, 1, 2]] * 3


def test_one_that_has_not_begun_stops_where_the_furthest_does():
    with company_of(2) as members:
        members[1].ask(signal.SIGINT)
        while members[0].signal_number is None or members[1].signal_number is None:
            time.sleep(0.01)
        assert run_all(members, steps_until_due) == [1, 1]


def test_without_a_request_nobody_stops():
    with company_of(2) as members:
        assert run_all(members, lambda member: steps_until_due(member, most=50)) == [None, None]


COMPANY = """
import sys, time
from mpjax.loop import company, join
from mpjax.loop.cluster import Seat

company.BEAT, company.SILENCE, company.GRACE = 0.1, 2.0, 1.0
process, port, path = int(sys.argv[1]), sys.argv[2], sys.argv[3]
seat, joined = Seat(f"127.0.0.1:{port}", 3, process), company.Company(process, 3)
address = join.enter(joined, seat, {}, b"", path, timeout=30)
join.start_jax(joined, seat, path, address)
print("joined", flush=True)
if sys.stdin.readline() == "fail\\n":
    joined.fail("out of luck", 7)
    joined.end(7)
time.sleep(60)
"""


@contextlib.contextmanager
def three(folder):
    """Three processes that give up another after 2 s of silence."""
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1])
    pipes, running = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE), []
    try:
        for process in range(3):
            command = [sys.executable, "-c", COMPANY, str(process), port, str(folder / str(process))]
            running.append(subprocess.Popen(command, **pipes, text=True))
        assert [each.stdout.readline() for each in running] == ["joined\n"] * 3
        yield running
    finally:
        for each in running:
            each.kill()
            each.communicate()


@pytest.mark.parametrize("killed", [0, 1])
def test_a_process_that_is_killed_ends_the_others_which_name_it(tmp_path, killed):
    """Without a stack trace of JAX, and in seconds: its own heartbeats would take two minutes."""
    with three(tmp_path) as running:
        gone = running.pop(killed)
        gone.kill()
        gone.communicate()
        began = time.monotonic()
        for each in running:
            assert each.wait(20) == 1
            assert [line for line in each.stderr.read().splitlines() if line.startswith("error")] == [
                f"error: process {killed} has ended without a word: it was killed, or its machine is gone; "
                "--resume continues from the last checkpoint"
            ]
        assert time.monotonic() - began < 5


@pytest.mark.parametrize("failing", [0, 2])
def test_what_ends_one_is_told_by_the_others_with_its_code(tmp_path, failing):
    with three(tmp_path) as running:
        failed = running.pop(failing)
        failed.stdin.write("fail\n")
        failed.stdin.flush()
        for each in (*running, failed):
            assert each.wait(20) == 7
        failed.communicate()
        for each in running:
            assert f"error: process {failing} has ended: out of luck\n" in each.stderr.read()


def test_one_that_fails_while_the_first_is_stopped_ends_all_the_same(tmp_path):
    with three(tmp_path) as (first, failing, _):
        first.send_signal(signal.SIGSTOP)
        failing.stdin.write("fail\n")
        failing.stdin.flush()
        assert failing.wait(20) == 7


def test_a_process_that_is_stopped_for_ever_ends_the_others_which_say_so(tmp_path):
    with three(tmp_path) as (stopped, *others):
        stopped.send_signal(signal.SIGSTOP)
        for each in others:
            assert each.wait(20) == 1
            assert each.stderr.read() == (
                f"error: process 0 on {socket.gethostname()} has not answered for 2 s: it is stopped, or "
                "its host hangs; end it there; --resume continues from the last checkpoint\n"
            )


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [[0], [0, 1, 2]], ids=["the first", "all"])
def test_processes_that_are_stopped_for_a_while_go_on(tmp_path, stopped):
    """One for less than 2 s; all of them, as a suspended job is, for any time."""
    with three(tmp_path) as running:
        time.sleep(0.5)
        for process in stopped:
            running[process].send_signal(signal.SIGSTOP)
        time.sleep(3 if len(stopped) == 3 else 1)
        for process in stopped:
            running[process].send_signal(signal.SIGCONT)
        time.sleep(3)
        assert [each.poll() for each in running] == [None] * 3


def test_one_process_is_a_company_of_its_own():
    alone = Alone()
    assert (alone.first, alone.processes, alone.gather({"a": 1})) == (True, 1, [{"a": 1}])
    assert not alone.stop.due(3)
    alone.stop.ask(signal.SIGTERM)
    assert alone.stop.due(3)
    assert alone.stop.signal_number == signal.SIGTERM

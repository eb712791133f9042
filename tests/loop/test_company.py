"""What the processes of a run tell each other; here all of them are in one, each with a thread."""

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from mpjax.loop.company import Alone, Company
from mpjax.loop.messages import Connection


@contextlib.contextmanager
def company_of(count):
    lines = {}
    with socket.create_server(("127.0.0.1", 0)) as server:
        for process in range(1, count):
            there = Connection(socket.create_connection(server.getsockname()))
            lines[process] = Connection(server.accept()[0]), there
    first = Company(0, count, {process: here for process, (here, _) in lines.items()})
    members = [first, *(Company(process, count, {0: there}) for process, (_, there) in lines.items())]
    try:
        yield members
    finally:
        run_all(members, lambda member: member.disband())
        for pair in lines.values():
            for line in pair:
                line.close()


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
import socket, sys, time
from mpjax.loop import company
from mpjax.loop.messages import Connection

company.BEAT, company.SILENCE = 0.1, 2.0
process, port = map(int, sys.argv[1:])
if process:
    lines = {0: Connection(socket.create_connection(("127.0.0.1", port)))}
else:
    server = socket.create_server(("127.0.0.1", 0))
    print(server.getsockname()[1], flush=True)
    lines = {other: Connection(server.accept()[0]) for other in (1, 2)}
company.Company(process, 3, lines)
print("joined", flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def three():
    """Three processes that give up another after 2 s of silence."""
    running, port = [], "0"
    try:
        for process in range(3):
            command = [sys.executable, "-c", COMPANY, str(process), port]
            running.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
            said = running[process].stdout.readline().strip()  # in their order, so they are accepted in it
            port = port if process else said
        assert running[0].stdout.readline() == "joined\n"
        yield running
    finally:
        for each in running:
            each.kill()
            each.communicate()


def test_a_process_that_is_stopped_for_ever_ends_the_others_which_say_so():
    with three() as (stopped, *others):
        stopped.send_signal(signal.SIGSTOP)
        for each in others:
            assert each.wait(20) == 1
            assert each.stderr.read() == (
                f"error: process 0 on {socket.gethostname()} has not answered for 2 s: it is stopped, or "
                "its host hangs; end it there; --resume continues from the last checkpoint\n"
            )


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [[0], [0, 1, 2]], ids=["the first", "all"])
def test_processes_that_are_stopped_for_a_while_go_on(stopped):
    """One for less than 2 s; all of them, as a suspended job is, for any time."""
    with three() as running:
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

"""What process 0 decides about an elastic run, told by hand what the processes say."""

import queue
import signal
import threading
import time

import pytest

from mpjax.config import Config, Data, Distributed
from mpjax.loop import GONE, ElasticTerms, terms


WITHIN = 20


class Said:
    """The link to a process: what was sent to it."""

    def __init__(self):
        self.messages = queue.SimpleQueue()

    def send(self, **message):
        self.messages.put(message)

    def close(self):
        self.messages.put({"kind": "closed"})


class Run:
    """Four processes of one device each, whose supervisors are this test."""

    def __init__(self, folder, processes=4, timeout=5.0, batch=24, absent=None, resume=False):
        self.folder, self.lines, self.events = folder, [], queue.SimpleQueue()
        self.links = {process: Said() for process in range(processes)}
        config = Config(
            output_dir=str(folder),
            resume=resume,
            data=Data(batch_size=batch),
            distributed=Distributed(elastic=True, timeout=timeout),
        )
        self.terms = ElasticTerms(config, "10.0.0.1", processes, self.events, self.links, self.lines.append)
        for process in self.links if absent is None else self.links.keys() - {absent}:
            self.events.put(("door", {"process": process, "host": f"host{process}"}))
        self.thread = threading.Thread(target=self.terms.run, daemon=True)

    def says(self, process, kind, **values):
        self.events.put((process, {"kind": kind, **values}))

    def heard(self, process, kind):
        """The next message to a process, which has to be of this kind."""
        message = self.links[process].messages.get(timeout=WITHIN)
        assert message["kind"] == kind, message
        return message

    def started(self, *members, train=True):
        """All of these were told to start; returns the number of the term."""
        messages = [self.heard(member, "start") for member in members]
        assert [message["process"] for message in messages] == list(range(len(members)))
        assert {message["processes"] for message in messages} == {len(members)}
        assert len({message["coordinator"] for message in messages}) == 1
        term = messages[0]["term"]
        for member in members if train else ():
            self.says(member, "running", term=term, devices=1)
        return term

    def ended(self, term, codes):
        for member, code in codes.items():
            self.says(member, "ended", term=term, code=code)

    def saved(self, step):
        (self.folder / "checkpoints" / str(step)).mkdir(parents=True)

    def end(self, *members):
        messages = [self.heard(member, "end") for member in members]
        self.thread.join(WITHIN)
        (end,) = {(message["code"], message["text"]) for message in messages}
        return end


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(terms, "SETTLING", 0.2)
    monkeypatch.setattr(terms, "ANSWER", 0.5)
    run = Run(tmp_path)
    run.thread.start()
    return run


ALL = (0, 1, 2, 3)


def test_a_run_that_is_done_ends_for_all(run):
    term = run.started(*ALL)
    run.ended(term, dict.fromkeys(ALL, 0))
    assert run.end(*ALL) == (0, "")
    assert run.lines == []


def test_a_worker_that_is_killed_is_started_again_with_the_others(run):
    term = run.started(*ALL)
    run.saved(50)
    run.says(0, "at", term=term, step=57)
    run.ended(term, {2: -9})
    for other in (0, 1, 3):
        run.heard(other, "kill")
    run.ended(term, dict.fromkeys((0, 1, 3), -9))
    assert run.started(*ALL) == 2
    assert run.lines == ["process 2 of 4 (host2) died after step 57; all 4 go on from the checkpoint of step 50"]


def test_without_a_process_that_is_gone_the_others_go_on_and_take_it_in_when_it_is_back(run):
    term = run.started(*ALL)
    run.saved(50)
    run.says(0, "at", term=term, step=57)
    run.links.pop(2)
    run.events.put((2, GONE))
    for other in (0, 1, 3):
        run.heard(other, "kill")
    run.ended(term, dict.fromkeys((0, 1, 3), -9))
    term = run.started(0, 1, 3)
    run.links[2] = Said()
    run.events.put(("door", {"process": 2, "host": "other"}))
    assert run.heard(0, "ask")["signal"] == signal.SIGTERM
    run.saved(70)
    run.ended(term, dict.fromkeys((0, 1, 3), 143))
    assert run.started(*ALL) == 3
    assert run.lines == [
        "process 2 of 4 (host2) died after step 57; 3 of 4 processes go on from the checkpoint of step 50, with 8 "
        "examples per device at once in place of 6",
        "process 2 of 4 (other) is there again",
        "all 4 go on from the checkpoint of step 70, with 6 examples per device at once in place of 8",
    ]


def test_two_that_die_at_once_are_both_told(run):
    term = run.started(*ALL)
    for gone in (1, 3):
        run.links.pop(gone)
    for gone in (1, 3):
        run.events.put((gone, GONE))
    for other in (0, 2):
        run.heard(other, "kill")
    run.ended(term, {0: -9, 2: -9})
    assert run.started(0, 2) == 2
    assert run.lines[0].startswith("processes 1, 3 of 4 (host1, host3) died after step 0; 2 of 4 processes go on from ")
    assert "from the start: there is no checkpoint yet" in run.lines[0]


def test_before_all_have_trained_a_process_that_is_gone_is_waited_for(run):
    """Until then nobody knows how many devices there are, and the first batches would be others."""
    term = run.started(*ALL, train=False)
    run.links.pop(3)
    run.events.put((3, GONE))
    run.ended(term, dict.fromkeys((0, 1, 2), -9))
    time.sleep(0.3)
    run.links[3] = Said()
    run.events.put(("door", {"process": 3, "host": "host3"}))
    for other in (0, 1, 2):
        run.heard(other, "kill")
    assert run.started(*ALL) == 2


def test_a_process_for_which_the_batch_does_not_divide_waits(tmp_path):
    run = Run(tmp_path, batch=8)
    run.thread.start()
    term = run.started(*ALL)
    run.links.pop(1)
    run.events.put((1, GONE))
    run.ended(term, dict.fromkeys((0, 2, 3), -9))
    for other in (0, 2, 3):
        run.heard(other, "kill")
    run.started(0, 2)
    assert run.lines[0].endswith("; process 3 waits, as 8 examples do not divide")


@pytest.mark.parametrize(("code", "text"), [(2, "no such data"), (3, "training diverged"), (1, "disk full")])
def test_an_error_of_the_program_ends_the_run_and_is_told_once(run, code, text):
    term = run.started(*ALL)
    for member in ALL:
        run.says(member, "failed", term=term, code=code, text=text)
    run.ended(term, dict.fromkeys(ALL, code))
    assert run.end(*ALL) == (code, text)
    assert run.lines == []


def test_an_error_of_one_names_it_and_the_others_are_ended(run):
    term = run.started(*ALL)
    run.says(2, "failed", term=term, code=1, text="disk full")
    run.ended(term, {2: 1})
    for other in (0, 1, 3):
        run.heard(other, "kill")
    run.ended(term, dict.fromkeys((0, 1, 3), -9))
    assert run.end(*ALL) == (1, "process 2: disk full")


@pytest.mark.parametrize(
    ("resume", "file", "wanted"), [(True, False, True), (False, True, True), (False, False, False)]
)
def test_all_resume_if_process_0_does_or_the_run_has_begun(tmp_path, resume, file, wanted):
    """A process that comes back with --resume before that would otherwise train with other settings than the rest."""
    if file:
        (tmp_path / "config.toml").touch()
    run = Run(tmp_path, resume=resume)
    run.thread.start()
    assert [run.heard(member, "start")["resume"] for member in ALL] == [wanted] * 4


@pytest.mark.parametrize("code", [2, 1])
def test_an_error_of_one_ends_the_run_though_the_others_have_ended_before_it(run, code):
    """Process 0 waits until the others have heard of its error. One that hangs then is killed, and keeps its code."""
    term = run.started(*ALL)
    run.says(0, "failed", term=term, code=code, text="no such layer")
    run.ended(term, dict.fromkeys((1, 2, 3), code))
    run.heard(0, "kill")
    run.ended(term, {0: -9})
    assert run.end(*ALL) == (code, "process 0: no such layer")
    assert run.lines == []


def test_an_error_that_is_heard_after_a_worker_has_vanished_is_not_one_of_the_program(run):
    term = run.started(*ALL)
    run.ended(term, {2: 1})  # by os._exit, without a word
    run.says(1, "failed", term=term, code=1, text="Gloo all-reduce failed")
    run.ended(term, dict.fromkeys((0, 1, 3), 1))
    run.started(*ALL)


def test_an_error_that_follows_from_a_death_is_not_one_of_the_program(run):
    """Sums over processes fail in the others when one dies, and they may be heard first."""
    term = run.started(*ALL)
    run.says(1, "failed", term=term, code=1, text="Gloo all-reduce failed")
    run.ended(term, {1: 1, 2: -9})
    for other in (0, 3):
        run.heard(other, "kill")
    run.ended(term, {0: -9, 3: -9})
    run.heard(1, "start")


def test_a_worker_that_hangs_is_killed_and_one_that_cannot_be_is_left_out(run):
    """The others end by themselves, and say no error of their own."""
    term = run.started(*ALL)
    run.ended(term, dict.fromkeys((0, 1, 3), 1))
    silent = run.links[2]
    assert run.heard(2, "kill")["term"] == term
    assert silent.messages.get(timeout=WITHIN) == {"kind": "closed"}
    run.started(0, 1, 3)
    assert run.lines[0].startswith("process 2 of 4 (host2) did not answer after step 0; 3 of 4 processes go on")


def test_workers_that_die_again_and_again_end_the_run(run):
    for _ in range(5):
        term = run.started(*ALL)
        run.ended(term, {1: -11})
        for other in (0, 2, 3):
            run.heard(other, "kill")
        run.ended(term, dict.fromkeys((0, 2, 3), -9))
    code, text = run.end(*ALL)
    assert code == 1
    assert text.startswith("workers died 5 times in a row before a new checkpoint was complete")


def test_deaths_with_checkpoints_between_them_do_not_end_it(run):
    for step in range(10, 80, 10):
        term = run.started(*ALL)
        run.saved(step)
        run.ended(term, {1: -9})
        for other in (0, 2, 3):
            run.heard(other, "kill")
        run.ended(term, dict.fromkeys((0, 2, 3), -9))
    run.started(*ALL)


def test_one_that_is_told_to_end_leaves_after_a_checkpoint(run):
    term = run.started(*ALL)
    run.says(3, "leave", signal=15)
    assert run.heard(0, "ask") == {"kind": "ask", "term": term, "signal": 15}
    run.saved(61)
    run.ended(term, dict.fromkeys(ALL, 143))
    assert run.heard(3, "end")["code"] == 143
    run.started(0, 1, 2)
    assert run.lines[1].startswith("3 of 4 processes go on from the checkpoint of step 61")


def test_one_that_is_told_to_end_before_all_are_there_or_while_it_waits_leaves_at_once(tmp_path):
    run = Run(tmp_path, absent=1, batch=8)
    run.thread.start()
    run.says(3, "leave", signal=15)
    assert run.heard(3, "end")["code"] == 143
    for process in (1, 3):
        run.links[process] = Said()
        run.events.put(("door", {"process": process, "host": f"host{process}"}))
    term = run.started(*ALL)
    run.links.pop(1)
    run.events.put((1, GONE))
    for other in (0, 2, 3):
        run.heard(other, "kill")
    run.ended(term, dict.fromkeys((0, 2, 3), -9))
    run.started(0, 2)
    run.says(3, "leave", signal=15)
    assert run.heard(3, "end")["code"] == 143
    assert run.links[0].messages.empty()


@pytest.mark.parametrize(("who", "number", "code"), [(0, 15, 143), (2, 2, 130)])
def test_sigterm_to_the_first_or_ctrl_c_to_any_ends_all(run, who, number, code):
    term = run.started(*ALL)
    run.says(who, "leave", signal=number)
    run.heard(0, "ask")
    run.saved(61)
    run.ended(term, dict.fromkeys(ALL, code))
    ended, text = run.end(*ALL)
    assert ended == code
    assert text.startswith("stopped; the checkpoint of step 61 is saved; --resume continues in ")


def test_a_stop_before_the_first_step_ends_at_once(run):
    term = run.started(*ALL, train=False)
    run.says(0, "leave", signal=2)
    for member in ALL:
        run.heard(member, "kill")
    run.ended(term, dict.fromkeys(ALL, -9))
    assert run.end(*ALL)[0] == 130


def test_one_that_never_comes_is_named(tmp_path):
    run = Run(tmp_path, processes=3, timeout=0.3, absent=1)
    run.links.pop(1)
    run.thread.start()
    assert run.end(0, 2) == (
        2,
        "process 1 of 3 did not come within 0.3 seconds: see what they printed, or wait longer with "
        "--distributed.timeout",
    )


def test_what_an_earlier_term_says_late_is_not_heard(run):
    term = run.started(*ALL)
    run.ended(term, {1: -9})
    for other in (0, 2, 3):
        run.heard(other, "kill")
    run.ended(term, dict.fromkeys((0, 2, 3), -9))
    now = run.started(*ALL)
    run.ended(term, dict.fromkeys(ALL, 2))
    run.ended(now, dict.fromkeys(ALL, 0))
    assert run.end(*ALL) == (0, "")

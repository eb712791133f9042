"""Ctrl-C while the main thread is where Python runs no handlers, and where it does."""

import signal
import subprocess
import sys
import time

import pytest


IN_C = "hashlib.pbkdf2_hmac('sha256', b'', b'', 2**28)"  # minutes outside Python, as a compilation
START = """
import hashlib, signal, time
from mpjax.ctrl_c import ended_by_interrupts
from mpjax.loop.signals import StopRequest, stop_on_signals
"""


def ended(body, interrupts):
    """The exit code, output and seconds of a program that is interrupted a second after it says that it is ready."""
    program = [sys.executable, "-c", START + body]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    for _ in range(interrupts):
        time.sleep(1)
        process.send_signal(signal.SIGINT)
    began = time.monotonic()
    try:
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
    return process.returncode, out, err, time.monotonic() - began


def test_an_interrupt_ends_a_program_that_computes_outside_python():
    code, _, err, seconds = ended(f"with ended_by_interrupts():\n print('ready', flush=True)\n {IN_C}", 1)
    assert (code, err) == (130, "interrupted\n")
    assert seconds < 5


@pytest.mark.slow
def test_where_the_first_asks_to_stop_the_second_ends():
    body = f"with ended_by_interrupts(), stop_on_signals(StopRequest()):\n print('ready', flush=True)\n {IN_C}"
    code, _, err, seconds = ended(body, 2)
    assert (code, err) == (130, "stopping after this step; Ctrl-C again ends at once\ninterrupted\n")
    assert seconds < 5


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3])
def test_one_that_python_answers_leaves_time_to_clean_up(count):
    """Also after interrupts that a run took for the wish to stop."""
    body = """
with ended_by_interrupts():
    for _ in range(%d):
        stop = StopRequest()
        with stop_on_signals(stop):
            print('ready', flush=True)
            while not stop:
                time.sleep(0.01)
    time.sleep(1.5)
    print('clean', flush=True)
"""
    code, out, err, _ = ended(body % count, count)
    assert (code, out.splitlines()[-1], err) == (0, "clean", "")


def test_handlers_come_back():
    from mpjax.ctrl_c import ended_by_interrupts, interrupt

    before = signal.getsignal(signal.SIGINT)
    with ended_by_interrupts():
        assert signal.getsignal(signal.SIGINT) is interrupt
    assert signal.getsignal(signal.SIGINT) is before
    assert signal.set_wakeup_fd(-1) == -1

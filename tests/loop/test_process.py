"""Signals as a wish to stop."""

import os
import signal
import threading

import pytest

from mpjax.loop.process import stop_on_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_recorded_and_handlers_come_back(number):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with stop_on_signals() as stop:
        assert not stop
        os.kill(os.getpid(), number)
        assert stop
        assert stop.signal_number == number
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_second_interrupt_means_now():
    with stop_on_signals():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_outside_the_main_thread_signals_are_left_alone():
    found = []

    def body():
        with stop_on_signals() as stop:
            found.append(bool(stop))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert found == [False]

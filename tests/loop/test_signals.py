"""Signals as a wish to stop."""

import os
import signal
import threading

import pytest

from mpjax.loop import StopRequest, stop_on_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_recorded_and_handlers_come_back(number):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    stop = StopRequest()
    with stop_on_signals(stop):
        assert not stop
        assert not stop.due(7)
        os.kill(os.getpid(), number)
        assert stop
        assert stop.due(7)
        assert stop.signal_number == number
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_second_interrupt_means_now():
    with stop_on_signals(StopRequest()):
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_outside_the_main_thread_signals_are_left_alone():
    found, before = [], signal.getsignal(signal.SIGTERM)

    def body():
        with stop_on_signals(StopRequest()):
            found.append(signal.getsignal(signal.SIGTERM) == before)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert found == [True]

"""A clock that stands still while paused."""

import types

import pytest

from mpjax.loop import train as loop


def test_pauses_do_not_count(monkeypatch):
    now = iter([10.0, 11.0, 12.0, 15.0, 17.0, 20.0, 26.0, 30.0])
    monkeypatch.setattr(loop, "time", types.SimpleNamespace(perf_counter=lambda: next(now)))
    watch = loop.Clock()
    assert watch.seconds() == 1
    with watch.pause():
        pass
    assert watch.seconds() == 4
    with pytest.raises(KeyError), watch.pause():
        raise KeyError
    assert watch.seconds() == 11

"""A user's writer: what it gets, and what becomes of its failure."""

import pytest

from mpjax.errors import CallbackError, LoggerWarning
from mpjax.report.own_writer import Failures, OwnWriter
from mpjax.report.writer import Writers


class Album:
    def __init__(self, failing=()):
        self.failing, self.heard = failing, []

    def __getattr__(self, name):
        if name not in ("write", "layers", "saved", "message", "close", "images"):
            raise AttributeError(name)

        def hear(*arguments):
            self.heard.append((name, *arguments))
            if name in self.failing:
                raise ValueError(name)

        return hear


def test_all_is_passed_on():
    own = OwnWriter(album := Album())
    writers = Writers([own])
    writers.write(2, {"train/loss": 1.0})
    writers.layers(2, ["stem"])
    writers.images(2, {"masks/0": "picture"})
    writers.saved(2)
    writers.message("hello")
    writers.close()
    assert album.heard == [
        ("write", 2, {"train/loss": 1.0}),
        ("layers", 2, ["stem"]),
        ("images", 2, {"masks/0": "picture"}),
        ("saved", 2),
        ("message", "hello"),
        ("close",),
    ]
    assert own.failure is None


def test_a_writer_takes_pictures_if_it_has_the_method():
    assert Writers([OwnWriter(Album())]).takes_images
    plain = OwnWriter(object())  # pyright: ignore
    assert not Writers([plain]).takes_images
    Writers([plain]).images(2, {})
    assert plain.failure is None


def test_the_first_failure_is_kept_and_nothing_more_is_passed_on():
    own = OwnWriter(album := Album(failing=("write", "close")))
    own.write(3, {})
    own.message("hello")
    own.close()
    assert [name for name, *_ in album.heard] == ["write", "close"]
    assert str(own.failure).startswith("writer Album.write at step 3: ValueError: write (test_own_writer.py, line ")


def test_a_failure_is_raised_at_the_next_event_and_once():
    failures = Failures()
    own = failures.of(Album(failing=("write",)))
    failures.logged(1, {})
    own.write(3, {})
    with pytest.raises(CallbackError, match="Album.write at step 3"):
        failures.evaluated(3, {}, None)
    failures.ended({})


def test_what_was_not_raised_is_a_warning_if_a_run_fails():
    def run():
        with Failures().warned_of() as failures:
            failures.of(Album(failing=("close",))).close()
            raise ZeroDivisionError

    with pytest.warns(LoggerWarning, match="writer Album.close: ValueError: close"), pytest.raises(ZeroDivisionError):
        run()

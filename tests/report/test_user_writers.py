"""A user's writers: what they receive, and what becomes of a failure."""

import pytest

from mpjax.errors import CallbackError, LoggerWarning
from mpjax.extend import Writer
from mpjax.loop import Callbacks
from mpjax.report import UserWriters, failures_of_writers


class Album:
    """Has the methods of a writer, and no base class."""

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


CALLS = [
    ("write", 2, {"train/loss": 1.0}),
    ("layers", 2, ["stem"]),
    ("images", 2, {"masks/0": "picture"}),
    ("saved", 2),
    ("message", "hello"),
    ("close",),
]


def played(album, failures):
    writers = UserWriters([album], failures)
    for method, *arguments in CALLS:
        getattr(writers, method)(*arguments)
    return album.heard


def test_every_call_is_forwarded():
    failures = []
    assert played(Album(), failures) == CALLS
    assert failures == []


class Printer(Writer):
    def message(self, text):
        print(text)


class Gallery(Writer):
    def images(self, step, images):
        print(*images)


@pytest.mark.parametrize(
    ("writer", "takes"), [(Album(), True), (Gallery(), True), (Printer(), False), (Writer(), False), (object(), False)]
)
def test_a_run_draws_images_only_for_a_writer_with_a_method_for_them(writer, takes):
    failures = []
    writers = UserWriters([writer], failures)
    assert writers.takes_images is takes
    writers.images(2, {})
    assert failures == []


@pytest.mark.parametrize("method", [method for method, *_ in CALLS])
def test_after_its_first_failure_a_writer_is_only_closed(method):
    failures = []
    heard = [name for name, *_ in played(Album(failing=(method, "close")), failures)]
    names = [name for name, *_ in CALLS]
    assert heard == [*names[: names.index(method) + 1], *(["close"] if method != "close" else [])]
    (failed,) = failures
    step = " at step 2" if method not in ("message", "close") else ""
    assert str(failed).startswith(f"writer Album.{method}{step}: ValueError: {method} (test_user_writers.py, line ")
    assert isinstance(failed.__cause__, ValueError)


def test_the_failure_of_one_writer_does_not_keep_the_others_from_the_rest():
    broken, sound, failures = Album(failing=("write", "close")), Album(), []
    writers = UserWriters([broken, sound], failures)
    writers.write(3, {})
    writers.message("hello")
    writers.close()
    assert [name for name, *_ in sound.heard] == ["write", "message", "close"]
    assert len(failures) == 1


@pytest.mark.parametrize("event", ["started", "logged", "skipped", "evaluated", "saved", "diverged", "ended"])
def test_a_failure_is_raised_at_the_next_event_and_once(event):
    failures = []
    callbacks = Callbacks(failures=failures)
    writers = UserWriters([Album(failing=("write",))], failures)
    callbacks.call(event)
    writers.write(3, {})
    with pytest.raises(CallbackError, match="Album.write at step 3"):
        callbacks.call(event)
    callbacks.call(event)


def test_a_failure_in_one_process_is_raised_in_all():
    told = {"asks": [], "error": "writer Album.write at step 3: ValueError: write"}
    callbacks = Callbacks(gather=lambda value: [value, told], failures=[])
    with pytest.raises(CallbackError, match="^process 1: writer Album.write at step 3"):
        callbacks.call("logged", 3, {})


def test_a_failure_that_was_not_raised_is_a_warning_if_the_run_fails():
    def run():
        with failures_of_writers() as failures:
            UserWriters([Album(failing=("close",))], failures).close()
            raise ZeroDivisionError

    with pytest.warns(LoggerWarning, match="writer Album.close: ValueError: close"), pytest.raises(ZeroDivisionError):
        run()

"""Several writers as one."""

import pytest

from mpjax.report.writer import Writers


class Recorder:
    def __init__(self, name, calls, failure=None):
        self.name, self.calls, self.failure = name, calls, failure

    def write(self, step, metrics):
        self.calls.append((self.name, step, metrics))

    def layers(self, step, layers):
        self.calls.append((self.name, "layers", step, layers))

    def saved(self, step):
        self.calls.append((self.name, "saved", step))

    def message(self, text):
        self.calls.append((self.name, text))

    def close(self):
        self.calls.append((self.name, "close"))
        if self.failure:
            raise self.failure


def test_every_writer_gets_metrics_and_messages_in_order():
    calls = []
    writers = Writers([Recorder("a", calls), Recorder("b", calls)])
    writers.write(20, {"train/loss": 1.5})
    writers.message("saved")
    assert calls == [("a", 20, {"train/loss": 1.5}), ("b", 20, {"train/loss": 1.5}), ("a", "saved"), ("b", "saved")]


def test_every_writer_gets_the_layers():
    calls = []
    Writers([Recorder("a", calls), Recorder("b", calls)]).layers(100, ["stem"])
    assert calls == [("a", "layers", 100, ["stem"]), ("b", "layers", 100, ["stem"])]


def test_pictures_are_for_writers_that_take_them():
    calls = []

    class Album(Recorder):
        def images(self, step, images):
            self.calls.append((self.name, step, images))

    plain, some = Writers([Recorder("a", calls)]), Writers([Recorder("a", calls), Writers([Album("b", calls)])])
    assert (plain.takes_images, some.takes_images, Writers().takes_images) == (False, True, False)
    plain.images(5, {"masks/0": "picture"})
    some.images(5, {"masks/0": "picture"})
    assert calls == [("b", 5, {"masks/0": "picture"})]


def test_every_writer_is_told_of_a_checkpoint():
    calls = []
    Writers([Recorder("a", calls), Recorder("b", calls)]).saved(100)
    assert calls == [("a", "saved", 100), ("b", "saved", 100)]


def test_a_failing_close_does_not_keep_the_others_open():
    calls = []
    writers = Writers([Recorder("a", calls), Recorder("b", calls, OSError("full")), Recorder("c", calls)])
    with pytest.raises(OSError, match="full"):
        writers.close()
    assert calls == [("c", "close"), ("b", "close"), ("a", "close")]


def test_no_writers_are_silent():
    quiet = Writers()
    quiet.write(1, {"train/loss": 1.0})
    quiet.message("nothing")
    quiet.close()

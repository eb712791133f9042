"""Callbacks: whom they hear, what they may ask for, and what happens if they fail."""

import sys

import pytest

from mpjax.config import PythonObject
from mpjax.errors import CallbackError, UsageError
from mpjax.extend import Callback, RunInfo
from mpjax.loop import Callbacks, EarlyStopping, load_callbacks


class Saver:
    def logged(self, step, metrics):
        return "save" if step == 2 else None


class Stopper(Callback):
    def logged(self, step, metrics):
        return "stop"


class Broken:
    def evaluated(self, step, metrics, model):
        raise ValueError("no such table")


def test_what_callbacks_ask_for_is_collected():
    assert Callbacks([Saver(), Stopper()]).call("logged", 2, {}) == {"save", "stop"}
    assert Callbacks([Saver(), Stopper()]).call("logged", 3, {}) == {"stop"}
    assert Callbacks([Saver()]).call("saved", 3) == set()
    assert Callbacks().call("logged", 1, {}) == set()


def test_a_failure_names_callback_event_step_and_line():
    with pytest.raises(
        CallbackError, match=r"callback Broken.evaluated at step 7: ValueError: no such table \(test_callb"
    ):
        Callbacks([Broken()]).call("evaluated", 7, {}, None)


@pytest.mark.parametrize("code", [0, 3, None, "done"])
def test_a_callback_that_exits_has_failed(code):
    class Done:
        def logged(self, step, metrics):
            sys.exit(code)

    said = (
        rf"Done.logged at step 3: it called sys.exit\({'' if code is None else repr(code)}\) \(test_callb.*\); to end a"
    )
    with pytest.raises(CallbackError, match=said):
        Callbacks([Done()]).call("logged", 3, {})


def test_another_answer_is_an_error():
    class Odd:
        def saved(self, step):
            return True

    with pytest.raises(CallbackError, match='Odd.saved returned True: wanted "stop", "save" or None'):
        Callbacks([Odd()]).call("saved", 3)


def test_what_process_0_asks_for_holds_for_all():
    def gather(value):
        return [{"asks": ["stop"], "error": None}, value]

    assert Callbacks([Saver()], gather).call("logged", 2, {}) == {"stop"}


def test_a_failure_in_another_process_is_one_here():
    def gather(value):
        return [value, {"asks": [], "error": "callback X.logged: ValueError"}]

    with pytest.raises(CallbackError, match="process 1: callback X.logged: ValueError"):
        Callbacks([Saver()], gather).call("logged", 2, {})


@pytest.mark.parametrize("name", ["evaluate", "loged", "on_saved"])
def test_a_method_that_is_nearly_an_event_is_an_error(name):
    callback = type("Mine", (), {name: lambda self, *args: None, "ended": lambda self, summary: None})()
    with pytest.raises(UsageError, match=f"callback Mine: {name} is not an event; did you mean"):
        Callbacks([callback])


@pytest.mark.parametrize("name", ["on_train_batch_end", "on_epoch_end", "before_fit", "train_begin"])
def test_an_event_of_another_framework_is_an_error(name):
    callback = type("Mine", (), {name: lambda self, *args: None, "ended": lambda self, summary: None})()
    with pytest.raises(
        UsageError, match=f"callback Mine: {name} is not an event, and would never be called; .*_{name}$"
    ):
        Callbacks([callback])


def test_methods_that_are_no_events_may_have_any_other_name():
    class Plotter(Saver):
        def plot(self, values): ...

        def _on_end(self): ...

    assert Callbacks([Plotter()]).call("logged", 2, {}) == {"save"}


@pytest.mark.parametrize(
    ("event", "method", "said"),
    [
        ("logged", lambda self, step: None, r"logged takes \(step\): it is called with \(step, metrics\)"),
        ("ended", lambda self: None, r"ended takes \(\): it is called with \(summary\)"),
        (
            "evaluated",
            lambda self, step, metrics: None,
            r"evaluated takes \(step, metrics\): it is called with \(step, metrics, model",
        ),
        ("saved", lambda self, step, folder: None, r"saved takes \(step, folder\): it is called with \(step\)"),
        ("started", lambda self, *, run: None, r"started takes \(\*, run\): it is called with \(run\)"),
    ],
)
def test_a_method_that_takes_other_arguments_is_an_error_before_it_is_called(event, method, said):
    with pytest.raises(UsageError, match=f"callback Mine.{said}"):
        Callbacks([type("Mine", (), {event: method})()])


def test_a_method_may_take_any_arguments_or_have_defaults():
    assert Callbacks([type("Mine", (), {"logged": lambda self, *arguments: None})()])
    assert Callbacks([type("Mine", (), {"saved": lambda self, step, folder="x": None})()])


def test_an_object_without_events_is_an_error():
    with pytest.raises(UsageError, match="callback object has none of the methods started, logged"):
        Callbacks([object()])


def test_classes_are_made_and_objects_are_taken():
    (made,) = load_callbacks([PythonObject(Saver)])
    assert isinstance(made, Saver)
    saver = Saver()
    assert load_callbacks([PythonObject(saver)]) == [saver]


def test_a_class_with_arguments_is_an_error():
    class Needy:
        def __init__(self, folder):
            self.folder = folder

    with pytest.raises(UsageError, match="missing 1 required positional argument: 'folder'; wanted a class"):
        load_callbacks([PythonObject(Needy)])


@pytest.mark.parametrize("error", [ValueError("no table"), SystemExit(0)])
def test_a_class_that_cannot_be_made_is_an_error(error):
    class Bad:
        def __init__(self):
            raise error

    with pytest.raises(
        UsageError, match=r"Bad: (ValueError: no table|it called sys.exit\(0\)) \(test_callbacks.py, line"
    ):
        load_callbacks([PythonObject(Bad)])


def test_the_reason_of_a_stop_is_a_callback_or_an_evaluation_without_improvement():
    class Impatient:
        def started(self, run):
            return "stop"

    early = Callbacks([EarlyStopping(lambda value, best: value < best, "test/loss", 1)])
    assert early.call("evaluated", 1, {"test/loss": 1.0}, None) == set()
    assert early.reason == ""
    assert early.call("evaluated", 2, {"test/loss": 1.0}, None) == {"stop"}
    assert early.reason == ": test/loss did not improve in an evaluation (--loop.stop_after 1)"
    asked = Callbacks([Impatient()])
    asked.call("started", None)
    assert asked.reason == ", as a callback asked"


def stops_at(values, patience=2, before=(), since=0):
    records = [{"step": step, "test/loss": value} for step, value in before]
    early = EarlyStopping(lambda value, best: value < best, "test/loss", patience)
    early.started(RunInfo(None, None, 2, 10, True, records, since))
    for number, value in enumerate(values):
        if early.evaluated(number, {"test/loss": value}, None) == "stop":
            return number
    return None


def test_early_stopping_counts_evaluations_without_improvement():
    assert stops_at([3.0, 2.0, 2.0, 2.5, 1.0]) == 3
    assert stops_at([3.0, 2.0, 2.5, 1.0, 1.5]) is None


def test_nan_is_no_improvement():
    nan = float("nan")
    assert stops_at([nan, nan, 1.0]) == 1
    assert stops_at([1.0, nan, 0.5, nan, nan]) == 4


def test_a_resumed_run_counts_on():
    """The record of step 3 is of a part of the run that was thrown away."""
    assert stops_at([1.5], before=[(1, 1.0), (2, 2.0), (3, 0.1)]) == 0
    assert stops_at([0.5, 1.0], before=[(1, 1.0), (2, 2.0), (3, 0.1)]) is None


def test_evaluations_of_another_meaning_do_not_count():
    assert stops_at([1.5, 1.4], before=[(1, 1.0), (2, 2.0)], since=2) is None
    assert stops_at([2.5], before=[(1, 1.0), (2, 2.0)], since=1) is None

"""The loop, on a step that only counts."""

import itertools
import math
import signal
import types

import jax.numpy as jnp
import pytest

from mpjax.errors import CallbackError, Diverged, Interrupted
from mpjax.loop import Callbacks, Explain, Limits, StopRequest, When, train_loop


PATIENT = Limits(1.0, 99)


EXPLAIN = Explain(
    lambda number: f"first bad layer: head, in step {number}",
    lambda position, state: f"evaluation of {state} after step {position}",
)


class Recorder:
    """Stands for everything that the loop talks to, and keeps what it was told in order."""

    def __init__(self, *, losses=None, finite=None, stop_at=None):
        self.events, self.written, self.stop = [], {}, StopRequest()
        self.losses, self.finite, self.stop_at = losses or {}, finite or {}, stop_at
        self.tested, self.callbacks = 1.0, Callbacks()

    def step(self, state, batch, count):
        self.events.append(f"step {batch}")
        if batch == self.stop_at:
            self.stop.signal_number = signal.SIGTERM
        good = self.finite.get(batch, True)
        metrics = {
            "loss": jnp.float32(self.losses.get(batch, batch)),
            "grad_norm": jnp.float32(1),
            "learning_rate": jnp.float32(batch / 100),
            "loss_scale": jnp.float32(1),
            "skipped": jnp.float32(0 if good else 1),
            "consecutive_skips": jnp.float32(0 if good else 1),
            "finite": jnp.float32(good),
        }
        return state + 1, metrics

    def write(self, step, metrics):
        self.events.append(f"write {step} {min(metrics).split('/')[0]}")
        self.written.setdefault(step, {}).update(metrics)

    def layers(self, step, layers):
        self.events.append(f"layers {step} {layers}")

    def probe(self, state, batch, count):
        self.events.append(f"probe {state} {batch}")
        return types.SimpleNamespace(by_layer=lambda: f"of {batch}")

    def message(self, text):
        self.events.append(text)

    def evaluate(self, state):
        self.events.append(f"evaluate {state}")
        return {"test/accuracy": state / 100, "test/loss": self.tested}

    def save(self, position, state, score):
        self.events.append(f"save {position} {state} {score}")

    def train(self, steps=10, log=0, evaluate=0, save=0, layers=0, start=0, limits=PATIENT):
        return train_loop(
            start,
            self.step,
            itertools.count(start + 1),
            start=start,
            when=When(steps, log, evaluate, save, layers),
            batch_size=4,
            limits=limits,
            writer=self,
            evaluate=self.evaluate,
            save=self.save,
            explain=lambda: EXPLAIN,
            stop=self.stop,
            probe=self.probe if layers else None,
            callbacks=self.callbacks,
            model_of=lambda state: lambda: state,
        )


def test_everything_in_its_order():
    """Metrics of an interval are read while the next step is at work, unless a pause comes first."""
    recorder = Recorder()
    assert recorder.train(steps=6, log=2, evaluate=3, save=4) == 6
    assert recorder.events == [
        "step 1",
        "step 2",
        "step 3",
        "write 2 train",
        "write 3 train",
        "evaluate 3",
        "write 3 test",
        "step 4",
        "write 4 train",
        "save 4 4 None",
        "step 5",
        "step 6",
        "write 6 train",
        "evaluate 6",
        "write 6 test",
        "save 6 6 0.06",
    ]


def test_several_steps_in_a_call_are_as_many_rows_of_metrics():
    """Logged when a line was due within the call; means over all its steps."""
    recorder = Recorder()
    calls = []

    def call(state, fed, count):
        calls.append((fed, count))
        of_steps = [recorder.step(state, number, 1)[1] for number in fed]
        metrics = {name: jnp.stack([step[name] for step in of_steps]) for name in of_steps[0]}
        return state + count, metrics if count > 1 else of_steps[0]

    when = When(steps=8, log=2, evaluate=5, save=0, per_call=3)
    feed = iter([[1, 2, 3], [4], [5], [6, 7, 8]])
    final = train_loop(
        0,
        call,
        feed,
        start=0,
        when=when,
        batch_size=4,
        limits=PATIENT,
        writer=recorder,
        evaluate=recorder.evaluate,
        save=recorder.save,
        explain=lambda: EXPLAIN,
        stop=recorder.stop,
    )
    assert final == 8
    assert calls == [([1, 2, 3], 3), ([4], 1), ([5], 1), ([6, 7, 8], 3)]
    assert recorder.written[3]["train/loss"] == 2
    assert recorder.written[8]["train/loss"] == 7
    assert list(recorder.written) == [3, 4, 5, 8]


def test_a_divergence_within_a_call_is_named_by_its_step():
    recorder = Recorder(losses={2: math.nan})

    def call(state, fed, count):
        of_steps = [recorder.step(state, number, 1)[1] for number in fed]
        return state + count, {name: jnp.stack([step[name] for step in of_steps]) for name in of_steps[0]}

    when = When(steps=3, log=0, evaluate=0, save=0, per_call=3)
    with pytest.raises(Diverged, match="step 2"):
        train_loop(
            0,
            call,
            iter([[1, 2, 3]]),
            start=0,
            when=when,
            batch_size=4,
            limits=Limits(None, 1),
            writer=recorder,
            evaluate=recorder.evaluate,
            save=recorder.save,
            explain=lambda: EXPLAIN,
            stop=recorder.stop,
        )


def test_metrics_are_means_over_the_interval_and_counters_the_last():
    recorder = Recorder()
    recorder.train(steps=4, log=2)
    assert recorder.written[2]["train/loss"] == 1.5
    assert recorder.written[4]["train/loss"] == 3.5
    assert recorder.written[4]["train/learning_rate"] == pytest.approx(0.04)
    assert set(recorder.written[2]) == {
        f"train/{name}" for name in ("loss", "grad_norm", "learning_rate", "loss_scale", "skipped", "consecutive_skips")
    } | {"train/examples_per_second"}
    assert all(isinstance(value, float) for value in recorder.written[2].values())


def test_skipped_steps_do_not_spoil_the_means():
    recorder = Recorder(losses={2: math.nan, 4: math.inf}, finite={2: False, 4: False})
    recorder.train(steps=4, log=4)
    assert recorder.written[4]["train/loss"] == 2
    assert recorder.written[4]["train/skipped"] == 1


def test_an_interval_of_skips_alone_says_so():
    recorder = Recorder(losses={1: math.nan}, finite={1: False})
    recorder.train(steps=1)
    assert math.isnan(recorder.written[1]["train/loss"])


def test_a_resumed_loop_goes_on_behind_its_checkpoint():
    recorder = Recorder()
    assert recorder.train(steps=9, log=5, start=7) == 9
    assert recorder.events[:2] == ["step 8", "step 9"]
    assert recorder.written[9]["train/loss"] == 8.5


def test_a_finished_loop_does_nothing():
    recorder = Recorder()
    assert recorder.train(steps=7, start=7) == 7
    assert recorder.events == []


@pytest.mark.parametrize("log", [1, 2, 0])
def test_divergence_names_its_step_and_asks_what_is_wrong_with_it(log):
    recorder = Recorder(losses={3: math.nan})
    with pytest.raises(Diverged) as raised:
        recorder.train(log=log, limits=Limits(None, 10))
    assert str(raised.value) == ("training diverged at step 3: loss is nan\nfirst bad layer: head, in step 3")
    assert recorder.written[3 if log == 1 else 4 if log else 10]


def test_nothing_is_saved_once_training_has_diverged():
    recorder = Recorder(losses={3: math.nan})
    with pytest.raises(Diverged):
        recorder.train(save=3, limits=Limits(None, 10))
    assert not [event for event in recorder.events if event.startswith(("save", "evaluate"))]


def test_a_wish_to_stop_is_granted_after_the_step_with_a_checkpoint():
    recorder = Recorder(stop_at=3)
    with pytest.raises(Interrupted, match="stopped at step 3; the checkpoint is saved") as raised:
        recorder.train(evaluate=3)
    assert raised.value.signal_number == signal.SIGTERM
    assert recorder.events[-2:] == ["write 3 train", "save 3 3 None"]


def test_a_wish_that_comes_with_the_last_step_changes_nothing():
    recorder = Recorder(stop_at=10)
    assert recorder.train() == 10
    assert recorder.events[-1] == "save 10 10 0.1"


def test_a_failed_evaluation_does_not_lose_what_was_learned():
    recorder = Recorder()
    recorder.evaluate = lambda state: (_ for _ in ()).throw(MemoryError("360 sounds"))
    with pytest.raises(MemoryError, match="360 sounds"):
        recorder.train()
    assert recorder.events[-2:] == ["save 10 10 None", "the evaluation failed; the checkpoint of step 10 is saved"]


def test_throughput_leaves_out_evaluating_and_saving(monkeypatch):
    """A second a step, a thousand for an evaluation: 4 examples per second."""
    now = [0.0]
    monkeypatch.setattr("mpjax.loop.train.time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    recorder = Recorder()
    step, evaluate = recorder.step, recorder.evaluate

    def slow_step(state, batch, count):
        now[0] += 1
        return step(state, batch, count)

    def slow_evaluation(state):
        now[0] += 1000
        return evaluate(state)

    recorder.step, recorder.evaluate = slow_step, slow_evaluation
    recorder.train(steps=6, log=3, evaluate=3)
    assert [recorder.written[at]["train/examples_per_second"] for at in (3, 6)] == [4, 4]


def test_a_run_whose_last_test_loss_is_nan_has_diverged_after_it_was_saved():
    recorder = Recorder()
    recorder.tested = math.nan
    with pytest.raises(Diverged, match=r"the test loss is nan at the end\nevaluation of 10 after step 10"):
        recorder.train()
    assert recorder.events[-1] == "save 10 10 0.1"


def test_layers_are_looked_at_before_a_step_and_read_while_the_next_one_runs():
    recorder = Recorder()
    recorder.train(steps=5, layers=2)
    assert recorder.events[:9] == [
        "step 1",
        "probe 1 2",
        "step 2",
        "step 3",
        "layers 2 of 2",
        "probe 3 4",
        "step 4",
        "step 5",
        "layers 4 of 4",
    ]


def test_layers_of_a_saved_step_are_written_before_it_is_saved():
    recorder = Recorder()
    recorder.train(steps=4, layers=2, save=2)
    first = recorder.events.index("layers 2 of 2")
    assert first < recorder.events.index("save 2 2 None")
    assert recorder.events.index("layers 4 of 4") < recorder.events.index("evaluate 4")


class Hearing:
    """A callback that keeps what it hears and asks as it is told."""

    def __init__(self, recorder, **asks):
        self.recorder, self.asks = recorder, asks

    def _heard(self, event, step):
        self.recorder.events.append(f"{event} {step}")
        ask = self.asks.get(f"{event}_{step}")
        if ask == "fail":
            raise ValueError("broken")
        return ask

    def logged(self, step, metrics):
        assert "train/loss" in metrics
        return self._heard("logged", step)

    def skipped(self, step, metrics):
        assert metrics["finite"] == 0
        return self._heard("skipped", step)

    def evaluated(self, step, metrics, model):
        assert model() == metrics["test/accuracy"] * 100
        return self._heard("evaluated", step)

    def saved(self, step):
        return self._heard("saved", step)

    def diverged(self, step, reason):
        return self._heard("diverged", step)


def heard(recorder, asks, **settings):
    recorder.callbacks = Callbacks([Hearing(recorder, **asks)])
    final = recorder.train(**settings)
    return final, [event for event in recorder.events if not event.startswith(("write", "step 1"))]


def test_callbacks_hear_of_everything_at_their_steps():
    final, events = heard(Recorder(finite={2: False}), {}, steps=4, log=2, evaluate=4, save=4)
    assert final == 4
    assert events[events.index("step 3") :] == [
        "step 3",
        "skipped 2",
        "logged 2",
        "step 4",
        "logged 4",
        "evaluate 4",
        "evaluated 4",
        "save 4 4 0.04",
        "saved 4",
    ]


def test_a_stop_that_is_asked_for_ends_the_run_evaluated_and_saved():
    """Metrics of step 2 are read while step 3 runs, so that the run ends after step 3."""
    final, events = heard(Recorder(), {"logged_2": "stop"}, steps=9, log=2, evaluate=9, save=9)
    assert final == 3
    assert events[-4:] == ["evaluate 3", "evaluated 3", "save 3 3 0.03", "saved 3"]


def test_a_stop_at_an_evaluation_ends_the_run_there():
    final, events = heard(Recorder(), {"evaluated_4": "stop"}, steps=9, log=0, evaluate=2, save=0)
    assert final == 4
    assert events[-2:] == ["save 4 4 0.04", "saved 4"]


def test_a_save_that_is_asked_for_happens_once():
    final, events = heard(Recorder(), {"logged_2": "save"}, steps=5, log=2, evaluate=5, save=5)
    assert final == 5
    assert [event for event in events if event.startswith("save ")] == ["save 3 3 None", "save 5 5 0.05"]


@pytest.mark.parametrize(("event", "saved"), [("logged_2", 3), ("evaluated_4", 4), ("saved_4", 4)])
def test_a_failed_callback_ends_the_run_with_one_checkpoint(event, saved):
    recorder = Recorder()
    with pytest.raises(CallbackError, match=f"ValueError: broken .*; the checkpoint of step {saved} is saved"):
        heard(recorder, {event: "fail"}, steps=9, log=2, evaluate=4, save=4)
    assert [e.split()[:2] for e in recorder.events if e.startswith("save ")] == [["save", str(saved)]]


def test_a_diverged_run_is_not_saved_for_a_failed_callback():
    recorder = Recorder(losses={3: math.nan})
    with pytest.raises(Diverged, match="step 3"):
        heard(recorder, {"logged_2": "fail"}, steps=9, log=2, save=9, limits=Limits(None, 1))
    assert not [event for event in recorder.events if event.startswith("save")]


def test_callbacks_hear_of_a_divergence():
    recorder = Recorder(losses={3: math.nan})
    with pytest.raises(Diverged):
        heard(recorder, {}, steps=9, log=4, limits=Limits(None, 1))
    assert recorder.events[-1] == "diverged 3"


def test_a_callback_that_fails_at_a_divergence_does_not_hide_it():
    recorder = Recorder(losses={3: math.nan})
    with pytest.raises(
        Diverged, match=r"step 3: loss is nan\nfirst bad layer(.|\n)*callback Hearing.diverged at step 3: Value"
    ):
        heard(recorder, {"diverged_3": "fail"}, steps=9, log=4, save=4, limits=Limits(None, 1))
    assert not [event for event in recorder.events if event.startswith("save")]

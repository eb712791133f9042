"""The progress bar of a diagnosis: what it says, and where it says nothing."""

import io
import re

import jax
import jax.numpy as jnp
import pytest

import mpjax
from mpjax.diagnosis import Emulator, program_of, progress


class Terminal(io.StringIO):
    """A terminal that remembers what was drawn."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def terminal(monkeypatch):
    """One that can be drawn on, 80 columns wide."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    return Terminal()


def test_says_what_it_does_and_how_far_it_is(terminal):
    times = iter(range(100))
    with progress.progress_at(terminal, lambda: float(next(times))) as shown:
        shown.started("each module alone", 7)()
        shown.started(None, 5)
        shown.started(None, 5)
        shown.verifying().started(None, 3)
    assert terminal.getvalue().endswith("\x1b[1A\x1b[2K")  # the line is gone
    drawn = re.sub(r"\x1b\[[\d;]*m", "", terminal.getvalue())
    assert "each module alone" in drawn
    assert "1/7 operations" in drawn
    assert "searching for a repair, attempt 1" in drawn
    assert "searching for a repair, attempt 2" in drawn
    assert "verifying, attempt 1" in drawn


def test_work_of_less_than_a_second_shows_nothing(terminal):
    times = iter([0.0, 0.4, 0.9])
    with progress.progress_at(terminal, lambda: next(times)) as shown:
        shown.started(None, 1)()
    assert terminal.getvalue() == ""


@pytest.mark.parametrize(("stream", "term"), [(io.StringIO, "xterm"), (Terminal, "dumb")], ids=["file", "dumb"])
def test_nothing_is_written_but_to_a_terminal(monkeypatch, stream, term):
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(progress, "SHOWN_AFTER", 0.0)
    stream = stream()
    with progress.progress_at(stream) as shown:
        shown.started("half precision and float32", 1)()
    assert stream.getvalue() == ""


def test_a_run_ends_with_all_its_operations_done():
    def loss_of(x):
        squared = jax.jit(lambda x: x * x + x)(x.astype(jnp.float16))
        last = jax.lax.scan(lambda carry, row: (carry + row * row, None), squared[0], squared)[0]
        return jnp.sum(last.astype(jnp.float32))

    class Counted(progress._Bar):
        done = total = 0

        def __init__(self):
            pass  # nothing to draw on

        def start(self, what, total, *, counted):
            self.total = total

        def advance(self):
            self.done += 1

    bar = Counted()
    program = program_of(loss_of, jnp.ones((3, 2)), {})._replace(progress=progress.Progress(bar))
    Emulator().run(*program.at(1.0))
    assert bar.done == bar.total > 5


@pytest.mark.slow
def test_diagnose_shows_it_at_a_terminal_and_returns_the_same(networks, terminal, monkeypatch):
    monkeypatch.setattr(progress, "SHOWN_AFTER", 0.0)
    monkeypatch.setattr(progress, "_BETWEEN", 0.0)
    model, loss_fn, batch = networks.make("mlp")
    loud = lambda model, batch: loss_fn(model, {**batch, "x": batch["x"] * 1e5})  # noqa: E731
    plain = mpjax.diagnose(model, loud, batch)
    monkeypatch.setattr("sys.stderr", terminal)
    watched = mpjax.diagnose(model, loud, batch)
    for text in ("half precision and float32", "each module alone", "searching for a repair", "verifying"):
        assert text in terminal.getvalue(), text
    assert watched.to_json() == plain.to_json()

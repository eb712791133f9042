"""Commands are named as the user started them."""

import sys

import pytest

from mpjax.config import command_line, typed


@pytest.mark.parametrize(
    ("started", "name", "line"),
    [
        ("/env/bin/mpjax", "mpjax diagnose", "mpjax diagnose --run 'runs/a b'"),
        ("scripts/train.py", "diagnose.py", "python scripts/diagnose.py --run 'runs/a b'"),
        ("/src/mpjax/scripts/train.py", "diagnose.py", "python /src/mpjax/scripts/diagnose.py --run 'runs/a b'"),
        ("", "diagnose.py", "python scripts/diagnose.py --run 'runs/a b'"),
    ],
)
def test_a_command_is_named_as_this_process_was_started(monkeypatch, started, name, line):
    monkeypatch.setattr(sys, "argv", [started])
    assert typed("diagnose") == name
    assert command_line("diagnose", "--run", "runs/a b") == line

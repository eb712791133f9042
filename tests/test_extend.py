"""The page of extension points: light to import, and complete."""

import pathlib
import subprocess
import sys

import mpjax.extend
from mpjax.commands import PARTS
from mpjax.config import CODE


def test_it_imports_neither_jax_nor_numpy():
    code = "import sys, mpjax.extend; assert not {'jax', 'numpy', 'flax'} & set(sys.modules), list(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_setting_that_names_code_is_in_its_table():
    table = mpjax.extend.__doc__
    for setting in CODE:
        assert f"--{setting}`" in table, setting
    for part in PARTS:
        assert f"`{part}` |" in table, part


def test_a_callback_hears_of_these_events():
    assert mpjax.extend.EVENTS == ("started", "logged", "skipped", "evaluated", "saved", "diverged", "ended")
    assert all(getattr(mpjax.extend.Callback(), event) for event in mpjax.extend.EVENTS)


def test_every_example_is_short():
    folder = pathlib.Path(__file__).parents[1] / "docs/examples/parts"
    lengths = {path.name: len(path.read_text().splitlines()) for path in folder.glob("*.py")}
    assert len(lengths) >= 6
    assert max(lengths.values()) < 40, lengths

import pytest

from mpjax.config import load_function
from mpjax.errors import UsageError


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "own.py"
    path.write_text("SIZE = 3\nclass Net: pass\ndef trimap(example): return example\n")
    return path


def test_from_a_file(file):
    assert load_function(f"{file}:trimap", flag="--x")(4) == 4
    assert load_function(f"{file}:Net", flag="--x").__name__ == "Net"


def test_from_a_module():
    assert load_function("json:dumps", flag="--x")([1]) == "[1]"


@pytest.mark.parametrize("spec", ["trimap", "own.py:", ":trimap", ""])
def test_misspelt(spec):
    with pytest.raises(UsageError, match=f"--x {spec}: wanted FILE.py:NAME or package.module:NAME"):
        load_function(spec, flag="--x")


def test_no_such_file():
    with pytest.raises(UsageError, match="--x no/own.py:f: no file no/own.py"):
        load_function("no/own.py:f", flag="--x")


def test_no_such_module():
    with pytest.raises(UsageError, match="--x no_such.thing:f: cannot import no_such.thing: No module named 'no_such'"):
        load_function("no_such.thing:f", flag="--x")


def test_no_such_function_says_what_there_is(file):
    with pytest.raises(UsageError, match=r"has no trimaps; did you mean trimap\? it has Net, trimap"):
        load_function(f"{file}:trimaps", flag="--x")


def test_what_is_there_and_not_callable_is_called_so(file):
    with pytest.raises(UsageError, match="--x .*:SIZE is not callable: it is a int; wanted a function or a class"):
        load_function(f"{file}:SIZE", flag="--x")
    file.write_text("import optax\nrule = optax.sgd(0.1)\n")
    with pytest.raises(UsageError, match="it is an optax transformation; .* `lambda learning_rate: optax.adam"):
        load_function(f"{file}:rule", flag="--x")


def test_the_names_that_a_file_imports_are_not_listed(file):
    file.write_text("from json import *\nfrom pathlib import Path\n" + file.read_text())
    with pytest.raises(UsageError, match="has no other; it has Net, trimap$"):
        load_function(f"{file}:other", flag="--x")


def test_what_the_file_raises_is_named_with_its_line_each_time(tmp_path):
    (tmp_path / "own.py").write_text("f = int\nf('one')")
    for _ in range(2):
        with pytest.raises(
            UsageError, match=r"--x .*:f: ValueError: .*'one' \(own.py, line 2\) when .* imported$"
        ) as raised:
            load_function(f"{tmp_path / 'own.py'}:f", flag="--x")
        assert isinstance(raised.value.__cause__, ValueError)


def test_a_file_that_does_not_import(tmp_path):
    (tmp_path / "own.py").write_text("import no_such")
    with pytest.raises(UsageError, match="cannot import .*own.py: No module named 'no_such'"):
        load_function(f"{tmp_path / 'own.py'}:f", flag="--x")


def test_a_file_that_is_no_python_is_named_with_its_line(tmp_path):
    (tmp_path / "own.py").write_text("import json\n\ndef f(example)\n    return example\n")
    with pytest.raises(UsageError, match=r"--x .*own.py:f: .*own.py, line 3: SyntaxError: expected ':': def f\(exam"):
        load_function(f"{tmp_path / 'own.py'}:f", flag="--x")


def test_so_is_a_file_that_it_imports(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_beside.py").write_text("x = 1\n  y = 2\n")
    (tmp_path / "own.py").write_text("\n\n\nimport broken_beside\n")
    with pytest.raises(UsageError, match=r"own.py:f: .*broken_beside.py, line 2: IndentationError: unexpected indent"):
        load_function(f"{tmp_path / 'own.py'}:f", flag="--x")

"""What editors and type checkers see of the public names."""

import ast
import inspect
import json
import os
import pathlib
import subprocess
import sys

import pytest

import mpjax


STUB = pathlib.Path(mpjax.__file__).with_suffix(".pyi")


def stubbed():
    """The homes of the names in the stub."""
    imports = [node for node in ast.parse(STUB.read_text()).body if isinstance(node, ast.ImportFrom)]
    for node in imports:
        assert all(alias.asname == alias.name for alias in node.names), "else a type checker takes it for private"
    return {(node.module, alias.name) for node in imports for alias in node.names}


def test_type_checkers_are_told_the_names_that_python_gives():
    homes = {(home, name) for home, names in mpjax._HOMES.items() for name in names}
    assert stubbed() == homes | {("mpjax", part) for part in mpjax._PARTS}


def test_a_function_has_a_signature_of_named_parameters():
    for name in mpjax.__all__:
        value = getattr(mpjax, name)
        if not inspect.isclass(value):
            parameters = inspect.signature(value).parameters.values()
            assert parameters, name
            assert all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters), name


@pytest.mark.slow
def test_pyright_knows_the_type_of_every_public_name(tmp_path):
    program = tmp_path / "names.py"
    lines = [f"reveal_type(mpjax.{name})" for name in (*mpjax.__all__, "__version__")]
    program.write_text("\n".join(["import mpjax", *lines, "mpjax.nope", "mpjax.get_policy(3)"]))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, str(program)]
    source = os.pathsep.join(filter(None, [str(STUB.parents[1]), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": source}
    )
    said = json.loads(done.stdout)["generalDiagnostics"]
    types = [one["message"] for one in said if one["severity"] == "information"]
    assert len(types) == len(lines)
    assert [message for message in types if message.endswith(('is "Any"', 'is "Unknown"'))] == []
    assert [one["rule"] for one in said if one["severity"] == "error"] == [
        "reportAttributeAccessIssue",
        "reportArgumentType",
    ]

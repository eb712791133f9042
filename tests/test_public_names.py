"""The order and the types of the public names."""

import inspect
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

import mpjax


STUB = pathlib.Path(mpjax.__file__).with_suffix(".pyi")
DOCS = pathlib.Path(__file__).parents[1] / "docs"

FIRST = shlex.split("""
Policy get_policy apply_policy autocast full_precision
dynamic_loss_scaling static_loss_scaling no_loss_scaling scaled_value_and_grad where_finite
master_weights reduce_gradients diagnose receipt
run Config Callback load_pretrained make_train_step create_state TrainState
UsageError Diverged
""")
OTHERS = shlex.split("""
audit check_dtypes
scale_loss loss_scale_state LossScaleState
Duration take_apart make_eval_step Mean
diagnose_function Diagnosis mismatch Mismatch Receipt RunInfo
CallbackError DtypeError Interrupted CheckpointWarning DataWarning LoggerWarning PrecisionWarning
""")


def test_the_names_that_a_user_starts_with_come_first():
    assert mpjax.__all__ == [*FIRST, *OTHERS]
    assert dir(mpjax) == sorted([*FIRST, *OTHERS])


def test_the_others_follow_in_the_order_of_the_reference():
    pages = re.findall(r"^reference/\w+$", (DOCS / "index.md").read_text(), re.MULTILINE)
    text = "\n".join((DOCS / f"{page}.md").read_text() for page in pages)
    names = re.findall(r"^\.\. auto\w+:: mpjax\.(\w+)(?:\(.*\))?$", text, re.MULTILINE)
    assert [name for name in names if name not in FIRST] == OTHERS


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

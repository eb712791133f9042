"""What a diagnosis leaves behind, and the lines around it."""

import pathlib
import types
from typing import Any

from mpjax.commands import command_for, first_bad_layer, of_the_step_alone


def found(path, direction, *rows) -> Any:
    table = [types.SimpleNamespace(path=p, direction=d, non_finite=n, overflow=0.0) for p, d, n in rows]
    return types.SimpleNamespace(path=path, direction=direction, table=table)


def test_the_first_bad_layer_is_the_one_where_the_fault_begins():
    assert first_bad_layer(found("head", "forward")) == "first bad layer: head (forward)\n"
    assert first_bad_layer(found(None, None)) == ""


def test_a_fault_between_modules_names_the_first_module_after_it_in_its_direction():
    rows = ("stem", "forward", 0.0), ("", "forward", 0.1), ("head", "backward", 0.1), ("body", "forward", 0.1)
    assert first_bad_layer(found(None, "forward", *rows)) == "first bad layer: body (forward)\n"
    assert first_bad_layer(found(None, "forward")) == "first bad layer: none by name (forward)\n"


def test_the_command_quotes_the_folder():
    command = command_for(pathlib.Path("runs/my run"), 7, "--evaluation")
    assert command == "python scripts/diagnose.py --run 'runs/my run' --step 7 --evaluation"


def test_a_repair_that_was_verified_for_the_step_is_told_beside_another_cause():
    advice = ("Set the loss scale to 1024 (verified by running), or ...",)
    step = types.SimpleNamespace(verified=True, verdict="underflow", path="", direction="backward", advice=advice)
    assert of_the_step_alone(step) == (
        "This step has a cause of its own besides, underflow in no module (backward). For that: Set the loss scale to "
        "1024 (verified by running), or ...",
    )
    assert of_the_step_alone(types.SimpleNamespace(verified=False)) == ()

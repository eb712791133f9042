"""What an audit says of its findings, in lines, as a table and as JSON."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.precision import Audit, Leaf, Operation, Upcast, WeakType


F16, BF16, F32 = np.dtype("float16"), np.dtype(jnp.bfloat16), np.dtype("float32")


def audit_of(**found):
    fields = ("operations", "leaves", "upcasts", "products", "disobeying", "weak_types", "narrow")
    return Audit("mixed_float16", **{name: tuple(found.get(name, ())) for name in fields})


FAULTS = {
    "upcasts": (
        Upcast("head", "dot_general", F16, F32, (2, 4), "net.py:7"),
        "head: float16 [2, 4] silently becomes float32 for dot_general, net.py:7",
    ),
    "products": (
        Operation("", "dot_general", "low", F32, 3),
        "(outside modules): 3 dot_general in float32, which is not the policy's compute dtype",
    ),
    "disobeying": (Leaf("head/kernel", F16, F32), "head/kernel: stored in float16, the policy says float32"),
    "weak_types": (
        WeakType("", "result", F32),
        "result (the value itself): weakly typed float32; make it an array, as jnp.asarray(x, jnp.float32), or the "
        "function compiles again",
    ),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_one_finding_of_each_kind_is_a_fault_and_makes_the_audit_false(kind):
    row, line = FAULTS[kind]
    audit = audit_of(**{kind: [row]})
    assert audit.faults == [line]
    assert not audit
    with pytest.raises(AssertionError) as raised:
        audit.assert_clean()
    assert str(raised.value) == f"1 fault:\n{line}"


def test_operations_leaves_and_first_suspects_are_no_faults():
    exp = Operation("head", "exp", "full", F16, 1)
    audit = audit_of(operations=[exp], leaves=[Leaf("head/kernel", F32, F32)], narrow=[exp])
    audit.assert_clean()
    assert audit
    assert list(audit) == [exp]
    lines = str(audit).splitlines()
    assert "float32 list" in lines[3]
    assert lines[4:] == ["  head: 1 exp in float16", "", "no faults"]


def test_a_notebook_shows_faults_and_table():
    row, line = FAULTS["upcasts"]
    exp = Operation("head", "exp", "full", F16, 1)
    html = audit_of(upcasts=[row], operations=[exp], narrow=[exp])._repr_html_()
    assert html.index("<b>1 fault:</b>") < html.index(f"<p>{line}</p>") < html.index(">float32 list<")
    assert ">1 float16<" in html
    assert "<p>  head: 1 exp in float16</p>" in html
    assert "<b>no faults</b>" in audit_of()._repr_html_()


def test_a_line_of_the_table_adds_up_what_a_module_does_in_each_dtype():
    rows = [
        Operation("head", "dot_general", "low", F16, 2),
        Operation("", "add", "widest", F32, 1),
        Operation("head", "conv_general_dilated", "low", F16, 3),
        Operation("head", "dot_general", "low", F32, 1),
        Operation("head", "exp", "full", F32, 4),
        Operation("head", "mul", "widest", F16, 5),
        Operation("head", "custom", "as_traced", F16, 6),
        Operation("head", "convert_element_type", "cast", BF16, 7),
    ]
    cells = [
        [cell.strip() for cell in line.split("  ") if cell] for line in str(audit_of(operations=rows)).splitlines()
    ]
    assert cells[:3] == [
        ["module", "products", "float32 list", "other", "casts to"],
        ["head", "5 float16, 1 float32", "4 float32", "11 float16", "7 bfloat16"],
        ["(outside modules)", "1 float32"],
    ]


def test_json_is_read_back_with_dtypes_by_name_shapes_as_lists_and_no_dtype_as_null(tmp_path):
    audit = audit_of(upcasts=[FAULTS["upcasts"][0]], leaves=[Leaf("args/1", BF16, None)])
    text = audit.to_json(str(tmp_path / "audit.json"))
    assert (tmp_path / "audit.json").read_text() == f"{text}\n"
    told = json.loads(text)
    assert told["leaves"] == [{"path": "args/1", "dtype": "bfloat16", "wanted": None}]
    assert told["upcasts"][0]["shape"] == [2, 4]
    assert told["faults"] == audit.faults
    assert told["narrow"] == []


@pytest.mark.parametrize("path", ["block[stage]/x", "layers/" + 40 * "long/"])
def test_a_path_is_printed_as_it_is(path):
    assert path in str(audit_of(operations=[Operation(path, "dot_general", "low", F16, 1)]))

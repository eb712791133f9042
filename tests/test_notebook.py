"""What notebooks need: HTML that shows what was given, and names of cells."""

import sys
import types

import pytest

from mpjax import notebook
from mpjax.diagnosis import Fastest
from mpjax.models.pretrained import PretrainedReport
from mpjax.precision import Audit, PolicyReport, PolicyRow


def test_every_text_is_escaped():
    evil = "<script>&"
    shown = notebook.block(
        notebook.heading(evil),
        notebook.paragraphs([evil]),
        notebook.verbatim(evil),
        notebook.table([evil], [[evil]]),
    )
    assert shown.count("&lt;script&gt;&amp;") == 5
    assert "<script>" not in shown


def test_a_table_has_a_row_of_heads_and_one_for_each_of_the_others():
    shown = notebook.table(("a", "b"), [("1", "2"), ("3", "4")])
    assert [shown.count(tag) for tag in ("<th ", "<td ", "<tr>")] == [2, 4, 3]


def test_text_to_copy_keeps_its_lines():
    assert notebook.verbatim("[a]\nb = 1") == "<pre>[a]\nb = 1</pre>"


class Shell:
    """An IPython shell of which one file stands for a cell."""

    class compile:
        @staticmethod
        def format_code_name(file):
            return ("Cell", "In[3]") if file == "/tmp/ipykernel_1/2.py" else None


def test_a_file_that_stands_for_a_cell_has_the_name_of_the_cell(monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=Shell))
    assert notebook.file_or_cell("/tmp/ipykernel_1/2.py") == "Cell In[3]"
    assert notebook.file_or_cell("model.py") == "model.py"


@pytest.mark.parametrize("ipython", [None, types.SimpleNamespace(get_ipython=lambda: None), types.SimpleNamespace()])
def test_outside_of_a_notebook_there_is_no_shell_and_files_are_files(monkeypatch, ipython):
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert notebook.running_shell() is None
    assert notebook.file_or_cell("/tmp/ipykernel_1/2.py") == "/tmp/ipykernel_1/2.py"


def test_ipython_shows_a_report_as_print_does_where_it_shows_no_html():
    written = []
    printer = types.SimpleNamespace(text=written.append)
    policies = PolicyReport([PolicyRow("a", "Linear", None, None, "policy")])
    audit = Audit(None, *[()] * 7)
    reports = (policies, audit, PretrainedReport("w", "mpjax", ()), Fastest(None, (), 0.05))
    for report in reports:
        report._repr_pretty_(printer, False)
    assert written == list(map(str, reports))

"""The report of `apply_policy` in a notebook."""

import re

import numpy as np

from mpjax.precision import PolicyReport, PolicyRow


def test_a_notebook_shows_the_same_table_and_notes():
    report = PolicyReport([PolicyRow("a<b>", "Linear", np.dtype("float32"), None, "policy")], ["a note"])
    cells = re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", report._repr_html_())
    assert cells == [*PolicyRow._fields, "a&lt;b&gt;", "Linear", "float32", "-", "policy"]
    assert "<p>a note</p>" in report._repr_html_()

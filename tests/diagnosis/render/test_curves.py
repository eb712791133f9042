"""Curves of the page: errors by depth and the loss scale, as they lie in the picture."""

import re

import pytest

from mpjax.diagnosis import ScaleStep
from mpjax.diagnosis.render import errors, name_of, scales_of


def drawn(text, kind):
    """The outline of each path of a class."""
    return re.findall(rf'<path class="{kind}" d="([^"]*)"', text)


def ticks(text):
    return re.findall(r'<span style="bottom:([\d.]+)%">\d+<sup>(-?\d+)</sup>', text)


@pytest.mark.parametrize(
    ("path", "name"),
    [("a/b", "a/<wbr>b"), ("", "(no module)"), ("<b>/&", "&lt;b&gt;/<wbr>&amp;")],
)
def test_a_name_breaks_after_a_slash_and_means_nothing_else_in_html(path, name):
    assert name_of(path) == name


def test_errors_run_from_the_input_forward_and_from_the_loss_backward(row_of, facts_of):
    found = [row_of(path, "forward", error=error) for path, error in (("a", 1e-4), ("b", 1e-2))]
    found += [row_of(path, "backward", error=error) for path, error in (("b", 1e-3), ("a", 1.0))]
    text = errors(facts_of(*found))
    # From 1 at the top to 1e-4: each power of ten is 1 high, each module 1 wide.
    assert drawn(text, "curve carried") == ["M0.5 4L1.5 2", "M0.5 3L1.5 0"]
    assert re.findall(r"module (\d)", text) == ["1", "2", "2", "1"]


def test_an_infinite_error_has_a_line_of_its_own_above_all_others(row_of, facts_of):
    rows = row_of("a", error=1e-4), row_of("b", error=1e-2), row_of("c", error=1e-2, non_finite=0.5)
    text = errors(facts_of(*rows))
    # Finite errors reach from 1e-4 to 1e-2, two powers of ten; inf is 0.36 above.
    assert drawn(text, "curve carried") == ["M0.5 2.36L1.5 0.36"]
    assert drawn(text, "dots lost") == ["M2.5 0h0"]
    assert '<span style="bottom:100%">inf</span>' in text
    assert "inf: some results are inf or nan" in text
    finite = errors(facts_of(*rows[:2]))
    assert drawn(finite, "curve carried") == ["M0.5 2L1.5 0"]
    assert "inf" not in finite


def test_a_direction_without_results_has_no_picture(row_of, facts_of):
    text = errors(facts_of(row_of("a", error=1e-2)))
    assert len(drawn(text, "curve carried")) == 1
    assert text.count("<svg") == 1


def test_an_exact_result_lies_on_the_bottom_line(row_of, facts_of):
    text = errors(facts_of(row_of("a", error=1e-3), row_of("b", error=0.0), row_of("c", error=1e-1)))
    assert drawn(text, "curve carried") == ["M0.5 2L1.5 2L2.5 0"]


def test_one_rounding_of_the_dtype_is_a_line_where_it_is_in_the_picture(row_of, facts_of):
    rows = row_of("a", error=1e-5), row_of("b", error=1.0)
    assert drawn(errors(facts_of(*rows)), "dash") == ["M0 3.31133h2"]  # 2^-11 is 10^-3.31133
    assert drawn(errors(facts_of(*(row._replace(error=0.9) for row in rows))), "dash") == []


def test_an_axis_has_six_numbers_at_most(row_of, facts_of):
    text = errors(facts_of(row_of("a", error=1e-12), row_of("b", error=1.0)))
    assert ticks(text) == [("0", "-12"), ("25", "-9"), ("50", "-6"), ("75", "-3"), ("100", "0")]


def test_the_scale_of_a_run_is_kept_until_the_step_that_changes_it():
    text = scales_of([ScaleStep(100, 2.0**10, False), ScaleStep(104, 2.0**12, False), ScaleStep(108, 0.0, True)])
    # From 2^9, where a scale of zero is put, to 2^13.
    assert drawn(text, "curve carried") == ["M0 3L4 3L4 1L8 1L8 4"]
    assert drawn(text, "dots lost") == ["M8 3.52h0"]
    assert "step 100" in text
    assert "step 108" in text


def test_a_run_without_steps_has_no_picture_of_its_scale():
    assert scales_of([]) == ""

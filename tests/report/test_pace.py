"""The remaining time."""

from mpjax.report.console import Pace


def test_the_first_report_begins_the_estimate_and_the_end_has_none_left():
    seconds = iter([100.0, 102.0])
    pace = Pace(690, lambda: next(seconds))
    assert pace.remaining(20) is None  # what came before was compiling
    assert pace.remaining(120) == 2.0 / 100 * 570
    assert pace.remaining(690) == 0.0

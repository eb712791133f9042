"""Strips of the page: what they span, how strong their colours are, and the limits that they are held against."""

import re

from mpjax.diagnosis.render import range_strips


def strips(text):
    """What each strip holds; empty where there is none."""
    return re.findall(r'<div class="strip">(.*?)</div>', text)


def cells(strip):
    return re.findall(r'<path class="(\w+)" opacity="([\d.]+)" d="([^"]+)"', strip)


def widths(text):
    return set(re.findall(r'viewBox="0 0 (\d+) 1"', text))


def axis(text):
    return re.findall(r'<div class="axis">(.*?)</div>', text)[0]


def test_the_picture_spans_float16_s_range_and_all_values_beyond(row_of, facts_of):
    assert widths(range_strips(facts_of(row_of("a", counts={0: 1})))) == {"46"}  # -27 to 19
    assert widths(range_strips(facts_of(row_of("a", counts={0: 1}), row_of("b", counts={-40: 1, 30: 1})))) == {"71"}


def test_the_more_values_the_stronger_the_colour_and_few_can_still_be_seen(row_of, facts_of):
    (strip, _) = strips(range_strips(facts_of(row_of("a", counts={0: 1600, 1: 401, 2: 400, 3: 1}))))
    assert cells(strip) == [
        ("normal", "1", "M27 0h1v1h-1z"),
        ("normal", "0.75", "M28 0h1v1h-1z"),
        ("normal", "0.5", "M29 0h1v1h-1z"),
        ("normal", "0.25", "M30 0h1v1h-1z"),
    ]


def test_a_module_without_results_in_a_direction_keeps_its_place_there(row_of, facts_of):
    text = range_strips(facts_of(row_of("a", counts={0: 1}), row_of("b", counts={0: 1}), row_of("b", "backward")))
    assert [bool(strip) for strip in strips(text)] == [True, True, False, True]


def test_the_limits_told_are_those_of_the_half_precision_that_most_rows_have(row_of, facts_of):
    halves = [row_of("a"), row_of("b", dtype="bfloat16"), row_of("c", dtype="bfloat16")]
    text = range_strips(facts_of(*halves))
    assert "2<sup>128</sup>" in text  # from which bfloat16 is inf
    assert "2<sup>16</sup>" not in text
    text = range_strips(facts_of(halves[0], *[row_of(path, dtype="float32") for path in "bcd"]))
    assert "2<sup>128</sup>" not in text
    assert re.findall(r"2<sup>(-?\d+)</sup>", axis(text)) == ["-24", "-14", "16"]


def test_float32_has_neither_a_band_nor_limits(row_of, facts_of):
    half, _ = strips(range_strips(facts_of(row_of("a", counts={0: 1}))))
    single, _ = strips(range_strips(facts_of(row_of("a", counts={0: 1}, dtype="float32"))))
    assert '<rect class="band" x="13" width="30" height="1"/>' in half  # -14 to 16
    assert half.count('class="limit"') == 3
    assert "band" not in single
    assert "limit" not in single


def test_a_strip_tells_the_numbers_of_its_row(row_of, facts_of):
    strip, _ = strips(range_strips(facts_of(row_of("a/<b>", counts={3: 1}, overflow=0.5, error=0.25))))
    (title,) = re.findall("<title>(.*?)</title>", strip)
    assert title.startswith("a/&lt;b&gt; (forward)")
    for told in ("log2 range 3..3", "overflow % 50.0", "underflow % 0", "error 2.5e-01", "own error -"):
        assert told in title

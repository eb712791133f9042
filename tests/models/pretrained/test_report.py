"""How a report prints."""

import numpy as np

from mpjax.models.pretrained import PretrainedReport, WeightRow


FLOAT32, FLOAT16 = np.dtype(np.float32), np.dtype(np.float16)

REPORT = PretrainedReport(
    "model.safetensors",
    "timm",
    (
        WeightRow("stem/conv/kernel", "conv1.weight", (3, 3, 3, 8), FLOAT32, FLOAT16, 1, 20, 0.000244),
        WeightRow("stem/norm/mean", "bn1.running_mean", (8,), FLOAT32, FLOAT32),
        WeightRow("head/kernel", None, (8, 10), FLOAT16, FLOAT16),
    ),
    ("bn1.num_batches_tracked",),
)


def test_it_prints_as_a_table_with_its_totals_and_what_was_left_out():
    assert str(REPORT).splitlines() == [
        "path              key               shape    before   after    overflow  flushed  error",
        "----------------  ----------------  -------  -------  -------  --------  -------  -------",
        "stem/conv/kernel  conv1.weight      3x3x3x8  float32  float16  1         20       2.4e-04",
        "stem/norm/mean    bn1.running_mean  8        float32  float32  0         0        0",
        "head/kernel       (initial values)  8x10     float16  float16  0         0        0",
        "",
        "2 variables (224 numbers) of model.safetensors, timm layout: 1 float32 to float16, 1 float32; 1 overflow, 20 "
        "flush to zero, largest relative error 0.00024; left at initial values: head/kernel",
        "keys of the file that were not read: bn1.num_batches_tracked",
    ]


def test_a_notebook_shows_the_same_rows_and_lines():
    html = REPORT._repr_html_()
    assert html.count("<tr>") == 1 + len(REPORT)
    assert ">(initial values)<" in html
    assert f"<p>{REPORT.totals}</p>" in html
    assert "<p>keys of the file that were not read: bn1.num_batches_tracked</p>" in html


def test_it_iterates_over_its_rows_and_adds_them_up():
    assert [row.path for row in REPORT] == ["stem/conv/kernel", "stem/norm/mean", "head/kernel"]
    assert (len(REPORT), REPORT.overflow, REPORT.flushed, REPORT.error) == (3, 1, 20, 0.000244)
    assert PretrainedReport("a", "mpjax", ()).error == 0


def test_the_totals_name_some_of_what_was_left_and_count_the_rest():
    rows = tuple(WeightRow(f"head/{number}", None, (2,), FLOAT32, FLOAT32) for number in range(6))
    left = PretrainedReport("a", "mpjax", rows).totals.rpartition("; ")[2]
    assert left == "left at initial values: head/0, head/1, head/2, head/3 and 2 more"

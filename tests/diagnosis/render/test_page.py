"""The page: whole, without a network, escaped, for few modules and many."""

import html.parser
import re

import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.diagnosis import EXPONENTS, Diagnosis, TraceRow


class Page(html.parser.HTMLParser):
    """Checks that tags nest, and collects their attributes and texts."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.text = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "wbr"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"style", "script", "svg"} & set(self.open):
            self.text.append(data)

    def of_class(self, word):
        return [attrs for _, attrs in self.tags if word in attrs.get("class", "").split()]


def row(path, direction, exponents=(-3, 2), dtype="float16", **fields):
    histogram = tuple(10 * (e in exponents) for e in EXPONENTS)
    given = {"largest": 0.0, "mean": 1.0, "overflow": 0.0, "underflow": 0.0, "subnormal": 0.0, "error": 1e-4}
    given |= {"own_error": 1e-5, "histogram": histogram}
    return TraceRow(path=path, direction=direction, dtype=np.dtype(dtype), **{**given, **fields})


def diagnosis(count=3, **fields):
    table = [row(f"layers/{n}", "forward") for n in range(count)]
    table += [row(f"layers/{n}", "backward") for n in reversed(range(count))]
    given = {
        "verdict": "underflow",
        "path": "layers/1",
        "direction": "backward",
        "operation": "dot_general",
        "source": "model.py:7",
        "evidence": "Half of it becomes zero.",
        "rules": {"layers/1": "float32"},
        "better_scale": None,
        "verified": True,
        "float32_flops": 0.25,
        "advice": ("Keep layers/1 in float32.",),
        "table": tuple(table),
        "policy": "params=float32,compute=float16,output=float32",
        "loss_scale": 1024.0,
        "loss": (2.25, 2.5),
        "flushed": {"layers/1/kernel": 0.5, "layers/0/kernel": 0.0},
    }
    return Diagnosis(**{**given, **fields})


def said(found, **options):
    return " ".join(" ".join(Page(found.to_html(**options)).text).split())


def test_the_page_is_written_and_given(tmp_path):
    file = tmp_path / "page.html"
    text = diagnosis().to_html(file)
    assert file.read_text(encoding="utf-8") == text
    assert text.startswith("<!doctype html>")


def test_verdict_place_evidence_losses_and_lines_to_paste_are_on_it():
    text = said(diagnosis())
    assert "Values too small for half precision become zero: layers/1" in text
    assert "backward pass · dot_general · model.py:7" in text
    assert "Half of it becomes zero." in text
    assert "Loss in half precision 2.25 Loss in float32 2.5 Relative difference 0.1 Loss scale 1024 Modules 3" in text
    assert (
        "A run with this change is healthy. 25.0% of the FLOPs of matrix products and convolutions move to float32."
        in text
    )
    assert '[precision.rules] "layers/1" = "float32"' in text
    assert '--precision.rules "layers/1" float32' in text
    assert "as the policy copy params=float32, compute=float16, output=float32; layers/1=float32" in text
    assert "output=float32;<wbr>layers/1=float32</pre>" in diagnosis().to_html()
    assert "Not verified" in said(diagnosis(verified=False))


def test_advice_beside_rules_is_on_it():
    text = said(diagnosis(advice=("Keep in float32: ...", "Cheaper: only this line in float32, model.py:7.")))
    assert "move to float32. Cheaper: only this line in float32, model.py:7." in text
    assert "Keep in float32" not in text


def test_the_table_says_what_its_shares_are_of():
    assert "Shares are of all half-precision results of a module in one direction together." in said(diagnosis())


@pytest.mark.parametrize("count", [1, 5, 200])
def test_nothing_is_loaded_and_each_module_has_two_strips(count):
    text = diagnosis(count).to_html()
    page = Page(text)
    outside = {"src", "href", "xlink:href", "data", "action", "poster", "srcset"}
    assert not [(tag, attrs) for tag, attrs in page.tags if outside & set(attrs) or tag in ("link", "iframe", "img")]
    assert not re.findall(r"https?:|//[a-z]|@import|url\(|@font-face", text)
    assert len(page.of_class("strip")) == 2 * count
    assert len(page.of_class("dense")) == (2 if count > 40 else 0)
    assert len(text) < 20_000 + 4_000 * count


def test_what_a_user_named_is_escaped_everywhere():
    evil = "<script>alert('&\"')</script>"
    table = (row(evil, "forward"), row(evil, "backward"))
    fields = dict.fromkeys(("path", "operation", "source", "evidence", "policy"), evil)
    found = diagnosis(table=table, rules={evil: "float32"}, advice=(evil,), flushed={evil: 0.5}, **fields)
    for text in (found.to_html(), diagnosis(table=table, rules={}, advice=(evil,)).to_html()):
        assert "alert('" not in text
        assert text.count("<script>") == 1
        Page(text)


def test_what_a_user_named_turns_no_line():
    evil = "a\u202e\x9bb"
    found = diagnosis(table=(row(evil, "forward"), row(evil, "backward")), path=evil, rules={evil: "float32"})
    text = found.to_html()
    assert r"a\u202e\x9bb" in text
    assert not {"\u202e", "\x9b"} & set(text)


def test_text_with_dollars_stays_as_it_is():
    assert "costs $body" in said(diagnosis(evidence="costs $body"))


def strips(found):
    """Kind and outline of what is drawn in each strip."""
    drawn = [svg for svg in re.findall(r"<svg.*?</svg>", found.to_html()) if "<title>" in svg]
    kinds = r'<path class="(normal|subnormal|zero|overflow)"[^>]* d="([^"]+)"'
    return [re.findall(kinds, svg) for svg in drawn]


def test_values_are_coloured_by_what_float16_does_to_them():
    """Subnormal from 2^-24 to 2^-15, inf from 2^16; the picture begins at -27, or where values do."""
    (drawn,) = strips(diagnosis(table=(row("a", "forward", (-25, -24, -15, -14, 15, 16)),)))
    assert dict(drawn) == {
        "zero": "M2 0h1v1h-1z",
        "subnormal": "M3 0h1v1h-1zM12 0h1v1h-1z",
        "normal": "M13 0h1v1h-1zM42 0h1v1h-1z",
        "overflow": "M43 0h1v1h-1z",
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_that_another_dtype_holds_are_in_range(dtype):
    (drawn,) = strips(diagnosis(table=(row("a", "forward", (-25, 16), dtype=jnp.dtype(dtype)),)))
    assert [kind for kind, _ in drawn] == ["normal"]


def test_the_place_is_marked_in_its_direction_only():
    assert len(Page(diagnosis().to_html()).of_class("here")) == 1


def test_modules_stand_in_program_order_and_what_is_outside_of_them_last():
    table = (row("", "forward"), row("b", "forward"), row("a", "forward"), row("a", "backward"), row("c", "backward"))
    assert "1 b 2 a 3 c 4 (no module)" in said(diagnosis(table=table))


def test_updates_have_a_picture_of_their_own_by_parameter():
    update = row("layers/1/kernel", "update", dtype="bfloat16", own_error=None)
    found = diagnosis(table=(*diagnosis().table, update), path="layers/1/kernel", direction="update")
    text = said(found)
    assert "optimizer's update · dot_general" in text
    assert "Update, by parameter" in text
    assert "1 layers/ 1/ kernel" in text
    assert "Modules 3" in text
    assert len(strips(found)) == 7
    assert len(Page(found.to_html()).of_class("here")) == 1
    assert "Update, by parameter" not in said(diagnosis())


def test_results_that_are_not_finite_are_marked_and_not_taken_for_exact():
    text = diagnosis(table=(row("a", "forward", error=0.0, non_finite=1.0), row("b", "forward"))).to_html()
    assert "some results are inf or nan" in text
    assert re.search(r'class="curve carried" d="M1.5 [\d.]+"', text)
    assert re.search(r'class="dots lost" d="M0.5 0h0"', text)
    assert "some results are inf" not in diagnosis().to_html()


def test_own_errors_that_were_not_measured_are_not_drawn():
    table = tuple(r._replace(own_error=None) for r in diagnosis().table)
    text = diagnosis(table=table).to_html()
    assert "curve own" not in text
    assert "was not measured" in text
    assert "curve own" in diagnosis().to_html()


def test_the_worst_twenty_flushed_parameters_are_shown():
    text = said(diagnosis(flushed={f"p{n}": n / 100 for n in range(30)}))
    assert "Shown: the worst 20 of 29 affected parameters, of 30 in total." in text
    assert "p29 29.0 % p28 28.0 %" in text
    assert "p9 9.00 %" not in text
    assert "No gradient value underflows to zero in any of 1 parameters." in said(diagnosis(flushed={"a": 0.0}))


def test_gradients_that_are_not_finite_are_not_said_to_lose_nothing():
    for found in (
        diagnosis(flushed={"a": 0.0}, loss=(float("nan"), 2.5)),
        diagnosis(flushed={"a": 0.0}, table=(row("a", "backward", non_finite=0.5),)),
    ):
        assert "No gradient value" not in said(found)
        assert "their underflow cannot be measured" in said(found)
    assert "Some gradients are not finite" in said(diagnosis(loss=(float("nan"), 2.5)))


def test_work_that_stays_in_half_precision_is_said_in_words():
    assert "None of the FLOPs of matrix products and convolutions move to float32." in said(
        diagnosis(float32_flops=0.0)
    )


def test_a_history_of_the_loss_scale_is_drawn_if_there_is_one():
    assert "Loss scale over the run" not in said(diagnosis())
    text = diagnosis().to_html(scales=[(0, 2.0**15, False), (10, 2.0**14, True), (20, 2.0**14, False)])
    assert "skipped (1 of 3 shown steps)" in text
    assert 'class="curve carried" d="M0 1L10 1L10 2L20 2L20 2"' in text
    Page(diagnosis().to_html(scales=[(7, 1.0, False)]))


@pytest.mark.parametrize("loss", [(float("nan"), 2.5), (0.0, 0.0), (1.0, 0.0), (float("inf"), float("inf"))])
def test_any_loss_can_be_shown(loss):
    Page(diagnosis(loss=loss).to_html())


@pytest.mark.parametrize("verdict", ["healthy", "overflow", "underflow", "rounding", "loss_scale", "not_precision"])
def test_every_verdict_has_a_headline_even_without_place_table_or_advice(verdict):
    nothing = {"path": None, "direction": None, "operation": None, "source": None, "rules": {}, "advice": ()}
    found = diagnosis(verdict=verdict, table=(), flushed={}, **nothing)
    assert "What to change" not in said(found)
    assert len(Page(found.to_html()).of_class("verdict")) == 1


REASONS = (
    "The step is not finite in float32 either",
    "The run does not recover in float32 either",
    "The loss of the whole test set is not finite in float32 either",
)


@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize("verdict", ["healthy", "overflow", "underflow", "rounding", "loss_scale", "not_precision"])
def test_what_fails_in_float32_too_is_one_sentence_of_headline_and_evidence(verdict, reason):
    before = diagnosis(verdict=verdict, evidence="In float32 the step is finite.", better_scale=8.0)
    found = before.beyond_dtypes(reason, "it is nan", ["Look at the data."])
    assert f"<h1>{reason}: layers/1</h1>" in found.to_html()
    but = reason if verdict == "not_precision" else f"But t{reason[1:]}"
    assert found.evidence == f"In float32 the step is finite. {but}: it is nan."
    assert (found.verdict, found.toml, found.flags, found.verified) == ("not_precision", "", "", False)
    assert not any(sentence in said(before) for sentence in REASONS)


def test_a_strip_of_zeros_is_empty():
    assert strips(diagnosis(table=(row("a", "forward", (), error=0.0, own_error=0.0),))) == [[]]


def test_a_table_cell_says_its_column_for_narrow_screens_and_its_value_for_sorting():
    page = Page(diagnosis(table=(row("a", "forward", overflow=0.5),)).to_html())
    cells = {attrs["data-name"]: attrs["data-value"] for tag, attrs in page.tags if tag == "td"}
    assert cells["overflow %"] == "0.5"
    assert cells["log2 range"] == "2"
    assert len(cells) == 9

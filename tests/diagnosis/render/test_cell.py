"""A diagnosis in a notebook."""

from mpjax.diagnosis.render import cell_of


def test_it_says_verdict_place_evidence_advice_and_what_to_paste(row_of, facts_of):
    fields = {"verdict": "overflow", "path": "a/b", "direction": "forward", "operation": "mul", "source": "x.py:7"}
    facts = facts_of(row_of("a/b", overflow=0.25), advice=("Keep a/b.",), rules={"a/b": "float32"}, **fields)
    text = cell_of(facts)
    assert "<b>verdict: overflow in a/b (forward, mul)</b>" in text
    for line in ("at x.py:7", "All is well.", "Keep a/b."):
        assert f"<p>{line}</p>" in text
    assert "<pre>[precision.rules]\n&quot;a/b&quot; = &quot;float32&quot;\n\nparams=float32,compute=float16" in text
    assert "left out" not in text


def test_a_healthy_step_has_nothing_to_paste_and_no_place(facts_of):
    text = cell_of(facts_of())
    assert text == "<div><p><b>verdict: healthy</b></p><p>All is well.</p></div>"


def test_it_has_the_worst_twenty_rows(row_of, facts_of):
    rows = [row_of(f"layers/{n}", overflow=n / 100) for n in range(25)]
    text = cell_of(facts_of(*rows))
    assert text.index("layers/24<") < text.index("layers/5<")
    assert "layers/4<" not in text
    assert "5 rows with less harm are left out; to_html(file) has all." in text

"""Plans as an image."""

import matplotlib.image
import pytest
from matplotlib.figure import Figure

from mpjax.plan import plot_plans


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are saved."""
    figures, save = [], Figure.savefig

    def keep(figure, *args, **settings):
        figures.append(figure)
        save(figure, *args, **settings)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def test_each_plan_has_its_bars(plan_of, drawn, tmp_path):
    plans = [plan_of(), plan_of("mixed_bfloat16", measured=True), plan_of("mixed_bfloat16", "a100")]
    plot_plans(plans, tmp_path / "plans.png", "resnet50")
    assert matplotlib.image.imread(tmp_path / "plans.png").shape[2] == 4
    memory, time = drawn[0].axes
    names = [label.get_text() for label in memory.get_yticklabels()]
    assert names == ["h100  float32", "h100  mixed_bfloat16", "a100  mixed_bfloat16"]
    ends = [max(bar.get_x() + bar.get_width() for bar in bars) for bars in zip(*memory.containers, strict=True)]
    assert ends == pytest.approx([43.5, 23.5, 23.5])  # GB
    arithmetic, traffic = time.containers[:2]
    assert [bar.get_width() for bar in arithmetic] == pytest.approx([2, 2, 2])  # ms
    assert [bar.get_width() for bar in traffic] == pytest.approx([8, 4, 4])
    assert [text.get_text() for text in time.texts] == ["12,500/s", "25,000/s", "25,000/s"]
    assert "measured" in [text.get_text() for text in time.get_legend().get_texts()]
    assert drawn[0].get_suptitle() == "resnet50"


def test_what_a_run_may_use_is_a_line_for_each_plan(plan_of, drawn, tmp_path):
    plot_plans([plan_of(), plan_of("mixed_bfloat16")], tmp_path / "plans.svg")
    assert [line.get_xdata()[0] for line in drawn[0].axes[0].get_lines()] == [40, 40]
    assert (tmp_path / "plans.svg").read_text().startswith("<?xml")

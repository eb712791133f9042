"""The site of the pages: all pages, names and flags are on it, and it loads nothing from a network."""

import importlib
import pathlib
import re
import subprocess
import sys

import pytest

import mpjax
import mpjax.extend
from mpjax.cli import COMMANDS
from mpjax.config import flags_of


DOCS = pathlib.Path(__file__).parents[2] / "docs"
REFERENCE = "\n".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))


def test_every_page_is_in_the_table_of_contents():
    """Notebooks are added by conf.py."""
    trees = re.findall(r"^```{toctree}\n(.*?)^```$", (DOCS / "index.md").read_text(), re.MULTILINE | re.DOTALL)
    listed = [line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]
    pages = {page.relative_to(DOCS).with_suffix("").as_posix() for page in DOCS.rglob("*.md")}
    assert sorted(listed) == sorted(pages - {"index"})


def test_every_public_name_is_in_the_reference_once():
    found = re.findall(r"^\.\. auto\w+:: mpjax\.(\w+)(?:\(.*\))?$", REFERENCE, re.MULTILINE)
    assert sorted(found) == sorted(mpjax.__all__)


def test_what_a_user_s_own_parts_are_called_with_is_in_the_reference():
    protocols = [name for name, value in vars(mpjax.extend).items() if getattr(value, "_is_protocol", False)]
    named = re.findall(r"^\.\. autoclass:: (\w+)\(\)$", REFERENCE, re.MULTILINE)
    assert sorted(named) == sorted(set(protocols) - {"Protocol"})


def test_every_command_has_its_flags_in_the_reference():
    assert sorted(re.findall(r"^```{flags} (\w+)$", REFERENCE, re.MULTILINE)) == sorted(COMMANDS)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for module in ("sphinx", "furo", "myst_nb", "sphinx_copybutton"):
        pytest.importorskip(module, reason="pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", str(DOCS), str(folder)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return folder


@pytest.mark.extra
def test_every_name_and_flag_has_an_anchor(site):
    pages = "\n".join(page.read_text() for page in (site / "reference").glob("*.html"))
    anchors = set(re.findall(r' id="([^"]+)"', pages))
    assert {f"mpjax.{name}" for name in mpjax.__all__} <= anchors
    for command, (_, _, settings) in COMMANDS.items():
        for place in settings[:1]:
            module, _, kind = place.partition(":")
            flags = dict(flags_of(getattr(importlib.import_module(module), kind)))
            assert {f"cmdoption-{command}-{flag.removeprefix('--')}" for flag in flags} <= anchors, command


@pytest.mark.extra
def test_help_texts_are_shown_as_written(site):
    page = (site / "reference" / "train.html").read_text()
    shown = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", page))
    assert "--training.accumulate INT|auto" in shown
    assert "--resume, --no_resume" in shown
    assert "Folder of the run: a new one, or with --resume an existing one" in shown
    assert "runs/&lt;data&gt;-&lt;model&gt;-&lt;policy&gt;-&lt;time&gt;" in shown
    assert "Default: 30 epochs" in shown


@pytest.mark.extra
def test_it_loads_nothing_from_a_network(site):
    """Links to other sites are for readers; scripts, styles, fonts and pictures are the site's own."""
    for page in site.rglob("*.html"):
        loads = re.findall(r'<(?:script|img|iframe|source)\b[^>]*\bsrc="([^"]+)"', page.read_text())
        loads += re.findall(r'<link\b[^>]*\bhref="([^"]+)"', page.read_text())
        assert [url for url in loads if "//" in url] == [], page
    for style in site.rglob("*.css"):
        assert "url(http" not in style.read_text(), style
        assert "@import url(" not in style.read_text(), style

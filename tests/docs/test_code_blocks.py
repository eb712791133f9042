"""Every Python block in the README and the docs runs, and prints what the page says that it prints.

The blocks of a page run in order in one namespace. A block fenced as `python no-run` is left out. A `text` block that
follows a Python block directly is its output.
"""

import contextlib
import dataclasses
import io
import itertools
import pathlib
import pkgutil
import re
import textwrap

import pytest

import mpjax


ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

# What a page that shows fragments takes its reader to have.
GIVEN = {
    "docs/precision.md": """
import jax.numpy as jnp, optax, mpjax
schedule = optax.cosine_decay_schedule(1e-3, 100)
def loss_fn(params, x):
    return jnp.mean((x @ params["w"]) ** 2)
""",
}

# Pages with a whole training run, and those that use a package of an extra.
MARKS = {"docs/training.md": [pytest.mark.optimized], "docs/data.md": [pytest.mark.extra]}
# They diagnose, train, or compile for many seconds.
MARKS |= {page: [pytest.mark.slow] for page in ("docs/diagnosis.md", "docs/your_own_loop.md", "docs/devices.md")}
MARKS |= {page: [pytest.mark.slow] for page in ("docs/questions.md", "docs/float8.md", "docs/tutorial.md")}
MARKS |= {page: [pytest.mark.slow] for page in ("docs/extending.md", "docs/coming_from.md", "docs/pretrained.md")}
MARKS |= {"docs/networks_for_images.md": [pytest.mark.slow]}

FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(text):
    """(line number, code, printed output or None) of each block to run."""
    fences = list(FENCE.finditer(text))
    for fence, following in itertools.zip_longest(fences, fences[1:]):
        if fence["info"].strip() != "python":
            continue
        direct = following and following["info"].strip() == "text" and not text[fence.end() : following.start()].strip()
        yield text[: fence.start("body")].count("\n"), fence["body"], following["body"] if direct else None


def name(page):
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", [pytest.param(page, id=name(page), marks=MARKS.get(name(page), ())) for page in PAGES])
def test_the_blocks_of_a_page_run(page, request, tmp_path, monkeypatch):
    if request.node.get_closest_marker("extra"):
        pytest.importorskip("datasets", reason="pip install -e '.[hf]'")
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": page.stem}
    exec(GIVEN.get(name(page), ""), namespace)
    for line, code, wanted in blocks(page.read_text()):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            # Lines in front, so that a traceback names the page's own line.
            exec(compile("\n" * line + code, str(page), "exec"), namespace)
        if wanted is not None:
            assert lines(printed.getvalue()) == lines(wanted), f"output of the block at line {line + 1}"


def lines(text):
    return [line.rstrip() for line in text.strip().splitlines()]


def test_a_fence_is_python_no_python_or_marked_as_not_to_run():
    infos = {fence["info"].strip() for page in PAGES for fence in FENCE.finditer(page.read_text())}
    site = {"{include}", "{toctree}", "{eval-rst}", "{flags}"}  # for Sphinx: what stands there are no examples
    assert {info for info in infos if info.split(" ")[0] not in site} <= {
        "python",
        "python no-run",
        "text",
        "bash",
        "toml",
        "json",
        "",
    }


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_text_above_a_block_that_is_left_out_says_why(page):
    text = page.read_text()
    for fence in FENCE.finditer(text):
        if fence["info"].strip() == "python no-run":
            assert "tests" in text[: fence.start()].strip().rpartition("\n\n")[2], fence["body"]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_mpjax_name_on_a_page_exists(page):
    for mentioned in set(re.findall(r"\bmpjax(?:\.[a-z_]\w*)+", page.read_text(), re.IGNORECASE)):
        assert resolves(mentioned), f"{mentioned} is on {name(page)}, but does not exist"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_dotted_flag_on_a_page_is_a_setting(page):
    sections = {field.name: field.default for field in dataclasses.fields(mpjax.Config)}
    for section, setting in set(re.findall(r"--([a-z_]+)\.([a-z_0-9]+)", page.read_text())):
        switched_off = isinstance(getattr(sections[section], setting.removeprefix("no_"), None), bool)
        assert hasattr(sections[section], setting) or switched_off, (
            f"--{section}.{setting} is on {name(page)}, but is no setting"
        )


def test_every_policy_that_stands_for_one_of_another_framework_is_one():
    rows = (ROOT / "docs" / "coming_from.md").read_text().splitlines()
    second = [row.split(" | ")[1] for row in rows if row.startswith("| ") and row.count(" | ") > 1]
    policies = {text for column in second for text in re.findall(r"`\"([^\"`]+)\"`", column)}
    assert len(policies) > 8
    for text in policies:
        mpjax.get_policy(text)


def resolves(dotted):
    try:
        pkgutil.resolve_name(dotted)
    except (AttributeError, ImportError):
        return False
    return True


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_link_to_a_file_leads_to_one(page):
    text = page.read_text()
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text) + re.findall(r"^\[[^\]]+\]: (\S+)", text, re.MULTILINE)
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []


def test_blocks_are_found_with_their_line_and_output():
    page = textwrap.dedent(
        """\
        ```python
        print(1)
        ```

        ```text
        1
        ```

        ```python no-run
        boom
        ```

        ```python
        x = 2
        ```
        That was it.
        ```text
        not its output
        ```
        """
    )
    assert list(blocks(page)) == [(1, "print(1)\n", "1\n"), (13, "x = 2\n", None)]

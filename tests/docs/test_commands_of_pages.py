"""Every command and every TOML block in the README and the docs: programs, flags, files and extras are there.

Commands are parsed as their programs parse them, and not run. Those with `pip install` and of other programs are read
for the files and extras that they name.
"""

import pathlib
import re
import shlex
import tomllib

import pytest

from mpjax.cli import COMMANDS, settings_of
from mpjax.config import from_toml


ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(bash|toml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def commands(text):
    """The words of each command: lines that end in a backslash go on, and so does a line after `&&` or `|`."""
    for language, body in BLOCK.findall(text):
        if language == "bash":
            for line in body.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                while words:
                    end = next((at for at, word in enumerate(words) if word in ("&&", "|")), len(words))
                    spelled = [word for word in words[:end] if not re.fullmatch(r"[A-Z_]+=.*", word)]
                    yield [each for word in spelled for each in expanded(word)]
                    words = words[end + 1 :]


def expanded(word):
    """Two folders for a pattern of folders of runs, as a shell would give."""
    return [word.replace("*", number) for number in "01"] if re.fullmatch(r"runs/.*\*", word) else [word]


def name(page):
    return page.relative_to(ROOT).as_posix()


def fault(words):
    """What is wrong with a command, or None."""
    if words[0] == "mpjax" and words[1] in COMMANDS:
        return fault(["python", f"scripts/{words[1]}.py", *words[2:]])
    if words[:2] == ["pip", "install"]:
        wanted = re.findall(r"[\w]+", "".join(re.findall(r"\[(.*?)\]", " ".join(words))))
        return next((f"no extra {extra}" for extra in wanted if extra not in EXTRAS), None)
    if words[0] in ("python", "sbatch") and not (ROOT / words[1]).exists():
        return f"no file {words[1]}"
    script = re.fullmatch(r"scripts/(\w+)\.py", words[1]) if words[0] == "python" else None
    if script and "--help" not in words:
        try:
            settings_of(script[1], [word for word in words[2:] if word != "..."])
        except ValueError as error:
            return str(error)
    return None


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_command_on_a_page_is_one_that_its_program_takes(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    faults = {shlex.join(words): fault(words) for words in commands(page.read_text())}
    assert {command: fault for command, fault in faults.items() if fault} == {}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_toml_block_on_a_page_is_a_file_of_settings(page, tmp_path):
    for language, body in BLOCK.findall(page.read_text()):
        if language == "toml":
            (tmp_path / "settings.toml").write_text(body)
            from_toml(tmp_path / "settings.toml")


def test_a_wrong_command_is_seen():
    install, train = "pip install -e '.[plan,hff]'", "python scripts/train.py --step 3 \\\n  --seed 1  # a comment"
    found = list(commands(f"```bash\n{install} && {train}\nCPUS=1 python nothing.py\n```\n"))
    assert found[1:] == [["python", "scripts/train.py", "--step", "3", "--seed", "1"], ["python", "nothing.py"]]
    says = [fault(words) for words in found]
    assert says[0] == "no extra hff"
    assert "--step" in says[1]
    assert says[2] == "no file nothing.py"
    assert fault(["mpjax", "train", "--steps", "3"]) is None

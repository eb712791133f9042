"""docs/nanochat.md: its commands, as they stand, make a chat model, and transformers computes its logits."""

import os
import pathlib
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest

from mpjax.models.decoder import load_decoder
from mpjax.strict_json import decode


ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "nanochat.md").read_text(encoding="utf-8")
TWIN, LARGE = PAGE.split("\n## On one GPU\n")
COMMANDS = [
    words
    for block in re.findall(r"^```bash\n(.*?)^```$", TWIN, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
    if (words := shlex.split(line, comments=True))[0] == "python"
]

pytestmark = [pytest.mark.extra, pytest.mark.slow]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The folder in which all commands of the page ran in their order, and what each printed."""
    pytest.importorskip("datasets", reason="pip install -e '.[hf]'")
    folder = tmp_path_factory.mktemp("page")
    for name in ("scripts", "examples", "configs"):
        (folder / name).symlink_to(ROOT / name)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"}
    printed = {}
    for words in COMMANDS:
        ran = subprocess.run(
            [sys.executable, *words[1:]],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        assert ran.returncode == 0, f"{shlex.join(words)}\n{ran.stdout}\n{ran.stderr}"
        printed[shlex.join(words[1:])] = ran.stdout
    return folder, printed


def summary(folder, run):
    return decode((folder / "runs" / run / "summary.json").read_text(encoding="utf-8"))


def test_it_learns_the_texts_and_then_the_answers(done):
    """An untrained one has a loss of 7.6, the logarithm of its 2,048 tokens."""
    folder, _ = done
    assert summary(folder, "twin")["steps"] == 200
    assert summary(folder, "twin")["test/loss"] < 4.1
    assert summary(folder, "twin_chat")["test/loss"] < 3.6
    assert summary(folder, "twin_lora")["test/loss"] < 3.8


def test_an_answer_is_a_sentence_that_it_ends_by_itself(done):
    _, printed = done
    answers = [text for words, text in printed.items() if "predict.py" in words and "twin_chat" in words]
    assert len(answers) >= 1
    for text in answers:
        assert "<|im_end|>" not in text
        assert len(text.strip()) > 10


def test_merged_adapters_give_the_logits_of_transformers(done):
    torch = pytest.importorskip("torch", reason="pip install -e '.[parity]'")
    transformers = pytest.importorskip("transformers", reason="pip install -e '.[parity]'")
    folder, _ = done
    path = folder / "twin" / "merged"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What does heapq.heappop do?"}], tokenize=False, add_generation_prompt=True
    )
    tokens = np.asarray([tokenizer(text)["input_ids"]])
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(load_decoder(path)(tokens), expected, atol=1e-4)
    base = load_decoder(folder / "twin" / "base")(tokens)
    assert np.abs(np.asarray(base) - expected).max() > 0.1

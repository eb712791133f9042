"""docs/nanochat.md: its commands, as they stand, make a chat model, and transformers computes its logits."""

import contextlib
import io
import pathlib
import re
import runpy
import shlex
import sys

import numpy as np
import pytest

from mpjax.models.decoder import load_decoder
from mpjax.strict_json import decode


ROOT = pathlib.Path(__file__).parents[2]
TWIN = (ROOT / "docs" / "nanochat.md").read_text(encoding="utf-8").partition("\n## On one GPU\n")[0]
COMMANDS = [
    words
    for block in re.findall(r"^```bash\n(.*?)^```$", TWIN, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
    if (words := shlex.split(line, comments=True))[0] == "python"
]
FEW_STEPS = shlex.split(
    "--steps 2 --loop.eval_every 2 --loop.save_every 2 --optimizer.warmup 1 --data.batch_size 2 "
    "--data.eval_batch_size 4 --data.test_split test[:8] --report.no_plot --report.no_tensorboard"
)

pytestmark = [pytest.mark.extra, pytest.mark.slow]


def run_all(folder, flags=()):
    """Runs the commands of the page in a folder, with more flags for train.py; returns what each printed."""
    pytest.importorskip("datasets", reason="pip install -e '.[hf]'")
    for name in ("scripts", "examples"):
        (folder / name).symlink_to(ROOT / name)
    printed = {}
    for _, *words in COMMANDS:
        more = flags if words[0] == "scripts/train.py" else ()
        out = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
            patch.chdir(folder)
            patch.setattr(sys, "argv", [*words, *more])
            try:
                runpy.run_path(words[0], run_name="__main__")
            except SystemExit as end:
                assert end.code in (None, 0), shlex.join(words)  # noqa: PT017 (a script ends with its exit code)
        printed[shlex.join(words)] = out.getvalue()
    return printed


def difference_of_merged(folder):
    """Largest differences of the logits of the merged folder: from transformers', and from those of the base."""
    torch = pytest.importorskip("torch", reason="pip install -e '.[parity]'")
    transformers = pytest.importorskip("transformers", reason="pip install -e '.[parity]'")
    path = folder / "twin" / "merged"
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    question = [{"role": "user", "content": "What does heapq.heappop do?"}]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nWhat does heapq.heappop do?<|im_end|>\n<|im_start|>assistant\n"
    tokens = np.asarray([tokenizer(text)["input_ids"]])
    with torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(path)(torch.tensor(tokens)).logits.numpy()
    ours, base = (np.asarray(load_decoder(folder / "twin" / name)(tokens)) for name in ("merged", "base"))
    return np.abs(ours - theirs).max(), np.abs(ours - base).max()


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """The folder in which the commands ran with few steps, and what they printed."""
    folder = tmp_path_factory.mktemp("few")
    return folder, run_all(folder, FEW_STEPS)


def test_every_command_runs_and_its_files_serve_the_next_one(few):
    folder, printed = few
    assert len(printed) == len(COMMANDS) == 11
    assert sorted(path.name for path in (folder / "runs").iterdir()) == ["twin", "twin_chat", "twin_lora"]
    assert {path.name for path in (folder / "twin" / "chat").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_merged_adapters_give_the_logits_of_transformers(few):
    from_theirs, from_base = difference_of_merged(few[0])
    assert from_theirs < 1e-5
    assert from_base > 1e-4


@pytest.mark.optimized
def test_it_learns_the_texts_and_then_the_answers_and_ends_them(tmp_path):
    """An untrained one has a loss of 7.6, the logarithm of its 2,048 tokens."""
    printed = run_all(tmp_path)
    losses = {
        run: decode((tmp_path / "runs" / run / "summary.json").read_text(encoding="utf-8"))["test/loss"]
        for run in ("twin", "twin_chat", "twin_lora")
    }
    assert losses["twin"] < 4.0
    assert losses["twin_chat"] < 3.8
    assert losses["twin_lora"] < 4.0
    answers = [text for words, text in printed.items() if "predict.py --run runs/twin_chat" in words]
    assert len(answers) == 2
    for text in answers:
        assert "<|im_end|>" not in text
        assert len(text.partition("do?\n")[2].split()) > 2
    from_theirs, from_base = difference_of_merged(tmp_path)
    assert from_theirs < 1e-4
    assert from_base > 0.1

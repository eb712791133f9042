"""examples/nanochat: texts of the standard library, questions about them, and a folder for a decoder to be."""

import importlib.util
import json
import pathlib
import sys

import jax
import pytest
from flax import nnx

from mpjax.models.decoder import Decoder, read_settings


FOLDER = pathlib.Path(__file__).parents[2] / "examples" / "nanochat"


def example(name):
    spec = importlib.util.spec_from_file_location(f"nanochat_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(name, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
    example(name).main()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("Pop the smallest\nitem off. It is next.", "Pop the smallest item off."),
        ("Write version 1.0 of it.", "Write version 1.0 of it."),
        ("Too short.", None),
        ("no end of a sentence", None),
    ],
)
def test_the_first_sentence_of_a_text_ends_at_a_stop_before_a_space(text, sentence):
    assert example("text").first_sentence(text) == sentence


def test_texts_have_their_names_and_a_question_asks_for_the_first_sentence(tmp_path, monkeypatch):
    library = tmp_path / "library"
    (library / "a" / "test").mkdir(parents=True)
    (library / "a" / "b.py").write_text(
        '"""Tells the time. In hours."""\nclass C:\n  def d(self):\n    """Returns the hour of the day."""\n'
        '  def e(self):\n    """."""'
    )
    (library / "a" / "test" / "c.py").write_text('"""A test is left out."""')
    (library / "broken.py").write_text('"""Not Python.""" (')
    monkeypatch.setattr("sysconfig.get_path", {"stdlib": str(library)}.get)
    main("text", monkeypatch, "--output", tmp_path / "out")
    rows = {
        kind: {line for file in (tmp_path / "out" / kind).iterdir() for line in file.read_text().splitlines()}
        for kind in ("text", "chats")
    }
    assert sorted(json.loads(row)["text"] for row in rows["text"]) == [
        "a.b\n\nTells the time. In hours.",
        "a.b.C.d\n\nReturns the hour of the day.",
        "a.b.C.e\n\n.",
    ]
    assert sorted(tuple(json.loads(row).values()) for row in rows["chats"]) == [
        ("What does a.b do?", "Tells the time."),
        ("What does a.b.C.d do?", "Returns the hour of the day."),
    ]


@pytest.fixture
def lines(tmp_path):
    """A file of 400 texts."""
    texts = [f"The {number} times table begins with {number * 2} and {number * 3}." for number in range(400)]
    file = tmp_path / "lines.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


@pytest.mark.extra
class TestFolder:
    @pytest.fixture(autouse=True)
    def _packages(self):
        pytest.importorskip("datasets", reason="pip install -e '.[hf]'")

    def test_the_small_one_has_a_million_parameters_and_the_large_one_135_million(self, lines, tmp_path, monkeypatch):
        counts = {}
        for size, vocabulary in (("twin", 280), ("d12", 280)):
            folder = tmp_path / size
            main("folder", monkeypatch, lines, "--size", size, "--vocabulary", vocabulary, "--output", folder)
            config = json.loads((folder / "config.json").read_text())
            assert config["vocab_size"] == 280
            config["vocab_size"] = example("folder").VOCABULARY[size]
            (folder / "config.json").write_text(json.dumps(config))
            settings = read_settings(folder)
            model = nnx.eval_shape(lambda settings=settings: Decoder(settings, rngs=nnx.Rngs(0)))
            counts[size] = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
        assert counts == {"twin": 1_115_776, "d12": 135_288_576}

    def test_texts_are_what_their_tokens_say_and_turns_are_tokens_of_their_own(self, lines, tmp_path, monkeypatch):
        from mpjax.data.text import load_chat

        main("folder", monkeypatch, lines, "--size", "twin", "--vocabulary", 280, "--output", tmp_path / "new")
        chat = load_chat(str(tmp_path / "new"))
        text = "Zwölf\n\tx = 17  \N{SNOWMAN}"
        assert chat.tokenizer.text_of(chat.tokenizer.whole([text]).values) == text
        assert chat.tokenizer.end == 0
        ((tokens, answers),) = chat.marked([[{"role": "user", "content": "2?"}, {"role": "assistant", "content": "3"}]])
        assert chat.special == {0: "<|endoftext|>", 1: "<|im_start|>", 2: "<|im_end|>"}
        assert (tokens.count(1), tokens.count(2), chat.ends) == (2, 2, {2})
        assert chat.tokenizer.text_of([t for t, mark in zip(tokens, answers, strict=True) if mark]) == "3\n"

    def test_too_little_text_another_column_and_a_folder_that_is_there_are_errors(self, lines, tmp_path, monkeypatch):
        new = tmp_path / "new"
        with pytest.raises(SystemExit, match=r"fewer than 32768: bring more text, or write --vocabulary \d+"):
            main("folder", monkeypatch, lines, "--output", new)
        with pytest.raises(SystemExit, match="has the columns text: name that of the texts by --column"):
            main("folder", monkeypatch, lines, "--column", "body", "--output", new)
        with pytest.raises(SystemExit, match=r"a\.csv: wanted a file of \.jsonl, \.json, \.parquet, \.txt"):
            main("folder", monkeypatch, tmp_path / "a.csv", "--output", new)
        assert not new.exists()
        new.mkdir()
        with pytest.raises(SystemExit, match="exists: write another folder, or remove it"):
            main("folder", monkeypatch, lines, "--output", new)

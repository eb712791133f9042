"""Texts of a stored language model: printed as they are written, or a line for each, the same either way."""

import json

import pytest

from mpjax.commands import predict_run
from mpjax.config import Prediction
from mpjax.errors import UsageError


pytestmark = pytest.mark.slow

TINY = "--model.width 16 --model.depth 1 --model.heads 2 --data.length 48 --steps 40 --data.batch_size 16"


@pytest.fixture(scope="module")
def folder(folder_of):
    model = f"--task language_modeling --model.name gpt2 {TINY} --training.remat full --optimizer.learning_rate 0.01"
    return str(folder_of(f"--data.name docstrings --precision.policy mixed_bfloat16 {model}"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    file = tmp_path_factory.mktemp("prompts") / "a.txt"
    file.write_text("Return the\nOpen\n\n")
    return str(file)


def lines(capsys, **settings):
    capsys.readouterr()
    count = predict_run(Prediction(**settings))
    out = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(out) == count
    return out


@pytest.mark.parametrize("drawn", [{}, {"temperature": 1.0, "top_k": 50, "policy": "float32"}], ids=["greedy", "drawn"])
def test_printed_texts_are_those_of_the_lines(folder, drawn, capsys):
    settings = {"run": folder, "prompt": ("Return the", "Open"), "max_tokens": 12, **drawn}
    records = lines(capsys, json=True, **settings)
    assert [record["input"] for record in records] == ["prompt 1", "prompt 2"]
    assert all(record["stopped"] == "end" or record["tokens"] == 12 for record in records)
    assert predict_run(Prediction(**settings)) == 2
    whole = [record["prompt"] + record["text"] for record in records]
    assert capsys.readouterr().out == "\n\n".join(whole) + "\n"


def test_each_line_of_a_file_is_continued_whatever_the_batch(folder, prompts, tmp_path, capsys):
    settings = {"run": folder, "inputs": (prompts,), "generate": True, "max_tokens": 6}
    records = lines(capsys, **settings)
    assert [(record["input"].rpartition(":")[2], record["prompt"]) for record in records] == [
        ("1", "Return the"),
        ("2", "Open"),
        ("3", ""),
    ]
    assert lines(capsys, batch_size=2, **settings) == records
    predict_run(Prediction(output=str(tmp_path / "out.jsonl"), **settings))
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()] == records


def test_a_text_ends_before_a_stop_string_and_at_the_length_of_the_model(folder, capsys):
    settings = {"run": folder, "prompt": ("Return the",), "json": True}
    (free,) = lines(capsys, **settings)
    assert (free["tokens"], free["stopped"]) == (48 - 11, "length")
    stop = free["text"][5:7]
    (text,) = lines(capsys, stop=(stop, "never"), **settings)
    assert (text["text"], text["stopped"]) == (free["text"][: free["text"].index(stop)], "stop")


def test_a_policy_per_operation_writes_too(folder, capsys):
    settings = {"run": folder, "prompt": ("Return the",), "max_tokens": 5, "json": True}
    assert lines(capsys, policy="O1", **settings) == lines(capsys, policy="float32", **settings)


def test_a_prompt_that_leaves_no_room_is_an_error_or_is_reported(folder, tmp_path, capsys):
    file = tmp_path / "long.txt"
    file.write_text("x" * 48 + "\nOpen\n")
    settings = {"run": folder, "inputs": (str(file),), "generate": True, "max_tokens": 2}
    with pytest.raises(UsageError, match="long.txt:1 has 49 tokens, and the model takes texts of at most 48"):
        predict_run(Prediction(**settings))
    (record,) = lines(capsys, skip_bad=True, **settings)
    assert record["input"] == f"{file}:2"


def test_a_run_of_another_task_is_an_error(folder_of):
    with pytest.raises(UsageError, match="is for classification: --prompt and --generate want one with --task"):
        predict_run(Prediction(run=str(folder_of("--steps 1")), prompt=("a",)))

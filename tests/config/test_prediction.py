"""The command line of predictions."""

import pytest

from mpjax.config import Prediction, load_settings
from mpjax.errors import UsageError


def loaded(line):
    return load_settings((Prediction,), line.split(), prog="predict.py")[0]


def test_inputs_stand_without_a_flag():
    assert loaded("a.png b --run r --top 2 --skip_bad") == Prediction(
        inputs=("a.png", "b"), run="r", top=2, skip_bad=True
    )
    assert loaded("--run r --split test --output x.jsonl").split == "test"


def test_texts_to_continue_are_prompts_or_inputs():
    prompts = loaded("--run hf:a --prompt b c --stop d --temperature 0.5 --seed 2")
    assert (prompts.prompt, prompts.stop, prompts.temperature, prompts.seed) == (("b", "c"), ("d",), 0.5, 2)
    assert prompts.continues
    assert loaded("b --run r --generate").continues
    assert not loaded("b --run r").continues


def test_an_empty_stop_string_is_refused():
    with pytest.raises(UsageError, match="--stop has an empty string, which every text begins with"):
        load_settings((Prediction,), ["--run", "r", "--prompt", "a", "--stop", ""], prog="predict.py")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--run r", "neither inputs nor --split nor --prompt nor --images: wanted one, such as photos/"),
        ("a --run r --split test", "both inputs and --split: wanted one"),
        ("a --run r --prompt b", "both inputs and --prompt: wanted one"),
        ("a --run r --seed 3", "--seed has no meaning for what is not --prompt or --generate"),
        ("a --run r --generate --top 3", "--top has no meaning for texts that are continued"),
        ("a --run r --generate --json", "--json: --generate prints JSON lines anyway"),
        ("--run r --prompt a --top_k 3", "--top_k and --top_p choose among draws, and --temperature is 0"),
        ("--run r --prompt a --top_p 1.5", "--top_p is 1.5: wanted more than 0 and at most 1"),
        ("--run r --prompt a --temperature -1", "--temperature is -1.0: wanted"),
        ("--run r --prompt a --max_tokens 0", "--max_tokens is 0: wanted at least 1"),
        ("--run hf:a b", "--run hf:a is a model without a run. A decoder, a T5 and a Whisper write texts"),
        ("--run hf:a --prompt b --ema", "--run hf:a has no checkpoints: leave out --checkpoint and --ema"),
        ("a --run r --top 0", "--top is 0: wanted at least 1"),
        ("a --run r --batch_size -1", "--batch_size is -1: wanted at least 0"),
        ("a", "missing from predict.py: --run"),
    ],
)
def test_settings_that_predict_nothing_are_refused(line, message):
    with pytest.raises(UsageError, match=message):
        loaded(line)

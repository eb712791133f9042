"""A checkpoint knows the decoder whose weights it holds, whatever becomes of the folder's config.json."""

import json
import pathlib
import re

import pytest
from flax import nnx

from mpjax.commands import described_decoder, evaluate_run, run, verify_decoder
from mpjax.config import Evaluation, Model, load_config
from mpjax.errors import UsageError
from mpjax.models.decoder import Decoder, read_settings
from mpjax.models.pretrained import export_safetensors


TINY = pathlib.Path(__file__).parents[1] / "models" / "decoder" / "tiny"


@pytest.fixture
def folder(tmp_path):
    """A decoder of one block with a window of 4 tokens, without weights."""
    config = json.loads((TINY / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "layer_types": ["sliding_attention"], "hidden_size": 8, "intermediate_size": 8}
    (tmp_path / "decoder").mkdir()
    (tmp_path / "decoder" / "config.json").write_text(json.dumps(config))
    return tmp_path / "decoder"


def edit(folder, **settings):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def test_a_decoder_of_other_settings_is_named_with_the_first_that_differs(folder):
    model = Model(name=f"hf:{folder}")
    before = described_decoder(model)
    edit(folder, max_position_embeddings=128, torch_dtype="float32")
    verify_decoder(model, before)
    edit(folder, sliding_window=5, rope_local_base_freq=20000.0)
    says = "has another network than the checkpoint: layers/0/rope/theta is 20000.0, before 10000.0, and 1 more; put"
    with pytest.raises(UsageError, match=re.escape(says)):
        verify_decoder(model, before)


@pytest.mark.slow
def test_weights_are_not_evaluated_in_another_decoder(folder, tmp_path):
    export_safetensors(
        Decoder(read_settings(folder), rngs=nnx.Rngs(0)), folder / "model.safetensors", layout="huggingface"
    )
    flags = (
        f"--task language_modeling --data.name docstrings --data.tokenizer bytes --data.length 16 --data.batch_size 8 "
        f"--model.name hf:{folder} --steps 1 --precision.policy float32 --report.no_plot --report.no_tensorboard "
        f"--output_dir {tmp_path / 'run'} --data.train_split train[:20] --data.test_split test[:20]"
    )
    run(load_config(flags.split()))
    edit(folder, sliding_window=5)
    with pytest.raises(UsageError, match="layers/0/window is 5, before 4; put the file of before back"):
        evaluate_run(Evaluation(run=str(tmp_path / "run")))
    with pytest.raises(UsageError, match="layers/0/window is 5, before 4"):
        run(load_config(f"--resume --output_dir {tmp_path / 'run'} --steps 2".split()))

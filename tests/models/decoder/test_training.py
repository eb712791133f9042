"""A decoder in training: as one loop, with recomputed activations, under every policy, and in a diagnosis."""

import math
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from mpjax import diagnose
from mpjax.commands import evaluate_run, export_run
from mpjax.config import Evaluation, Export, load_config
from mpjax.errors import UsageError
from mpjax.models import apart, apply_remat, stacks_of
from mpjax.models.decoder import Decoder, load_decoder, read_settings
from mpjax.models.pretrained import export_safetensors
from mpjax.precision import name_scopes
from mpjax.training import take_apart


TINY = pathlib.Path(__file__).with_name("tiny")
TOKENS = jnp.arange(16).reshape(2, 8) % 20


def loss_and_gradients(settings, *, scan=False, remat="none", policy="float32"):
    model = Decoder(settings, scan_blocks=scan, rngs=nnx.Rngs(0))
    name_scopes(model)
    mpjax.apply_policy(model, policy)
    apply_remat(model, remat)
    structure, params, _ = take_apart(model)

    @jax.jit
    @jax.value_and_grad
    def loss(params):
        return jnp.mean(jnp.square(structure.assemble(params, {})(TOKENS)))

    value, grads = loss(params)
    return float(value), apart(grads, stacks_of(model))


@pytest.fixture(scope="module")
def plain(gemma):
    return loss_and_gradients(gemma)


@pytest.mark.parametrize(
    "options",
    [
        {"scan": True},
        {"remat": "full"},
        pytest.param({"remat": "dots"}, marks=pytest.mark.slow),
        pytest.param({"scan": True, "remat": "dots"}, marks=pytest.mark.slow),
        pytest.param({"scan": True, "remat": "full"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_loop_and_recomputed_activations_change_nothing(gemma, plain, options):
    """Also where layers have windows and position embeddings of their own."""
    value, grads = loss_and_gradients(gemma, **options)
    assert value == pytest.approx(plain[0], rel=1e-6)
    assert grads.keys() == plain[1].keys()
    for path, expected in plain[1].items():
        np.testing.assert_allclose(grads[path], expected, atol=1e-6 * float(jnp.max(jnp.abs(expected))) + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_in_half_precision_a_loop_differs_by_rounding(gemma, policy):
    (value, grads), (scanned, gradients) = (
        loss_and_gradients(gemma, scan=scan, policy=policy) for scan in (False, True)
    )
    assert scanned == pytest.approx(value, rel=1e-2)
    for path, expected in grads.items():
        np.testing.assert_allclose(gradients[path], expected, atol=0.05 * float(jnp.max(jnp.abs(expected))) + 1e-9)


@pytest.mark.slow
def test_a_diagnosis_reads_it_and_names_a_layer_that_overflows(gemma):
    def loss(model, tokens):
        return jnp.mean(jnp.square(model(tokens).astype(jnp.float32)))

    model = Decoder(gemma, rngs=nnx.Rngs(0))
    assert diagnose(model, loss, TOKENS, policy="mixed_float16").verdict == "healthy"
    model.blocks[1].mlp.down.kernel[...] = 1e9 * model.blocks[1].mlp.down.kernel[...]
    found = diagnose(model, loss, TOKENS, policy="mixed_float16", search=False)
    assert (found.verdict, found.path) == ("overflow", "blocks/1/mlp/down")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files of a decoder with random weights."""
    folder = tmp_path_factory.mktemp("tiny")
    shutil.copy(TINY / "config.json", folder)
    model = Decoder(read_settings(TINY), rngs=nnx.Rngs(0))
    export_safetensors(model, folder / "model.safetensors", layout="huggingface")
    return folder


def train(folder, output, flags):
    shared = (
        f"--task language_modeling --data.name docstrings --data.tokenizer bytes --data.length 16 --data.batch_size 8 "
        f"--data.eval_batch_size 32 --model.name hf:{folder} --output_dir {output} --steps 8 --loop.log_every 4 "
        "--loop.eval_every 8 --loop.save_every 8 --optimizer.name adamw --optimizer.learning_rate 1e-3 "
        "--optimizer.warmup 2 --precision.strict --report.no_plot --report.no_tensorboard"
    )
    return mpjax.run(load_config(f"{shared} {flags}".split()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "flags"),
    [
        ("mixed_bfloat16", "--model.scan_blocks"),
        ("mixed_float16", "--training.remat dots --precision.initial_scale 1024"),
        ("O1", "--precision.initial_scale 1024"),
        ("bfloat16", "--training.chunked_loss 32"),
        ("mixed_float8", ""),
    ],
)
def test_eight_steps_of_a_run_are_finite_and_its_folder_serves_every_command(folder, tmp_path, policy, flags):
    run = tmp_path / "run"
    summary = train(folder, run, f"--precision.policy {policy} {flags}")
    assert (summary["steps"], summary["skipped"]) == (8, 0)
    assert summary["test/loss"] < math.log(260)
    assert (run / "receipt.json").exists()
    metrics = evaluate_run(Evaluation(run=str(run)))
    assert metrics["test/loss"] == pytest.approx(summary["test/loss"], rel=1e-5)
    export_run(Export(run=str(run), output=str(tmp_path / "out"), layout="huggingface", dtype="float32"))
    trained, before = load_decoder(tmp_path / "out"), load_decoder(folder)
    assert trained.settings == before.settings
    assert not np.array_equal(trained.norm.scale[...], before.norm.scale[...])


@pytest.fixture
def without_weights(tmp_path):
    """A folder with the settings of a decoder alone."""
    (tmp_path / "new").mkdir()
    shutil.copy(TINY / "config.json", tmp_path / "new")
    return tmp_path / "new"


def test_a_folder_without_weights_is_an_error_that_says_how_to_begin_at_random(without_weights, tmp_path):
    with pytest.raises(UsageError, match=r"no safetensors in .*; to train .*, write --model.pretrained none"):
        train(without_weights, tmp_path / "run", "")


@pytest.mark.slow
def test_with_pretrained_none_a_run_begins_with_the_random_values_of_its_seed(
    without_weights, folder, tmp_path, capsys
):
    """Also if the folder has weights."""
    zero = "--steps 1 --optimizer.learning_rate 0 --model.pretrained none --seed"
    for name, source, seed in (("a", without_weights, 1), ("b", folder, 1), ("c", folder, 2)):
        train(source, tmp_path / name, f"{zero} {seed}")
        assert "the model begins with random weights: --model.pretrained none\n" in capsys.readouterr().out
        export_run(Export(run=str(tmp_path / name), output=str(tmp_path / f"{name}_out"), layout="huggingface"))
    a, b, c = (load_decoder(tmp_path / f"{name}_out").tokens.embedding[...] for name in "abc")
    np.testing.assert_array_equal(a, b)
    assert not np.allclose(a, c, atol=0.01)
    assert not np.allclose(b, load_decoder(folder).tokens.embedding[...], atol=0.01)

"""The settings and models with which `--mesh.context` is refused, and what a run with it computes."""

import jax
import pytest

from mpjax.commands import fields_of, planned_step, train_all
from mpjax.config import load_config
from mpjax.errors import UsageError
from mpjax.training import make_mesh


TEXTS = "--task language_modeling --data.name docstrings --data.length 6 --data.batch_size 2 --steps 3"
GPT2 = f"{TEXTS} --model.name gpt2 --model.width 8 --model.depth 1 --model.heads 2"
OWN = "tests/commands/models_of_texts.py"


def step_of(flags: str):
    config = load_config(flags.split())
    return planned_step(config, fields_of(config))


def build(flags: str, context: int = 2):
    mesh = make_mesh(jax.devices() * (context // 2), data=1, context=context)
    return step_of(flags).build_on(mesh)


@pytest.mark.parametrize(
    ("flags", "context", "message"),
    [
        (
            "--data.name digits --model.name mlp",
            2,
            "--mesh.context 2 divides the positions of texts for --task language_modeling or instructions, not "
            "classification",
        ),
        (f"{GPT2} --data.length 5", 2, "--mesh.context 2 does not divide texts of 5 tokens: write --data.length 4"),
        (
            f"{GPT2} --data.length 8",
            4,
            "--mesh.context 4 does not divide the 2 heads of a device, with 2 of keys and values: write --mesh.data -1 "
            "--mesh.context 2",
        ),
        (
            f"{GPT2} --training.objective tests/commands/models_of_texts.py:losses",
            2,
            "--mesh.context 2 with --training.objective tests/commands/models_of_texts.py:losses, which takes whole "
            "texts: leave one of them out",
        ),
        (
            f"{TEXTS} --model.name {OWN}:Bag",
            2,
            f"--mesh.context 2: --model.name {OWN}:Bag has no `context`, and takes whole texts: give it the",
        ),
        (
            f"{TEXTS} --model.name {OWN}:Alone",
            2,
            f"--mesh.context 2: --model.name {OWN}:Alone attends to its own part of each text alone: let it",
        ),
    ],
)
def test_what_cannot_be_divided_is_an_error(flags, context, message):
    with pytest.raises(UsageError) as error:
        build(flags, context)
    assert message in str(error.value)


def test_a_model_of_ones_own_that_reads_its_context_is_divided():
    flags = f"{TEXTS} --model.name {OWN}:Divided"
    layout, _, _ = build(flags)
    assert layout.context
    assert layout.terms == 2
    assert layout.shares == 1


@pytest.mark.slow
def test_a_model_whose_logits_depend_on_the_part_it_is_called_with_does_not_train(tmp_path):
    run = f"{TEXTS} --data.tokenizer bytes --mesh.data 1 --mesh.context 2 --report.no_plot --report.no_tensorboard"
    train_all(load_config(f"{run} --model.name {OWN}:Divided --output_dir {tmp_path}/divided".split()))
    with pytest.raises(UsageError, match=f"{OWN}:Both computes other logits from parts of texts than from whole ones"):
        train_all(load_config(f"{run} --model.name {OWN}:Both --output_dir {tmp_path}/both".split()))


def test_positions_that_tensor_does_not_divide_after_context_are_an_error():
    mesh = make_mesh(jax.devices() * 2, data=1, context=2, tensor=2)
    flags = f"{GPT2} --mesh.sequence".replace("--model.heads 2", "--model.heads 4")
    with pytest.raises(UsageError, match=r"does not divide the 6 positions in blocks/0 of GPT2 .* a multiple of 4 as"):
        step_of(flags).build_on(mesh)

"""What `--mesh.sequence` divides, and the settings and models with which it is refused."""

import collections
import re

import jax
import pytest

from mpjax.commands import fields_of, plan, plan_run, planned_step
from mpjax.config import Plan, load_config
from mpjax.errors import UsageError
from mpjax.plan import Search
from mpjax.training import make_mesh


GPT2 = (
    "--task language_modeling --data.name docstrings --data.length 6 --data.batch_size 2 --model.name gpt2 "
    "--model.width 8 --model.depth 2 --model.heads 2 --steps 3"
)
VIT = "--model.name vit_ti16 --model.width 8 --model.depth 1 --model.heads 2 --model.patch 4 --data.name digits"
RESNET = "--model.name resnet18 --data.name digits"


def step_of(flags: str):
    config = load_config(flags.split())
    with jax.numpy_dtype_promotion("standard"):  # as rules for some modules need it
        return planned_step(config, fields_of(config))


def divisions(flags: str) -> collections.Counter:
    """How often the program of a step divides a value in which way over `tensor`, in the forward and backward pass."""
    step = step_of(flags)
    with jax.numpy_dtype_promotion("standard"):
        train_step, arguments = step.on(make_mesh(data=1, tensor=2))
        text = str(jax.make_jaxpr(train_step)(*arguments))
    found = re.findall(r"sharding_constraint\[.*?\n\s*\]", text, re.DOTALL)
    specs = [re.findall(r"spec=P(?:artitionSpec)?\((.*?)\)", each) for each in found if "Manual" in each]
    return collections.Counter(spec for (spec,) in specs)


def test_without_the_flag_no_value_is_divided_by_name():
    assert divisions(GPT2) == {}


def test_values_between_layers_are_shares_and_layers_take_all_positions():
    found = divisions(f"{GPT2} --mesh.sequence")
    assert found.keys() == {"None, 'tensor'", "None, None, 'tensor'", ""}


@pytest.mark.parametrize(
    ("flags", "tensor", "message"),
    [
        (GPT2, 1, "--mesh.sequence divides positions over tensor, and --mesh.tensor is 1: leave it out"),
        (
            f"{GPT2} --data.length 5",
            2,
            "--mesh.sequence does not divide the 5 positions in blocks/0 of GPT2 among --mesh.tensor 2: take a "
            "multiple of 2 as --data.length, write another --mesh.tensor, or leave it out",
        ),
        (
            f"{VIT} --model.pool cls",
            2,
            "--mesh.sequence does not divide the 5 positions in blocks/0 of ViT among --mesh.tensor 2: write another "
            "--mesh.tensor, or leave it out",
        ),
        (
            f"{GPT2} --training.lora blocks/*",
            2,
            "--mesh.sequence with --training.lora: the compiler would add the gradients",
        ),
        (
            f"{GPT2} --model.width 64 --precision.policy mixed_mxfp8",
            2,
            "--mesh.sequence with products in float8, which XLA cannot divide over tensor: write",
        ),
        (RESNET, 2, "--mesh.tensor 2 divides no layer of ResNet"),
        (
            f"{RESNET} --mesh.rules blocks/*/conv1 columns",
            2,
            "--mesh.sequence divides positions, and blocks/0/conv1 of ResNet is a convolution, which reads those "
            "beside each: leave it out",
        ),
        (
            f"{RESNET} --mesh.rules head rows",
            2,
            "--mesh.sequence divides the values between layers of blocks, and no block of ResNet (a module in a list) "
            "has a layer that is divided over tensor: leave it out",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(flags, tensor, message):
    step = step_of(f"{flags} --mesh.sequence")
    with jax.numpy_dtype_promotion("standard"), pytest.raises(UsageError) as raised:
        step.build_on(make_mesh(data=2 // tensor, tensor=tensor))
    assert message in str(raised.value)


def test_a_search_divides_positions_on_the_meshes_with_tensor_alone(monkeypatch):
    steps = []

    def search_mesh(gpu, step, devices, **settings):
        steps.append(step)
        return Search(gpu, devices, (), {}, 0, {"no reason": 7})

    monkeypatch.setattr(plan, "search_mesh", search_mesh)
    monkeypatch.setattr(plan, "_print_searches", lambda searches: None)
    plan_run(Plan(gpu=("h100",), devices=2, search="mesh"), load_config(f"{GPT2} --mesh.sequence".split()))
    meshes = make_mesh(data=2), make_mesh(data=1, tensor=2)
    assert [steps[0].build_on(mesh).layout.sequence for mesh in meshes] == [False, True]
    assert steps[0].sequence

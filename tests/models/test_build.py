"""Settings become the network they name, its operations named by module path."""

import ast
import dataclasses
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from mpjax import models
from mpjax.config import DIFFUSION_MODELS, MODELS, Model
from mpjax.data import Image, Label, Length, Mask, Tokens, labelled_images
from mpjax.errors import UsageError
from mpjax.models import ENTRIES, MLP, BasicBlock, Bottleneck, ImageNetStem, SmallStem


def build(**settings):
    config = dataclasses.replace(Model(width=4), **settings)
    return models.build_model(config, fields=labelled_images(7, (8, 8, 3)), rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("name", "blocks", "block"),
    [
        ("resnet18", 8, BasicBlock),
        pytest.param("resnet34", 16, BasicBlock, marks=pytest.mark.slow),
        pytest.param("resnet50", 16, Bottleneck, marks=pytest.mark.slow),
    ],
)
def test_a_resnet_of_its_depth(name, blocks, block):
    model = nnx.eval_shape(lambda: build(name=name))
    assert len(model.blocks) == blocks
    assert all(isinstance(one, block) for one in model.blocks)
    assert isinstance(model.stem, SmallStem)


def test_the_imagenet_stem():
    assert isinstance(nnx.eval_shape(lambda: build(stem="imagenet")).stem, ImageNetStem)


def test_an_mlp_takes_whole_images():
    model = build(name="mlp", depth=3)
    assert isinstance(model, MLP)
    assert [layer.kernel.shape for layer in model.layers] == [(192, 4), (4, 4), (4, 4)]
    assert jax.eval_shape(model, jnp.zeros((2, 8, 8, 3))).shape == (2, 7)


def test_operations_carry_the_path_of_their_module():
    graph, state = nnx.split(nnx.eval_shape(build))

    def forward(state, images):
        return nnx.merge(graph, state)(images)

    text = jax.jit(forward).lower(state, jax.ShapeDtypeStruct((2, 8, 8, 3), jnp.float32)).as_text(debug_info=True)
    for path in ("blocks/0/conv1", "blocks/2/shortcut/norm", "stem/conv", "head"):
        assert path in text


@pytest.mark.parametrize("name", ["mlp", "resnet18", "resnet50"])
def test_parameters_are_float32(name):
    params = jax.tree.leaves(nnx.state(nnx.eval_shape(lambda: build(name=name)), nnx.Param))
    assert {leaf.dtype.name for leaf in params} == {"float32"}


TEXTS = {"tokens": Tokens(9, 50), "length": Length(9), "label": Label(7)}
PIXELS = {"image": Image((32, 32, 3)), "mask": Mask((32, 32), 7)}
SMALL = {"vit": {"patch": 8, "width": 8, "heads": 2, "depth": 1}, "convnext": {"width": 8, "patch": 1}, "mlp": {}}
SMALL |= {"dit": {"width": 8, "heads": 2, "depth": 1}}
SMALL |= {"bert": {"width": 8, "heads": 2, "depth": 1}, "gpt2": {"width": 8, "heads": 2, "depth": 1}}


def fields_for(name):
    return {"bert": TEXTS, "gpt2": {"tokens": Tokens(9, 50)}, "unet": PIXELS}.get(name, labelled_images(7, (32, 32, 3)))


def test_every_name_of_the_settings_is_a_model_and_the_other_way_round():
    assert list(ENTRIES) == list(MODELS)
    assert all(0 < len(line) < 70 for line in MODELS.values())


LARGE = ("resnet34", "resnet50", "resnext50", "wrn28_10", "xception", "convnext_t")
LARGE += ("efficientnet_b0", "mobilenetv3_large", "regnetx_004", "regnety_004", "densenet121")
DEEPER = ("resnet101", "resnet152")  # a ResNet-50 with more blocks in a stage; test_resnet.py counts their parameters
DEEPER += ("efficientnet_b1", "efficientnet_b2", "efficientnet_b3", "efficientnet_b4")  # as B0, counted in its test
DEEPER += ("regnetx_032", "regnety_016", "regnety_032")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in LARGE else ()) for name in MODELS if name not in DEEPER],
)
def test_every_model_gives_logits_for_the_fields_of_its_task(name):
    settings = SMALL.get(name.split("_")[0], {"width": 8})
    fields = fields_for(name)
    inputs = [jnp.zeros((2, 32, 32, 3))] if "image" in fields else [jnp.zeros((2, 9), jnp.int32)]
    if name == "gpt2":
        inputs = [inputs[0][:, :-1]]
    if name == "bert":
        inputs.append(jnp.array([9, 3], jnp.int32))
    if name in DIFFUSION_MODELS:  # times and labels
        inputs += [jnp.array([0, 999]), jnp.array([6, 7])]

    def logits():
        return models.build_model(Model(name=name, **settings), fields=fields, rngs=nnx.Rngs(0))(*inputs)

    wanted = {"gpt2": (2, 8, 50), "unet": (2, 32, 32, 7), **dict.fromkeys(DIFFUSION_MODELS, (2, 32, 32, 3))}
    assert nnx.eval_shape(logits).shape == wanted.get(name, (2, 7))


def test_the_files_of_other_networks_are_not_imported():
    code = """
import sys
from flax import nnx
from mpjax.config import Model
from mpjax.data import labelled_images
from mpjax.models import build_model
build_model(Model(name="mlp"), fields=labelled_images(7, (8, 8, 3)), rngs=nnx.Rngs(0))
print(sorted(name.rpartition(".")[2] for name in sys.modules if name.startswith("mpjax.models.")))
"""
    imported = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert "mlp" in imported
    others = {file.stem for file in pathlib.Path(models.__file__).parent.glob("*.py")} & {
        *("bert", "convnext", "densenet", "efficientnet", "gpt2", "mobilenetv3", "regnet", "resnet", "unet", "vit"),
        *("wide_resnet", "xception", "inverted_residual", "squeeze_excitation", "conv_norm"),
    }
    assert len(others) == 15
    assert others & set(ast.literal_eval(imported)) == set()


@pytest.mark.parametrize(
    ("name", "fields", "says"),
    [
        (
            "resnet18",
            TEXTS,
            "resnet18 is for classification: it takes .*has tokens, length, label; write --model.name bert, or",
        ),
        ("resnet18", PIXELS, "has image, mask; write --model.name unet, or --task classification"),
        ("unet", labelled_images(7, (8, 8, 3)), "unet is for segmentation: it takes image, mask"),
        ("gpt2", TEXTS, "gpt2 is for language_modeling.* write --model.name bert, or --task language_modeling"),
        ("bert", labelled_images(7, (8, 8, 3)), "bert is for text_classification"),
        ("dit_s2", PIXELS, "dit_s2 is for diffusion: it takes image, .* write --model.name unet, or --task diffusion"),
        (
            "resnet18",
            {"image": Image((8, 8, 3))},
            "write --model.name dit_s2 or dit_b2 or dit_l2 or dit_xl2 or unet_ddpm",
        ),
    ],
)
def test_a_model_for_other_data_is_refused(name, fields, says):
    with pytest.raises(UsageError, match=says):
        models.build_model(Model(name=name), fields=fields, rngs=nnx.Rngs(0))


OTHER = {"width": 8, "depth": 1, "heads": 2, "patch": 8, "pool": "cls", "dropout": 0.5, "scan_blocks": True}
OTHER |= {"stem": "imagenet", "norm_kernel": "pallas"}


@pytest.mark.parametrize("name", MODELS)
def test_a_setting_that_a_model_does_not_read_is_refused_or_named(name):
    assert {field.name for field in dataclasses.fields(Model)} == {"name", "pretrained", "pretrained_skip", *OTHER}
    for setting in OTHER.keys() - set(ENTRIES[name].settings):
        usual = getattr(Model(), setting)
        if setting in ("pool", "stem"):  # runs have been stored with them
            says = f"--model.{setting} {OTHER[setting]} without effect: {name} does not read it"
            config = Model(name=name, **{setting: OTHER[setting]})
            assert models.advice_on(config) == [says]
            continue
        leave = f"leave it out, or write --model.{'no_scan_blocks' if usual is False else f'{setting} {usual}'}"
        with pytest.raises(UsageError, match=f"--model.{setting}.*: {name} has no such setting; {leave}$"):
            models.build_model(Model(name=name, **{setting: OTHER[setting]}), fields=fields_for(name), rngs=nnx.Rngs(0))


@pytest.mark.parametrize("name", ["mlp", "resnet18"])
def test_a_model_is_built_with_settings_that_have_no_effect(name):
    settings = {name: OTHER[name] for name in {"pool", "stem"} - set(ENTRIES[name].settings)}
    config = Model(name=name, **settings)
    nnx.eval_shape(lambda: models.build_model(config, fields=fields_for(name), rngs=nnx.Rngs(0)))


@pytest.mark.parametrize("name", MODELS)
def test_a_setting_that_a_model_reads_reaches_it(name, monkeypatch):
    given = []

    def make(**arguments):
        given.append({key: value for key, value in arguments.items() if key != "rngs"})
        return nnx.Module()

    monkeypatch.setitem(ENTRIES, name, ENTRIES[name]._replace(make=make))
    for settings in ({}, *({setting: OTHER[setting]} for setting in ENTRIES[name].settings)):
        models.build_model(Model(name=name, **settings), fields=fields_for(name), rngs=nnx.Rngs(0))
    assert all(arguments != given[0] for arguments in given[1:])


def test_settings_beside_a_model_of_the_user_have_no_effect_and_are_named():
    for setting, value in OTHER.items():
        says = f"--model.{setting} {value} without effect: net.py:Net is your own model, which its code alone describes"
        assert models.advice_on(Model(name="net.py:Net", **{setting: value})) == [says]
    assert models.advice_on(Model(name="net.py:Net")) == models.advice_on(Model(name="mlp", width=8)) == []


OWN = """
from flax import nnx

class Net(nnx.Module):
    def __init__(self, fields, *, rngs):
        self.layer = nnx.Linear(fields["image"].shape[2], fields["label"].num_classes, rngs=rngs)

    def __call__(self, x):
        return self.layer(x.mean((1, 2)))

def none(fields, *, rngs):
    return None

def other(image, num_classes, *, rngs):
    return None

class Bare(nnx.Module):
    def __init__(self, *, rngs):
        self.head = nnx.Linear(3, 7, rngs=rngs)
"""


def test_a_model_of_ones_own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    model = build(width=0, name=f"{tmp_path}/own.py:Net")
    assert model(jnp.ones((2, 8, 8, 3))).shape == (2, 7)
    with pytest.raises(UsageError, match=r"own.py:none returned NoneType; wanted a flax.nnx.Module"):
        build(width=0, name=f"{tmp_path}/own.py:none")
    with pytest.raises(UsageError, match=r"own.py:other: missing a required.*wanted NAME\(fields, \*, rngs\)"):
        build(width=0, name=f"{tmp_path}/own.py:other")
    with pytest.raises(UsageError, match=r"own.py:Bare: .*wanted NAME\(fields, \*, rngs\)"):
        build(width=0, name=f"{tmp_path}/own.py:Bare")
    with pytest.raises(UsageError, match="has no Nt; did you mean Net"):
        build(width=0, name=f"{tmp_path}/own.py:Nt")

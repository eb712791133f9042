"""Settings become the network they name, its operations named by module path."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from mpjax import models
from mpjax.config.schema import Model
from mpjax.models import mlp, resnet


def build(**settings):
    config = dataclasses.replace(Model(width=4), **settings)
    return models.build(config, image_shape=(8, 8, 3), num_classes=7, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("name", "blocks", "block"),
    [
        ("resnet18", 8, resnet.BasicBlock),
        ("resnet34", 16, resnet.BasicBlock),
        ("resnet50", 16, resnet.Bottleneck),
    ],
)
def test_a_resnet_of_its_depth(name, blocks, block):
    model = nnx.eval_shape(lambda: build(name=name))
    assert len(model.blocks) == blocks
    assert all(isinstance(one, block) for one in model.blocks)
    assert isinstance(model.stem, resnet.SmallStem)


def test_the_imagenet_stem():
    assert isinstance(nnx.eval_shape(lambda: build(stem="imagenet")).stem, resnet.ImageNetStem)


def test_an_mlp_takes_whole_images():
    model = build(name="mlp", depth=3)
    assert isinstance(model, mlp.MLP)
    assert [layer.kernel.shape for layer in model.layers] == [(192, 4), (4, 4), (4, 4)]
    assert model(jnp.zeros((2, 8, 8, 3))).shape == (2, 7)


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

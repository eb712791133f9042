"""What the compiler makes of a training step under autocast: the program of casts placed by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import mpjax
from mpjax.models import SmallStem, normalize, relu, resnet18


F32 = jnp.float32
WIDTH = 8
BLOCKS = [(stage, index) for stage in range(4) for index in range(2)]
IMAGES = jax.ShapeDtypeStruct((8, 32, 32, 3), F32)
LABELS = jax.ShapeDtypeStruct((8,), jnp.int32)


@pytest.fixture(autouse=True)
def _ranks():
    """Flax adds a bias of one rank to images of another."""
    with jax.numpy_rank_promotion("allow"):
        yield


def resnet18_of_nnx():
    make = lambda: resnet18(SmallStem, channels=3, width=WIDTH, num_classes=10, rngs=nnx.Rngs(0))  # noqa: E731
    graph, shapes, rest = nnx.split(nnx.eval_shape(make), nnx.Param, ...)
    stats = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), rest)
    structure = jax.tree.structure(shapes)

    def net(params, images):
        return nnx.merge(graph, jax.tree.unflatten(structure, jax.tree.leaves(params)), stats, copy=True)(images)

    return net, nnx.to_pure_dict(shapes)


def resnet18_by_hand(half):
    def conv_norm(x, kernel, norm, stride=1):
        numbers = ("NHWC", "HWIO", "NHWC")
        x = lax.conv_general_dilated(x.astype(half), kernel.astype(half), (stride,) * 2, "SAME", None, None, numbers)
        scale, bias = (norm[name].reshape(1, 1, 1, -1) for name in ("scale", "bias"))
        return normalize((1e-5, None, False), x.astype(F32), scale, bias)[0]

    def net(params, images):
        x = relu(conv_norm(images, params["stem"]["conv"]["kernel"], params["stem"]["norm"]))
        for number, (stage, index) in enumerate(BLOCKS):
            block, stride = params["blocks"][number], 2 if stage > 0 and index == 0 else 1
            y = relu(conv_norm(x, block["conv1"]["kernel"], block["norm1"], stride))
            y = conv_norm(y, block["conv2"]["kernel"], block["norm2"])
            if "shortcut" in block:
                x = conv_norm(x, block["shortcut"]["conv"]["kernel"], block["shortcut"]["norm"], stride)
            x = relu(y + x)
        features, head = x.mean((1, 2)), params["head"]
        return (features.astype(half) @ head["kernel"].astype(half)).astype(F32) + head["bias"]

    return net


def operations(net, params):
    """How many of each kind the optimized program of a training step has."""

    def step(params, images, labels):
        def loss(params):
            return optax.softmax_cross_entropy_with_integer_labels(net(params, images), labels).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda param, grad: param - 0.1 * grad, params, grads), value

    text = jax.jit(step).lower(params, IMAGES, LABELS).compile().as_text()
    kinds = ("fusion", "convolution", "dot", "custom-call", "convert", "reduce", "copy", "transpose")
    return {kind: text.count(f" {kind}(") for kind in kinds}


@pytest.mark.slow
def test_a_training_step_of_resnet18_has_the_operations_of_hand_placed_casts():
    net, params = resnet18_of_nnx()
    by_hand = operations(resnet18_by_hand(np.dtype("float16")), params)
    assert operations(mpjax.autocast(net, "float16"), params) == by_hand
    assert by_hand["convolution"] >= 20
    assert by_hand["convert"] >= 20


@pytest.mark.parametrize(("policy", "products"), [(None, 8), (jax.checkpoint_policies.dots_saveable, 6)])
def test_rematerialised_products_are_computed_as_often_as_with_hand_placed_casts(policy, products):
    """Forward two, backward four, and the forward two again where they were not to be saved."""

    def loss(cast):
        def block(x, w):
            return jnp.tanh(cast(jnp.tanh(cast(x) @ cast(w)).astype(F32)) @ cast(w)).astype(F32)

        return lambda x, w: jax.checkpoint(block, policy=policy)(x, w).sum()

    def count(fn):
        square = jax.ShapeDtypeStruct((4, 4), F32)
        return str(jax.make_jaxpr(jax.grad(fn, argnums=(0, 1)))(square, square)).count("dot_general[")

    by_hand = count(loss(lambda a: a.astype(jnp.bfloat16)))
    assert count(mpjax.autocast(loss(lambda a: a), "bfloat16")) == by_hand
    assert by_hand == products

"""What files say about a network for images is understood or refused; its images and its statistics are checked."""

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax import models
from mpjax.commands import build_run
from mpjax.config import Model, load_config
from mpjax.data import Image, Label, Labels, NumericTarget
from mpjax.errors import UsageError
from mpjax.models import ConvNeXtBlock, apply_remat, blocks_of, stacks_of
from mpjax.models.vision import load_vision, make_network, require_statistics, settings_of
from mpjax.precision import apply_policy


VIT = {
    "model_type": "vit",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 16,
    "patch_size": 4,
}
DINO = {key: value for key, value in VIT.items() if key != "intermediate_size"} | {"model_type": "dinov2"}
DINO3 = VIT | {"model_type": "dinov3_vit"}
BASE = {"model_type": "dinov2", "hidden_size": 768, "image_size": 518, "patch_size": 14}
GIANT = {"model_type": "dinov2_with_registers", "hidden_size": 1536, "num_hidden_layers": 40, "num_attention_heads": 24}
TINY = {"model_type": "convnextv2", "num_stages": 4, "image_size": 224}
SWIN = {"model_type": "swin", "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2], "window_size": 2, "patch_size": 2}


def network(config, size=16, classes=3, channels=3, **options) -> Any:
    shape = (size, size, channels)
    return make_network(settings_of(config), image_shape=shape, num_classes=classes, rngs=nnx.Rngs(0), **options)


@pytest.mark.parametrize(
    ("config", "numbers"),
    [
        ({"model_type": "vit"}, 86_567_656),
        ({"model_type": "deit", "hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768}, 5_717_800),
        (BASE, 88_116_712),
        (GIANT | {"image_size": 518, "patch_size": 14, "use_swiglu_ffn": True}, 1_139_558_376),
        (TINY, 28_635_496),
        ({"model_type": "dinov3_vit", "num_register_tokens": 4}, 21_981_160),
        ({"model_type": "swin"}, 28_288_354),
        ({"model_type": "clip", "vision_config": {"patch_size": 16}}, 86_566_888),
        ({"model_type": "siglip"}, 86_566_120),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_published_sizes_have_their_numbers_of_parameters(config, numbers):
    size = config.get("patch_size", 16) * 16
    model = nnx.eval_shape(lambda: network(config, size=size, classes=1000))
    assert sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))) == numbers


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (VIT | {"rope_theta": 100}, "mpjax does not know rope_theta 100"),
        (VIT | {"qkv_bias": False}, "qkv_bias is false: the vision network of mpjax has true only"),
        (VIT | {"attention_probs_dropout_prob": 0.1}, "attention_probs_dropout_prob is 0.1"),
        (VIT | {"hidden_act": "silu"}, 'hidden_act is "silu": wanted gelu or'),
        (VIT | {"image_size": [16, 32]}, "image_size is .16, 32.: wanted the side of a square"),
        (VIT | {"num_attention_heads": 3}, "cannot have 3 heads"),
        (VIT | {"mlp_ratio": 4}, "mpjax does not know mlp_ratio 4"),
        (VIT | {"architectures": ["SwinModel"]}, "wanted one class of ViT"),
        (DINO | {"drop_path_rate": 1.0}, "drop_path_rate is 1.0"),
        (DINO | {"num_register_tokens": 4}, "does not know num_register_tokens"),
        (TINY | {"hidden_sizes": [96, 192, 384, 700]}, "each stage of twice the width"),
        (TINY | {"num_stages": 3}, "one of each for 3 stages"),
        (TINY | {"hidden_act": "relu"}, 'hidden_act is "relu"'),
        (DINO3 | {"key_bias": True}, "key_bias is true: the vision network of mpjax has false only"),
        (DINO3 | {"hidden_act": "relu", "use_gated_mlp": True}, 'hidden_act is "relu": wanted silu or'),
        (DINO3 | {"num_attention_heads": 8}, "turn heads of 4, 8, 12, ... features, got 2"),
        (DINO3 | {"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ({"model_type": "clip", "vision_config": {"rope": 1}}, "does not know vision_config.rope 1"),
        (
            {"model_type": "clip", "vision_config": {"hidden_size": 12}, "vision_config_dict": {"hidden_size": 24}},
            "vision_config and vision_config_dict describe two networks",
        ),
        ({"model_type": "siglip", "vision_config": {"hidden_size": 9}}, "of width 9 cannot have 12 heads"),
        (SWIN | {"use_absolute_embeddings": True}, "use_absolute_embeddings is true"),
        (SWIN | {"num_heads": [2]}, "as many whole numbers of at least 1 in both"),
        (SWIN | {"num_heads": [3, 2]}, "of width 8 cannot have 3 heads"),
        (SWIN | {"pretrained_window_size": 0}, "does not know pretrained_window_size"),
    ],
)
def test_what_is_not_understood_is_an_error(config, says):
    with pytest.raises(UsageError, match=says):
        settings_of(config)


def test_images_that_do_not_fit_are_refused():
    with pytest.raises(UsageError, match=r"patches of 4 x 4: write --data.image_size 16, or another") as error:
        network(VIT, size=18)
    assert error.value.repair == {"data.image_size": 16}
    for config in (VIT, TINY, SWIN):
        with pytest.raises(UsageError, match="images have 1 channels, and config.json .* says num_channels 3"):
            network(config, size=32, channels=1)
    for config in (TINY, SWIN):
        with pytest.raises(UsageError, match="of several widths: write --model.no_scan_blocks"):
            network(config, size=32, scan_blocks=True)
    with pytest.raises(UsageError, match=r"1 rows or columns of patches in the last stage.* write --data.image_size 8"):
        network(SWIN, size=4)
    assert network(SWIN, size=5).head.in_features == 16


def loss_and_gradients(options, remat: Any = "none", **changes: Any):
    model = network(DINO | changes, **options)
    apply_remat(model, remat)

    def loss(model, x):
        return jnp.sum(jnp.square(model(x)))

    value, grads = nnx.jit(nnx.value_and_grad(loss))(model, jax.random.normal(jax.random.key(0), (4, 16, 16, 3)))
    return float(value), models.apart(
        {"/".join(map(str, path)): x[...] for path, x in nnx.to_flat_state(grads)}, stacks_of(model)
    )


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_loop_and_recomputed_activations_change_nothing_with_dropped_paths(remat):
    rates = {"drop_path_rate": 0.5, "hidden_dropout_prob": 0.1}
    plain, looped = loss_and_gradients({}, **rates), loss_and_gradients({"scan_blocks": True}, remat, **rates)
    assert looped[0] == pytest.approx(plain[0], rel=1e-6)
    assert looped[1].keys() == plain[1].keys()
    for path, expected in plain[1].items():
        np.testing.assert_allclose(looped[1][path], expected, atol=2e-6 * float(jnp.max(jnp.abs(expected))) + 1e-9)


def test_a_dropped_path_is_of_whole_examples_and_in_training_alone():
    model = network(DINO | {"drop_path_rate": 0.99, "num_hidden_layers": 1})
    block = model.blocks[0]
    x = jax.random.normal(jax.random.key(0), (64, 3, 16))
    unchanged = np.all(np.asarray(block(x) == x), axis=(1, 2))
    assert unchanged.sum() > 50
    block.eval()
    assert not np.any(np.all(np.asarray(block(x) == x), axis=(1, 2)))


def test_the_gradient_of_a_bias_of_positions_adds_in_float32_under_every_preset():
    """The middle row of the table is read by all 4 queries of each of 2 x 512 windows: in float16, 2048 + 1 is 2048."""
    model = network(SWIN | {"depths": [1], "num_heads": [1]}, size=64)
    apply_policy(model, "float16")
    positions = model.layers[0].positions

    def loss(positions):
        return jnp.sum(jnp.broadcast_to(positions()[None], (1025, 1, 4, 4)).astype(jnp.float32))

    grads = nnx.grad(loss)(positions)
    assert positions.table[...].dtype == jnp.float16
    assert np.asarray(grads.table[...]).ravel().tolist() == [1025, 2050, 1025, 2050, 4100, 2050, 1025, 2050, 1025]


def test_blocks_are_found():
    assert list(blocks_of(network(DINO))) == ["blocks/0", "blocks/1"]


def test_sums_of_the_response_norm_are_float32_and_its_gradient_of_zeros_is_finite():
    """In float16, squares of 300 overflow, and 64 x 64 of them before."""
    block = ConvNeXtBlock(8, 0.0, version=2, rngs=nnx.Rngs(0))
    apply_policy(block, "mixed_float16")
    norm: Any = block.response
    norm.scale[...] = jnp.ones(32)
    y = norm(jnp.full((1, 64, 64, 32), 300, jnp.float16))
    assert y.dtype == jnp.float16
    np.testing.assert_allclose(y, 600, rtol=1e-3)
    gradient = jax.grad(lambda x: jnp.sum(norm(x)))(jnp.zeros((1, 2, 2, 32)))
    assert np.all(np.isfinite(gradient))


STATISTICS = {"do_normalize": True, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.5, 0.5], "resample": 3}


def written(folder, **changes):
    (folder / "preprocessor_config.json").write_text(json.dumps(STATISTICS | changes))
    return folder


def test_statistics_of_the_file_have_to_be_those_of_the_run(tmp_path):
    require_statistics(tmp_path, (0.0,), (1.0,))  # no file
    folder = written(tmp_path)
    require_statistics(folder, (0.5, 0.4, 0.3), (0.5,))
    for mean, std in [((0.0,), (1.0,)), ((0.5, 0.4, 0.3), (0.25,)), ((0.5,), (0.5,))]:
        with pytest.raises(UsageError, match="write the former") as error:
            require_statistics(folder, mean, std)
        assert error.value.repair == {"data.mean": (0.5, 0.4, 0.3), "data.std": (0.5, 0.5, 0.5)}
    require_statistics(written(tmp_path, do_normalize=False), (0.0,), (1.0,))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"do_rescale": False}, "mpjax divides images by 255"),
        ({"rescale_factor": 1 / 127.5}, "rescale_factor is 0.00784.*: mpjax divides images by 255"),
        ({"image_mean": "imagenet"}, 'image_mean is "imagenet": wanted a list'),
        ({"do_flip_channel_order": True}, "does not know .*do_flip_channel_order true"),
        ({"do_pad": True}, "do_pad is true"),
    ],
)
def test_what_changes_pixels_is_an_error(tmp_path, changes, says):
    with pytest.raises(UsageError, match=says):
        require_statistics(written(tmp_path, **changes), (0.5, 0.4, 0.3), (0.5,))


def test_what_is_not_read_about_images_is_told(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(VIT))
    (line,) = models.advice_on(Model(name=f"hf:{tmp_path}"), {"image": Image((16, 16, 3))})
    assert "has no preprocessor_config.json: no one knows if --data.mean and --data.std are those of" in line
    line, _ = models.advice_on(Model(name=f"hf:{tmp_path}"), {"image": Image((16, 32, 3))})
    assert line == "position embeddings of images of 16 x 16 pixels are interpolated to 16 x 32"
    (tmp_path / "config.json").write_text(json.dumps(DINO3 | {"pos_embed_rescale": 2.0, "pos_embed_shift": None}))
    line, _ = models.advice_on(Model(name=f"hf:{tmp_path}"), {"image": Image((16, 32, 3))})
    assert line == "config.json: pos_embed_rescale 2.0 without effect: training leaves the coordinates of patches alone"
    (tmp_path / "config.json").write_text(json.dumps(VIT))
    written(tmp_path, size={"shortest_edge": 256}, crop_size=224)
    (line,) = models.advice_on(Model(name=f"hf:{tmp_path}"))
    told = 'size {"shortest_edge": 256}, crop_size 224, resample 3 without effect: --data.image_size resizes images'
    assert line == f"preprocessor_config.json: {told}"


def test_other_data_and_settings_than_those_of_images_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(VIT))
    name = f"hf:{tmp_path}"

    def built(fields, **settings):
        return models.build_model(Model(name=name, **settings), fields=fields, rngs=nnx.Rngs(0))

    fields = {"image": Image((16, 16, 3)), "label": Label(3)}
    assert type(nnx.eval_shape(lambda: built(fields))).__name__ == "VisionTransformer"
    for outputs in ({"labels": Labels(("a", "b"))}, {"target": NumericTarget(("u", "v"), (0.0, 0.0), (1.0, 1.0))}):
        model: Any = nnx.eval_shape(lambda outputs=outputs: built({"image": Image((16, 16, 3)), **outputs}))
        assert model.head.out_features == 2
    with pytest.raises(UsageError, match="has no such setting"):
        built(fields, depth=3)
    with pytest.raises(UsageError, match="is for classification: it takes image, label"):
        built({"image": Image((16, 16, 3))})
    with pytest.raises(UsageError, match="no safetensors in"):
        load_vision(tmp_path, image_shape=(16, 16, 3), num_classes=3)


def test_a_head_for_as_many_classes_of_other_names_is_told(tmp_path):
    def told(names, **settings):
        fields = {"image": Image((16, 16, 3)), "label": Label(2, names=names)}
        return [
            line
            for line in models.advice_on(Model(name=f"hf:{tmp_path}", **settings), fields)
            if "other classes" in line
        ]

    (tmp_path / "config.json").write_text(json.dumps(DINO | {"id2label": {"0": "dog", "1": "cat"}}))
    (line,) = told(("cat", "dog"))
    assert line == (
        f"the head of {tmp_path} is for other classes: number 0 is 'dog' there, and 'cat' in the data; for a new head, "
        'write --model.pretrained_skip "head/*"'
    )
    assert told(("Dog", "cat")) == told(()) == told(("cat", "dog"), pretrained_skip=("head/*",)) == []
    assert told(("cat", "dog"), pretrained="none") == []
    (tmp_path / "config.json").write_text(json.dumps(DINO | {"id2label": {"0": "LABEL_0", "1": "LABEL_1"}}))
    assert told(("cat", "dog")) == []


@pytest.mark.parametrize(
    ("folder", "task", "tasks"),
    [
        ("vision/dinov2", "text_classification", "classification or regression or multilabel"),
        ("image_text/clip", "embedding", "image_text or classification or regression or multilabel"),
        ("t5/tiny", "classification", "text_to_text"),
        ("decoder/tiny", "embedding", "language_modeling or instructions or preference"),
    ],
)
def test_a_folder_for_other_tasks_is_an_error_before_the_data_are_opened(folder, task, tasks):
    model = f"hf:{pathlib.Path(__file__).parents[1] / folder}"
    config = load_config(f"--task {task} --model.name {model} --data.name no_such_set".split())
    with pytest.raises(
        UsageError, match=f"is for other tasks than {task}: write --task {tasks}, or name another model"
    ):
        build_run(config)

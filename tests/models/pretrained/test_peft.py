"""Adapters alone in a folder that PEFT reads: its names, shapes and settings, and what it computes with them."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from mpjax.errors import UsageError
from mpjax.models import GPT2, MLP, add_lora, merge_lora
from mpjax.models.decoder import Decoder, export_decoder, load_decoder, read_settings, settings_of
from mpjax.models.mamba2 import Mamba2
from mpjax.models.mamba2 import settings_of as mamba2_settings
from mpjax.models.pretrained import export_adapter, export_safetensors
from mpjax.models.vision import load_vision


TINY = pathlib.Path(__file__).parents[1] / "decoder" / "tiny"
TOKENS = np.arange(24).reshape(2, 12)
PREFIX = "base_model.model.model.layers"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with random weights of a decoder of three blocks, of width 64 with 8 heads of 16 features."""
    folder = tmp_path_factory.mktemp("tiny")
    config = json.loads((TINY / "config.json").read_text()) | {"torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    model = Decoder(read_settings(folder), rngs=nnx.Rngs(0))
    export_safetensors(model, folder / "model.safetensors", layout="huggingface")
    return folder


def adapted(base, variant, patterns=("blocks/*/attention/*", "blocks/*/mlp/down"), **settings):
    return with_adapters(load_decoder(base, **settings), variant, patterns)


def with_adapters(model, variant, patterns):
    """Adds adapters that are not zero."""
    add_lora(model, patterns, rank=4, alpha=8.0, variant=variant, rngs=nnx.Rngs(1))
    state = nnx.state(model)
    for number, (path, variable) in enumerate(nnx.to_flat_state(state)):
        if path[-1] == "lora_b":
            variable.set_value(0.1 * jax.random.normal(jax.random.key(number), variable.get_value().shape))
    nnx.update(model, state)
    return model


def test_the_file_has_the_names_and_shapes_of_peft(base, tmp_path):
    count = export_adapter(adapted(base, "dora"), tmp_path / "a", base="tiny", task="CAUSAL_LM")
    tensors = load_file(tmp_path / "a" / "adapter_model.safetensors")
    shapes = {
        name.removeprefix(f"{PREFIX}.1."): array.shape for name, array in tensors.items() if f"{PREFIX}.1." in name
    }
    assert shapes == {
        "self_attn.q_proj.lora_A.weight": (4, 64),
        "self_attn.q_proj.lora_B.weight": (128, 4),
        "self_attn.q_proj.lora_magnitude_vector": (128,),
        "self_attn.k_proj.lora_A.weight": (4, 64),
        "self_attn.k_proj.lora_B.weight": (64, 4),
        "self_attn.k_proj.lora_magnitude_vector": (64,),
        "self_attn.v_proj.lora_A.weight": (4, 64),
        "self_attn.v_proj.lora_B.weight": (64, 4),
        "self_attn.v_proj.lora_magnitude_vector": (64,),
        "self_attn.o_proj.lora_A.weight": (4, 128),
        "self_attn.o_proj.lora_B.weight": (64, 4),
        "self_attn.o_proj.lora_magnitude_vector": (64,),
        "mlp.down_proj.lora_A.weight": (4, 128),
        "mlp.down_proj.lora_B.weight": (64, 4),
        "mlp.down_proj.lora_magnitude_vector": (64,),
    }
    assert (len(tensors), count) == (45, sum(array.size for array in tensors.values()))
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["use_dora"], config["use_rslora"]) == (4, 8, True, False)
    assert (config["peft_type"], config["task_type"], config["base_model_name_or_path"]) == (
        "LORA",
        "CAUSAL_LM",
        "tiny",
    )
    assert (config["target_modules"], config["fan_in_fan_out"]) == (
        ["down_proj", "k_proj", "o_proj", "q_proj", "v_proj"],
        False,
    )


@pytest.mark.parametrize(("variant", "scale"), [("lora", 2.0), ("rslora", 4.0)])
def test_the_base_and_the_adapter_in_the_files_make_the_merged_weight(base, tmp_path, variant, scale):
    """W + alpha / r B A in the file's [out, in], of blocks in a loop too; for rsLoRA, alpha / sqrt(r)."""
    model = adapted(base, variant, scan_blocks=True)
    export_adapter(model, tmp_path / "a", base="tiny", task=None)
    merge_lora(model)
    export_decoder(model, tmp_path / "m", source=base)
    weights, merged = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "m"))
    adapter = load_file(tmp_path / "a" / "adapter_model.safetensors")
    for layer in ("0.self_attn.q_proj", "1.self_attn.o_proj", "2.mlp.down_proj"):
        a, b = (adapter[f"{PREFIX}.{layer}.lora_{name}.weight"] for name in "AB")
        expected = weights[f"model.layers.{layer}.weight"] + scale * (b @ a)
        np.testing.assert_allclose(merged[f"model.layers.{layer}.weight"], expected, atol=1e-6)
    unchanged = "model.layers.0.mlp.up_proj.weight"
    np.testing.assert_array_equal(merged[unchanged], weights[unchanged])


def test_layers_that_share_a_last_name_with_others_are_named_in_full(base, tmp_path):
    export_adapter(adapted(base, "lora", ["blocks/1/mlp/up"]), tmp_path / "a", base="tiny", task=None)
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["model.layers.1.mlp.up_proj"]


def test_experts_have_names_of_layers_too_and_peft_refuses_an_output_of_mamba_2(tmp_path):
    """PEFT finds layers by `gate_proj`, and would adapt the experts of block 0 with the dense layers of block 1."""
    sizes = {"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 2, "head_dim": 4, "intermediate_size": 8}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "mlp_only_layers": [1]}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 16}
    config = {"model_type": "qwen3_moe", **sizes, **heads, **experts}
    model = with_adapters(Decoder(settings_of(config), rngs=nnx.Rngs(0)), "lora", ["blocks/1/mlp/*"])
    export_adapter(model, tmp_path / "a", base="tiny", task=None)
    targets = json.loads((tmp_path / "a" / "adapter_config.json").read_text())["target_modules"]
    assert targets == [f"model.layers.1.mlp.{name}_proj" for name in ("down", "gate", "up")]
    mamba = {"model_type": "mamba2", "vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1, "num_heads": 4}
    network = Mamba2(mamba2_settings(mamba | {"head_dim": 4, "state_size": 4, "n_groups": 1}), rngs=nnx.Rngs(0))
    adapted = with_adapters(network, "lora", ["blocks/*/mixer/out_proj"])
    with pytest.raises(UsageError, match="PEFT loads no adapter of backbone.layers.0.mixer.out_proj"):
        export_adapter(adapted, tmp_path / "b", base="tiny", task=None)


def test_gpt_2_has_its_inputs_first_and_no_adapter_for_a_part_of_a_layer(tmp_path):
    def gpt2(patterns):
        model = GPT2(vocabulary=16, length=8, width=8, depth=1, heads=2, rngs=nnx.Rngs(0))
        add_lora(model, patterns, rank=2, rngs=nnx.Rngs(1))
        return model

    export_adapter(gpt2(["blocks/*/mlp"]), tmp_path / "a", base="gpt2", task=None)
    assert json.loads((tmp_path / "a" / "adapter_config.json").read_text())["fan_in_fan_out"] is True
    with pytest.raises(UsageError, match=r"blocks/0/attention/query is a part of transformer.h.0.attn.c_attn.weight"):
        export_adapter(gpt2(["blocks/*/attention/query"]), tmp_path / "b", base="gpt2", task=None)


def test_what_cannot_be_exported_is_an_error(base, tmp_path):
    model = adapted(base, "lora")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(UsageError, match="full is not an empty folder"):
        export_adapter(model, tmp_path / "full", base="tiny", task=None)
    with pytest.raises(UsageError, match="Decoder has no adapters: add them"):
        export_adapter(load_decoder(base), tmp_path / "a", base="tiny", task=None)
    mlp = MLP(4, 4, 1, 2, rngs=nnx.Rngs(0))
    add_lora(mlp, ["head"], rngs=nnx.Rngs(1))
    with pytest.raises(UsageError, match="MLP is no model of transformers"):
        export_adapter(mlp, tmp_path / "a", base="tiny", task=None)
    model.blocks[0].attention.query.lora_b[...] = jnp.full((4, 128), 1e6)
    with pytest.raises(UsageError, match="512 of 512 values overflow"):
        export_adapter(model, tmp_path / "a", base="tiny", task=None, dtype="float16")
    add_lora(model, ["blocks/*/mlp/up"], rank=2, rngs=nnx.Rngs(1))
    with pytest.raises(UsageError, match="adapters of several kinds"):
        export_adapter(model, tmp_path / "a", base="tiny", task=None)
    with pytest.raises(UsageError, match="the huggingface layout has no key for blocks/0/attention/key/lora_a"):
        export_safetensors(model, tmp_path / "m.safetensors", layout="huggingface")


@nnx.jit
def logits(model, tokens):
    return model(tokens)


def logits_there(theirs) -> np.ndarray:
    import torch

    with torch.no_grad():
        return theirs.eval()(torch.tensor(TOKENS)).logits.numpy()


def loaded_there(folder):
    pytest.importorskip("torch", reason="pip install -e '.[parity]'")
    transformers = pytest.importorskip("transformers", reason="pip install -e '.[parity]'")
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


VARIANTS = pytest.mark.parametrize("variant", ["lora", "rslora", "dora"])
QUIETLY = pytest.mark.filterwarnings("default")  # some in the other libraries' own code


@pytest.mark.extra
@QUIETLY
@VARIANTS
def test_transformers_computes_the_logits_of_the_adapted_model_with_merged_weights(base, tmp_path, variant):
    model = adapted(base, variant)
    expected = logits(model, jnp.asarray(TOKENS))
    merge_lora(model)
    export_decoder(model, tmp_path / "m", source=base)
    assert np.max(np.abs(expected - logits_there(loaded_there(base)))) > 0.1
    np.testing.assert_allclose(logits_there(loaded_there(tmp_path / "m")), expected, atol=2e-6)


@pytest.mark.extra
@QUIETLY
@VARIANTS
def test_peft_computes_them_with_the_base_and_the_adapters(base, tmp_path, variant):
    peft = pytest.importorskip("peft", reason="pip install -e '.[parity]'")
    model = adapted(base, variant)
    export_adapter(model, tmp_path / "a", base=str(base), task="CAUSAL_LM")
    theirs = peft.PeftModel.from_pretrained(loaded_there(base), tmp_path / "a")
    np.testing.assert_allclose(logits_there(theirs), logits(model, jnp.asarray(TOKENS)), atol=2e-6)


SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
IMAGES = {"image_size": 8, "patch_size": 4, "num_channels": 3}
SWIN = {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2, "image_size": 8, "patch_size": 2}
NETWORKS = {
    "vit": ("ViTForImageClassification", SIZES | IMAGES | {"intermediate_size": 32}),
    "deit": ("DeiTForImageClassification", SIZES | IMAGES | {"intermediate_size": 32}),
    "dinov2": ("Dinov2ForImageClassification", SIZES | IMAGES),
    "dinov2_with_registers": ("Dinov2WithRegistersForImageClassification", SIZES | IMAGES),
    "dinov3_vit": ("DINOv3ViTModel", SIZES | IMAGES | {"intermediate_size": 32}),
    "swin": ("SwinForImageClassification", SWIN),
}


@pytest.mark.extra
@QUIETLY
@pytest.mark.parametrize("kind", NETWORKS)
def test_peft_finds_the_layers_of_networks_for_images_which_transformers_renames(kind, tmp_path):
    """`k_proj` in memory is `attention.attention.key` in a file of ViT; PEFT passes over names that are not there."""
    peft = pytest.importorskip("peft", reason="pip install -e '.[parity]'")
    import torch
    import transformers

    torch.manual_seed(0)
    name, sizes = NETWORKS[kind]
    kind_of_network = getattr(transformers, name)
    classifies = "ImageClassification" in name  # transformers has no classifier of DINOv3
    labels = {"num_labels": 3} if classifies else {}
    kind_of_network(transformers.AutoConfig.for_model(kind, **sizes, **labels)).save_pretrained(tmp_path)
    model = load_vision(tmp_path, image_shape=(8, 8, 3), num_classes=3, skip=() if classifies else ("head/*",))
    blocks = "layers" if kind == "swin" else "blocks"
    with_adapters(model, "lora", [f"{blocks}/*/attention/*", f"{blocks}/*/mlp/*"]).eval()
    export_adapter(model, tmp_path / "a", base=str(tmp_path), task=None)
    images = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype(np.float32)
    theirs = kind_of_network.from_pretrained(tmp_path).eval()

    def of_theirs(network):
        with torch.no_grad():
            outputs = network(pixel_values=torch.tensor(images.transpose(0, 3, 1, 2)))
        return (outputs.logits if classifies else outputs.last_hidden_state[:, 0]).numpy()

    expected = np.asarray(logits(model, images) if classifies else model.features(images)[:, 0])
    assert np.max(np.abs(of_theirs(theirs) - expected)) > 0.01
    np.testing.assert_allclose(of_theirs(peft.PeftModel.from_pretrained(theirs, tmp_path / "a")), expected, atol=2e-6)

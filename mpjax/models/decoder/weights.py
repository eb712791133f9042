"""Maps a decoder to the files of Hugging Face transformers (`LlamaForCausalLM` and those with the same layers)."""

from collections.abc import Mapping

from mpjax.models.decoder.network import Decoder
from mpjax.models.pretrained.layouts.entry import (
    ROW,
    FileEntry,
    WeightMap,
    attention_entries,
    layer_entries,
    transposed,
)


MODEL = Decoder

_NAMES_OF_EXPERTS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "qwen": ("mlp", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}),
    "mixtral": ("block_sparse_moe", {"gate": "w1", "up": "w3", "down": "w2"}),
}
"""The name of the layer and the names of an expert's kernels, by those of `ExpertSettings.files`."""

_TURNED = transposed("transposed", 0, 2, 1)


def huggingface(model: Decoder) -> WeightMap:
    """Builds the layout of `LlamaForCausalLM`, `MistralForCausalLM`, `Qwen3ForCausalLM`, `Gemma3ForCausalLM` and more.

    In their files, as in our queries and keys, rotary embeddings pair the features i and i + H/2.
    """
    names = {"tokens": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    entries, experts = {}, model.settings.experts
    for number, block in enumerate(model.blocks):
        path, prefix = f"blocks/{number}", f"model.layers.{number}"
        names[f"{path}/norm1"] = f"{prefix}.input_layernorm"
        if model.settings.norms_after:
            names[f"{path}/norm_after_attention"] = f"{prefix}.post_attention_layernorm"
            names[f"{path}/norm2"] = f"{prefix}.pre_feedforward_layernorm"
            names[f"{path}/norm_after_mlp"] = f"{prefix}.post_feedforward_layernorm"
        else:
            names[f"{path}/norm2"] = f"{prefix}.post_attention_layernorm"
        names[f"{path}/attention/query_norm"] = f"{prefix}.self_attn.q_norm"
        names[f"{path}/attention/key_norm"] = f"{prefix}.self_attn.k_norm"
        if experts is None or not experts.sparse[number]:
            names |= {f"{path}/mlp/{layer}": f"{prefix}.mlp.{layer}_proj" for layer in ("gate", "up", "down")}
        else:
            layer, of_expert = _NAMES_OF_EXPERTS[experts.files]
            names[f"{path}/mlp/router"] = f"{prefix}.{layer}.gate"
            for ours, theirs in of_expert.items():
                entry = FileEntry(f"{prefix}.{layer}.experts.{ROW}.{theirs}.weight", _TURNED, rows=experts.count)
                entries[f"{path}/mlp/experts/{ours}"] = entry
        projections = {layer: f"{prefix}.self_attn.{layer[0]}_proj" for layer in ("query", "key", "value", "out")}
        entries |= attention_entries(block.attention, f"{path}/attention", **projections)
    return WeightMap(
        "huggingface",
        layer_entries(model, names) | entries,
        base="model.",
        ignored=("layers.*.self_attn.rotary_emb.inv_freq",),  # constants, which old files hold
        tied={"lm_head.weight": "embed_tokens.weight"} if model.settings.tied else {},
    )


LAYOUTS = {"huggingface": huggingface}

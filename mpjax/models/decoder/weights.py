"""Maps a decoder to the files of Hugging Face transformers (`LlamaForCausalLM` and those with the same layers)."""

from mpjax.models.decoder.network import Decoder
from mpjax.models.pretrained.layouts.entry import WeightMap, attention_entries, layer_entries


MODEL = Decoder


def huggingface(model: Decoder) -> WeightMap:
    """The layout of `LlamaForCausalLM`, `MistralForCausalLM`, `Qwen3ForCausalLM`, `Gemma3ForCausalLM` and others.

    Queries and keys of their files have the features of a pair H/2 apart, as ours have.
    """
    names = {"tokens": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    entries = {}
    for number, block in enumerate(model.blocks):
        ours, theirs = f"blocks/{number}", f"model.layers.{number}"
        names[f"{ours}/norm1"] = f"{theirs}.input_layernorm"
        if model.settings.norms_after:
            names[f"{ours}/norm_after_attention"] = f"{theirs}.post_attention_layernorm"
            names[f"{ours}/norm2"] = f"{theirs}.pre_feedforward_layernorm"
            names[f"{ours}/norm_after_mlp"] = f"{theirs}.post_feedforward_layernorm"
        else:
            names[f"{ours}/norm2"] = f"{theirs}.post_attention_layernorm"
        names[f"{ours}/attention/query_norm"] = f"{theirs}.self_attn.q_norm"
        names[f"{ours}/attention/key_norm"] = f"{theirs}.self_attn.k_norm"
        names |= {f"{ours}/mlp/{layer}": f"{theirs}.mlp.{layer}_proj" for layer in ("gate", "up", "down")}
        projections = {layer: f"{theirs}.self_attn.{layer[0]}_proj" for layer in ("query", "key", "value", "out")}
        entries |= attention_entries(block.attention, f"{ours}/attention", **projections)
    return WeightMap(
        "huggingface",
        layer_entries(model, names) | entries,
        base="model.",
        ignored=("layers.*.self_attn.rotary_emb.inv_freq",),  # constants, which old files hold
        tied={"lm_head.weight": "embed_tokens.weight"} if model.settings.tied else {},
    )


LAYOUTS = {"huggingface": huggingface}

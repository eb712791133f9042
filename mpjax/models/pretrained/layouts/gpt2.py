"""Maps GPT-2 to the files of Hugging Face transformers (`GPT2LMHeadModel`)."""

from mpjax.models.attention import Attention
from mpjax.models.gpt2 import GPT2
from mpjax.models.pretrained.layouts.entry import FileEntry, FusedPart, WeightMap, layer_entries, reshaped


MODEL = GPT2


def huggingface_gpt2(model: GPT2) -> WeightMap:
    """Builds the layout of `GPT2LMHeadModel`.

    Its kernels are [in, out], the same as ours. The kernel of the logits is the token embedding.
    """
    names = {"tokens": "transformer.wte", "norm": "transformer.ln_f"}
    entries = {"positions": FileEntry("transformer.wpe.weight")}
    for number, block in enumerate(model.blocks):
        path, prefix = f"blocks/{number}", f"transformer.h.{number}"
        names[f"{path}/norm1"] = f"{prefix}.ln_1"
        names[f"{path}/norm2"] = f"{prefix}.ln_2"
        for layer, name in (("up", "c_fc"), ("down", "c_proj")):
            entries[f"{path}/mlp/{layer}/kernel"] = FileEntry(f"{prefix}.mlp.{name}.weight")
            entries[f"{path}/mlp/{layer}/bias"] = FileEntry(f"{prefix}.mlp.{name}.bias")
        entries |= _attention(block.attention, f"{path}/attention", f"{prefix}.attn")
    return WeightMap(
        "huggingface",
        layer_entries(model, names) | entries,
        base="transformer.",
        ignored=("h.*.attn.bias", "h.*.attn.masked_bias"),  # constants for the causal mask
        tied={"lm_head.weight": "wte.weight"},
    )


def _attention(attention: Attention, path: str, prefix: str) -> dict[str, FileEntry]:
    """Maps the variables of an attention to entries of a file whose query, key and value are one matrix, [D, 3 D].

    `path` is the path of the attention in our model, `prefix` the prefix of its keys in the file.
    """
    width, heads, features = attention.query.kernel.get_value().shape
    out = reshaped((width, width), (heads, features, width))
    entries = {
        f"{path}/out/kernel": FileEntry(f"{prefix}.c_proj.weight", out),
        f"{path}/out/bias": FileEntry(f"{prefix}.c_proj.bias"),
    }
    for index, name in enumerate(("query", "key", "value")):
        kernel, bias = reshaped((width, width), (width, heads, features)), reshaped((width,), (heads, features))
        entries[f"{path}/{name}/kernel"] = FileEntry(f"{prefix}.c_attn.weight", kernel, FusedPart(index, 3, axis=1))
        entries[f"{path}/{name}/bias"] = FileEntry(f"{prefix}.c_attn.bias", bias, FusedPart(index, 3, axis=0))
    return entries


LAYOUTS = {"huggingface": huggingface_gpt2}

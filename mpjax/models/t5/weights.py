"""Maps a T5 to the files of Hugging Face transformers (`T5ForConditionalGeneration`, `MT5ForConditionalGeneration`)."""

from mpjax.models.pretrained.layouts.entry import FileEntry, WeightMap, attention_entries, layer_entries
from mpjax.models.t5.network import T5


MODEL = T5


def huggingface(model: T5) -> WeightMap:
    """Builds the layout of `T5ForConditionalGeneration`.

    In the files, the first block of a stack has the bias of positions, which all its blocks read.
    """
    names, entries = {"tokens": "shared", "head": "lm_head"}, {}
    for stack in ("encoder", "decoder"):
        names[f"{stack}/norm"] = f"{stack}.final_layer_norm"
        first = f"{stack}.block.0.layer.0.SelfAttention"
        entries[f"{stack}/positions/embedding"] = FileEntry(f"{first}.relative_attention_bias.weight")
        for number, block in enumerate(getattr(model, stack).blocks):
            path, prefix = f"{stack}/blocks/{number}", f"{stack}.block.{number}.layer"
            attentions = {"attention": ("norm1", f"{prefix}.0", "SelfAttention")}
            if stack == "decoder":
                attentions["cross"] = ("cross_norm", f"{prefix}.1", "EncDecAttention")
            for name, (norm, layer, kind) in attentions.items():
                names[f"{path}/{norm}"] = f"{layer}.layer_norm"
                projections = {part: f"{layer}.{kind}.{part[0]}" for part in ("query", "key", "value", "out")}
                entries |= attention_entries(getattr(block, name), f"{path}/{name}", **projections)
            mlp = f"{prefix}.{len(attentions)}"
            names[f"{path}/norm2"] = f"{mlp}.layer_norm"
            gated = {"gate": "wi_0", "up": "wi_1", "down": "wo"}
            layers = gated if model.settings.gated else {"up": "wi", "down": "wo"}
            names |= {f"{path}/mlp/{ours}": f"{mlp}.DenseReluDense.{theirs}" for ours, theirs in layers.items()}
    copies = dict.fromkeys(("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"), "shared.weight")
    return WeightMap(
        "huggingface",
        layer_entries(model, names) | entries,
        # Old files have it; the network has no bias there.
        ignored=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
        tied=copies | ({"lm_head.weight": "shared.weight"} if model.settings.tied else {}),
    )


LAYOUTS = {"huggingface": huggingface}

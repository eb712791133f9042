"""Maps a Mamba-2 to the files of Hugging Face transformers (`Mamba2ForCausalLM`)."""

from mpjax.models.mamba2.network import Mamba2
from mpjax.models.pretrained.files import variables_of
from mpjax.models.pretrained.layouts.entry import FileEntry, WeightMap, layer_entries, reshaped, transposed


MODEL = Mamba2


def huggingface(model: Mamba2) -> WeightMap:
    """Builds the layout of `Mamba2ForCausalLM`."""
    names = {"tokens": "backbone.embeddings", "norm": "backbone.norm_f", "head": "lm_head"}
    entries, variables = {}, variables_of(model)
    for number, _ in enumerate(model.blocks):
        path, prefix = f"blocks/{number}", f"backbone.layers.{number}"
        names[f"{path}/norm"] = f"{prefix}.norm"
        names |= {f"{path}/mixer/{layer}": f"{prefix}.mixer.{layer}" for layer in ("in_proj", "norm", "out_proj")}
        taps, features = variables[f"{path}/mixer/conv/kernel"].get_value().shape
        turn = transposed("OIW to WIO", 2, 1, 0).then(reshaped((taps, 1, features), (taps, features)))
        entries[f"{path}/mixer/conv/kernel"] = FileEntry(f"{prefix}.mixer.conv1d.weight", turn)
        if f"{path}/mixer/conv/bias" in variables:
            entries[f"{path}/mixer/conv/bias"] = FileEntry(f"{prefix}.mixer.conv1d.bias")
        for ours, theirs in (("log_rates", "A_log"), ("skip", "D"), ("step_bias", "dt_bias")):
            entries[f"{path}/mixer/space/{ours}"] = FileEntry(f"{prefix}.mixer.{theirs}")
    return WeightMap(
        "huggingface",
        layer_entries(model, names) | entries,
        base="backbone.",
        tied={"lm_head.weight": "embeddings.weight"} if model.settings.tied else {},
    )


LAYOUTS = {"huggingface": huggingface}

"""Maps a `ConvNeXtV2` to the files of Hugging Face transformers (`ConvNextV2ForImageClassification`)."""

from mpjax.models.convnext import ConvNeXtBlock
from mpjax.models.pretrained.layouts.entry import FileEntry, WeightMap, layer_entries, reshaped
from mpjax.models.vision.convnextv2 import ConvNeXtV2


MODEL = ConvNeXtV2

_BLOCK = {"depthwise": "dwconv", "norm": "layernorm", "expand": "pwconv1", "project": "pwconv2"}


def huggingface(model: ConvNeXtV2) -> WeightMap:
    """Builds the layout of `ConvNextV2ForImageClassification`."""
    base = "convnextv2."
    names = {
        "stem/conv": f"{base}embeddings.patch_embeddings",
        "stem/norm": f"{base}embeddings.layernorm",
        "norm": f"{base}layernorm",
        "head": "classifier",
    }
    entries: dict[str, FileEntry] = {}
    stage = index = 0
    for number, layer in enumerate(model.layers):
        path = f"layers/{number}"
        if not isinstance(layer, ConvNeXtBlock):
            stage, index = stage + 1, 0
            names[f"{path}/norm"] = f"{base}encoder.stages.{stage}.downsampling_layer.0"
            names[f"{path}/conv"] = f"{base}encoder.stages.{stage}.downsampling_layer.1"
            continue
        prefix = f"{base}encoder.stages.{stage}.layers.{index}"
        names |= {f"{path}/{ours}": f"{prefix}.{theirs}" for ours, theirs in _BLOCK.items()}
        for ours, theirs in (("scale", "weight"), ("bias", "bias")):
            shape = getattr(layer.response, ours).get_value().shape
            entries[f"{path}/response/{ours}"] = FileEntry(f"{prefix}.grn.{theirs}", reshaped((1, 1, 1, *shape), shape))
        index += 1
    return WeightMap("huggingface", layer_entries(model, names) | entries, base=base)


LAYOUTS = {"huggingface": huggingface}

"""Maps Whisper to the files of transformers (`WhisperForConditionalGeneration`, `WhisperForAudioClassification`)."""

from typing import Any

from mpjax.models.pretrained.layouts.entry import FileEntry, WeightMap, attention_entries, layer_entries
from mpjax.models.whisper.network import Whisper, WhisperClassifier


MODEL = (Whisper, WhisperClassifier)

_PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "out_proj"}


def huggingface(model: Whisper | WhisperClassifier) -> WeightMap:
    """Builds the layout of `WhisperForConditionalGeneration`, or of `WhisperForAudioClassification` for a classifier.

    The encoder of a classifier is also read from a file of the former, whose decoder is then not read.
    """
    if isinstance(model, WhisperClassifier):
        names = {"projector": "projector", "head": "classifier"}
        names, entries = _stack(model, "encoder", "", names)
        renamed, ignored = (("model.encoder.", "encoder."),), ("model.decoder.*", "proj_out.weight")
        return WeightMap("huggingface", layer_entries(model, names) | entries, renamed=renamed, ignored=ignored)
    names, entries = {"tokens": "model.decoder.embed_tokens"}, {}
    for stack in ("encoder", "decoder"):
        names, more = _stack(model, stack, "model.", names)
        entries |= more
    tied = {"proj_out.weight": "decoder.embed_tokens.weight"}
    return WeightMap("huggingface", layer_entries(model, names) | entries, base="model.", tied=tied)


def _stack(model: Any, stack: str, base: str, names: dict[str, str]) -> tuple[dict[str, str], dict[str, FileEntry]]:
    """Adds the layers of the encoder or the decoder to `names`, and lists its other entries."""
    prefix = f"{base}{stack}"
    names = names | {f"{stack}/norm": f"{prefix}.layer_norm"}
    if stack == "encoder":
        names |= {f"encoder/{conv}": f"{prefix}.{conv}" for conv in ("conv1", "conv2")}
    entries = {f"{stack}/positions": FileEntry(f"{prefix}.embed_positions.weight")}
    for number, block in enumerate(getattr(model, stack).blocks):
        ours, theirs = f"{stack}/blocks/{number}", f"{prefix}.layers.{number}"
        attentions = {"attention": ("norm1", "self_attn")}
        if stack == "decoder":
            attentions["cross"] = ("cross_norm", "encoder_attn")
        for name, (norm, attention) in attentions.items():
            names[f"{ours}/{norm}"] = f"{theirs}.{attention}_layer_norm"
            projections = {part: f"{theirs}.{attention}.{layer}" for part, layer in _PROJECTIONS.items()}
            entries |= attention_entries(getattr(block, name), f"{ours}/{name}", **projections)
        names[f"{ours}/norm2"] = f"{theirs}.final_layer_norm"
        names |= {f"{ours}/mlp/up": f"{theirs}.fc1", f"{ours}/mlp/down": f"{theirs}.fc2"}
    return names, entries


LAYOUTS = {"huggingface": huggingface}

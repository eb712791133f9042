"""How transformers 5 renames the layers of networks for images when it loads their files."""

from collections.abc import Iterable


def loaded_name(name: str, pairs: Iterable[tuple[str, str]]) -> str:
    """The name in a loaded network, by (old, new) substrings of the name in its file, in order."""
    for old, new in pairs:
        name = name.replace(old, new)
    return name


def _projections(inputs: str, output: str) -> tuple[tuple[str, str], ...]:
    inner = ((f"{inputs}.{name}", f"attention.{name[0]}_proj") for name in ("query", "key", "value"))
    return (*inner, (output, "attention.o_proj"))


OF_DINO = _projections("attention.attention", "attention.output.dense")

_OF_MLP = ((".intermediate.dense", ".mlp.fc1"), (".output.dense", ".mlp.fc2"))
OF_VIT = ((".encoder.layer.", ".layers."), *OF_DINO, *_OF_MLP)
OF_SWIN = (*_projections("attention.self", "attention.output.dense"), *_OF_MLP)

"""Plain layers as PyTorch's files have them: their names and the arrangement of their kernels."""

from collections.abc import Mapping

from flax import nnx

from mpjax.models.pretrained.layouts.entry import CONV, LINEAR, SAME, Entry
from mpjax.models.pretrained.variables import variables_of


_NAMES = {
    "kernel": "weight",
    "scale": "weight",
    "embedding": "weight",
    "bias": "bias",
    "mean": "running_mean",
    "var": "running_var",
}
_KERNELS = {2: LINEAR, 4: CONV}


def layer_entries(model: nnx.Module, names: Mapping[str, str]) -> dict[str, Entry]:
    """The entries of linear layers, 2-D convolutions, embeddings and norms.

    Args:
      model: what holds the layers; may be abstract.
      names: module path of a layer to its name in the file: `{"stem/conv": "conv1"}`.

    Returns:
      Our path to entry, for all variables of these layers: `{"stem/conv/kernel": Entry("conv1.weight", CONV)}`.
    """
    entries = {}
    for path, variable in variables_of(model).items():
        module, _, leaf = path.rpartition("/")
        if module in names:
            transform = _KERNELS[len(variable.get_value().shape)] if leaf == "kernel" else SAME
            entries[path] = Entry(f"{names[module]}.{_NAMES[leaf]}", transform)
    return entries

"""The variables of a model that a file of weights holds."""

from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from flax import nnx


def variables_of(model: "nnx.Module") -> "dict[str, nnx.Variable]":
    """Parameters, statistics and other lasting arrays by path (attribute names and indices joined by `/`).

    Random streams, caches and intermediate values are left out. The variables are the model's own: what they are set
    to, the model has.
    """
    from flax import nnx

    passing = (nnx.RngState, nnx.Cache, nnx.Intermediate)
    found = {}
    for path, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Variable) and not isinstance(node, passing) and hasattr(node.get_value(), "dtype"):
            found["/".join(map(str, path))] = node
    return found

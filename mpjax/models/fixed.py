"""Arrays of a model that are not trained, and that no step changes."""

from flax import nnx


class Fixed(nnx.Variable):
    """An array that a file has and that is not trained: no parameter, so no optimizer and no gradient finds it.

    It is a statistic of the training state that keeps every bit, also on several devices, whose mean may round.
    """


def fixed_paths(model: nnx.Module) -> frozenset[str]:
    """The paths of the `Fixed` arrays of a model, which may be abstract."""
    return frozenset("/".join(map(str, path)) for path, node in nnx.iter_graph(model) if isinstance(node, Fixed))

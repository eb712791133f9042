"""Projections of attention: a matrix in a file, an axis of heads and one of features in our models."""

from mpjax.models.attention import Attention
from mpjax.models.pretrained.layouts.entry import LINEAR, Entry, reshaped


def attention_entries(attention: Attention, path: str, query: str, key: str, value: str, out: str) -> dict[str, Entry]:
    """The entries of an attention whose projections are four of PyTorch's linear layers.

    Args:
      attention: ours; may be abstract.
      path: where it is in the model.
      query: the name of the layer in the file; so are `key`, `value` and `out`.
    """
    width, heads, features = attention.query.kernel.get_value().shape
    matrix = width, heads * features
    entries = {
        f"{path}/out/kernel": Entry(f"{out}.weight", LINEAR.then(reshaped(matrix[::-1], (heads, features, width)))),
        f"{path}/out/bias": Entry(f"{out}.bias"),
    }
    for ours, theirs in (("query", query), ("key", key), ("value", value)):
        kernel = LINEAR.then(reshaped(matrix, (width, heads, features)))
        entries[f"{path}/{ours}/kernel"] = Entry(f"{theirs}.weight", kernel)
        entries[f"{path}/{ours}/bias"] = Entry(f"{theirs}.bias", reshaped(matrix[1:], (heads, features)))
    return entries

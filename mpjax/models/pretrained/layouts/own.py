"""mpjax's own layout: the names of any NNX model, joined by dots."""

from flax import nnx

from mpjax.models.pretrained.layouts.entry import Entry, Layout
from mpjax.models.pretrained.variables import variables_of


def layout(model: nnx.Module) -> Layout:
    """Every variable under its own path, `blocks.0.conv1.kernel`; a file may have `/` in place of the dots."""
    entries = {path: Entry(path.replace("/", ".")) for path in variables_of(model)}
    return Layout("mpjax", entries, renamed=(("/", "."),))

"""Names and arrangements of plain layers in PyTorch's files."""

from flax import nnx

from mpjax.models.pretrained.layouts import CONV, LINEAR, SAME, FileEntry, layer_entries


class Layers(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(4, 4, (3, 3), feature_group_count=2, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.embed = nnx.Embed(5, 4, rngs=rngs)
        self.linear = nnx.Linear(4, 2, rngs=rngs)
        self.other = nnx.Linear(4, 2, rngs=rngs)


def test_layers_are_named_and_turned_as_pytorchs():
    model = nnx.eval_shape(lambda: Layers(nnx.Rngs(0)))
    names = {"conv": "c", "norm": "bn", "embed": "e.w", "linear": "fc", "absent": "x"}
    assert layer_entries(model, names) == {
        "conv/kernel": FileEntry("c.weight", CONV),
        "conv/bias": FileEntry("c.bias", SAME),
        "norm/scale": FileEntry("bn.weight"),
        "norm/bias": FileEntry("bn.bias"),
        "norm/mean": FileEntry("bn.running_mean"),
        "norm/var": FileEntry("bn.running_var"),
        "embed/embedding": FileEntry("e.w.weight"),
        "linear/kernel": FileEntry("fc.weight", LINEAR),
        "linear/bias": FileEntry("fc.bias"),
    }

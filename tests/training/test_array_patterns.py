"""Patterns cover arrays by their path, by a module around them, or by its class; an idle pattern is an error."""

import pytest
from flax import nnx

from mpjax.errors import UsageError
from mpjax.models import in_series
from mpjax.training import ArrayPaths


class Net(nnx.Module):
    """A stem with batch norm, two blocks, a head."""

    def __init__(self, scan=False, *, rngs):
        self.stem = nnx.Sequential(nnx.Linear(4, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs))
        self.blocks = in_series(lambda rngs: nnx.Linear(4, 4, rngs=rngs), 2, rngs=rngs, scan=scan)
        self.head = nnx.Linear(4, 2, rngs=rngs)


def covered(pattern, model=None):
    paths = ArrayPaths.of(model or Net(rngs=nnx.Rngs(0)))
    return [path for path in (*paths.params, *paths.stats) if paths.covers(pattern, path)]


HEAD = ["head/bias", "head/kernel"]
NORM = ["stem/layers/1/bias", "stem/layers/1/scale", "stem/layers/1/mean", "stem/layers/1/var"]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("head", HEAD),
        ("head/*", HEAD),
        ("hea", []),
        ("head/kernel", ["head/kernel"]),
        ("blocks/1", ["blocks/1/bias", "blocks/1/kernel"]),
        ("type:BatchNorm", NORM),
        ("type:norm", NORM),
        ("stem/layers/1", NORM),
        ("*/mean", ["stem/layers/1/mean"]),
    ],
)
def test_a_pattern_covers(pattern, found):
    assert covered(pattern) == found


def test_blocks_of_a_stack_are_counted_one_by_one():
    model = nnx.eval_shape(lambda: Net(scan=True, rngs=nnx.Rngs(0)))
    assert covered("blocks/1", model) == ["blocks/1/bias", "blocks/1/kernel"]
    assert len(covered("type:Linear", model)) == 8


def decided(*patterns):
    paths = ArrayPaths.of(Net(rngs=nnx.Rngs(0)))
    return paths.decided(patterns, paths.params, "--flag")


def test_the_first_pattern_that_matches_decides():
    found = decided("head/bias", "head", "blocks/*")
    assert (found["head/bias"], found["head/kernel"], found["blocks/0/bias"]) == ("head/bias", "head", "blocks/*")
    assert "stem/layers/0/bias" not in found


def test_a_pattern_that_decides_nothing_is_an_error():
    with pytest.raises(UsageError, match="--flag 'haed' matches nothing; nearest: head"):
        decided("haed")
    with pytest.raises(UsageError, match="--flag 'head/bias' decides nothing: 'head' before it decides all"):
        decided("head", "head/bias")

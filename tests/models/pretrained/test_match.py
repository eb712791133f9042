"""Keys of a file against variables of a model."""

import re

import numpy as np
import pytest
from flax import nnx

from mpjax.errors import UsageError
from mpjax.models import BasicBlock, ImageNetStem, ResNet
from mpjax.models.pretrained import Tensor, foreign_shape, match_arrays, variables_of
from mpjax.models.pretrained.layouts import LINEAR, FileEntry, FusedPart, layouts_of, reshaped


def tensors(weights, rename=lambda key: key):
    """As a file would give them; matching reads no numbers."""
    return {
        rename(key): Tensor(None, rename(key), array.shape, str(array.dtype))  # pyright: ignore[reportArgumentType]
        for key, array in weights.items()
    }


def resnet():
    return nnx.eval_shape(
        lambda: ResNet((1, 1), BasicBlock, ImageNetStem, channels=3, width=4, num_classes=5, rngs=nnx.Rngs(0))
    )


@pytest.mark.parametrize("prefix", ["module.", "model.", "_orig_mod.", "module.model."])
def test_what_a_wrapper_put_before_all_keys_is_taken_off(small, weights, prefix):
    found = match_arrays(small, tensors(weights, lambda key: prefix + key)).tensors
    assert found["stem/kernel"].key == f"{prefix}stem.kernel"


class Headed(nnx.Module):
    def __init__(self, model):
        self.model = model
        self.head = nnx.eval_shape(lambda: nnx.Linear(4, 2, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize("prefix", ["model.", "module.model.", "module._orig_mod.model.", "model.model."])
def test_a_part_of_a_model_that_is_named_as_a_wrapper_is_read_by_its_name(small, weights, prefix):
    file = tensors(weights, lambda key: prefix + key)
    found = match_arrays(Headed(small), file, skip=("head/*",)).tensors
    assert {path: tensor.key for path, tensor in found.items()} == {
        f"model/{key.replace('.', '/')}": f"{prefix}{key}" for key in weights
    }
    faults = re.findall(r"(missing|unexpected): (\S+)", refused(Headed(small), file))
    assert faults == [("missing", "head.bias"), ("missing", "head.kernel")]


@pytest.mark.parametrize("prefix", ["", "model.", "module.", "module.model."])
def test_a_file_with_one_wrapper_fewer_or_more_than_the_model_is_read(small, weights, prefix):
    class Wrapped(nnx.Module):
        def __init__(self, model):
            self.model = model

    found = match_arrays(Wrapped(small), tensors(weights, lambda key: prefix + key)).tensors
    assert found["model/stem/kernel"].key == f"{prefix}stem.kernel"


def test_slashes_in_place_of_dots_are_our_own_layout_too(small, weights):
    assert len(match_arrays(small, tensors(weights, lambda key: key.replace(".", "/"))).tensors) == 7


@pytest.mark.parametrize(
    ("key", "name"), [("resnet.embedder.embedder.convolution.weight", "huggingface"), ("conv1.weight", "timm")]
)
def test_the_layout_is_recognised_by_the_keys(key, name):
    with pytest.raises(UsageError, match=f"read in the {name} layout"):
        match_arrays(resnet(), tensors({key: np.zeros((4, 3, 7, 7))}))


def test_a_layout_can_be_named(weights):
    with pytest.raises(UsageError, match="read in the timm layout"):
        match_arrays(resnet(), tensors(weights), layout="timm")


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ("hf", "no layout 'hf' for ResNet: wanted one of huggingface, timm, mpjax"),
        (
            None,
            r"matches no layout of ResNet: it has a.b\n  huggingface: expects keys such as resnet.encoder.*\n  timm: ",
        ),
    ],
)
def test_a_layout_that_is_not_known_is_refused(layout, says):
    with pytest.raises(UsageError, match=says):
        match_arrays(resnet(), tensors({"a.b": np.zeros(1)}), layout=layout)


def test_a_variable_that_a_library_does_not_have_is_missing():
    model = resnet()
    model.extra = nnx.data(nnx.eval_shape(lambda: nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0))))
    shapes = {name: variable.get_value().shape for name, variable in variables_of(model).items()}
    entries = layouts_of(model)["timm"](model).entries
    file = tensors({entry.key: np.zeros(foreign_shape(shapes[name], entry)) for name, entry in entries.items()})
    with pytest.raises(UsageError, match="missing: extra/kernel, for which the timm layout has no key"):
        match_arrays(model, file)
    assert len(match_arrays(model, file, skip=("extra/*",)).tensors) == len(shapes) - 1


@pytest.mark.parametrize("skip", [("haed/*",), ("head/*", "haed/*")])
def test_a_pattern_to_skip_that_matches_nothing_is_refused(small, weights, skip):
    with pytest.raises(
        UsageError, match=r"skip \(.* --model.pretrained_skip\) matches no variable .* 'haed/\*' \(nearest: head"
    ):
        match_arrays(small, tensors(weights), skip=skip)


def test_one_pattern_without_its_tuple_is_refused(small, weights):
    with pytest.raises(UsageError, match=r"skip is 'head/\*': wanted patterns in a tuple, \('head/\*',\)"):
        match_arrays(small, tensors(weights), skip="head/*")


def test_two_keys_for_one_variable_are_refused(small, weights):
    both = tensors(weights) | tensors({"stem/bias": weights["stem.bias"]})
    with pytest.raises(UsageError, match="keys that name the same variable in the mpjax layout: stem.bias, stem/bias"):
        match_arrays(small, both)


def test_of_many_faults_twenty_of_a_kind_are_shown(small, weights):
    strangers = {f"other.{number}": np.zeros(1) for number in range(30)}
    with pytest.raises(UsageError) as raised:
        match_arrays(small, tensors(weights | strangers))
    lines = str(raised.value).splitlines()
    assert sum(line.startswith("  unexpected: other.") for line in lines) == 20
    assert lines[-2] == "  unexpected: 10 more"


def test_an_integer_of_the_model_wants_the_same_integer(small, weights):
    small.count = nnx.BatchStat(np.zeros((), np.int32))
    assert "count" in match_arrays(small, tensors(weights | {"count": np.zeros((), np.int32)})).tensors
    with pytest.raises(UsageError, match=r"dtype: count is int64, wanted int32 \(count\)"):
        match_arrays(small, tensors(weights | {"count": np.zeros((), np.int64)}))


@pytest.mark.parametrize(
    ("shape", "entry", "wanted"),
    [
        ((3, 2), FileEntry("k", LINEAR), (2, 3)),
        ((8, 2, 4), FileEntry("k", LINEAR.then(reshaped((8, 8), (8, 2, 4))), FusedPart(1, 3, axis=0)), (24, 8)),
        ((), FileEntry("k"), ()),
    ],
)
def test_the_shape_in_the_file_follows_from_the_transform(shape, entry, wanted):
    assert foreign_shape(shape, entry) == wanted


def refused(model, file):
    with pytest.raises(UsageError) as raised:
        match_arrays(model, file)
    return str(raised.value)


def test_where_a_module_does_not_fit_the_advice_says_what_to_write_and_is_enough(small, weights):
    weights["head.kernal"] = weights.pop("head.kernel")
    weights["stem.bias"] = np.zeros(5, np.float32)
    assert refused(small, tensors(weights)).splitlines()[-1] == (
        "to skip them (variables keep their initial values, other keys of the file are not read), write "
        "--model.pretrained_skip 'head.*' 'head/*' 'stem/*', in Python skip=('head.*', 'head/*', 'stem/*',)"
    )
    assert len(match_arrays(small, tensors(weights), skip=("head.*", "head/*", "stem/*")).tensors) == 4


@pytest.mark.parametrize(
    "change",
    [
        lambda name, array: array.astype(np.int8) if name == "head.kernel" else array,
        lambda name, array: array if name == "stem.bias" else np.zeros((9, 9), np.float32),
    ],
    ids=["numbers of a wrong kind", "another model"],
)
def test_where_skipping_does_not_help_it_is_not_advised(small, weights, change):
    assert "skip" not in refused(small, tensors({name: change(name, array) for name, array in weights.items()}))


def test_more_modules_than_anyone_would_list_are_not_advised_to_be_skipped(small, weights):
    strangers = {f"other{number}.kernel": np.zeros(1, np.float32) for number in range(5)}
    assert "skip" not in refused(small, tensors(weights | strangers))
    del strangers["other4.kernel"]
    assert "'other0.*' 'other1.*' 'other2.*' 'other3.*'" in refused(small, tensors(weights | strangers))

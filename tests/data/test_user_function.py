import io

import numpy as np
import pytest
from PIL import Image as Picture

from mpjax.data import (
    Image,
    Label,
    Other,
    PreprocessedExamples,
    Text,
    conform,
    labelled_images,
    load_preprocess,
    shape_after,
)
from mpjax.errors import UsageError


class Stored(list):
    """Examples in a list."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def png(width, height, value=0):
    buffer = io.BytesIO()
    Picture.new("RGB", (width, height), (value,) * 3).save(buffer, "PNG")
    return buffer.getvalue()


def through(function, *examples, **columns):
    columns = columns or {"image": Image((None, None, 3)), "label": Label(9)}
    return PreprocessedExamples(Stored(examples), function, "own.py:f", columns)


def test_the_function_is_given_pixels_and_str():
    seen = []
    columns = {"image": Image((None, None, 3)), "text": Text(), "label": Label(3)}
    examples = through(
        lambda example: seen.append(example) or example,
        {"image": png(3, 2, 7), "text": "é".encode(), "label": 1},
        **columns,
    )
    assert len(examples) == 1
    assert (examples[0]["image"].shape, examples[0]["image"].max()) == ((2, 3, 3), 7)
    assert seen[0]["text"] == "é"
    assert examples.__getitems__([0])[0]["label"] == 1


def test_a_text_that_is_not_utf8_is_named():
    with pytest.raises(UsageError, match="^example 1: text: not UTF-8: .*; convert the data to UTF-8$"):
        through(lambda example: example, {"text": b"a"}, {"text": b"\xff"}, text=Text()).__getitems__([0, 1])


def test_what_is_no_dict_is_refused():
    with pytest.raises(UsageError, match=r"--data.preprocess own.py:f returned NoneType; wanted a dict.*image, label"):
        through(lambda example: None, {"image": png(1, 1), "label": 0})[0]


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_images_in_another_floating_dtype_are_cast_once(dtype):
    examples = through(lambda e: {**e, "image": e["image"].astype(dtype) / 4}, {"image": png(2, 2, 3), "label": 1})
    settled = conform(examples[0], labelled_images(9, (2, 2, 3)))["image"]
    assert (settled.dtype, settled[0, 0, 0]) == (np.float32, 0.75)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda e: {**e, "label": np.float32(1)}, r"^label \(.* after own.py:f\): dtype float32"),
        (lambda e: {**e, "image": e["image"].astype(int)}, r"^image: dtype int64; .*image.astype\(np.uint8\)"),
        (lambda e: {**e, "image": [[1], [1, 2]]}, "^image: .*wanted lists of one length"),
        (lambda e: {"image": e["image"]}, "^label: missing; the example has image; .*--data.preprocess must return"),
        (lambda e: {**e, "label": "cat"}, r"^label \(.*\): got str 'cat'; wanted an array of numbers"),
    ],
)
def test_what_it_returns_is_checked(change, says):
    fields = {"image": Image((2, 2, 3)), "label": Label(9, origin="column 'kind' after own.py:f")}
    with pytest.raises(UsageError, match=says):
        conform(through(change, {"image": png(2, 2), "label": 1})[0], fields)


SIZES = [(3, 2), (4, 4), (5, 9)]
VARYING = [{"image": png(*size), "label": 0} for size in SIZES]


@pytest.mark.parametrize(
    ("function", "examples", "shape"),
    [
        (lambda e: e, VARYING, (None, None, 3)),
        (lambda e: e, VARYING[:1] * 3, (None, None, 3)),
        (lambda e: {**e, "image": e["image"][:2, :2, :1]}, VARYING, (2, 2, 1)),
        (lambda e: {**e, "image": np.zeros((8, 8, 3))}, VARYING, (8, 8, 3)),
        (lambda e: {**e, "image": np.zeros((8, 8))}, VARYING, None),
        (lambda e: {"label": 0}, VARYING, None),
    ],
)
def test_the_shape_of_what_comes_out(function, examples, shape):
    assert shape_after(through(function, *examples), "image") == shape


def test_a_fixed_size_stays_fixed():
    examples = through(lambda e: e, *VARYING[:1], image=Image((2, 3, 3)), label=Label(9))
    assert shape_after(examples, "image") == (2, 3, 3)


def test_images_made_of_what_is_none():
    function = lambda e: {**e, "image": np.reshape(e["image"], (2, 2, 1))}  # noqa: E731
    examples = through(function, {"image": [1, 2, 3, 4], "label": 0}, image=Other("flat"), label=Label(9))
    assert shape_after(examples, "image") == (2, 2, 1)


@pytest.fixture
def own(tmp_path):
    """A file of functions, one per line."""

    def write(text):
        (tmp_path / "pp.py").write_text(text)
        return f"{tmp_path / 'pp.py'}"

    return write


def failing(spec, count=30):
    stored = Stored({"label": index} for index in range(count))
    return PreprocessedExamples(stored, load_preprocess(spec), spec, {"label": Label(count)})


def test_what_the_function_raises_is_told_with_the_example_and_the_line(own):
    spec = own("def f(example):\n    if example['label'] == 17:\n        example['boom']\n    return example\n") + ":f"
    examples = failing(spec)
    assert examples[16] == {"label": 16}
    for read in (lambda: examples[17], lambda: examples.__getitems__([3, 17])):
        with pytest.raises(UsageError) as raised:
            read()
        said = f"--data.preprocess {spec} failed on example 17: KeyError: 'boom' (pp.py, line 3)"
        assert str(raised.value) == said
        assert isinstance(raised.value.__cause__, KeyError)


def test_the_line_is_the_users_and_not_the_librarys(own):
    spec = own("import numpy as np\n\ndef f(example):\n    return np.broadcast_to([1, 2], (3,))\n") + ":f"
    with pytest.raises(UsageError, match=r"failed on example 0: ValueError: .*\(pp.py, line 4\)$"):
        failing(spec)[0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def f(image, label): return image", r"f\(image, label\) cannot be called .*missing a required argument"),
        ("def f(): return {}", r"f\(\) cannot be called with one example: too many positional arguments"),
        ("def f(*, example): return {}", r"f\(\*, example\) cannot be called"),
    ],
)
def test_a_function_of_other_than_one_argument_is_refused_before_any_example(own, text, says):
    with pytest.raises(UsageError, match=f"(?s){says}.*write\n  def f\\(example\\): ... return {{...}}"):
        load_preprocess(own(text) + ":f")


@pytest.mark.parametrize("arguments", ["example", "example, scale=2", "*examples"])
def test_arguments_with_defaults_are_no_hindrance(own, arguments):
    assert callable(load_preprocess(own(f"def f({arguments}): return {{}}") + ":f"))

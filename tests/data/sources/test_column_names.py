import warnings

import pytest

from mpjax.data.sources import require_names
from mpjax.errors import DataWarning, UsageError


datasets = pytest.importorskip("datasets", reason="pip install -e '.[hf]'")

pytestmark = pytest.mark.extra


def split(text, separator=","):
    names, *lines = [line.split(separator) for line in text.splitlines()]
    return datasets.Dataset.from_dict({name: [line[at] for line in lines] for at, name in enumerate(names)})


@pytest.mark.parametrize(
    ("text", "reason", "names"),
    [
        ("a fine film,1\na dull one,0", "'1' is a number", "text label"),
        ("a fine film,good\na dull one,bad\nbright,good\nwarm,good", "'good' is also a value", "text label"),
        ("neg,a dull film\npos,a fine one\nneg,dull\nneg,weak", "'neg' is also a value in its column", "label text"),
        ("neg,7,a dull film\npos,8,a fine one\nneg,9,dull", "'7' is a number", "label column2 text"),
    ],
)
def test_a_first_line_that_is_an_example_is_refused_with_the_flag_to_write(text, reason, names):
    with pytest.raises(UsageError, match=f"looks like an example: {reason}.*--data.header {names}$") as refused:
        require_names(split(text), ())
    assert refused.value.repair == {"data.header": tuple(names.split())}


@pytest.mark.parametrize("text", ["0,1,2\n5,6,7", "text,label\ntext,1\nother,0"])
def test_names_that_look_a_little_like_values_are_names(text):
    require_names(split(text), ())


def test_there_is_a_name_for_each_column():
    with pytest.raises(UsageError, match="--data.header label text has 2 names, .* 3 columns, in .* 1,a,b;"):
        require_names(split("0,1,2\n1,a,b"), ("label", "text"))
    require_names(split("0,1\n1,a"), ("label", "text"))


@pytest.mark.parametrize("header", [("label", "text"), ("LABEL", "Text"), (" label", "text ")])
def test_a_header_that_the_file_has_already_is_refused(header):
    with pytest.raises(UsageError, match="the first line of the file has these names already; leave it out"):
        require_names(split("0,1\nLabel,text\n1,a"), header)


LABELLED = "".join(f"{at % 2},film {at}\n" for at in range(12))
NAMED = "".join(f"{'neg' if at % 2 else 'pos'},film {at}\n" for at in range(12))


@pytest.mark.parametrize(
    ("lines", "header", "says"),
    [
        ("label,text\n" + LABELLED, "target body", "'label' is not a number, and all others of its column are"),
        (f"label,text\n{LABELLED}label,text\n{LABELLED}", "target body", "'label' is not a number"),
        (",label,text\n" + "".join(f"{at},{at % 2},film\n" for at in range(9)), "id y x", "'label' is not a number"),
        ("label,text\n" + NAMED, "text label", "is label,text, which are names of columns already; leave it out"),
    ],
)
def test_a_first_line_of_other_names_than_the_header_is_refused(lines, header, says):
    count = lines.partition("\n")[0].count(",") + 1
    file = split(",".join(map(str, range(count))) + "\n" + lines)
    with pytest.raises(UsageError, match=says) as refused:
        require_names(file, header.split())
    assert refused.value.repair == {"data.header": ()}


def test_a_first_line_that_may_be_names_is_told():
    says = "'label' is nowhere else in its column, .*; if the line gives names, leave --data.header out"
    with pytest.warns(DataWarning, match=says):
        require_names(split("0,1\nlabel,text\n" + NAMED), ("target", "body"))


@pytest.mark.parametrize(
    "lines",
    [
        "0,film\n" + LABELLED,
        "?,a film\n" + LABELLED,  # a number that is missing
        "neutral,a film\nneg,a\npos,b\nneg,c",  # a class that comes once in a small file
        "neg,a film\n" + NAMED,
        "neutral,film 3\n" + NAMED,  # the text comes again: the line is an example
        "neutral,7 days\n" + "".join(f"class {at},film {at}\n" for at in range(12)),
        "a film,1984\n1984,film\nthe film,7",
    ],
)
def test_a_first_line_that_is_an_example_is_taken_without_a_word(lines):
    with warnings.catch_warnings(action="error"):
        require_names(split("0,1\n" + lines), ("label", "text"))


def test_a_bool_of_the_first_line_is_one_of_its_column():
    texts = [f"film {at}" for at in range(12)]
    with warnings.catch_warnings(action="error"):
        require_names(datasets.Dataset.from_dict({"0": [True, False] * 6, "1": texts}), ("label", "text"))

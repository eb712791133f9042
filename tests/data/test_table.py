import re

import pytest

from mpjax.config import Data
from mpjax.data import Image, Label, Mask, Other, Table, Text, choose_columns
from mpjax.errors import UsageError


RGB, GRAY = Image((None, None, 3)), Image((None, None, 1))
CIFAR100 = {"img": RGB, "fine_label": Label(100), "coarse_label": Label(20)}
PETS = {"image": RGB, "label": Label(37), "segmentation_mask": GRAY, "species": Label(2), "file_name": Text()}
SST2 = {"idx": Other("int32"), "label": Label(2), "sentence": Text()}
SCALAR, VECTOR = Other("float64", rank=0), Other("float64 [3]", rank=1)
OWN = (
    "to learn something else from these columns write --task own --training.objective FILE.py:NAME, a function of your "
    "model and a batch of them"
)
LABELLED, SEGMENTED, READ = ("image", "label"), ("image", "mask"), ("text", "label")


def choose(columns, fields, named=None, **besides):
    table = Table("set", columns, open=lambda names: pytest.fail("only the types are needed"), **besides)
    return choose_columns(table, fields, Data(columns=named or {}))


@pytest.mark.parametrize(
    ("columns", "fields", "chosen"),
    [
        ({"image": RGB, "label": Label(2)}, LABELLED, {"image": "image", "label": "label"}),
        ({"photo": RGB, "kind": Label(2), "id": Other("int64")}, LABELLED, {"image": "photo", "label": "kind"}),
        ({"pixels": Other("float64"), "label": Other("int64")}, LABELLED, {"image": "pixels", "label": "label"}),
        (PETS, LABELLED, {"image": "image", "label": "label"}),
        (PETS, SEGMENTED, {"image": "image", "mask": "segmentation_mask"}),
        ({"image": RGB, "mask": Other("uint8")}, SEGMENTED, {"image": "image", "mask": "mask"}),
        ({"image": Mask((28, 28), 0), "label": Label(9)}, LABELLED, {"image": "image", "label": "label"}),
        ({"scan": RGB, "organs": Mask((4, 4), 5)}, SEGMENTED, {"image": "scan", "mask": "organs"}),
        (SST2, READ, {"text": "sentence", "label": "label"}),
        ({"body": Text()}, ("text",), {"text": "body"}),
    ],
)
def test_names_and_types_say_it(columns, fields, chosen):
    assert choose(columns, fields) == chosen


def test_what_the_set_prefers_goes_before_names():
    columns = {"label": Label(2), "subject": Label(5), "image": RGB}
    assert choose(columns, LABELLED, preferred={"label": "subject"})["label"] == "subject"


def test_what_the_user_names_goes_before_all():
    assert choose(CIFAR100, LABELLED, {"label": "coarse_label"}) == {"image": "img", "label": "coarse_label"}
    assert choose(SST2, ("text",), {"text": "idx"}) == {"text": "idx"}


def test_a_column_of_text_is_a_label_only_where_the_set_can_number_classes():
    columns = {"text": Text(), "label": Text()}
    assert choose(columns, READ, labelled=lambda name: None) == {"text": "text", "label": "label"}
    with pytest.raises(UsageError, match="no column that could be the label"):
        choose(columns, READ)


def test_several_would_do():
    says = (
        r"several columns that could be the label, .*fine_label: Label\(num_classes=100\).*write --data.columns label"
    )
    with pytest.raises(UsageError, match=says):
        choose(CIFAR100, LABELLED)


def test_none_would_do():
    with pytest.raises(UsageError, match=r"no column that could be the image.*its columns are idx: int32, label"):
        choose(SST2, LABELLED)


def test_a_colour_image_is_no_mask():
    with pytest.raises(UsageError, match="no column that could be the mask"):
        choose({"image": RGB, "label": Label(2)}, SEGMENTED)


def test_a_column_that_is_not_there():
    with pytest.raises(UsageError, match=r"--data.columns label fine_lable: 'set' has img.*did you mean fine_label\?"):
        choose(CIFAR100, LABELLED, {"label": "fine_lable"})


def test_a_field_that_the_task_has_not():
    with pytest.raises(UsageError, match="--data.columns mask: this task has the fields image, label"):
        choose(CIFAR100, LABELLED, {"mask": "img"})


@pytest.mark.parametrize(
    ("columns", "fields", "hint"),
    [
        (
            {"text": Text(), "label": Label(2)},
            LABELLED,
            "for texts write --task text_classification or --task language_modeling",
        ),
        ({"image": RGB, "mask": Mask((4, 4), 0)}, LABELLED, "for masks write --task segmentation"),
        ({"image": RGB, "label": Label(2)}, SEGMENTED, "for labelled images write --task classification"),
        ({"text": Text()}, READ, "for texts write --task language_modeling"),
        ({"image": RGB}, LABELLED, OWN),
        ({"x": SCALAR, "label": Label(2)}, LABELLED, OWN),
        ({"x": VECTOR, "label": Label(2)}, LABELLED, "write --data.columns image x"),
        ({"image": RGB, "x": Other("int64", rank=0)}, LABELLED, "write --data.columns label x"),
    ],
)
def test_a_column_or_another_task_is_advised_only_where_it_would_do(columns, fields, hint):
    with pytest.raises(UsageError) as raised:
        choose(columns, fields)
    assert str(raised.value).partition("its columns are ")[2].partition("; ")[2] == hint


@pytest.mark.parametrize("fields", [LABELLED, SEGMENTED, READ])
@pytest.mark.parametrize("column", [RGB, GRAY, Label(2), Mask((4, 4), 0), Text(), SCALAR, VECTOR, Other("lists")])
def test_every_advised_column_is_taken(column, fields):
    """What the message names is chosen once it is written, whatever else the set has."""
    fitting = {"image": RGB, "label": Label(2), "mask": Mask((8, 8), 3), "text": Text()}
    for field in fields:
        columns = {name: fitting[name] for name in fields if name != field} | {"x": column, "y": column}
        try:
            choose(columns, fields)
        except UsageError as error:
            advised = re.findall(r"write --data.columns \w+ COLUMN, with (.*) for COLUMN", str(error))
            alone = re.findall(r"write --data.columns \w+ (\w+)(?:;|$)", str(error))
            repaired = error.repair.get("data.columns", {}).get(field)
            for name in [*alone, *(one for names in advised for one in names.split(" or "))]:
                assert choose(columns, fields, {field: name})[field] == name
                assert repaired == (name if alone else None)
                assert not (field == "image" and column is SCALAR)


def test_a_scalar_is_no_mask():
    with pytest.raises(UsageError, match="no column that could be the mask"):
        choose({"image": RGB, "label": Other("int64", rank=0)}, SEGMENTED)
    assert choose({"image": RGB, "label": Other("int64", rank=2)}, SEGMENTED)["mask"] == "label"


def test_a_whole_number_is_proposed_for_the_label_before_a_floating_one():
    columns = {"body": Text(), "stars": Other("int64", rank=0), "score": SCALAR}
    with pytest.raises(UsageError, match="write --data.columns label stars; for texts"):
        choose(columns, READ)

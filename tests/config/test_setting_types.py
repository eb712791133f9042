"""Types of settings with a parser of their own, as flags and back: names, durations, lists and mappings."""

import dataclasses
from typing import Annotated

import pytest

from mpjax.config import (
    Duration,
    FloatByName,
    Floats,
    Integers,
    TextByName,
    Texts,
    WayByName,
    epochs,
    flags_of,
    list_of,
    load_config,
    parse,
    to_toml,
)
from mpjax.errors import UsageError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shop:
    """Sells."""

    names: Texts = ()
    counts: Integers = (3,)
    prices: Floats = (0.5, 1.0)
    labels: TextByName = dataclasses.field(default_factory=dict)
    rates: FloatByName = dataclasses.field(default_factory=dict)
    ways: WayByName = dataclasses.field(default_factory=dict)
    days: Annotated[object, list_of(("mon", "tue"))] = ()


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        ("", "counts", (3,)),
        ("--names", "names", ()),
        ("--names a b", "names", ("a", "b")),
        ("--counts -1 20", "counts", (-1, 20)),
        ("--prices 1 2e-3", "prices", (1.0, 0.002)),
        ("--labels a 1 b/* x", "labels", {"a": "1", "b/*": "x"}),
        ("--rates a 2", "rates", {"a": 2.0}),
        ("--ways a rows b whole", "ways", {"a": "rows", "b": "whole"}),
        ("--days tue mon", "days", ("tue", "mon")),
    ],
)
def test_words_become_a_list_or_a_mapping(argv, field, value):
    found = getattr(parse(Shop, argv.split(), prog="shop"), field)
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("--counts 1 x", "--counts: wanted whole numbers, got 'x'"),
        ("--counts 1.5", "--counts: wanted whole numbers, got '1.5'"),
        ("--prices dear", "--prices: wanted numbers, got 'dear'"),
        ("--labels a b c", "--labels: wanted pairs of a name and a value, got 3 words: a b c"),
        ("--rates a b", "--rates: wanted numbers, got 'b'"),
        ("--rates a 1 b 2 a 3", "--rates: a is given twice: wanted one value for each name"),
        ("--ways a row", "--ways: wanted one of columns, rows, whole, got 'row'"),
        ("--days wed", "invalid choice 'wed' for argument '--days'"),
    ],
)
def test_a_wrong_word_is_named_with_what_is_wanted(argv, says):
    with pytest.raises(UsageError) as refused:
        parse(Shop, argv.split(), prog="shop")
    assert str(refused.value).startswith(says)


def test_help_shows_how_many_words_and_the_defaults(capsys):
    with pytest.raises(SystemExit):
        parse(Shop, ["--help"], prog="shop")
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "--counts [INT [INT ...]] (default: 3)" in out
    assert "--prices [FLOAT [FLOAT ...]] (default: 0.5 1.0)" in out
    assert "--ways [STR {columns,rows,whole} [STR {columns,rows,whole} ...]]" in out


def test_words_that_are_known_are_completed():
    assert dict(flags_of(Shop))["--days"] == ("mon", "tue")
    assert dict(flags_of(Shop))["--names"] == ()


def test_each_is_parsed_from_a_flag_and_written_as_it_is_read():
    flags = "--steps=3 epochs", "--model.name=vit_s16", "--optimizer.name=lion", "--optimizer.schedule=linear"
    config = load_config(flags)
    assert config.steps == epochs(3) == Duration(3, "epochs")
    assert (config.model.name, config.optimizer.name, config.optimizer.schedule) == ("vit_s16", "lion", "linear")
    assert 'steps = "3 epochs"' in to_toml(config)


@pytest.mark.parametrize("flag", ["--steps=3 weeks", "--model.name=resnet17", "--optimizer.schedule=cosinus"])
def test_a_wrong_word_is_an_error_that_names_the_flag(flag):
    with pytest.raises(UsageError, match=flag.partition("=")[0]):
        load_config([flag])

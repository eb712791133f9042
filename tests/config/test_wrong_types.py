"""Settings of Python code have the types that the command line gives them."""

import dataclasses

import pytest

from mpjax.config import Config, Data, Duration, Loop, Optimizer, Report, Training, check, load_config, wrong_types
from mpjax.errors import UsageError


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"data": Data(flip="no")}, "--data.flip is 'no' (str): wanted True or False"),
        ({"data": Data(batch_size="32")}, "--data.batch_size is '32' (str): wanted INT|auto"),
        ({"data": Data(batch_size=32.5)}, "--data.batch_size is 32.5 (float): wanted INT|auto"),
        ({"data": Data(batch_size=True)}, "--data.batch_size is True (bool): wanted INT|auto"),
        ({"data": Data(mix=("a", 0.3))}, "--data.mix is ('a', 0.3) (tuple): wanted a dict, [STR FLOAT"),
        ({"data": Data(mix={"a": "0.3"})}, "--data.mix is {'a': '0.3'} (dict): wanted a dict, [STR FLOAT"),
        ({"seed": "1"}, "--seed is '1' (str): wanted a whole number"),
        ({"seed": True}, "--seed is True (bool): wanted a whole number"),
        ({"seeds": (1, 2.0)}, "--seeds is (1, 2.0) (tuple): wanted a tuple, [INT [INT ...]]"),
        ({"training": Training(freeze="head")}, "--training.freeze is 'head' (str): wanted a tuple, [STR [STR ...]]"),
        ({"report": Report(plot_format="pdf")}, "--report.plot_format is 'pdf' (str): wanted a tuple, [{png,pdf,svg}"),
        ({"data": 3}, "--data is 3 (int): wanted a Data"),
        ({"loop": None}, "--loop is None (NoneType): wanted a Loop"),
        ({"task": "cls"}, "--task is 'cls' (str): wanted one of classification, segmentation"),
    ],
)
def test_another_type_is_named_with_what_is_wanted(settings, says):
    with pytest.raises(UsageError) as refused:
        check(Config(**settings))
    assert str(refused.value).startswith(says)


def test_what_converts_without_loss_is_taken():
    check(Config(steps=5, seeds=[1, 2], optimizer=Optimizer(learning_rate=1), loop=Loop(log_every="2 epochs")))


def test_all_faults_are_named_at_once():
    assert len([*wrong_types(Config(seed="1", output_dir=3, data=Data(flip="no", workers="2")))]) == 4


def test_every_default_and_every_parsed_setting_has_its_type():
    parsed = load_config(["--data.mix", "a", "1", "--optimizer.rates", "x", "2", "--data.std", "1", "--steps", "3"])
    assert [*wrong_types(Config()), *wrong_types(parsed)] == []
    assert [*wrong_types(dataclasses.replace(parsed, steps=Duration(1, "epochs")))] == []

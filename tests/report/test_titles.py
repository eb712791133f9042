"""The titles of figures."""

import pytest

from mpjax.config import load_config
from mpjax.config.user_code import PythonObject
from mpjax.report.wording import short_name, subject_of, title_of


def test_a_run_is_named_by_model_data_policy_and_rules():
    config = load_config(["--model.name", "mlp", "--precision.policy", "bfloat16"])
    assert subject_of(config) == "mlp on digits"
    assert title_of(config) == "mlp on digits, bfloat16"
    ruled = load_config(["--model.name", "mlp", "--precision.rules", "hidden/0", "float32", "logits", "float32"])
    assert title_of(ruled) == "mlp on digits, mixed_float16 with 2 rules"


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("/home/me/nets/mine.py:Net", "Net"),
        ("my.package:Net", "Net"),
        ("folder:/data/flowers/", "flowers"),
        ("hf:uoft-cs/cifar100", "cifar100"),
        ("hf:csv:/data/reviews.csv", "reviews.csv"),
        ("synthetic:8x8x1:10", "synthetic:8x8x1:10"),
        ("resnet18", "resnet18"),
    ],
)
def test_a_name_is_without_the_folders_that_it_is_in(spec, name):
    assert short_name(spec) == name


def test_what_was_given_in_python_has_its_own_name():
    class Net:
        pass

    assert short_name(PythonObject(Net)) == "Net"

"""Arguments of functions from settings: literals, checked against the signature."""

import pytest

from mpjax.config.function_arguments import arguments_of, parameters_of, read_arguments, require_call
from mpjax.errors import UsageError


def function(learning_rate, b2=0.9, steps=3, nesterov=False, betas=(0.9, 0.99), mode="fast", dtype=None, *, eps=1e-8):
    """A function with a default of every type."""


def read(**texts):
    return read_arguments("--arguments", texts, function, "function")


def test_values_are_python_literals_and_other_words_are_text():
    texts = {"b2": "1e-3", "steps": "-4", "nesterov": "True", "betas": "(0.8, 0.9)", "mode": "slow", "dtype": "None"}
    assert read(**texts) == {
        "b2": 0.001,
        "steps": -4,
        "nesterov": True,
        "betas": (0.8, 0.9),
        "mode": "slow",
        "dtype": None,
    }
    assert read(dtype="bfloat16", b2="1", eps=" 1e-3") == {"dtype": "bfloat16", "b2": 1, "eps": 1e-3}


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("b2", "x", "wanted a number, as its default 0.9"),
        ("b2", "True", "wanted a number"),
        ("b2", "inf", "wanted a number"),
        ("nesterov", "1", "wanted True or False"),
        ("betas", "0.9", "wanted a tuple in parentheses"),
        ("mode", "3", "wanted a word"),
    ],
)
def test_a_value_of_another_type_is_an_error(name, text, wanted):
    with pytest.raises(UsageError, match=f"--arguments {name} is '{text}': {wanted}"):
        read(**{name: text})


def test_an_unknown_name_is_an_error_with_the_nearest_and_all():
    with pytest.raises(UsageError, match=r"--arguments b3: function has no such argument; did you mean b2\? it takes"):
        read(b3="1")


def test_a_function_of_any_arguments_takes_any():
    assert read_arguments("--arguments", {"x": "1"}, lambda **more: more, "function") == {"x": 1}


def test_only_parameters_with_names_can_be_given():
    def with_others(one, /, two, *rest, three, **more):
        del one, two, rest, three, more

    assert list(parameters_of(with_others, "function")) == ["two", "three"]
    with pytest.raises(UsageError, match="function: wanted a function of Python"):
        parameters_of(dict, "function")


def test_a_call_is_checked_before_it_is_made():
    def logged(step: int) -> None:
        del step

    require_call(logged, ("step",), "logged")
    require_call(dict, ("anything",), "dict")  # Python does not know its signature
    with pytest.raises(UsageError, match=r"^logged takes \(step: int\): it is called with \(step, metrics\)$"):
        require_call(logged, ("step", "metrics"), "logged")


def test_the_arguments_of_a_method_are_without_self():
    class Mine:
        def write(self, step, metrics): ...

    assert arguments_of(Mine.write) == ("step", "metrics")

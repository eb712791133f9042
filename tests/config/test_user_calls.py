"""Calls of the user's code: arguments from settings, checked against the signature; errors in one line."""

import functools
import json

import pytest

from mpjax.config import arguments_of, load_function, named_failure, parameters_of, read_arguments, require_call
from mpjax.errors import UsageError, failure


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
    assert read(dtype="{[1]: 2}") == {"dtype": "{[1]: 2}"}  # a TypeError of Python


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


FILE = """import json

def raises(text):
    return json.loads(text)

class Called:
    def __call__(self, text):
        raise ValueError
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    return lambda name: load_function(f"{tmp_path}/mine.py:{name}", flag="--flag")


def said(function, *arguments):
    with pytest.raises(UsageError) as caught, named_failure("--flag x failed", function):
        function(*arguments)
    assert caught.value.__cause__ is not None
    return str(caught.value)


def test_the_line_is_that_of_the_users_file_and_not_of_a_library(own):
    assert said(own("raises"), "{") == (
        "--flag x failed: JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1) "
        "(mine.py, line 4)"
    )


def test_objects_and_partial_functions_have_files_too(own):
    assert said(own("Called")(), "") == "--flag x failed: ValueError (mine.py, line 8)"
    assert said(functools.partial(own("raises"), ""), *()).endswith("(mine.py, line 4)")


def test_without_a_file_of_the_user_it_is_the_line_that_raised():
    assert said(json.JSONDecoder().raw_decode, "").startswith("--flag x failed: JSONDecodeError")


def test_a_usage_error_stays():
    with pytest.raises(UsageError, match="^mine$"), named_failure("--flag", print):
        raise UsageError("mine")


def test_an_exit_is_told_as_its_call():
    def leaves():
        raise SystemExit(3)

    with pytest.raises(SystemExit) as caught:
        leaves()
    assert failure(caught.value).startswith("it called sys.exit(3) (test_user_calls.py, line ")

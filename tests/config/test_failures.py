"""Errors of the user's code are one line that says what failed and where."""

import functools
import json

import pytest

from mpjax.config.failures import named_failure
from mpjax.config.user_code import load_function
from mpjax.errors import UsageError, failure


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
    assert failure(caught.value).startswith("it called sys.exit(3) (test_failures.py, line ")

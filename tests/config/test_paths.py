"""What a user writes as a path."""

import pathlib

import pytest

from mpjax.config import expanded
from mpjax.errors import UsageError


def test_a_tilde_is_the_home_folder():
    assert expanded("~/a") == pathlib.Path.home() / "a"
    assert expanded("a~/b") == pathlib.Path("a~/b")


def test_a_user_that_does_not_exist_is_named():
    with pytest.raises(UsageError, match="^~nobody_here/x: ~nobody_here has no home folder; write the folder itself"):
        expanded("~nobody_here/x")


def test_text_that_no_file_has_as_its_name_is_refused():
    with pytest.raises(UsageError, match=r"is not a path: wanted text without surrogates"):
        expanded("\ud800")


def test_a_nul_is_in_no_path():
    with pytest.raises(UsageError, match=r"'a\\x00b' is not a path: wanted text without NUL"):
        expanded("a\0b")

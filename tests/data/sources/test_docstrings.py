import textwrap

import pytest

from mpjax.config import Data
from mpjax.data import Label, open_source
from mpjax.data.sources import PACKAGES, Docstring, of_largest, prepare_docstrings, read_docstrings
from mpjax.errors import UsageError


def write(folder, name, code):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(textwrap.dedent(code))


def test_modules_classes_and_functions_by_name(tmp_path):
    code = '''
    """A module."""
    raise SystemExit("it must not be imported")
    def f():
        """A function.

        Indented.
        """
    class C:
        """A class."""
        async def m(self):
            """  """
            def inner():
                r"""Deep\\d."""
    def bare(): pass
    '''
    write(tmp_path, "pkg/__init__.py", '"""The package."""')
    write(tmp_path, "pkg/mod.py", code)
    assert [tuple(found) for found in read_docstrings(tmp_path)] == [
        ("pkg:", "The package."),
        ("pkg.mod:", "A module."),
        ("pkg.mod:f", "A function.\n\nIndented."),
        ("pkg.mod:C", "A class."),
        ("pkg.mod:C.m.inner", "Deep\\d."),
    ]


def test_tests_installed_packages_and_broken_files_are_left_out(tmp_path):
    for name in ("test/a.py", "pkg/tests/a.py", "site-packages/a.py"):
        write(tmp_path, name, '"""No."""')
    write(tmp_path, "broken.py", '"""No."""\nprint "x"')
    write(tmp_path, "good.py", '"""Yes, with an invalid \\d escape."""')
    assert [found.name for found in read_docstrings(tmp_path)] == ["good:"]


def test_the_split_follows_from_the_name():
    names = [f"pkg.mod:f{index}" for index in range(1000)]
    tests = [name for name in names if Docstring(name, "").is_test]
    assert 70 < len(tests) < 130
    assert tests[:3] == [name for name in names if Docstring(name, "other").is_test][:3]


def test_the_largest_packages_and_each_text_once():
    many = [Docstring(f"p{package:02}.m:f{i}", f"{package} {i}") for package in range(12) for i in range(12 - package)]
    texts, names = of_largest([*many, Docstring("p00:again", "0 0"), Docstring("p11:more", "0 1")])
    assert names == [f"p{package:02}" for package in range(PACKAGES)]
    assert len(texts) == sum(12 - package for package in range(PACKAGES))


def test_a_python_without_source_files():
    with pytest.raises(UsageError, match="docstrings: 1 documented packages in .*; wanted at least 10"):
        of_largest([Docstring("a:b", "c")])


@pytest.mark.slow
def test_the_set_of_this_python(tmp_path):
    source = open_source(Data(name="docstrings", length=64), tmp_path, "text_classification")
    assert source.fields["label"] == Label(10)
    assert (len(source.train) > 2000, len(source.test) > 150) == (True, True)
    modelled = open_source(Data(name="docstrings", length=64), tmp_path, "language_modeling")
    assert len(modelled.train) * 64 > 300_000
    assert prepare_docstrings(tmp_path).startswith("docstrings/python3.")

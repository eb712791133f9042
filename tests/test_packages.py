"""What .ci/packages.py finds wrong with a wheel and an sdist."""

import pathlib
import runpy


faults = runpy.run_path(str(pathlib.Path(__file__).parents[1] / ".ci/packages.py"))["faults"]

TRACKED = ["README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml", "mpjax/a.py", "tests/test_a.py", "docs/a.md"]
TRACKED += ["configs/a.toml", "examples/a.py"]
SDIST = dict.fromkeys([*TRACKED, "PKG-INFO"], b"")
ABOUT = ["mpjax-1.dist-info/RECORD", "mpjax-1.dist-info/licenses/LICENSE"]
WHEEL = dict.fromkeys(["mpjax/a.py", "mpjax/configs/a.toml", *ABOUT], b"")


def without(files, name):
    return {other: content for other, content in files.items() if other != name}


def found(sdist=SDIST, built=WHEEL, direct=WHEEL):
    return list(faults(sdist, built, direct, TRACKED))


def test_complete_packages_have_no_fault():
    assert found() == []
    assert found(sdist=without(SDIST, "docs/a.md")) == []


def test_what_is_missing_is_named():
    assert found(sdist=without(SDIST, "tests/test_a.py")) == ["the sdist lacks tests/test_a.py"]
    assert found(sdist=without(SDIST, "examples/a.py")) == ["the sdist lacks examples/a.py"]
    assert found(sdist=without(SDIST, "LICENSE")) == ["the sdist lacks LICENSE"]
    assert found(sdist=without(SDIST, "configs/a.toml")) == ["the sdist lacks configs/a.toml"]
    less = without(WHEEL, "mpjax/configs/a.toml")
    assert found(built=less, direct=less) == ["the wheel lacks mpjax/configs/a.toml"]
    less = without(WHEEL, "mpjax/a.py")
    assert found(built=less, direct=less) == ["the wheel lacks mpjax/a.py"]
    less = without(WHEEL, "mpjax-1.dist-info/licenses/LICENSE")
    assert found(built=less, direct=less) == ["the wheel lacks the LICENSE"]


def test_what_is_not_tracked_or_no_part_of_the_package_is_named():
    assert found(sdist={**SDIST, "notes.txt": b""}) == ["the sdist has notes.txt, which git does not track"]
    more = {**WHEEL, "mpjax/__pycache__/a.pyc": b""}
    assert found(built=more, direct=more) == ["the wheel has mpjax/__pycache__/a.pyc, which is no file of the package"]


def test_both_wheels_have_the_same_bytes():
    says = "mpjax/a.py is not the same in the wheel of the sdist and in that of the checkout"
    assert found(direct={**WHEEL, "mpjax/a.py": b"x = 1"}) == [says]

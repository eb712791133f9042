"""Which files a plot can be written to."""

import pytest

from mpjax.config import faults_of_image


def test_an_image_in_a_folder_that_is_there_is_taken_and_so_is_none(tmp_path):
    for path in ("", "a.png", str(tmp_path / "a.SVG")):
        assert [*faults_of_image("--plot", path)] == []


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("a.xyz", "--plot a.xyz ends in '.xyz': wanted .png, .pdf, .svg, .jpg, .jpeg, .webp"),
        ("a", "--plot a ends in '': wanted .png"),
        ("nowhere/a.png", "--plot nowhere/a.png: there is no folder nowhere"),
    ],
)
def test_other_files_are_refused(path, says):
    (fault,) = faults_of_image("--plot", path)
    assert fault.startswith(says)

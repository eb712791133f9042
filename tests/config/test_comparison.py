"""The comparison's command line."""

import pytest

from mpjax.config import Compare, load_settings
from mpjax.errors import UsageError


def loaded(argv):
    (settings,) = load_settings((Compare,), argv, prog="x")
    return settings


def test_folders_come_without_a_flag_and_the_rest_with_one():
    settings = loaded(["a", "b", "--seeds", "0", "1", "--band", "std", "--metrics", "test/loss", "--json", "--plot="])
    assert settings == Compare(runs=("a", "b"), seeds=(0, 1), band="std", metrics=("test/loss",), json=True, plot="")


def test_the_defaults_compare_loss_accuracy_scale_and_gradient():
    settings = loaded(["a", "b"])
    assert settings.metrics == ("train/loss", "test/accuracy", "train/loss_scale", "train/grad_norm")
    assert (settings.tolerance, settings.smoothing, settings.plot) == (0.05, 5, "comparison.png")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("", "no run to compare: wanted the folders of two or more"),
        ("a b --smoothing 0", "--smoothing is 0: wanted 1 or more reports"),
        ("a b --tolerance -1", "--tolerance is -1.0: wanted 0 or more"),
        ("a b --tolerance nan", "--tolerance is nan: wanted 0 or more"),
        ("a b --plot a.xyz", r"--plot a.xyz ends in '.xyz': wanted .png, .pdf, .svg, .jpg, .jpeg, .webp"),
        ("a b --metrics", "--metrics is empty: wanted one or more, such as train/loss"),
    ],
)
def test_settings_that_make_no_comparison_are_refused(arguments, says):
    with pytest.raises(UsageError, match=f"^{says}$"):
        loaded(arguments.split())


@pytest.mark.parametrize("flag", ["--band=mean", "--seeds=one", "--sedes=1"])
def test_a_wrong_flag_is_named(flag):
    with pytest.raises(UsageError, match=flag.split("=")[0]):
        loaded(["a", "b", flag])

"""The settings files that come with mpjax are found by name, from any folder."""

import pytest

from mpjax.config import FOLDER, from_toml, load_config, load_function, names, settings_file
from mpjax.errors import UsageError


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_every_shipped_file_is_found_by_its_name():
    assert len(names()) == 25
    for name in names():
        for text in (name, f"{name}.toml", f"configs/{name}.toml"):
            assert settings_file(text) == FOLDER / f"{name}.toml"
    assert load_config(["--config", "digits_vit"]) == from_toml(FOLDER / "digits_vit.toml")


def test_a_function_that_a_shipped_file_names_is_found_too():
    preprocess = load_config(["--config", "oxford_pets_unet"]).data.preprocess
    assert load_function(preprocess, flag="--data.preprocess").__name__ == "trimap"


def test_a_file_of_the_users_goes_before_a_shipped_one_and_a_folder_does_not(tmp_path):
    (tmp_path / "digits").mkdir()
    assert settings_file("digits") == FOLDER / "digits.toml"
    (tmp_path / "digits.toml").write_text("seed = 7")
    assert load_config(["--config", "digits.toml"]).seed == 7


@pytest.mark.parametrize("text", ["../configs/digits", "configs/../../configs/digits.toml", "/digits"])
def test_names_lead_nowhere_else(text):
    with pytest.raises(UsageError, match="no config file"):
        load_config(["--config", text])


@pytest.mark.parametrize(("text", "near"), [("digit", "; did you mean digits?"), ("configs/zz.toml", ";")])
def test_an_unknown_name_is_answered_with_all(text, near):
    with pytest.raises(UsageError) as refused:
        load_config(["--config", text])
    assert str(refused.value) == f"no config file {text}{near} mpjax has {', '.join(names())}"

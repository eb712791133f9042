"""The hub: what is asked of it, and what is said where it does not answer."""

import sys
import types

import pytest

from mpjax.errors import UsageError
from mpjax.models.pretrained import download


@pytest.fixture
def hub(monkeypatch):
    """A hub that answers as the test says."""

    def answer(snapshot_download):
        monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot_download))

    return answer


def test_only_safetensors_and_settings_are_fetched(hub, tmp_path):
    asked = []
    hub(lambda name, allow_patterns: asked.append((name, allow_patterns)) or str(tmp_path))
    assert download("microsoft/resnet-50") == tmp_path
    wanted = ["model.safetensors", "model-*.safetensors", "model.safetensors.index.json", "config.json"]
    assert asked == [("microsoft/resnet-50", wanted)]


def test_without_network_the_message_says_how_to_fetch_by_hand(hub):
    def unreachable(name, allow_patterns):
        raise OSError("Name or service not known\nand more")

    hub(unreachable)
    with pytest.raises(UsageError) as raised:
        download("microsoft/resnet-50")
    assert str(raised.value).splitlines() == [
        "there is no file or folder 'microsoft/resnet-50', so it was taken for an id of the Hugging Face hub, but "
        "the download failed: Name or service not known",
        "or fetch it by hand on a machine with network, and give the folder in place of the id:",
        '  hf download microsoft/resnet-50 --include "*.safetensors" "*.json" --local-dir resnet-50',
    ]


def test_without_the_package_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UsageError, match="for which huggingface_hub is needed: pip install huggingface_hub\nor fetch"):
        download("gpt2")

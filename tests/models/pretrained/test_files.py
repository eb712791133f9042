"""What a path stands for: a file, a folder, a hub's id; never a pickle."""

import json
import pathlib
import shlex
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpjax.errors import UsageError
from mpjax.models.pretrained import files, find_files


def test_a_file_stands_for_itself(saved):
    path = saved({"a": np.zeros(1)}, "mine.safetensors")
    assert find_files(path) == find_files(str(path)) == [path]


@pytest.mark.parametrize("names", [("model.safetensors", "other.safetensors"), ("mine.safetensors",)])
def test_a_folder_stands_for_its_model_or_its_only_file(saved, tmp_path, names):
    for name in names:
        saved({"a": np.zeros(1)}, name)
    assert find_files(tmp_path) == [tmp_path / names[0]]


def index(folder, names):
    weights = {f"key{number}": name for number, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))


def test_a_sharded_model_stands_for_its_parts(saved, tmp_path):
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name in names:
        saved({name: np.zeros(1)}, name)
    index(tmp_path, [names[1], names[0], names[1]])
    assert find_files(tmp_path) == [tmp_path / name for name in names]


def test_a_part_that_is_not_there_is_named(saved, tmp_path):
    saved({"a": np.zeros(1)}, "1.safetensors")
    index(tmp_path, ["1.safetensors", "2.safetensors"])
    with pytest.raises(UsageError, match="index.json names files that are missing from .*: 2.safetensors$"):
        find_files(tmp_path)


def test_a_damaged_index_is_refused(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(UsageError, match="index.json is damaged"):
        find_files(tmp_path)


@pytest.mark.parametrize("name", ["a.bin", "a.pt", "a.pth", "a.pkl", "a.ckpt"])
def test_a_pickle_is_refused_with_the_line_that_converts_it(tmp_path, name):
    (tmp_path / name).write_bytes(b"not even opened")
    for path in (tmp_path / name, tmp_path):
        with pytest.raises(UsageError, match=r"is a pickle, which can run any code .*convert it once") as raised:
            find_files(path)
        code = shlex.split(str(raised.value).splitlines()[-1])[2]
        assert f'torch.load("{tmp_path / name}", map_location="cpu", weights_only=True)' in code


@pytest.mark.slow
@pytest.mark.extra
def test_the_line_that_converts_a_pickle_does_so(tmp_path):
    torch = pytest.importorskip("torch")
    tied = torch.ones(2, 3).T
    torch.save({"state_dict": {"a": tied, "b": tied}}, tmp_path / "a.bin")
    with pytest.raises(UsageError) as raised:
        find_files(tmp_path / "a.bin")
    code = shlex.split(str(raised.value).splitlines()[-1])[2]
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
    assert find_files(tmp_path / "a.safetensors") == [tmp_path / "a.safetensors"]


@pytest.mark.parametrize(
    "name", ["$(touch pwned).bin", "a b.bin", "it's.pt", '`touch pwned`".pth', "a;touch pwned.ckpt"]
)
def test_a_shell_that_is_given_the_line_runs_nothing_of_a_file_s_name(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(UsageError) as raised:
        find_files(tmp_path / name)
    line = str(raised.value).splitlines()[-1].replace("python -c", "printf %s", 1)
    printed = subprocess.run(["sh", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert json.dumps(str(tmp_path / name)) in printed
    assert not (tmp_path / "pwned").exists()


def test_a_run_of_mpjax_is_refused_with_the_line_that_exports_it(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.toml").touch()
    with pytest.raises(UsageError, match=r"is a run of mpjax.*\n  python scripts/export.py --run .* --output "):
        find_files(tmp_path)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        ([], "no safetensors in .*: wanted model.safetensors, or model.safetensors.index.json with its parts"),
        (
            ["a.safetensors", "b.safetensors"],
            "several safetensors files in .*: name one of a.safetensors, b.safetensors",
        ),
    ],
)
def test_a_folder_that_does_not_say_what_it_is_is_refused(tmp_path, make, says):
    for name in make:
        (tmp_path / name).touch()
    with pytest.raises(UsageError, match=says):
        find_files(tmp_path)


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "a.h5").touch()
    with pytest.raises(UsageError, match="is not a .safetensors file"):
        find_files(tmp_path / "a.h5")


@pytest.mark.parametrize("path", ["runs/model", "./model", "~/no/such", "/no/such", "x.safetensors", "a/b/c", "a b/c"])
def test_a_path_that_is_not_there_is_no_id(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    monkeypatch.setattr(files, "download", lambda name: pytest.fail("asked the hub"))
    with pytest.raises(UsageError, match=r"no file or folder .* \(looked for /"):
        find_files(path)


@pytest.mark.parametrize("name", ["microsoft/resnet-50", "gpt2", "timm/resnet18.a1_in1k"])
def test_what_can_only_be_an_id_is_asked_of_the_hub(saved, tmp_path, monkeypatch, name):
    path = saved({"a": np.zeros(1)})
    monkeypatch.setattr(files, "download", {name: pathlib.Path(tmp_path)}.__getitem__)
    assert find_files(name) == [path]


@pytest.mark.parametrize("named", [7, None, ["a"], "../a.safetensors", "/a.safetensors", ""])
def test_an_index_that_names_no_files_is_damaged(tmp_path, named):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": named}}))
    with pytest.raises(UsageError, match="model.safetensors.index.json is damaged .*; fetch it again"):
        find_files(tmp_path)


JSON = st.recursive(
    st.none() | st.integers() | st.text() | st.sampled_from(["a.safetensors", "..", "a\0", "a.bin", "x" * 999]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.just("weight_map"), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=200)
@given(JSON | st.builds(lambda value: {"weight_map": {"w": value}}, JSON))
def test_whatever_an_index_says_its_files_are_found_or_it_is_named(tmp_path_factory, content):
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "a.safetensors").touch()
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    try:
        found = find_files(folder)
    except UsageError as error:
        found = str(error)
    assert found == [folder / "a.safetensors"] or "model.safetensors.index.json" in found


def test_an_index_of_no_files_is_damaged(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(UsageError, match=r"index.json is damaged \(.*it names no files.*\); fetch it again"):
        find_files(tmp_path)

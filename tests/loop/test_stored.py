"""Stored checkpoints: which is chosen, what is read back and where to, what counts as complete, what is damaged."""

import contextlib
import errno
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mpjax.errors import CheckpointWarning, UsageError
from mpjax.loop import Checkpoints, complete_checkpoints, digest_of, read_checkpoint, set_aside
from mpjax.training import make_mesh


STATE = {
    "params": {"blocks/0/kernel": jnp.arange(6.0).reshape(2, 3), "half": jnp.array([1.5, -2], jnp.bfloat16)},
    "scale": jnp.float32(32768),
    "finite": jnp.bool_(True),
    "count": jnp.int32(7),
    "empty": (),
}


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Seven checkpoints in two sittings, of which some were scored."""
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    for sitting in (((1, 0.2), (2, 0.9), (3, None), (4, 0.5)), ((5, 0.9), (6, 0.1), (7, None))):
        checkpoints = Checkpoints(folder, keep=2)
        for position, score in sitting:
            state = jax.tree.map(lambda x, p=position: (x + jnp.asarray(p, x.dtype)).astype(x.dtype), STATE)
            checkpoints.save(position, state, {"policy": "p", "loss_scale": "dynamic"}, score=score)
        checkpoints.close()
    return folder


def test_the_newest_and_the_best_are_kept_also_over_a_resumption(kept):
    assert complete_checkpoints(kept) == [5, 6, 7]


@pytest.mark.parametrize(("which", "position"), [("latest", 7), ("best", 5), ("6", 6)])
def test_a_checkpoint_is_chosen(kept, which, position):
    assert read_checkpoint(kept, which)[0] == position


def test_arrays_come_back_by_path_as_stored(kept):
    _, arrays, about = read_checkpoint(kept, "6")
    assert sorted(arrays) == ["count", "finite", "params/blocks/0/kernel", "params/half", "scale"]
    np.testing.assert_array_equal(arrays["params/blocks/0/kernel"], [[6, 7, 8], [9, 10, 11]])
    assert arrays["params/half"].dtype == jnp.bfloat16
    assert (int(arrays["count"]), float(arrays["scale"]), bool(arrays["finite"])) == (13, 32774, True)
    assert all(isinstance(array, np.ndarray) for array in arrays.values())
    assert {name: about[name] for name in ("policy", "loss_scale", "format", "score")} == {
        "policy": "p",
        "loss_scale": "dynamic",
        "format": 2,
        "score": 0.1,
    }


def placed(name, shape):
    """Two parts along the first axis of parameters, the rest whole."""
    mesh = make_mesh(fsdp=2, data=1)
    return NamedSharding(mesh, PartitionSpec("fsdp") if name.startswith("params/") else PartitionSpec())


def test_arrays_come_to_their_places_without_a_copy_on_the_host(kept):
    _, arrays, _ = read_checkpoint(kept, "6", places=placed)
    assert all(isinstance(array, jax.Array) for array in arrays.values())
    assert arrays["params/blocks/0/kernel"].sharding.spec == PartitionSpec("fsdp")
    assert [part.data.tolist() for part in arrays["params/blocks/0/kernel"].addressable_shards] == [
        [[6, 7, 8]],
        [[9, 10, 11]],
    ]
    assert (arrays["params/half"].dtype, arrays["scale"].sharding.spec) == (jnp.bfloat16, PartitionSpec())


def test_an_array_that_jax_would_narrow_stays_on_the_host_in_its_dtype(tmp_path):
    with jax.enable_x64(True):
        checkpoints = Checkpoints(tmp_path)
        checkpoints.save(1, {"params/w": jnp.array([1 + 2**-40, 2.0]), "step": jnp.int32(1)}, {}, score=None)
        checkpoints.close()
    _, arrays, _ = read_checkpoint(tmp_path, places=placed)
    assert isinstance(arrays["params/w"], np.ndarray)
    assert arrays["params/w"].tolist() == [1 + 2**-40, 2.0]
    assert isinstance(arrays["step"], jax.Array)


@pytest.mark.parametrize("which", ["1", "8", "newest", "-7", "7.0"])
def test_an_absent_checkpoint_is_refused_with_those_there(kept, which):
    with pytest.raises(UsageError, match=f"no checkpoint '{which}': wanted latest, best or one of 5, 6, 7"):
        read_checkpoint(kept, which)


def test_a_best_one_among_the_unscored_is_the_newest(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=3)
    for position in (1, 2):
        checkpoints.save(position, STATE, {}, score=None)
    checkpoints.close()
    assert read_checkpoint(tmp_path, "best")[0] == 2


def test_the_search_for_the_best_begins_anew(tmp_path):
    """Checkpoint 1 has the highest score, but of another meaning; then none of the new ones has a score."""
    since = {"history": [{"step": 0}, {"step": 1, "best_anew": ["data.mean [0.9], before [0.0]"]}]}
    for first, sitting, about in (
        (0, ((1, 0.9),), {"history": [{"step": 0}]}),
        (1, ((2, None), (3, 0.2), (4, 0.1), (5, None)), since),
    ):
        checkpoints = Checkpoints(tmp_path, keep=2, since=first)
        for position, score in sitting:
            checkpoints.save(position, STATE, about, score=score)
            assert checkpoints.best() == {1: 1, 2: 2, 3: 3, 4: 3, 5: 3}[position]
        checkpoints.close()
    assert complete_checkpoints(tmp_path) == [3, 4, 5]
    assert read_checkpoint(tmp_path, "best")[0] == 3


def test_the_best_is_the_latest_of_equal_ones_and_nan_is_never_best(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    for position, score in ((1, 0.5), (2, 0.5), (3, float("nan"))):
        checkpoints.save(position, STATE, {}, score=score)
    assert checkpoints.best() == 2
    checkpoints.close()
    assert complete_checkpoints(tmp_path) == [2, 3]


@pytest.mark.parametrize("leftover", [None, "4.orbax-checkpoint-tmp", "4.orbax-checkpoint-tmp-1732000000"])
def test_a_folder_without_a_complete_checkpoint_is_refused(tmp_path, leftover):
    folder = tmp_path / "checkpoints"
    if leftover:
        (folder / leftover / "state").mkdir(parents=True)
    assert complete_checkpoints(folder) == []
    with pytest.raises(UsageError, match="no complete checkpoint in .*checkpoints"):
        read_checkpoint(folder)


def test_a_later_format_is_refused(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, STATE, {}, score=None)
    checkpoints.close()
    about = tmp_path / "1" / "about" / "data.json"
    about.write_text(json.dumps({**json.loads(about.read_text()), "format": 3}))
    with pytest.raises(UsageError, match="has format 3; this mpjax reads up to 2"):
        read_checkpoint(tmp_path)


def test_a_damaged_checkpoint_is_refused_by_name(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(7, {"params/w": np.arange(4096.0)}, {}, score=None)
    checkpoints.close()
    largest = max((tmp_path / "7" / "state").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    largest.write_bytes(largest.read_bytes()[:100])
    with pytest.raises(UsageError, match=r"checkpoint .*7 is damaged \(.*\); remove it to use another"):
        read_checkpoint(tmp_path)


def saved(folder, *positions, score=None):
    """Checkpoints of two arrays."""
    checkpoints = Checkpoints(folder, keep=3)
    for position in positions:
        arrays = {"params/w": jnp.arange(50.0) + position, "params/b": jnp.ones(3, jnp.bfloat16) * position}
        checkpoints.save(position, arrays, {"policy": "p"}, score=score)
    checkpoints.close()
    return folder


@pytest.mark.parametrize(
    "error", [MemoryError("2 GB"), ValueError("RESOURCE_EXHAUSTED: Out of memory"), OSError(errno.EMFILE, "many files")]
)
def test_a_checkpoint_that_does_not_fit_into_memory_is_not_damaged(tmp_path, monkeypatch, error):
    def load(*_, **__):
        raise error

    saved(tmp_path, 1, 2)
    monkeypatch.setattr("orbax.checkpoint.v1.load", load)
    with pytest.raises(UsageError, match=r"2 cannot be read: .* ran out \(.*(2 GB|Out of memory|many files)\)"):
        read_checkpoint(tmp_path)


def flipped(file, byte, bit):
    content = bytearray(file.read_bytes())
    content[byte] ^= 1 << bit
    file.write_bytes(content)


# Orbax leaves coroutines behind when it stops at a damaged file.
ORBAX = pytest.mark.filterwarnings("ignore:coroutine", "ignore::pytest.PytestUnraisableExceptionWarning")


@ORBAX
def test_a_flipped_bit_of_the_newest_falls_back_to_the_one_before_with_a_warning_that_names_both(tmp_path):
    saved(tmp_path, 1, 2)
    for file in (tmp_path / "2" / "state").rglob("d/*"):
        flipped(file, 150, 3)
    with pytest.warns(CheckpointWarning, match=r"checkpoint .*/2 is damaged \(.*\); .*; using .*/1 instead$"):
        position, arrays, _ = read_checkpoint(tmp_path)
    assert (position, arrays["params/w"][0]) == (1, 1.0)
    with pytest.raises(UsageError, match="checkpoint .*/2 is damaged"):
        read_checkpoint(tmp_path, "2")


def test_an_edited_description_is_refused(tmp_path):
    saved(tmp_path, 1)
    about = tmp_path / "1" / "about" / "data.json"
    about.write_text(json.dumps({**json.loads(about.read_text()), "policy": "q"}))
    with pytest.raises(UsageError, match="its description has changed since it was saved"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        *("config", "seed", "checksums"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("policy", "loss_scale", "seconds", "compile_seconds")
        ),
    ],
)
def test_a_description_of_wrong_types_is_refused(tmp_path, name):
    """Also one whose digest fits."""
    about = {"policy": "p", "loss_scale": "none", "config": "", "seed": 0, "seconds": 1.5, "compile_seconds": 2}
    with contextlib.closing(Checkpoints(tmp_path)) as checkpoints:
        checkpoints.save(1, STATE, about, score=None)
    file = tmp_path / "1" / "about" / "data.json"
    stored = json.loads(file.read_text())
    for value in (None, [], {}, 3, "text"):
        if type(value) is type(stored[name]) or (name.endswith("seconds") and value == 3):
            continue
        wrong = {**stored, name: value}
        file.write_text(json.dumps({**wrong, "digest": digest_of(wrong)}))
        with pytest.raises(UsageError, match=f"1 is damaged .its description has {name} "):
            read_checkpoint(tmp_path)


def test_a_folder_that_is_no_checkpoint_is_passed_over_and_can_be_set_aside(tmp_path):
    saved(tmp_path, 1)
    (tmp_path / "99999").mkdir()
    with pytest.warns(CheckpointWarning, match="99999 is damaged .* using .*/1 instead"):
        assert read_checkpoint(tmp_path)[0] == 1
    set_aside(tmp_path, after=1)
    assert complete_checkpoints(tmp_path) == [1]
    assert (tmp_path / "99999.damaged").is_dir()


@pytest.mark.parametrize(
    "content", [b"{", None, *(pytest.param(text, marks=pytest.mark.slow) for text in (b"", b"[1]", b'{"score": null}'))]
)
def test_a_damaged_score_of_an_old_checkpoint_blocks_nothing(tmp_path, content):
    saved(tmp_path, 1, 2, score=0.75)
    file = tmp_path / "1" / "metrics" / "metrics"
    file.unlink() if content is None else file.write_bytes(content)
    assert read_checkpoint(tmp_path)[0] == 2
    assert read_checkpoint(tmp_path, "best")[0] == 2
    saved(tmp_path, 3, score=0.5)
    assert json.loads(file.read_text()) == {"score": 0.75}  # as its description says
    assert read_checkpoint(tmp_path, "best")[0] in (1, 2)


def test_a_checkpoint_without_checksums_is_read_as_it_was(tmp_path):
    saved(tmp_path, 1)
    about = tmp_path / "1" / "about" / "data.json"
    about.write_text(json.dumps({"policy": "p", "format": 1}))
    assert read_checkpoint(tmp_path)[2] == {"policy": "p", "format": 1}


def test_checkpoints_of_orbax_before_its_v1_api_are_read_and_continued(tmp_path):
    """Written by mpjax 0.1 of November 2026 with Orbax's CheckpointManager: 3 with score 0.9, 4 with 0.5."""
    folder = shutil.copytree(pathlib.Path(__file__).parent / "written_before" / "orbax_0.12_v0", tmp_path / "run")
    position, arrays, about = read_checkpoint(folder)
    assert (position, about["policy"], about["score"]) == (4, "mixed_float16", 0.5)
    assert arrays["params/blocks/0/kernel"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (arrays["params/half"].dtype, arrays["params/half"].tolist()) == (jnp.bfloat16, [1.5, -2])
    assert (float(arrays["scale"]), int(arrays["count"]), bool(arrays["finite"])) == (32768, 7, True)
    saved(folder, 5, 6, 7, score=0.7)
    assert (complete_checkpoints(folder), read_checkpoint(folder, "best")[0]) == ([3, 5, 6, 7], 3)


@pytest.mark.slow
@ORBAX
def test_of_100_flipped_bits_and_every_file_cut_short_none_alters_what_is_read(tmp_path):
    saved(tmp_path / "whole", 1)
    _, wanted, _ = read_checkpoint(tmp_path / "whole")
    files = sorted(path for path in (tmp_path / "whole" / "1").rglob("*") if path.is_file())
    sizes = np.array([path.stat().st_size for path in files])
    random = np.random.default_rng(0)
    damages = [(files[i], int(random.integers(sizes[i])), int(random.integers(8)))
               for i in random.choice(len(files), 100, p=sizes / sizes.sum())]  # fmt: skip
    damages += [(file, size, None) for file in files for size in {0, file.stat().st_size // 2, file.stat().st_size - 1}]
    refused = 0
    for file, place, bit in damages:
        content = file.read_bytes()
        if bit is None:
            file.write_bytes(content[:place])
        else:
            flipped(file, place, bit)
        try:
            _, found, about = read_checkpoint(tmp_path / "whole")
            assert about["policy"] == "p"
            assert found.keys() == wanted.keys()
            assert all(found[name].tobytes() == wanted[name].tobytes() for name in wanted), (file, place, bit)
        except UsageError:
            refused += 1
        file.write_bytes(content)
    assert refused > 40  # the other bits and files are not read

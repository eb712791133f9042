"""Pictures of a segmentation, read back from the run's event file."""

import io
import types
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tensorboardX.proto.event_pb2 import Event

from mpjax.commands import coloured, open_task, pictures, predict_run, run, side_by_side
from mpjax.config import Prediction, from_toml, load_config
from mpjax.data.images import decode


UNET = """
--task segmentation --data.name digits_canvas --model.name unet --model.width 2 --model.depth 1 --steps 2
--data.crop_padding 0 --data.test_split test[:40] --data.eval_batch_size 40 --data.batch_size 8 --loop.eval_every 1
--precision.policy float32 --report.no_plot
"""


def train(folder, flags):
    run(load_config([*flags.split(), "--output_dir", str(folder)]))
    return drawn(folder)


def drawn(folder):
    """Pictures by step and name."""
    found = {}
    for path in (folder / "tensorboard").glob("events*"):
        data = path.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            event, data = Event.FromString(data[12 : 12 + size]), data[16 + size :]
            for value in event.summary.value:
                if value.HasField("image"):
                    png = Image.open(io.BytesIO(value.image.encoded_image_string))
                    assert (value.image.width, value.image.height, value.image.colorspace) == (*png.size, 3)
                    found[event.step, value.tag] = np.asarray(png)
    return found


@pytest.fixture(scope="module")
def segmented(tmp_path_factory):
    """A run of a small U-Net, its pictures, and how often what it predicts was traced."""
    folder = tmp_path_factory.mktemp("runs") / "a"
    traced = []
    whole = pictures.outputs_for

    def counted(*args, **kwargs):
        outputs_of = whole(*args, **kwargs)
        return lambda *given: (traced.append(1), outputs_of(*given))[1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pictures, "outputs_for", counted)
        found = train(folder, f"{UNET} --report.images 2")
    return folder, found, len(traced)


@pytest.mark.slow
def test_each_evaluation_shows_the_same_examples_with_their_masks_and_one_program_predicts(segmented):
    folder, found, traced = segmented
    assert sorted(found) == [(1, "masks/0"), (1, "masks/20"), (2, "masks/0"), (2, "masks/20")]
    assert traced == 1
    _, source, _ = open_task(from_toml(folder / "config.toml"))
    for (_, name), picture in found.items():
        example = source.test[int(name.removeprefix("masks/"))]
        image, mask = (decode(example[field], 1).reshape(32, 32) for field in ("image", "mask"))
        assert picture.shape == (32, 3 * 32 + 4, 3)
        assert set(np.unique(mask).tolist()) > {0}
        np.testing.assert_array_equal(picture[:, :32], np.stack([image] * 3, axis=-1))
        np.testing.assert_array_equal(picture[:, 34:66], coloured(mask))
    assert (found[1, "masks/0"][:, 68:] != found[2, "masks/0"][:, 68:]).any()


@pytest.mark.slow
def test_the_predicted_mask_is_that_of_predict(segmented, tmp_path):
    folder, found, _ = segmented
    settings = {"run": str(folder), "split": "test[:40]", "checkpoint": "latest", "output": str(tmp_path)}
    predict_run(Prediction(**settings))
    for number in (0, 20):
        mask = np.asarray(Image.open(tmp_path / f"test[:40][{number}].png"))
        np.testing.assert_array_equal(found[2, f"masks/{number}"][:, 68:], coloured(mask))


@pytest.mark.slow
def test_the_number_is_a_setting_and_need_not_divide_among_devices(tmp_path):
    found = train(tmp_path / "a", f"{UNET} --steps 1 --data.test_split test[:3] --report.images 50")
    assert [name for _, name in found] == ["masks/0", "masks/1", "masks/2"]


@pytest.mark.parametrize(
    "flags",
    [
        "--report.images 0",
        "--task classification --model.name mlp",
        "--training.objective own.py:loss",  # of whose model it is not known what it predicts
    ],
)
def test_runs_without_masks_draw_nothing(flags):
    config = load_config([*UNET.split(), *flags.split()])
    run: Any = types.SimpleNamespace(config=config, source=types.SimpleNamespace(test=range(40)))
    assert pictures.pictures_of(run) is None


@pytest.mark.slow
def test_a_classification_writes_no_pictures_and_a_run_without_a_writer_for_them_draws_none(tmp_path, monkeypatch):
    assert train(tmp_path / "digits", "--model.name mlp --model.width 8 --steps 1 --report.no_plot") == {}
    monkeypatch.setattr(pictures, "make_predict_step", None)
    run(load_config([*UNET.split(), "--steps", "1", "--report.no_tensorboard", "--output_dir", str(tmp_path / "none")]))


def test_image_mask_and_prediction_stand_side_by_side_and_ignored_pixels_are_white():
    image = np.array([[[10], [20]], [[30], [40]]], np.uint8)
    picture = side_by_side(image, np.array([[0, 1], [2, 255]]), np.array([[0, 1], [3, 3]], np.uint8))
    grey, black, red, green, olive, white = (128,) * 3, (0, 0, 0), (128, 0, 0), (0, 128, 0), (128, 128, 0), (255,) * 3
    assert (picture.shape, picture.dtype) == ((2, 10, 3), np.uint8)
    assert [[tuple(pixel) for pixel in row] for row in picture.tolist()] == [
        [(10,) * 3, (20,) * 3, grey, grey, black, red, grey, grey, black, red],
        [(30,) * 3, (40,) * 3, grey, grey, green, white, grey, grey, olive, olive],
    ]


def test_no_two_classes_have_one_colour_and_none_that_of_ignored_pixels():
    colours = coloured(np.arange(256)[None])[0]
    assert len({tuple(colour) for colour in colours.tolist()}) == 256
    assert colours[255].tolist() == [255, 255, 255]


def test_images_of_any_kind_are_visible():
    mask = np.zeros((1, 3), np.int32)

    def pixels(image):
        return side_by_side(image, mask, mask)[0, :3].tolist()

    assert pixels(np.array([[[-1.0], [0.0], [3.0]]], np.float32)) == [[0] * 3, [64] * 3, [255] * 3]
    assert pixels(np.full((1, 3, 1), 0.5, np.float32)) == [[0] * 3] * 3
    rgb = np.arange(9, dtype=np.uint8).reshape(1, 3, 3)
    assert pixels(rgb) == rgb[0].tolist()
    assert pixels(np.concatenate([rgb, rgb], axis=-1)) == rgb[0].tolist()
    assert pixels(rgb[..., :2]) == [[0] * 3, [3] * 3, [6] * 3]

"""The command line of a training on Ray."""

import pytest

from mpjax.config import Config, OnRay, load_settings
from mpjax.errors import UsageError


def loaded(line: str):
    return load_settings((OnRay, Config), line.split(), prog="train_ray.py")


def test_flags_of_the_workers_and_of_the_run_are_told_apart():
    settings, config = loaded(
        "--data.batch_size 256 --workers 16 --gpus 1 --model.name resnet50 --cpus 8 --restarts -1 --address auto"
    )
    assert settings == OnRay(workers=16, gpus=1, cpus=8, restarts=-1, address="auto")
    assert (config.data.batch_size, config.model.name) == (256, "resnet50")


def test_without_more_one_worker_trains_the_default_run():
    settings, config = loaded("")
    assert settings == OnRay(workers=1, gpus=-1, cpus=1, restarts=3, address="")
    assert config == Config()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--workers 0", "--workers is 0: wanted at least 1"),
        ("--gpus -2", "--gpus is -2: wanted at least -1"),
        ("--cpus -1", "--cpus is -1: wanted at least 0"),
        ("--restarts -2", "--restarts is -2: wanted at least -1"),
        ("--distributed.processes 2", "Ray numbers the processes: leave out --distributed.coordinator"),
        ("--distributed.coordinator a:1", "Ray numbers the processes"),
        ("--distributed.elastic", "Ray starts workers again itself: leave out --distributed.elastic"),
    ],
)
def test_settings_out_of_range_are_errors(line, said):
    with pytest.raises(UsageError, match=said):
        loaded(line)


def test_how_long_to_wait_for_all_workers_is_a_setting_of_the_run():
    assert loaded("--distributed.timeout 20")[1].distributed.timeout == 20


def test_a_wrong_flag_is_answered_with_the_nearest():
    with pytest.raises(UsageError, match=r"--data\.batchsize.*; did you mean.*--data\.batch_size"):
        loaded("--data.batchsize 4")
    with pytest.raises(UsageError, match=r"^unrecognized option --worker; did you mean --workers\?"):
        loaded("--worker 2")

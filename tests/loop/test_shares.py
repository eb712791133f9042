"""How many processes share a batch."""

import pytest

from mpjax.config import AUTO, Config, Data, Mesh, Training
from mpjax.loop import examples_at_once, sharing


def config_of(*, batch=24, accumulate=1, **mesh):
    return Config(data=Data(batch_size=batch), training=Training(accumulate=accumulate), mesh=Mesh(**mesh))


def members(there, *, devices=1, **settings):
    return sharing(config_of(**settings), dict.fromkeys(there, devices))


def test_all_that_are_there_share_a_batch_that_divides():
    assert members([3, 0, 1]) == (0, 1, 3)
    assert members([0, 1, 2], accumulate=4) == (0, 1, 2)
    assert members([0, 1, 2], accumulate=AUTO) == (0, 1, 2)


def test_the_last_wait_where_it_does_not():
    assert members([0, 1, 2], batch=8) == (0, 1)
    assert members([0, 1, 2], batch=64, devices=8) == (0, 1)
    assert members([0, 1, 2], batch=12, accumulate=3) == (0, 1)
    assert members([0, 1], batch=9, devices=2) == ()


def test_the_fixed_sizes_of_the_mesh_have_to_fit():
    assert members([0, 1, 2], devices=2, data=-1, fsdp=4) == (0, 1)
    assert members([0, 1, 2], devices=2, data=-1, tensor=2) == (0, 1, 2)
    assert members([0], devices=2, data=-1, fsdp=4) == ()


@pytest.mark.parametrize(("devices", "examples"), [(4, 6), (3, 8), (1, 24)])
def test_each_device_takes_more_examples_the_fewer_there_are(devices, examples):
    assert examples_at_once(config_of(), devices) == examples
    assert examples_at_once(config_of(batch=48, accumulate=2), devices) == examples
    assert examples_at_once(config_of(accumulate=AUTO), devices) is None

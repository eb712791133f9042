"""How many processes share a batch, and in how many micro-batches."""

import pytest

from mpjax.config.schema import Config, Data, Mesh, Training
from mpjax.config.choices import AUTO
from mpjax.loop.shares import share_of


def share(there, *, batch=24, accumulate=1, devices=1, processes=4, **mesh):
    config = Config(data=Data(batch_size=batch), training=Training(accumulate=accumulate), mesh=Mesh(**mesh))
    chosen = share_of(config, dict.fromkeys(there, devices), dict.fromkeys(range(processes), devices))
    return chosen and (chosen.members, chosen.accumulate)


def test_all_take_the_batch_as_the_settings_say():
    assert share([0, 1, 2, 3]) == ((0, 1, 2, 3), 1)
    assert share([0, 1, 2, 3], accumulate=3) == ((0, 1, 2, 3), 3)


def test_fewer_add_micro_batches_so_that_no_device_takes_more_at_once():
    assert share([0, 1, 3]) == ((0, 1, 3), 2)  # 8 examples each, at most 6 at once: 4 and 4
    assert share([0, 2], accumulate=3) == ((0, 2), 6)
    assert share([0]) == ((0,), 4)


def test_a_process_waits_where_the_batch_does_not_divide():
    assert share([0, 1, 2], batch=8) == ((0, 1), 2)
    assert share([0, 1, 2], batch=64, devices=8) == ((0, 1), 2)
    assert share([0], batch=9) is None or share([0], batch=9) == ((0,), 9)


def test_the_fixed_sizes_of_the_mesh_have_to_fit():
    assert share([0, 1, 2], devices=2, data=-1, fsdp=4) == ((0, 1), 2)
    assert share([0, 1, 2], devices=2, data=-1, tensor=2) == ((0, 1, 2), 2)
    assert share([0], devices=2, data=-1, fsdp=4) is None


def test_micro_batches_that_each_start_finds_stay_so():
    assert share([0, 1, 2], accumulate=AUTO) == ((0, 1, 2), AUTO)


@pytest.mark.parametrize("batch", [12, 24, 60])
@pytest.mark.parametrize("there", [[0], [0, 1], [0, 1, 2]])
def test_the_batch_divides_whatever_is_chosen(batch, there):
    members, pieces = share(there, batch=batch)
    assert batch % (len(members) * pieces) == 0
    assert batch // (len(members) * pieces) <= batch // 4

"""What is due when."""

import pytest

from mpjax.loop.when import When


@pytest.mark.parametrize(
    ("interval", "positions"), [(0, [10]), (1, [*range(1, 11)]), (3, [3, 6, 9, 10]), (5, [5, 10]), (20, [10])]
)
def test_every_interval_and_the_end(interval, positions):
    when = When(steps=10, log=1, evaluate=1, save=1)
    assert [position for position in range(1, 11) if when.due(interval, position)] == positions

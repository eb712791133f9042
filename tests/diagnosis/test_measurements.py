"""What is measured of one result, against NumPy in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.diagnosis import EXPONENTS, Marks, Recorder, Site, round_to
from mpjax.precision import FLOAT16


def _reading(wide, exact, low, marks=()):
    recorder = Recorder()
    after = recorder.observe(Site("", "forward", "mul", FLOAT16, wide.shape, ""), wide, exact, low, marks)
    return recorder.readings()[0], after


@pytest.mark.parametrize("shape", [(), (0,), (5,), (4, 4096), (3, 5, 4099)], ids=str)  # up to several blocks
def test_sums_are_those_of_all_values(shape):
    generator = np.random.default_rng(0)
    wide = (generator.normal(size=shape) * np.exp2(generator.integers(-30, 20, size=shape))).astype(np.float32)
    exact = wide * np.float32(1.01)
    low = np.asarray(round_to(jnp.asarray(exact), FLOAT16))
    reading, marks = _reading(jnp.asarray(wide), jnp.asarray(exact), jnp.asarray(low))
    finite = np.isfinite(low)
    assert reading.size == wide.size
    assert reading.overflow == reading.non_finite == (~finite).sum()
    assert reading.underflow == ((low == 0) & (exact != 0)).sum()
    assert reading.subnormal == ((np.abs(low) > 0) & (np.abs(low) < 2.0**-14)).sum()
    assert reading.largest == np.abs(low[finite]).max(initial=0)
    assert bool(marks.finite) == bool(finite.all())
    sums = {
        "total": np.abs(low[finite]),
        "exact": np.square(exact, dtype=np.float64),
        "lost": np.square(exact[low == 0], dtype=np.float64),
        "error": np.square(low[finite].astype(np.float64) - wide[finite]),
        "reference": np.square(wide[finite], dtype=np.float64),
    }
    for name, values in sums.items():
        assert getattr(reading, name) == pytest.approx(values.sum(dtype=np.float64), rel=1e-4), name


def test_the_last_block_counts_no_value_twice():
    values = jnp.full(2**14 + 1, 3.0)
    reading, _ = _reading(values, values, values)
    assert (reading.total, reading.reference) == (3.0 * (2**14 + 1), 9.0 * (2**14 + 1))
    assert reading.histogram[EXPONENTS.index(1)] == reading.histogram.sum() > 0


def test_what_is_not_finite_begins_where_all_that_was_given_is():
    wide, low = jnp.ones(3), jnp.array([1.0, jnp.inf, jnp.nan])
    reading, marks = _reading(wide, wide, low, [Marks()])
    assert (reading.begins, reading.reference_begins, reading.non_finite) == (1.0, 0.0, 2.0)
    assert _reading(wide, low, low, [marks])[0].begins == 0.0


def test_the_range_of_values_is_of_every_channel():
    values = np.ones((64, 64, 8, 4), np.float32)  # 131,072 values, of which every 32nd is of the first channel
    values[..., 3] = 2.0**20
    reading, _ = _reading(values, values, values)
    seen = {e: int(reading.histogram[EXPONENTS.index(e)]) for e in (0, 20)}
    assert seen == {0: 2979, 20: 993}

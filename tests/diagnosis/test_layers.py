"""Statistics of layers: taken of values given by hand, and those of one layer added up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.diagnosis import LayerRecorder, Site
from mpjax.precision import FLOAT16, FLOAT32


INF = float("inf")


def site(path="head", direction="forward", dtype=FLOAT16, source="/home/me/train.py:31"):
    return Site(path, direction, "mul", dtype, (), source)


def layers_of(*found):
    """Of sites with their values, and with what else is known of these."""

    def read():
        recorder = LayerRecorder()
        for place, values, *known in found:
            recorder.add(place, jnp.asarray(values, jnp.float32), **dict(*known))
        return recorder.layers()

    return jax.jit(read)().by_layer()


def layer_of(values, dtype=FLOAT16, **known):
    (layer,) = layers_of((site(dtype=dtype), values, known))
    return layer


def test_results_of_one_layer_are_added_up_and_those_of_another_direction_are_not():
    forward, backward = layers_of(
        (site(dtype=FLOAT32), [1.0, -3.0]),
        (site(direction="backward"), [8.0]),
        (site(), [2.0, 2.0]),
    )
    assert (forward.path, forward.direction, forward.dtype) == ("head", "forward", FLOAT16)
    assert (forward.largest, forward.mean, forward.counts) == (3.0, 2.0, {0: 1, 1: 3})
    assert (backward.direction, backward.largest, backward.counts) == ("backward", 8.0, {3: 1})


def test_what_is_not_finite_has_a_share_and_no_part_in_the_mean():
    layer = layer_of([1.0, 3.0, -INF, float("nan")])
    assert (layer.largest, layer.mean, layer.non_finite) == (3.0, 2.0, 0.5)
    assert layer.counts == {0: 1, 1: 1}


def test_an_infinity_that_was_one_before_rounding_is_no_overflow():
    layer = layer_of([1.0, 2.0, INF, INF], exact=jnp.array([1.0, 2.0, INF, 65536.0]))
    assert (layer.non_finite, layer.overflow) == (0.5, 0.25)


@pytest.mark.parametrize(("dtype", "share"), [(FLOAT16, 0.25), (FLOAT32, 0.0)])
def test_a_value_is_subnormal_below_the_smallest_normal_number_of_its_dtype_and_zero_is_not(dtype, share):
    assert layer_of([0.0, 2.0**-15, 2.0**-14, 1.0], dtype).subnormal == share


def test_what_lies_outside_of_all_modules_goes_by_its_file_and_line():
    (layer,) = layers_of((site(path=""), [1.0]))
    assert layer.path == "train.py:31"


def test_a_histogram_is_of_a_sample_and_all_else_is_of_every_value():
    values = np.ones(5000, np.float32)
    values[1::2] = 3.0
    layer = layer_of(values, underflow=jnp.asarray(values == 3))
    assert (layer.mean, layer.underflow) == (2.0, 0.5)
    assert layer.counts == {0: 500, 1: 500}  # every fifth


def test_sizes_beyond_the_histogram_are_in_its_outermost_counts():
    assert layer_of([2.0**-70, 2.0**70, 0.0], FLOAT32).counts == {-48: 1, 39: 1}


def test_a_step_in_which_nothing_is_read_has_no_layers():
    layers = LayerRecorder().layers()
    assert layers.array.shape == (0, 95)
    assert layers.by_layer() == []

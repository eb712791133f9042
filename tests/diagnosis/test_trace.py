"""A run of a step with its readings, and the rows that they come to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.diagnosis import EXPONENTS, Reading, Site, Trace, emulated, nowhere, program_of, table_of


def trace_of(*found):
    """Of path, direction, dtype and fields of the reading, each."""
    sites = [Site(path, direction, "mul", np.dtype(dtype), (), "") for path, direction, dtype, _ in found]
    zeros = {**dict.fromkeys(Reading._fields, 0.0), "histogram": np.zeros(88), "flushed": -1}
    return Trace(sites, [Reading(**{**zeros, "size": 4.0, **fields}) for *_, fields in found], [], [])


def test_a_row_is_a_module_in_one_direction_in_program_order():
    places = [("b", "forward"), ("a", "forward"), ("b", "forward"), ("a", "backward"), ("", "backward")]
    rows = table_of(trace_of(*((*place, "float16", {}) for place in places)), None)
    assert [(row.path, row.direction) for row in rows] == list(dict.fromkeys(places))


def test_what_rounding_did_is_a_share_of_the_results_in_half_precision():
    counts = {"overflow": 1.0, "underflow": 2.0, "subnormal": 1.0}
    (row,) = table_of(trace_of(("a", "forward", "float16", counts), ("a", "forward", "float32", {"size": 96.0})), None)
    assert (row.overflow, row.underflow, row.subnormal) == (0.25, 0.5, 0.25)
    assert row.dtype == np.dtype("float16")


def test_sizes_and_what_is_not_finite_are_of_all_results():
    first = {"largest": 2.0, "total": 4.0, "non_finite": 1.0}
    second = {"size": 12.0, "largest": 8.0, "total": 28.0, "non_finite": 7.0}
    (row,) = table_of(trace_of(("a", "forward", "float16", first), ("a", "forward", "float32", second)), None)
    assert (row.largest, row.mean, row.non_finite) == (8.0, 2.0, 0.5)


def test_the_errors_of_a_module_are_its_largest_and_its_own_those_of_the_run_alone():
    errors = [{"error": error, "reference": 1.0} for error in (0.25, 0.01, 0.04)]
    carried = trace_of(*(("a", "forward", "float16", error) for error in errors[:2]))
    alone = trace_of(*(("a", "forward", "float16", error) for error in errors[:0:-1]))
    (row,) = table_of(carried, alone)
    assert (row.error, row.own_error) == pytest.approx((0.5, 0.2))
    assert table_of(carried, None)[0].own_error is None


def test_a_module_without_values_has_a_row_of_zeros():
    (row,) = table_of(trace_of(("a", "forward", "float16", {"size": 0.0})), None)
    assert (row.mean, row.overflow, row.non_finite, row.exponents) == (0.0, 0.0, 0.0, None)


@pytest.fixture(scope="module")
def program():
    def loss_of(weight, x):
        with jax.named_scope("head"):
            y = weight.astype(jnp.float16) * x.astype(jnp.float16)
        return jnp.sum(y.astype(jnp.float32))

    return program_of(loss_of, jnp.full(2, 2.0**10), {"batch": jnp.array([2.0**10, 1.0])})


def test_a_run_gives_the_step_in_half_precision_and_in_float32_times_the_loss_scale(program):
    trace = emulated(program, 4.0)
    assert (float(trace.low[0]), float(trace.wide[0])) == (float("inf"), 4 * (2.0**20 + 2.0**10))
    assert trace.low[1].tolist() == trace.wide[1].tolist() == [2.0**12, 4.0]
    row = next(row for row in table_of(trace, None) if (row.path, row.direction) == ("head", "forward"))
    assert (row.overflow, row.largest) == (1 / 6, 2.0**10)  # of two casts and a product
    assert row.histogram[EXPONENTS.index(20)] == 1


def test_a_run_in_which_nothing_rounds_is_the_reference(program):
    trace = emulated(program, 1.0, rounds=nowhere)
    assert [x.tolist() for x in trace.low] == [x.tolist() for x in trace.wide]
    assert all(row.error == row.overflow == 0 for row in table_of(trace, None))

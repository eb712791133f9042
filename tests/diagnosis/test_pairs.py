"""A value of both runs and its place: what is taken for granted of one that nothing is known of."""

import numpy as np

from mpjax.diagnosis import Pair, Place, onward


def test_an_input_is_told_from_a_result_outside_of_all_modules():
    assert Pair(1.0, 1.0).path is None
    assert Place().path == ""


def test_a_value_rounds_unless_it_is_said_to_be_free():
    assert not Pair(1.0, 1.0).free


def test_a_value_without_a_history_is_no_cause_of_what_is_not_finite_after_it():
    value = Pair(1.0, 1.0)
    reading, after = onward(np.float32(1), np.float32(0), np.float32(0), (value.marks,), np.int32(7))
    assert (float(reading["begins"]), int(reading["flushed"])) == (1.0, -1)
    assert (bool(after.finite), bool(after.reference_finite)) == (False, True)


def test_a_place_is_forward_and_called_by_nothing_unless_said_otherwise():
    assert (Place("head").backward, Place("head").callers) == (False, ())

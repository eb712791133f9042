"""Rows and diagnoses of round numbers, for what shows them."""

import numpy as np
import pytest

from mpjax.diagnosis import EXPONENTS, Facts, TraceRow


@pytest.fixture
def row_of():
    def make(path, direction="forward", counts=(), *, dtype="float16", **fields):
        counts = dict(counts)
        histogram = tuple(counts.get(exponent, 0) for exponent in EXPONENTS)
        zeros = dict.fromkeys(("largest", "mean", "overflow", "underflow", "subnormal", "error"), 0.0)
        given = {**zeros, "own_error": None, "histogram": histogram, **fields}
        return TraceRow(path, direction, np.dtype(dtype), **given)

    return make


@pytest.fixture
def facts_of():
    def make(*table, **fields):
        given = {
            "verdict": "healthy",
            **dict.fromkeys(("path", "direction", "operation", "source", "better_scale")),
            "evidence": "All is well.",
            "rules": {},
            "verified": False,
            "float32_flops": 0.0,
            "advice": (),
            "table": table,
            "policy": "params=float32,compute=float16,output=float32",
            "loss_scale": 1.0,
            "loss": (1.0, 1.0),
            "flushed": {},
        }
        return Facts(**{**given, **fields})

    return make

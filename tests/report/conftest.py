"""What writers are given."""

import numpy as np
import pytest

from mpjax.diagnosis import EXPONENTS, Layer


@pytest.fixture
def layer():
    """A layer whose values lie in [2^-3, 2^-2), five of them, and [2, 4), seven."""
    histogram = tuple({-3: 5, 1: 7}.get(exponent, 0) for exponent in EXPONENTS)
    return Layer("stem/conv", "forward", np.dtype("float16"), 3.0, 1.5, 0.0, 0.0, 0.25, 0.125, histogram)

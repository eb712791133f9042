"""A site in words."""

import numpy as np

from mpjax.diagnosis import Site, named


def test_a_site_in_words_has_operation_module_direction_and_line():
    site = Site("body", "forward", "mul", np.dtype("float16"), (2,), "net.py:3")
    assert named(site) == "mul in body (forward, net.py:3)"
    assert named(site._replace(path="")) == "mul in no module (forward, net.py:3)"

"""Where a result stands: its module, direction, dtype, shape and line."""

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.diagnosis import Place, parameter_site, site_of


def test_a_result_has_its_module_its_shape_and_its_line():
    jaxpr = jax.make_jaxpr(lambda x: jnp.exp(x))(jax.ShapeDtypeStruct((2, 3), jnp.float16))  # noqa: PLW0108
    eqn = jaxpr.eqns[0]
    site = site_of(eqn, eqn.outvars[0], Place("blocks/0", backward=True))
    assert site[:5] == ("blocks/0", "backward", "exp", np.dtype("float16"), (2, 3))
    assert "test_sites.py:" in site.source


def test_a_parameter_has_no_line():
    site = parameter_site("head", "update", np.zeros(4, np.float32))
    assert site[:5] == ("head", "update", "parameter", np.dtype("float32"), (4,))
    assert "test_sites.py" not in site.source

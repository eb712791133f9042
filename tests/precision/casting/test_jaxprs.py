"""What the versions of JAX disagree on about jaxprs."""

import jax
import jax.numpy as jnp
from jax import lax

from mpjax.precision.casting.jaxprs import as_function, open_shardings, opened, scan_counts


X = jnp.arange(3.0)


def test_a_closed_jaxpr_opens_to_its_body_and_constants():
    body, consts = opened(jax.make_jaxpr(lambda x: x + X)(X))
    assert len(body.invars) == 1
    assert [const.tolist() for const in consts] == [[0.0, 1.0, 2.0]]


def test_a_scan_tells_its_constants_from_its_carries():
    def scan(x, y):
        return lax.scan(lambda carry, _: ((carry[0] + x, carry[1] * y), None), (x, y), None, length=2)

    body, _ = opened(jax.make_jaxpr(scan)(X, X))
    (eqn,) = [eqn for eqn in body.eqns if eqn.primitive.name == "scan"]
    assert scan_counts(eqn.params) == (2, 2)


def test_an_equation_is_a_function_of_all_its_inputs_repeated_and_literal_ones():
    body, _ = opened(jax.make_jaxpr(lambda x: lax.mul(x, x))(2.0))
    assert as_function(body.eqns[-1], body.debug_info)(5.0, 5.0) == [25.0]
    body, _ = opened(jax.make_jaxpr(lambda x: lax.add(x, 3.0))(2.0))
    assert as_function(body.eqns[-1], body.debug_info)(5.0, 3.0) == [8.0]


def test_shardings_left_to_the_compiler_are_none():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    assert open_shardings((sharding, object())) == (sharding, None)

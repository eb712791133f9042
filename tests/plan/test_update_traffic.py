"""How many bytes an update moves, from the text of a program and on an H200."""

import jax
import jax.numpy as jnp
import optax
import pytest

import mpjax
from mpjax.plan import parse, update_bytes
from mpjax.precision import (
    compensated_weights,
    half_moments,
    int8_moments,
    master_weights,
    no_loss_scaling,
    stochastic_weights,
)
from mpjax.precision.float8 import float8_moments


TEXT = """HloModule m

%scaled (g: f32[1000], n: f32[]) -> f32[1000] {
  %g = f32[1000]{0} parameter(0)
  %n = f32[] parameter(1)
  %all = f32[1000]{0} broadcast(%n), dimensions={}
  ROOT %s = f32[1000]{0} multiply(%g, %all)
}

%moved (p: f32[1000], m: f32[1000], u: f32[1000]) -> (f32[1000], f32[1000]) {
  %p = f32[1000]{0} parameter(0)
  %m = f32[1000]{0} parameter(1)
  %u = f32[1000]{0} parameter(2)
  %new = f32[1000]{0} add(%m, %u)
  %less = f32[1000]{0} subtract(%p, %new)
  ROOT %both = (f32[1000]{0}, f32[1000]{0}) tuple(%less, %new)
}

ENTRY %main (p: f32[1000], m: f32[1000], x: f32[1000]) -> (f32[1000], f32[1000], f32[1000]) {
  %p = f32[1000]{0} parameter(0)
  %m = f32[1000]{0} parameter(1)
  %x = f32[1000]{0} parameter(2)
  %h = f32[1000]{0} multiply(%x, %x), metadata={op_name="jit(step)/jvp(up)/mul"}
  %part = f32[1000]{0} multiply(%h, %p), metadata={op_name="jit(step)/transpose(jvp(up))/mul"}
  %grad = f32[1000]{0} all-reduce(%part), to_apply=%add
  %norm = f32[] reduce(%grad, %p), metadata={op_name="jit(step)/reduce_sum"}
  %clipped = f32[1000]{0} fusion(%grad, %norm), kind=kLoop, calls=%scaled, metadata={op_name="jit(step)/mul"}
  %new = (f32[1000]{0}, f32[1000]{0}) fusion(%p, %m, %clipped), kind=kLoop, calls=%moved
  %first = f32[1000]{0} get-tuple-element(%new), index=0
  %second = f32[1000]{0} get-tuple-element(%new), index=1
  ROOT %out = (f32[1000]{0}, f32[1000]{0}, f32[1000]{0}) tuple(%first, %second, %h)
}
"""


def test_kernels_from_the_gradient_to_the_new_state_are_counted_once():
    """The norm reads two arrays, clipping reads and writes one, and the update reads three and writes two."""
    norm, clipping, update = 8_000 + 4, 4_000 + 4 + 4_000, 20_000
    assert update_bytes(parse(TEXT), [0, 1]) == norm + clipping + update
    assert update_bytes(parse(TEXT), [1]) == norm + clipping + update


def test_what_the_model_computes_is_no_update():
    assert update_bytes(parse(TEXT), [2]) == 0


def test_in_a_loop_over_steps_one_step_counts():
    text = (
        TEXT.replace("ENTRY %main", "%main")
        + """
ENTRY %loop (p: f32[1000], m: f32[1000], x: f32[1000]) -> (f32[1000], f32[1000], f32[1000]) {
  %p = f32[1000]{0} parameter(0)
  %m = f32[1000]{0} parameter(1)
  %x = f32[1000]{0} parameter(2)
  %given = (f32[1000]{0}, f32[1000]{0}, f32[1000]{0}) tuple(%p, %m, %x)
  ROOT %last = (f32[1000]{0}, f32[1000]{0}, f32[1000]{0}) while(%given), condition=%go, body=%main
}
"""
    )
    assert update_bytes(parse(text), [0]) == update_bytes(parse(TEXT), [0])


# Bytes of an update for each parameter, of GPT-2's matrices: gradients in bfloat16, Adam's moments in float32 but for
# the last three. With float32 parameters, a gradient of 2 bytes is read, and 12 are read and written again.
UPDATES = {
    "float32": (lambda inner: inner, jnp.float32, 26),
    "copies": (master_weights, jnp.bfloat16, 30),
    "stochastic": (stochastic_weights, jnp.bfloat16, 22),
    "compensated": (compensated_weights, jnp.bfloat16, 26),
    "bfloat16 moments": (lambda inner: stochastic_weights(half_moments(inner)), jnp.bfloat16, 14),
    "float8 moments": (lambda inner: stochastic_weights(float8_moments(inner)), jnp.bfloat16, 26.5),
    "int8 moments": (lambda inner: stochastic_weights(int8_moments(inner)), jnp.bfloat16, 36.2),
}


@pytest.mark.parametrize("name", UPDATES)
def test_bytes_for_each_parameter_on_an_h200(plugin, name):
    wrap, dtype, wanted = UPDATES[name]
    tx = no_loss_scaling(wrap(optax.adamw(1e-3)))
    params = {"up": jax.ShapeDtypeStruct((256, 1024), dtype), "down": jax.ShapeDtypeStruct((1024, 256), dtype)}

    def step(params, opt_state, x):
        def loss(params):
            h = jnp.tanh(x @ params["up"].astype(jnp.bfloat16))
            return jnp.mean(jnp.square((h @ params["down"].astype(jnp.bfloat16)).astype(jnp.float32)))

        updates, opt_state = tx.update(jax.grad(loss)(params), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        state = jax.eval_shape(tx.init, params)
        found = mpjax.receipt(step, params, state, jax.ShapeDtypeStruct((64, 256), jnp.bfloat16), device="h200")
    assert found.update_bytes / (2 * 256 * 1024) == pytest.approx(wanted, rel=0.01)
    assert f"the update moves {found.update_bytes / 1e6:,.1f} MB" in str(found)

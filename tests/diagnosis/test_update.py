"""Updates that half-precision parameters do not take."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import mpjax
from mpjax import diagnose
from mpjax.precision import compensated_weights, stochastic_weights


@pytest.fixture
def mlp(networks):
    return networks.make("mlp")


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
def test_updates_too_small_for_half_stored_parameters_stall_and_the_report_says_so(mlp, policy):
    found = diagnose(*mlp, policy=policy, tx=optax.sgd(1e-3))
    assert (found.verdict, found.direction, found.operation) == ("rounding", "update", "apply_updates")
    assert found.path.endswith("kernel")
    assert found.verified
    assert found.rules == {}
    assert "so their training stalls" in found.evidence
    assert "mpjax.master_weights" in found.advice[0]
    rows = {row.path: row for row in found.table if row.direction == "update"}
    assert set(rows) == {
        f"{layer}/{name}" for layer in ("layers/0", "layers/1", "layers/2", "head") for name in ("kernel", "bias")
    }
    assert rows[found.path].underflow > 0.5  # of the rest the gradient is zero


@pytest.mark.slow
def test_updates_that_move_half_stored_parameters_are_healthy(mlp):
    found = diagnose(*mlp, policy="bfloat16", tx=optax.sgd(10.0))
    assert found.verdict == "healthy"
    rows = [row for row in found.table if row.direction == "update"]
    assert max(row.underflow for row in rows if row.path.endswith("kernel")) < 0.2
    # As far off as its gradient, which has eight bits.
    assert 5e-3 < next(row.error for row in rows if row.path == "head/kernel") < 2e-2


@pytest.mark.parametrize(
    "tx",
    [
        mpjax.dynamic_loss_scaling(mpjax.master_weights(optax.sgd(1e-3))),
        pytest.param(stochastic_weights(optax.sgd(1e-3)), marks=pytest.mark.slow),
        pytest.param(mpjax.dynamic_loss_scaling(compensated_weights(optax.sgd(1e-3))), marks=pytest.mark.slow),
    ],
    ids=["scaled masters", "stochastic", "scaled compensated"],
)
def test_under_what_keeps_small_updates_nothing_stalls(mlp, tx):
    found = diagnose(*mlp, policy="bfloat16", tx=tx)
    assert found.verdict == "healthy"
    assert not [row for row in found.table if row.direction == "update"]


@pytest.mark.slow
def test_float32_parameters_move_under_the_same_updates(mlp):
    assert diagnose(*mlp, policy="mixed_bfloat16", tx=optax.sgd(1e-3)).verdict == "healthy"


@pytest.mark.slow
def test_an_adam_whose_state_is_float16_gives_no_number(mlp):
    # Its second moments underflow and so does its eps: nothing divided by nothing.
    found = diagnose(*mlp, policy="float16", loss_scale=2.0**10, tx=optax.adam(1e-3))
    assert (found.verdict, found.direction) == ("overflow", "update")
    assert "the optimizer's state is in float16" in found.evidence
    row = next(row for row in found.table if row.direction == "update" and row.path == found.path)
    assert row.non_finite > 0


@pytest.mark.slow
def test_the_loss_scale_is_the_optimizers_own(mlp):
    tx = mpjax.dynamic_loss_scaling(optax.sgd(10.0))
    one, other = (diagnose(*mlp, policy="mixed_float16", loss_scale=s, tx=tx) for s in (2.0**15, 2.0**8))
    sizes = [[row.largest for row in found.table if row.direction == "update"] for found in (one, other)]
    assert len(sizes[0]) == 8
    assert jnp.allclose(jnp.array(sizes[0]), jnp.array(sizes[1]), rtol=1e-2)


@pytest.mark.slow
def test_a_state_in_the_middle_of_a_run_is_taken(mlp):
    params = nnx.state(mlp[0], nnx.Param)
    tx = optax.adam(1e-3)
    state = tx.init(params)
    # Large second moments: updates a thousand times smaller than Adam's first.
    state = (
        state[0]._replace(nu=jax.tree.map(lambda x: jnp.full_like(x, 1e3), state[0].nu), count=jnp.int32(1000)),
        state[1],
    )
    first, later = (
        max(
            row.largest
            for row in diagnose(*mlp, policy="mixed_bfloat16", tx=tx, opt_state=s).table
            if row.direction == "update"
        )
        for s in (None, state)
    )
    assert first == pytest.approx(1e-3, rel=1e-2)
    assert later < 1e-4

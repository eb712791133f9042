"""Attention is traced as on the GPU that is planned for."""

import jax
import jax.numpy as jnp
import pytest

from mpjax.jax_internals import cudnn_checks
from mpjax.models import attend, implementation_for
from mpjax.plan import GPUS, mesh_of, traced_for
from mpjax.precision.casting import equations


def chosen(gpu: str, implementation: str, shape=(2, 8, 2, 16), dtype=jnp.bfloat16) -> str:
    with traced_for(GPUS[gpu], mesh_of(gpu, 1).devices.flat[0], implementation):
        return implementation_for(jax.ShapeDtypeStruct(shape, dtype))


@pytest.mark.parametrize(
    ("gpu", "implementation", "wanted"),
    [("h200", "auto", "cudnn"), ("a100", "cudnn", "cudnn"), ("h200", "xla", "xla"), ("v100", "auto", "xla")],
)
def test_models_choose_as_on_the_gpu(plugin, gpu, implementation, wanted):
    assert chosen(gpu, implementation) == wanted


def test_what_keeps_cudnn_from_running_there_keeps_it_from_being_planned(plugin):
    assert chosen("h200", "auto", dtype=jnp.float32) == "xla"
    assert chosen("h200", "auto", shape=(2, 8, 2, 12)) == "xla"


def test_jax_is_told_what_the_gpu_can_and_outside_a_plan_nothing_is_changed(plugin):
    fused = cudnn_checks()
    before = (fused.check_cudnn_version, fused.check_compute_capability, jax.config.jax_default_device)

    def fail():
        with traced_for(GPUS["h200"], mesh_of("h200", 1).devices.flat[0], "auto"):
            assert fused.check_cudnn_version() == 91000
            assert (fused.check_compute_capability("9.0"), fused.check_compute_capability("10.0")) == (True, False)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert (fused.check_cudnn_version, fused.check_compute_capability, jax.config.jax_default_device) == before


def test_documents_apart_are_a_mask_of_the_fused_kernel(plugin):
    """cuDNN has no window beside a mask: the mask has it."""

    def mixed(query, segments):
        return attend(query, query, query, is_causal=True, segments=segments, window=3)

    query = jax.ShapeDtypeStruct((2, 8, 2, 16), jnp.bfloat16)
    with traced_for(GPUS["h200"], mesh_of("h200", 1).devices.flat[0], "auto"):
        traced = jax.make_jaxpr(mixed)(query, jax.ShapeDtypeStruct((2, 8), jnp.int32))
    (kernel,) = [eqn for _, eqn in equations(traced) if "dot_product_attention_fwd" in eqn.primitive.name]
    assert (2, 1, 8, 8) in [atom.aval.shape for atom in kernel.invars]
    assert kernel.params["sliding_window_length"] is None

"""What a run trains follows from its settings: the layout on devices, 64-bit arrays, the cache of programs."""

import jax
import pytest
from jax.sharding import PartitionSpec

from mpjax.commands import build_run, fresh_state, set_up_jax
from mpjax.config import load_config
from mpjax.errors import UsageError
from mpjax.training import make_mesh, plan_precision


FLAGS = "--model.name mlp --model.width 8 --data.name synthetic:8x8x1:10 --data.batch_size 100 --steps 10"


def config_of(flags=""):
    return load_config(f"{FLAGS} --optimizer.warmup 1 {flags}".split())


@pytest.fixture
def float64_as_before():
    before = jax.config.jax_enable_x64
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.mark.usefixtures("float64_as_before")
@pytest.mark.parametrize(("policy", "switched"), [("float64", True), ("mixed_bfloat16", False)])
def test_only_a_float64_policy_switches_64_bit_arrays_on(policy, switched):
    config = config_of(f"--precision.policy {policy}")
    set_up_jax(config, plan_precision(config.precision))
    assert jax.config.jax_enable_x64 == switched


@pytest.mark.parametrize("mode", ["module", "autocast"])
def test_a_policy_in_float8_that_no_layer_follows_is_an_error(mode):
    config = config_of(f"--precision.policy mixed_float8 --precision.mode {mode}")
    with pytest.raises(UsageError, match="no layer multiplies in float8: type:first_or_last"):
        build_run(config)


def test_compiled_programs_are_kept_in_the_cache_folder(tmp_path):
    config = config_of(f"--cache_dir {tmp_path}")
    set_up_jax(config, plan_precision(config.precision))
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "compiled")


@pytest.mark.parametrize("mesh", ["", "--mesh.data 1 --mesh.fsdp 2"])
def test_the_layout_adds_gradients_and_takes_statistics_as_the_settings_say(mesh, monkeypatch):
    monkeypatch.setattr("mpjax.training.layout.SMALL", 1)
    policy = "params=float32,compute=bfloat16,reduce=bfloat16"
    layout = build_run(config_of(f"--precision.policy {policy} --training.batch_norm global {mesh}")).layout
    assert (layout.reduce_dtype, layout.batch_norm) == ("bfloat16", "global")
    assert build_run(config_of(mesh)).layout.batch_norm == "device"


def test_parameters_travel_in_the_dtype_that_every_layer_casts_them_to(monkeypatch):
    monkeypatch.setattr("mpjax.training.layout.SMALL", 1)
    layout = build_run(config_of("--mesh.data 1 --mesh.fsdp 2 --precision.policy mixed_bfloat16")).layout
    assert layout.blocks == ("layers/0", "layers/1")
    assert {str(dtype) for dtype in layout.travels.values()} == {"bfloat16"}
    # Biases are repeated for each example before the cast, so that their gradients are added in float32.
    assert {name: str(dtype) for name, dtype in layout.given.items()} == {
        f"{layer}/{name}": dtype
        for layer in ("head", "layers/0", "layers/1")
        for name, dtype in (("kernel", "bfloat16"), ("bias", "float32"))
    }
    assert layout.divided["layers/0/kernel"] == PartitionSpec("fsdp", None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "arrays"), [("sgd", 4), ("adamw", 4), ("lamb", 6), ("lion", 4), ("novograd", 6), ("optax:adam", 6)]
)
def test_vectors_are_packed_for_optimizers_that_treat_numbers_one_by_one(optimizer, arrays):
    """Three layers: three kernels, and three biases in one array. LAMB divides by the norm of each array."""
    config = config_of(f"--optimizer.name {optimizer}")
    built = build_run(config)
    state, one = fresh_state(built), make_mesh(jax.devices()[:1])
    assert len(built.learner.on(one).packing.pack(state).params) == arrays
    assert len(built.packing.pack(state).params) == 6  # on two devices

"""Names that JAX does not publish: the JAX of this environment has them, and one that lacks them says what to write."""

import sys

import pytest

import mpjax.jax_internals as internals
from mpjax.errors import UsageError


NAMES = {
    "jax._src.clusters.ClusterEnv": internals.cluster_environment,
    "jax._src.distributed.global_state": internals.distributed_client,
    "jax._src.xla_bridge.make_cpu_client": lambda: internals.exchange_on_cpus_at("127.0.0.1"),
    "jax._src.xla_bridge.register_plugin": lambda: internals.register_compiler("no.so"),
    **{f"jax._src.cudnn.fused_attention_stablehlo.{name}": internals.cudnn_checks for name in internals.CUDNN_CHECKS},
}
WRITE = {
    "ClusterEnv": "write --distributed.coordinator HOST:PORT --distributed.processes N --distributed.process I",
    "global_state": "write --distributed.processes 1",
    "make_cpu_client": "write --distributed.processes 1",
    "register_plugin": "write: pip install --no-deps jax-cuda12-plugin==",
    "check_cudnn_version": "write: mpjax plan --attention xla",
}


def test_this_version_of_jax_has_them():
    assert callable(internals.cluster_environment().auto_detect_unset_distributed_params)
    assert internals.distributed_client() is None  # this process is alone
    assert all(callable(getattr(internals.cudnn_checks(), name)) for name in internals.CUDNN_CHECKS)


def test_the_client_of_this_version_has_the_key_value_store():
    client = sys.modules["jax._src.distributed"]._jax.DistributedRuntimeClient
    used = {"key_value_set_bytes", "blocking_key_value_get_bytes", "key_value_dir_get_bytes", "key_value_delete"}
    assert used - set(dir(client)) == set()


@pytest.mark.parametrize("name", NAMES)
def test_a_version_without_one_says_what_to_write_instead(name, monkeypatch):
    module, _, last = name.rpartition(".")
    NAMES["jax._src.clusters.ClusterEnv"]()  # so that the module is imported
    internals.cudnn_checks()
    monkeypatch.delattr(sys.modules[module], last)
    with pytest.raises(UsageError, match=rf"^JAX \d\S+ has no {name}, needed for .*; {WRITE.get(last, 'write: ')}"):
        NAMES[name]()

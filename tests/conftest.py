"""What every test runs under: strict dtypes and ranks, two CPU devices, a cache of its own."""

import os


os.environ.setdefault("JAX_PLATFORMS", os.environ.get("MPJAX_TEST_PLATFORM", "cpu"))
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

import jax
import pytest


jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory):
    """Prepared data and compiled programs of the tests, apart from the user's."""
    os.environ["MPJAX_CACHE"] = str(tmp_path_factory.mktemp("cache"))

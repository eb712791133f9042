"""What every test runs under: strict dtypes and ranks, two CPU devices, a cache of its own."""

import os
import pathlib
import sys


os.environ.setdefault("JAX_PLATFORMS", os.environ.get("MPJAX_TEST_PLATFORM", "cpu"))
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

import jax
import pytest

import mpjax


TESTS = pathlib.Path(__file__).parent
PACKAGE = pathlib.Path(mpjax.__file__).parent


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory):
    """Prepared data and compiled programs of the tests, apart from the user's."""
    os.environ["MPJAX_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    os.environ["HF_DATASETS_CACHE"] = str(tmp_path_factory.mktemp("huggingface"))
    if "datasets" in sys.modules:  # it has read the variable already
        sys.modules["datasets"].config.HF_DATASETS_CACHE = pathlib.Path(os.environ["HF_DATASETS_CACHE"])


@pytest.fixture(scope="module", autouse=True)
def _memory():
    """What one file compiled, no other needs: kept, it would come to gigabytes."""
    yield
    jax.clear_caches()


@pytest.fixture(autouse=True)
def _strict(request):
    """Where a test mirrors a folder of mpjax, every implicit widening of a dtype or a rank is an error."""
    folder = request.path.relative_to(TESTS).parts[0]
    if not (PACKAGE / folder).is_dir():
        yield
        return
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield

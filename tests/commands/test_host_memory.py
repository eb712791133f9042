"""What is freed on a CPU is there for the next step."""

import os
import platform
import subprocess
import sys

import pytest


GLIBC = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
PAGES = """
import resource
from mpjax.commands.host_memory import keep_freed_memory
kept = keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
bytearray(64 * 2**20)
before = faults()
for _ in range(5):
    bytearray(64 * 2**20)
print(kept, faults() - before)
"""


def pages(**environment):
    """Whether memory is kept, and the pages that five blocks of 64 MB cost after a first one has been freed."""
    without = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    result = subprocess.run(
        [sys.executable, "-c", PAGES], env=without | environment, capture_output=True, text=True, check=True
    )
    kept, faults = result.stdout.split()
    return kept == "True", int(faults)


@GLIBC
def test_memory_that_was_freed_is_not_cleared_again():
    kept, faults = pages(JAX_PLATFORMS="cpu")
    assert kept
    assert faults < 100  # 81,920 pages of 4 KB are written


@GLIBC
@pytest.mark.parametrize(
    "given",
    [
        {"JAX_PLATFORMS": "cuda"},
        pytest.param({"MALLOC_ARENA_MAX": "2"}, marks=pytest.mark.slow),
        pytest.param({"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}, marks=pytest.mark.slow),
    ],
)
def test_an_accelerator_and_what_the_user_has_set_are_left_alone(given):
    kept, faults = pages(**{"JAX_PLATFORMS": "cpu"} | given)
    assert not kept
    assert faults > 1000

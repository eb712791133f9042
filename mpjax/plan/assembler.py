"""A stand-in for NVIDIA's assembler: the machine code of a program that will not run here need not be made.

XLA hands every kernel to `ptxas` of CUDA's toolkit. What a plan reads is settled before: kernels, buffers, layouts. So
a plan needs no toolkit, and no old one for the V100, which CUDA 13 no longer knows.
"""

import atexit
import functools
import pathlib
import shutil
import tempfile


# The version is that of a toolkit whose ptxas knows all of mpjax.plan.devices; the result has to be a file, any file.
_SCRIPT = """#!/bin/sh
if [ "$1" = --version ]; then echo 'Cuda compilation tools, release 12.9, V12.9.86'; exit; fi
while [ $# -gt 1 ]; do
  if [ "$1" = -o ]; then echo none > "$2"; exit; fi
  shift
done
"""


@functools.cache
def toolkit_folder() -> str:
    """A folder for XLA's `xla_gpu_cuda_data_dir`, with `bin/ptxas` in it; gone when Python ends."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="mpjax_plan_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "bin").mkdir()
    for name in ("ptxas", "nvlink"):
        (folder / "bin" / name).write_text(_SCRIPT)
        (folder / "bin" / name).chmod(0o755)
    return str(folder)

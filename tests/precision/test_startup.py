"""What `import mpjax.precision` costs a program that has imported JAX."""

import subprocess
import sys


CODE = """
import sys, time
import jax
before = time.perf_counter()
import mpjax.precision
print(time.perf_counter() - before, *sys.modules)
"""


def test_precision_is_imported_in_a_fifth_of_a_second_and_without_flax_and_the_data_libraries():
    runs = [subprocess.check_output([sys.executable, "-c", CODE], text=True).split() for _ in range(5)]
    assert not {"flax", "grain", "tensorflow_datasets", "orbax"} & set(runs[0])
    assert min(float(seconds) for seconds, *_ in runs) <= 0.2

"""Callbacks: one looks at the model after each evaluation, one stops a run that is good enough.

python scripts/train.py --loop.callbacks docs/examples/parts/callbacks.py:Norms
"""

import jax.numpy as jnp
from flax import nnx

from mpjax.extend import Callback


class Norms(Callback):
    """Writes the norm of each parameter to `norms.txt` in the run's folder."""

    def started(self, run):
        """Remembers the file; with several processes only one writes."""
        self.file = run.folder / "norms.txt" if run.first else None

    def evaluated(self, step, metrics, model):
        """Adds the norms at this step."""
        if self.file:
            leaves = nnx.to_flat_state(nnx.state(model(), nnx.Param))
            norms = {"/".join(map(str, path)): float(jnp.linalg.norm(leaf[...])) for path, leaf in leaves}
            with self.file.open("a") as file:
                print(step, norms, file=file)


class GoodEnough(Callback):
    """Stops at 90 % accuracy; the run is evaluated, saved and summarised as at its end."""

    def evaluated(self, step, metrics, model):
        """Asks to stop."""
        return "stop" if metrics["test/accuracy"] >= 0.9 else None

"""A parameter that nothing moves keeps every bit through a run, its stop, and a resumption in any form."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.commands import run
from mpjax.config import load_config
from mpjax.loop import read_checkpoint


SMALL = f"--model.name {__file__}:Net --data.name synthetic:4x4x1:3 --data.batch_size 24 --loop.eval_every 0"
FORMS = {
    "float32": "--precision.policy float32 --precision.master_weights auto",
    "accumulated": "--precision.policy mixed_float16 --optimizer.name adamw --training.accumulate 2",
    "masters": "--precision.policy float16 --optimizer.name adamw --optimizer.moments bfloat16 --training.ema 0.9",
    "stochastic": "--precision.policy bfloat16 --precision.master_weights stochastic --optimizer.name lion",
    "divided": "--precision.policy bfloat16 --optimizer.name lamb --mesh.fsdp 2 --mesh.data 1",
    "kahan": "--precision.policy bfloat16 --precision.master_weights kahan --optimizer.name adamw",
}
NUMBERS = np.array([-0.0, 0.0, 1.5, -(2.0**-24), -0.0, 2.0**-20, -0.0, -2.0], np.float32)


class Net(nnx.Module):
    """A classifier with a parameter that the loss does not depend on."""

    def __init__(self, fields, *, rngs):
        self.head = nnx.Linear(16, 3, rngs=rngs)
        self.spare = nnx.Param(jnp.asarray(NUMBERS))

    def __call__(self, x):
        return self.head(x.reshape(len(x), -1))


@pytest.mark.slow
@pytest.mark.parametrize(("form", "then"), [("accumulated", "accumulated"), *itertools.pairwise([*FORMS, "float32"])])
def test_what_no_gradient_reaches_keeps_every_bit_through_a_run_and_its_resumption(tmp_path, form, then):
    folder = tmp_path / "run"
    for steps, flags in ((2, FORMS[form]), (4, f"{FORMS[then]} --resume")):
        run(load_config(f"--output_dir {folder} {SMALL} {flags} --steps {steps}".split()))
        position, arrays, _ = read_checkpoint(folder / "checkpoints")
        assert position == steps
        spare = arrays["params/spare"]
        assert spare.tobytes() == NUMBERS.astype(spare.dtype).tobytes()
        assert not np.array_equal(arrays["params/head/bias"], np.zeros(3, np.float32))

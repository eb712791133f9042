"""Checks a model of the user's that `--mesh.context` calls with parts of texts, by its logits."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.commands.build import Run
from mpjax.commands.context import CONTRACT
from mpjax.errors import UsageError
from mpjax.mesh_axes import CONTEXT
from mpjax.models.transformer import WholeTexts
from mpjax.precision.dtypes import FLOAT32
from mpjax.training.eval_step import in_evaluation
from mpjax.training.state import TrainState


def require_same_logits(run: Run, state: TrainState) -> None:
    """Checks that the model of a run computes from parts of texts what it computes from whole ones.

    It is called with short texts of random tokens in both ways, in evaluation mode, on the devices of the run. All
    processes call this together.

    Args:
      run: a run whose layout divides texts.
      state: the unpacked state.

    Raises:
      UsageError: a logit differs by more than rounding explains.
    """
    layout = run.layout
    tokens: Any = run.learner.fields["tokens"]
    parts = layout.mesh.shape[CONTEXT]
    shape = layout.shares, min(tokens.length - 1, 8 * parts)
    texts = {"tokens": np.random.default_rng(0).integers(0, tokens.vocabulary, shape, np.int32)}

    def compare(model: Any, texts: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        own = model(model.context.own(texts["tokens"])).astype(FLOAT32)
        in_parts = jax.lax.all_gather(own, CONTEXT, axis=1, tiled=True)
        model.context = WholeTexts()
        whole = model(texts["tokens"]).astype(FLOAT32)
        largest = functools.partial(jnp.max, axis=(1, 2))
        return {"difference": largest(jnp.abs(in_parts - whole)), "size": largest(jnp.abs(whole))}

    shards, on_shard = in_evaluation(run.task.structure, compare, cast=run.task.cast, layout=layout)
    compared = shards.per_example(on_shard)

    @functools.partial(jax.jit, out_shardings=layout.replicated)
    def largest(params: Any, stats: Any) -> dict[str, jax.Array]:
        return jax.tree.map(jnp.max, compared(params, stats, texts))

    found = {name: float(value) for name, value in largest(state.params, state.stats).items()}
    # The same numbers are added in another order, where XLA compiles other shapes otherwise.
    rounding = max(1e-5, 8 * float(jnp.finfo(run.plan.policy.compute_dtype).eps))
    if not found["difference"] <= rounding * found["size"]:
        raise UsageError(
            f"--mesh.context {parts}: --model.name {run.config.model.name} computes other logits from parts of texts "
            f"than from whole ones: they differ by up to {found['difference']:.2g} of {found['size']:.2g}: {CONTRACT}"
        )

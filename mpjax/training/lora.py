"""The adapters of a run: which parameters are frozen, what these are stored in, and what the checkpoint leaves out."""

import dataclasses
import functools
from collections.abc import Collection, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from mpjax.config.schema import Training
from mpjax.errors import UsageError
from mpjax.models.lora import FLAG, add_lora, lora_layers
from mpjax.models.pretrained.files import variables_of
from mpjax.models.scan import names_apart, stacks_of
from mpjax.precision.dtypes import as_dtype, is_floating
from mpjax.precision.modules import stored_dtypes
from mpjax.precision.policy import Policy
from mpjax.precision.policy_report import PolicyReport
from mpjax.training.freezing import covered_paths
from mpjax.training.state import Arrays, Structure, take_apart


_ADAPTERS = 2**30
"""Folded into the key of the initial values, for those of adapters."""


@dataclasses.dataclass(frozen=True)
class Lora:
    """The adapters of a run, before its model has them.

    Attributes:
      settings: the settings of the training step.
      frozen: the paths of the parameters and statistics that are not trained.
      dtypes: the dtype to store frozen parameters in, by path; empty: as the policy stores them.
    """

    settings: Training
    frozen: frozenset[str]
    dtypes: Mapping[str, np.dtype]

    def store(self, model: nnx.Module, report: PolicyReport) -> PolicyReport:
        """Casts the frozen parameters of a model, after its policy, in place; returns the report with their dtypes."""
        if not self.dtypes:
            return report
        cast = set()
        for path, variable in variables_of(model).items():
            if path in self.dtypes:
                variable.set_value(_astype(variable.get_value(), self.dtypes[path]))
                cast.add((path.rpartition("/")[0], self.dtypes[path]))
        of_modules = dict(sorted(cast, key=str))
        rows = (row._replace(param_dtype=of_modules.get(row.path, row.param_dtype)) for row in report)
        return PolicyReport(rows, report.notes)

    def add(self, model: nnx.Module, key: jax.Array) -> None:
        """Adds the adapters to a model that has its weights, in place."""
        settings = self.settings
        add_lora(
            model,
            settings.lora,
            rank=settings.lora_rank,
            alpha=settings.lora_alpha,
            variant=settings.lora_variant,
            rngs=nnx.Rngs(jax.random.fold_in(key, _ADAPTERS)),
        )

    def completed(self, base: Structure, params: Arrays, stats: Arrays, key: jax.Array) -> tuple[Arrays, Arrays]:
        """Adds the arrays of adapters to those of a model: `Task.complete`, once `base` is given."""
        model = base.assemble(params, stats)
        self.add(model, key)
        return take_apart(model)[1:]

    def adapted(self, abstract: nnx.Module) -> Any:
        """Adds adapters to the abstract model of a task, after its policy, in place, and returns its `complete`."""
        complete = functools.partial(self.completed, take_apart(abstract)[0])
        self.add(abstract, jax.random.key(0))
        return complete


def lora_of(settings: Training, model: nnx.Module, policy: Policy) -> Lora:
    """Plans the adapters of an abstract model that has none yet.

    Raises:
      UsageError: as `add_lora`; a pattern of trained parameters matches nothing, all parameters, some blocks of a
        stack, or a weight that has an adapter; or the policy's rules or dtypes do not allow the dtype of frozen ones.
    """
    layers = lora_layers(model, settings.lora)
    _, params, stats = take_apart(model)
    trained = covered_paths(model, settings.lora_trained, "--training.lora_trained")
    if both := sorted(f"{path}/kernel" for path in layers if f"{path}/kernel" in trained):
        raise UsageError(
            f"--training.lora_trained {' '.join(settings.lora_trained)} covers {both[0]}, which has an adapter by "
            f"{FLAG}: take it out of one of them"
        )
    if trained >= set(params):
        raise UsageError(
            f"--training.lora_trained {' '.join(settings.lora_trained)} covers all parameters: leave out --training.lora"
        )
    frozen = frozenset(params | stats) - trained
    dtypes = {}
    if settings.lora_base != "policy":
        stored = stored_dtypes(model, dataclasses.replace(policy, param_dtype=as_dtype(settings.lora_base)))
        dtypes = {path: stored[path] for path in params if path in frozen and is_floating(params[path])}
    return Lora(settings, frozen, dtypes)


def _astype(value: Any, dtype: np.dtype) -> Any:
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(value.shape, dtype)
    return value.astype(dtype)


def left_out(frozen: Collection[str], loaded: Collection[str], model: nnx.Module) -> frozenset[str]:
    """The paths of the arrays that a checkpoint leaves out: frozen ones that a file has.

    Args:
      frozen: the paths of the arrays that are not trained.
      loaded: the paths of the arrays in the file, of single blocks.
      model: the model, which says which arrays are stacks of blocks.
    """
    stacks, loaded = stacks_of(model), set(loaded)
    return frozenset(path for path in frozen if loaded.issuperset(names_apart(path, stacks)))

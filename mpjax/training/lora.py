"""The adapters of a run: which parameters are frozen, what these are stored in, and what the checkpoint leaves out."""

import dataclasses
import functools
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import jax
import numpy as np
from flax import nnx

from mpjax.config.schema import Training
from mpjax.errors import UsageError
from mpjax.models.adapters import adapted_layers
from mpjax.models.lora import FLAG, add_lora, has_known_product, lora_layers
from mpjax.models.pretrained.files import variables_of
from mpjax.models.quantised import SCALES, Kind, quantise
from mpjax.models.scan import names_apart, stacks_of
from mpjax.precision.calls import modules_of, wrap
from mpjax.precision.dtypes import as_dtype, is_floating
from mpjax.precision.heads import layer_tags
from mpjax.precision.modules import stored_dtypes
from mpjax.precision.policy import Policy
from mpjax.precision.policy_report import PolicyReport
from mpjax.precision.rules import HEAD
from mpjax.training.freezing import covered_paths
from mpjax.training.setup import Task
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
      codes: the codes of the layers that are quantised, by path.
    """

    settings: Training
    frozen: frozenset[str]
    dtypes: Mapping[str, np.dtype]
    codes: Mapping[str, Kind]

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
        """Quantises frozen weights of a model that has its weights, and adds the adapters, in place."""
        settings, modules = self.settings, modules_of(model)
        for path, kind in self.codes.items():
            quantise(modules[path], kind)
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
            f"--training.lora_trained {' '.join(settings.lora_trained)} covers all parameters: leave out {FLAG}"
        )
    frozen = frozenset(params | stats) - trained
    base = settings.lora_base
    dtypes: dict[str, np.dtype] = {}
    codes: dict[str, Kind] = {}
    if base == "int8" or base == "nf4":
        codes = {path: base for path in _quantisable(model, policy, base) if f"{path}/kernel" in frozen}
        frozen |= {f"{path}/{SCALES}" for path in codes}
    if base != "policy":
        stored = stored_dtypes(model, dataclasses.replace(policy, param_dtype=as_dtype("bfloat16" if codes else base)))
        dtypes = {path: stored[path] for path in params if path in frozen and is_floating(params[path])}
        # Codes are made of the weights as a file has them.
        dtypes |= {f"{path}/kernel": params[f"{path}/kernel"].dtype for path in codes}
    return Lora(settings, frozen, dtypes, codes)


def _quantisable(model: nnx.Module, policy: Policy, kind: str) -> list[str]:
    """The paths of the linear layers of a model whose weights become codes: all but heads.

    Raises:
      UsageError: the policy's products are in float8, or there is no such layer.
    """
    if policy.recipes:
        raise UsageError(
            f"--training.lora_base {kind} under {policy}: weights in codes are for products in half precision or "
            "float32, not float8; write --precision.policy mixed_bfloat16, or --training.lora_base bfloat16"
        )
    modules = modules_of(model)
    tags, head = layer_tags(modules), HEAD.removeprefix("type:")
    return [path for path, module in modules.items() if has_known_product(module) and head not in tags.get(path, ())]


def _astype(value: Any, dtype: np.dtype) -> Any:
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(value.shape, dtype)
    return value.astype(dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class _Heard:
    """A wrapper that writes down that a module is called."""

    path: str
    calls: set[str]
    depth: ClassVar[int] = -1

    def __call__(self, call, module, *args, **kwargs):
        self.calls.add(self.path)
        return call(module, *args, **kwargs)


def require_called(task: Task, batch: Mapping[str, Any]) -> None:
    """Checks that a training step calls each layer with an adapter, by tracing its loss on a prepared batch of shapes.

    Raises:
      UsageError: it does not call one, as in code that reads the weight of a layer: the adapter would change nothing.
    """
    calls: set[str] = set()
    structure, params, stats = take_apart(task.abstract)

    def loss_of(params, stats, key, batch):
        model = structure.assemble(params, stats, key)
        model.train()
        for path, layer in adapted_layers(model).items():
            wrap(layer, _Heard(path, calls))
        return task.objective.loss_of(model, batch, key)[0]

    jax.eval_shape(loss_of, params, stats, jax.eval_shape(jax.random.key, 0), batch)
    if silent := sorted(adapted_layers(task.abstract).keys() - calls):
        raise UsageError(
            f"{FLAG} covers {silent[0]}, which the model does not call, so its adapter would change nothing: leave it "
            "out of the patterns, or call the layer in place of reading its weight"
        )


def source_of(path: str) -> str:
    """The path in a file of what an array of the state is made of: scales of codes, of a kernel."""
    return path.removesuffix(SCALES) + "kernel" if path.endswith(f"/{SCALES}") else path


def left_out(frozen: Collection[str], loaded: Collection[str], model: nnx.Module) -> frozenset[str]:
    """The paths of the arrays that a checkpoint leaves out: frozen ones that a file has.

    Args:
      frozen: the paths of the arrays that are not trained.
      loaded: the paths of the arrays in the file, of single blocks.
      model: the model, which says which arrays are stacks of blocks.
    """
    stacks, loaded = stacks_of(model), set(loaded)
    return frozenset(path for path in frozen if loaded.issuperset(names_apart(source_of(path), stacks)))

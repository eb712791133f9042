"""Exports the adapters of a model alone, in the layout that PEFT reads (`PeftModel.from_pretrained`)."""

import os
from typing import Any

import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from mpjax.config.paths import expanded
from mpjax.errors import UsageError
from mpjax.files import write_atomically
from mpjax.models.adapters import Added, AddedByRoot, Renormalised, adapted_layers, adapter_of, on_host
from mpjax.models.pretrained.export import write_tensors
from mpjax.models.pretrained.layouts.entry import FileEntry, WeightMap
from mpjax.models.pretrained.layouts.families import layouts_of
from mpjax.models.pretrained.layouts.in_memory import loaded_name
from mpjax.models.pretrained.load import cast, losses, refusal
from mpjax.models.quantised import restore
from mpjax.models.scan import one_by_one
from mpjax.precision.calls import modules_of
from mpjax.precision.dtypes import as_dtype
from mpjax.precision.float8.layers import sides
from mpjax.strict_json import encode


WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"

_REFUSED = ".mixer.out_proj"
"""The end of the name of a layer of Mamba-2 whose adapters PEFT refuses to load."""

_PREFIX = "base_model.model."
"""What PEFT's wrappers put before the names of the model."""


def export_adapter(
    model: nnx.Module, path: str | os.PathLike, *, base: str, task: str | None, dtype: DTypeLike = "float32"
) -> int:
    """Writes a folder with `adapter_config.json` and `adapter_model.safetensors`; returns the number of their values.

    The base model is that of transformers with the same weights. Layers have their names in transformers 5, which
    renames some of its files (the layout "huggingface").

    Args:
      model: a model with adapters (`mpjax.models.lora.add_lora`), of one rank, alpha and variant.
      path: the folder, which must be empty or absent.
      base: the folder or the id of the base model, which PEFT reads from the file.
      task: PEFT's name of the task, such as "CAUSAL_LM"; None for others.
      dtype: the dtype of the arrays in the file.

    Raises:
      UsageError: `path` is a file or not empty; transformers has no such model; there are no adapters, or of several
        kinds; a layer is a part of a fused one there, as query, key and value of GPT-2 are; or values overflow or flush
        to zero in `dtype`.
    """
    model, folder, target = one_by_one(model), expanded(path), as_dtype(dtype)
    layers, known = adapted_layers(model), layouts_of(model)
    if not layers:
        raise UsageError(f"{type(model).__name__} has no adapters: add them by mpjax.models.lora.add_lora")
    if "huggingface" not in known:
        raise UsageError(
            f"{type(model).__name__} is no model of transformers, whose names an adapter's file has; export the merged "
            "weights"
        )
    shapes = nnx.eval_shape(_restored, model)  # quantised layers have kernels in it, not codes
    layout, of_kernels = known["huggingface"](shapes), modules_of(shapes)
    entries = layout.entries
    kinds = {(adapter_of(layer), layer.lora_a[...].shape[-1]) for layer in layers.values()}
    if len(kinds) > 1:
        raise UsageError(f"adapters of several kinds: wanted one rank, alpha and variant, got {sorted(kinds, key=str)}")
    adapter, rank = kinds.pop()

    tensors, names, first = {}, {}, set()
    for layer_path, layer in layers.items():
        entry = entries[f"{layer_path}/kernel"]
        if entry.part is not None:
            raise UsageError(
                f"{layer_path} is a part of {entry.key} in the files of transformers, which has one adapter there: "
                "export the merged weights"
            )
        names[layer_path] = _in_memory(entry, layout)
        if names[layer_path].endswith(_REFUSED):
            raise UsageError(
                f"PEFT loads no adapter of {names[layer_path]}: export the merged weights, or train without one of "
                f"{layer_path}"
            )
        first.add(_outputs_first(of_kernels[layer_path], entry))
        arrays = {"lora_A.weight": on_host(layer.lora_a).T, "lora_B.weight": on_host(layer.lora_b).T}
        if isinstance(adapter, Renormalised):
            arrays["lora_magnitude_vector"] = on_host(layer.magnitude)
        tensors |= {f"{_PREFIX}{names[layer_path]}.{name}": array for name, array in arrays.items()}
    if len(first) > 1:
        raise UsageError("some layers have their outputs first in the files and some last: export the merged weights")
    _require_kept(tensors, target)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is not an empty folder: write another one")
    folder.mkdir(parents=True, exist_ok=True)
    written = {name: np.array(cast(array, target), order="C") for name, array in tensors.items()}
    write_tensors(folder / WEIGHTS, written, format="pt")
    # The matrices of experts have names of layers too.
    linear = {_in_memory(entry, layout) for name, entry in entries.items() if name.endswith("/kernel") or entry.rows}
    settings = _config(adapter, rank, _targets(set(names.values()), linear), base=base, task=task)
    settings["fan_in_fan_out"] = not first.pop()
    write_atomically(folder / CONFIG, (encode(settings, indent=2) + "\n").encode())
    return sum(array.size for array in written.values())


def _in_memory(entry: FileEntry, layout: WeightMap) -> str:
    """The name of the layer of a kernel in the loaded model of transformers 5, by which PEFT finds it."""
    return loaded_name(entry.key.removesuffix(".weight"), layout.in_memory)


def _restored(model: nnx.Module) -> nnx.Module:
    model = nnx.clone(model)
    for layer in modules_of(model).values():
        restore(layer)
    return model


def _config(adapter: Any, rank: int, targets: list[str], *, base: str, task: str | None) -> dict[str, Any]:
    assert isinstance(adapter, Added)
    alpha = int(adapter.alpha) if adapter.alpha == int(adapter.alpha) else adapter.alpha
    return {
        "base_model_name_or_path": base,
        "bias": "none",
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": targets,
        "task_type": task,
        "use_dora": isinstance(adapter, Renormalised),
        "use_rslora": isinstance(adapter, AddedByRoot),
    }


def _targets(adapted: set[str], layers: set[str]) -> list[str]:
    """The names by which PEFT finds the adapted layers: their last parts, if no other layer has these."""
    ends = {name.rpartition(".")[2] for name in adapted}
    same = {name for name in layers if name.rpartition(".")[2] in ends}
    return sorted(ends if same == adapted else adapted)


def _outputs_first(layer: Any, entry: FileEntry) -> bool:
    """True if the matrix of a layer in the file is [out, in], as of a `torch.nn.Linear`."""
    inputs, outputs = sides(layer)
    numbers = np.broadcast_to(np.arange(outputs), (inputs, outputs)).reshape(layer.kernel.get_value().shape)
    file_array = entry.transform.write(numbers)
    return file_array.shape == (outputs, inputs) and np.array_equal(file_array[:, 0], np.arange(outputs))


def _require_kept(tensors: dict[str, np.ndarray], target: np.dtype) -> None:
    lossy = []
    for name, array in tensors.items():
        lost = losses(array, target)
        if lost.nonfinite:
            raise UsageError(f"{name} has {lost.nonfinite} values that are not finite: nothing was written")
        if lost.overflow or lost.flushed:
            lossy.append(f"{name}: {lost.overflow} of {array.size} values overflow and {lost.flushed} flush to zero")
    if lossy:
        raise UsageError(refusal("nothing was written", lossy, "write a wider dtype: --dtype bfloat16 or float32"))

"""What a linear layer with a low-rank adapter computes: wrappers of its call, and the weight that it stands for."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from mpjax.models.quantised import axes_of_kernel, dtype_of_kernel, kernel_of
from mpjax.precision.calls import modules_of, wrappers_of
from mpjax.precision.dtypes import FLOAT32, widest
from mpjax.precision.float8.layers import sides
from mpjax.precision.layers import DOT_GENERAL, without_bias


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float


SCOPE = "lora"
"""The named scope of an adapter's products, inside that of its layer: they are not in float8, as the layer's may be."""


ADAPTED = "adapted"
"""The name of the output of a layer with an adapter, for policies of `jax.checkpoint`."""


class Adapter(nnx.Param):
    """An array of an adapter, float32 or wider under every policy."""

    in_float32 = True


@dataclasses.dataclass(frozen=True)
class Added:
    """A wrapper that adds the product of the input and an adapter to the output of a linear layer.

    Both products of the adapter are in the layer's dtype. The last one keeps its float32 sums, and is added to the
    output in float32 before that is rounded.

    Attributes:
      alpha: the factor of the adapter's product, times its rank.
    """

    alpha: float
    depth: ClassVar[int] = 7

    def __call__(self, call, module, inputs, *args, **kwargs):
        """Calls a layer and adds the adapter's product, in the dtype of the layer's output."""
        y = call(module, inputs, *args, **kwargs)
        return _kept(_wide_sum(y, _change(module, inputs, y) * self.scale(module)).astype(y.dtype))

    def scale(self, layer: Any) -> float:
        """The factor of the adapter's product: s."""
        return self.alpha / _rank(layer)

    def weight(self, layer: Any) -> np.ndarray:
        """Computes the weight that the layer stands for, float32 [*S, in, out], on the host."""
        kernel, a, b = map(on_host, (matrix_of(layer), layer.lora_a, layer.lora_b))
        return kernel + np.float32(self.scale(layer)) * (a @ b)


@dataclasses.dataclass(frozen=True)
class Renormalised(Added):
    """A wrapper that computes with the weight of an adapted layer, its columns scaled to trained norms: DoRA.

    As in section 4.3 of the paper, no gradient flows through the norms of the columns. They are computed from the
    adapter in the layer's dtype, as its products are.
    """

    def __call__(self, call, module, inputs, *args, **kwargs):
        """Calls a layer without its bias, adds the adapter's product, scales each output, and adds the bias."""
        y = call(without_bias(module), inputs, *args, **kwargs)
        with jax.named_scope(SCOPE):
            product = DOT_GENERAL(*_arrays(module, _dtype_of(module, inputs)), _last_by_first(2))
            norms = jax.lax.stop_gradient(norms_of(_wide_sum(matrix_of(module), product * self.scale(module))))
        factors = module.magnitude[...].astype(norms.dtype) / jnp.where(norms == 0, 1, norms)
        changed = _wide_sum(y, _change(module, inputs, y) * self.scale(module))
        rows = changed.reshape(-1, factors.size)
        scaled = (rows * jnp.broadcast_to(factors.astype(rows.dtype), rows.shape)).reshape(changed.shape)
        if module.bias is not None:
            scaled = _wide_sum(scaled, jnp.broadcast_to(module.bias[...].astype(scaled.dtype), scaled.shape))
        return _kept(scaled.astype(y.dtype))

    def weight(self, layer: Any) -> np.ndarray:
        """Computes the weight that the layer stands for, float32 [*S, in, out], on the host."""
        weight = super().weight(layer)
        norms = np.sqrt(np.sum(np.square(weight), axis=-2, keepdims=True))
        return weight * (on_host(layer.magnitude)[..., None, :] / np.where(norms == 0, np.float32(1), norms))


@dataclasses.dataclass(frozen=True)
class AddedByRoot(Added):
    """A wrapper whose adapters keep their size as their rank grows: rsLoRA. `alpha` is over the root of the rank."""

    def scale(self, layer: Any) -> float:
        """The factor of the adapter's product: s."""
        return self.alpha / math.sqrt(_rank(layer))


WRAPPERS: dict[str, type[Added]] = {"lora": Added, "rslora": AddedByRoot, "dora": Renormalised}


def _rank(layer: Any) -> int:
    return layer.lora_a.get_value().shape[-1]


def _last_by_first(ndim: int) -> Any:
    return ((ndim - 1,), (0,)), ((), ())


def _dtype_of(layer: Any, inputs: jax.Array) -> Any:
    """The dtype in which a layer multiplies."""
    return layer.dtype or jnp.promote_types(inputs.dtype, dtype_of_kernel(layer))


def _change(layer: Any, inputs: jax.Array, like: jax.Array) -> jax.Array:
    """Multiplies inputs by an adapter, float32 or wider in the shape of `like`, the output of the layer."""
    axes = layer.axis if isinstance(layer, nnx.LinearGeneral) else -1
    axes = [axis % inputs.ndim for axis in ((axes,) if isinstance(axes, int) else axes)]
    others = [axis for axis in range(inputs.ndim) if axis not in axes]
    with jax.named_scope(SCOPE):
        x = jnp.transpose(inputs, (*others, *axes)).reshape(*(inputs.shape[axis] for axis in others), -1)
        a, b = _arrays(layer, dtype := _dtype_of(layer, inputs))
        inner = jax.lax.dot_general(x.astype(dtype), a, _last_by_first(x.ndim))
        return DOT_GENERAL(inner, b, _last_by_first(x.ndim)).reshape(like.shape)


def _arrays(layer: Any, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """A and B of a layer, in a dtype."""
    return layer.lora_a[...].astype(dtype), layer.lora_b[...].astype(dtype)


def _kept(y: jax.Array) -> jax.Array:
    """Marks the output of a layer, which a backward pass that recomputes keeps in place of its float32 terms."""
    return checkpoint_name(y, ADAPTED)


def _wide_sum(x: jax.Array, change: jax.Array) -> jax.Array:
    dtype = widest(x.dtype, change.dtype, FLOAT32)
    return x.astype(dtype) + change.astype(dtype)


def matrix_of(layer: Any) -> Float[Array, "*S K N"]:
    """The kernel of a layer as a matrix, or as several in a stack of blocks."""
    return kernel_of(layer).reshape(*stack_of_layer(layer), *sides(layer))


def stack_of_layer(layer: Any) -> tuple[int, ...]:
    """The axis of blocks of a layer in a stack; empty for others."""
    kernel = layer.kernel.get_value()
    return kernel.shape[: kernel.ndim - axes_of_kernel(layer)]


def norms_of(matrices: Float[Array, "*S K N"]) -> Float[Array, "*S N"]:
    """The norm of each column, in float32 or wider."""
    wide = matrices.astype(widest(matrices.dtype, FLOAT32))
    return jnp.sqrt(jnp.sum(jnp.square(wide), axis=-2))


def is_adapted(layer: Any) -> bool:
    """True for a layer with an adapter."""
    return adapter_of(layer) is not None


def adapter_of(layer: Any) -> Added | None:
    """The wrapper of a layer with an adapter, or None."""
    return next((wrapper for wrapper in wrappers_of(layer) if isinstance(wrapper, Added)), None)


def adapted_layers(model: nnx.Module) -> dict[str, Any]:
    """The layers of a model with adapters, by path."""
    return {path: module for path, module in modules_of(model).items() if is_adapted(module)}


def on_host(array: Any) -> np.ndarray:
    """Fetches an array or a variable to the host, float32 or wider."""
    value = array[...] if isinstance(array, nnx.Variable) else array
    value = np.asarray(jax.device_get(value))
    return value.astype(widest(value.dtype, FLOAT32))

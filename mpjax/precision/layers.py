"""Wrappers for Flax layers: casts of inputs and outputs, sums and products in float32, carries that keep one dtype."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.errors import DtypeError
from mpjax.precision.calls import Scope, unwrap, wrap, wrappers_of
from mpjax.precision.dtypes import FLOAT32, is_floating, widest


def keep_carried(module, dtype: np.dtype) -> None:
    """Makes a recurrent cell keep the dtypes of its carry, or attention keep its decoding cache in `dtype`, in place.

    A cache that exists is cast at once. Other modules do not change. A later call replaces the earlier `dtype`.
    """
    from flax import nnx

    for kind in (KeepsCarry, CachesIn):
        unwrap(module, kind)
    if isinstance(module, nnx.RNNCellBase):
        wrap(module, KeepsCarry())
    if isinstance(module, nnx.MultiHeadAttention):
        wrap(module, CachesIn(np.dtype(dtype)))
        cast_cache(module, np.dtype(dtype))


@dataclasses.dataclass(frozen=True)
class KeepsCarry:
    """A wrapper for a recurrent cell, `(carry, inputs) -> (carry, outputs)`: the carry keeps its dtypes."""

    depth: ClassVar[int] = 2

    def __call__(self, call, module, carry, *args, **kwargs):
        """Calls a cell, and casts each floating array of the new carry to the dtype that it has in the given carry."""
        new, outputs = call(module, carry, *args, **kwargs)
        return jax.tree.map(lambda a, b: a.astype(b.dtype) if is_floating(a) else a, new, carry), outputs


@dataclasses.dataclass(frozen=True)
class CachesIn:
    """A wrapper for decoding attention that casts the cached keys and values to `dtype`, that of new keys and values.

    Every call casts them in place first, because `init_cache` makes them float32 and may be called at any time.
    """

    dtype: np.dtype
    depth: ClassVar[int] = 4

    def __call__(self, call, module, *args, **kwargs):
        """Casts the cache of a module in place, then calls the module."""
        cast_cache(module, self.dtype)
        return call(module, *args, **kwargs)


def cast_cache(module, dtype: np.dtype) -> None:
    """Casts the cached keys and values of attention in place, also abstract ones; does nothing without a cache."""
    for name in ("cached_key", "cached_value"):
        variable = getattr(module, name, None)
        if variable is None or variable.get_value().dtype == dtype:
            continue
        value = variable.get_value()
        abstract = isinstance(value, jax.ShapeDtypeStruct)
        variable.set_value(jax.ShapeDtypeStruct(value.shape, dtype) if abstract else value.astype(dtype))


def adds_up(module) -> bool:
    """True for Flax's own layers for which `SumsInFloat32` sums the gradient of the bias or embedding table in float32.

    They are linear layers, convolutions and embeddings. False for a subclass, which may compute something else.
    """
    from flax import nnx

    return type(module) in (nnx.Linear, nnx.LinearGeneral, nnx.Conv, nnx.ConvTranspose, nnx.Embed)


def only_sums(module) -> bool:
    """True if `module` has the wrapper `SumsInFloat32`, and besides at most a `Scope` and a wrapper of its product.

    This holds for half-precision layers whose inputs and outputs `apply_policy` does not cast.
    """
    others = {type(wrapper) for wrapper in wrappers_of(module) if not getattr(wrapper, "of_product", False)}
    return others - {Scope} == {SumsInFloat32}


@dataclasses.dataclass(frozen=True)
class SumsInFloat32:
    """A wrapper for layers with `adds_up` that adds the gradient of a bias or embedding table in float32 (or wider).

    Outputs equal Flax's bit for bit.
    """

    depth: ClassVar[int] = 4

    def __call__(self, call, module, *args, **kwargs):
        """Calls a layer. Its bias is broadcast in float32, then cast, and added in the dtype of the product.

        Embeddings are looked up in float32, then cast. A layer without a bias is called as it is.
        """
        if hasattr(module, "embedding"):
            return _with_cast_after(call, module, *args, **kwargs)
        return call(module, *args, **kwargs) if module.bias is None else _with_bias_after(call, module, *args, **kwargs)


def _with_bias_after(call, module, inputs, *args, **kwargs):
    y = call(without_bias(module), inputs, *args, **kwargs)
    bias = module.bias[...]
    bias = bias.astype(widest(bias.dtype, FLOAT32)).reshape(_bias_shape(module, inputs))
    return y + jnp.broadcast_to(bias, y.shape).astype(module.dtype).astype(y.dtype)


def _bias_shape(module, inputs) -> tuple[int, ...]:
    """Computes the shape that a bias is reshaped to before it is broadcast to the result of a layer.

    It is the bias's own shape, except for a `LinearGeneral` with batch axes: other axes of the result get size 1.
    """
    batch_axes = {axis % inputs.ndim for axis in getattr(module, "batch_axis", ())}
    if not batch_axes:
        return module.bias.shape
    contracted = {axis % inputs.ndim for axis in _tuple(module.axis)}
    kept = (axis for axis in range(inputs.ndim) if axis not in contracted)
    return (*(inputs.shape[axis] if axis in batch_axes else 1 for axis in kept), *_tuple(module.out_features))


def _tuple(value) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)


def _with_cast_after(call, module, *args, **kwargs):
    table = module.embedding[...]
    outputs = call(changed(module, dtype=widest(table.dtype, FLOAT32)), *args, **kwargs)
    return outputs.astype(module.dtype)


def changed(module, **attributes):
    """Copies `module` shallowly and sets the given attributes of the copy, for use during one call.

    Submodules and variables are shared with `module`, which does not change.
    """
    changed = object.__new__(type(module))
    vars(changed).update(vars(module), **attributes)
    return changed


def without_bias(layer):
    """Copies a linear layer shallowly, without its bias, for use during one call; the kernel is shared."""
    return changed(layer, bias=None, use_bias=False)


def _cast_floating(tree, dtype: np.dtype | None):
    if dtype is None:
        return tree
    return jax.tree.map(lambda x: x.astype(dtype) if is_floating(x) else x, tree)


@dataclasses.dataclass(frozen=True)
class Casts:
    """A wrapper that casts the floating inputs of a call to `inside` and its floating outputs to `outside`.

    A dtype of None leaves values unchanged.

    Attributes:
      inside: the dtype of the inputs.
      outside: the dtype of the outputs.
      restores: whether an output with the shape of an input gets the dtype that this input had before the cast; for
        several inputs of one shape, the dtype to which JAX promotes theirs. A norm or a gate then does not change the
        dtype of its input, and the logits of a head, which have another shape, are not rounded.
    """

    inside: np.dtype | None
    outside: np.dtype | None
    restores: bool = False
    depth: ClassVar[int] = 3

    def __call__(self, call, module, *args, **kwargs):
        """Casts the floating inputs, calls the module, and casts its floating outputs.

        Raises:
          DtypeError: the carry of a JAX loop in the module (`lax.scan`, `lax.while_loop`) changes its dtype.
        """
        before: dict[tuple[int, ...], Any] = {}
        for x in filter(is_floating, jax.tree.leaves((args, kwargs)) if self.restores else ()):
            before[x.shape] = widest(before.get(x.shape, x.dtype), x.dtype)
        args, kwargs = _cast_floating((args, kwargs), self.inside)
        try:
            outputs = _cast_floating(call(module, *args, **kwargs), self.outside)
            return jax.tree.map(
                lambda x: x.astype(before[x.shape]) if is_floating(x) and x.shape in before else x, outputs
            )
        except TypeError as error:
            if "carry input and carry output must have equal types" not in str(error) or isinstance(error, DtypeError):
                raise
            which = next((line for line in str(error).splitlines() if "has type" in line), "")
            raise DtypeError(
                f"{type(module).__name__}: the carry of a loop changes its dtype, because under the policy the layers "
                f"in the loop compute in a dtype other than the carry's. {which.strip()} Cast the carry before the "
                "loop, as in x = x.astype(self.layers.dtype), or cast the body's result to the dtype of its input."
            ) from error


@dataclasses.dataclass(frozen=True)
class InFloat32:
    """A product of half-precision arrays with a result in float32; its derivatives are products in half precision.

    Attributes:
      product: `jax.lax.dot_general` or `jax.lax.conv_general_dilated`; an instance has the same signature.
    """

    product: Callable

    def __call__(self, x: jax.Array, kernel: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        """Multiplies `x` by `kernel` with a result in float32; operands of 32 bits or more are multiplied as usual."""
        if jnp.result_type(x, kernel).itemsize >= FLOAT32.itemsize:
            return self.product(x, kernel, *args, **kwargs)

        kernel, width = _aligned(kernel, *args, **kwargs) if self.product is jax.lax.dot_general else (kernel, None)
        product = functools.partial(self.product, **kwargs)

        @jax.custom_jvp
        def in_float32(x, kernel):
            # A CPU has no such product. XLA widens the operands for it, unless it has rewritten the product before.
            x, kernel = jax.lax.optimization_barrier((x, kernel))
            result = product(x, kernel, *args, preferred_element_type=FLOAT32)
            # Fused with the slice, the product would write rows that are not aligned.
            return result if width is None else jax.lax.optimization_barrier(result)

        @in_float32.defjvp
        def _(primals, tangents):
            (x, kernel), (dx, dkernel) = primals, tangents
            change = product(dx, kernel, *args) + product(x, dkernel, *args)
            return in_float32(x, kernel), change.astype(FLOAT32)

        return in_float32(x, kernel)[..., :width]


_LARGE, _ALIGNMENT = 2**12, 64


def _aligned(kernel: jax.Array, dimension_numbers: Any, *_: Any, **__: Any) -> tuple[jax.Array, int | None]:
    """Pads the output features of a kernel with zeros to a multiple of 64, so that rows of the product are aligned.

    A GPU loads 16 bytes at once, from a multiple of 16 bytes. Rows of 50,257 values begin elsewhere: with them, a step
    of GPT-2 takes 80.0 ms on an H200, and 66.7 ms with rows of 50,304 (docs/measured.md). The gradients of the product
    are padded too.

    Returns:
      The padded kernel and the number of its output features before. If these are fewer than 4,096 or already a
      multiple of 64, or if the kernel has batch axes or not one output axis: the kernel as it is, and None.
    """
    (_, contracted), (_, batched) = dimension_numbers
    free = [axis for axis in range(kernel.ndim) if axis not in contracted]
    size = kernel.shape[free[-1]] if free else 0
    if batched or len(free) != 1 or size < _LARGE or not size % _ALIGNMENT:
        return kernel, None
    return jnp.pad(kernel, [(0, -size % _ALIGNMENT if axis in free else 0) for axis in range(kernel.ndim)]), size


DOT_GENERAL = InFloat32(jax.lax.dot_general)
CONVOLUTION = InFloat32(jax.lax.conv_general_dilated)

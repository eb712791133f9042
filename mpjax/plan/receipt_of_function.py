"""Compiles a function, here or for an absent GPU, and reads the dtypes of its products, sums and updates."""

import contextlib
import difflib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import SingleDeviceSharding

from mpjax.errors import UsageError
from mpjax.plan.compiled_products import Target
from mpjax.plan.receipt import Receipt, receipt_of
from mpjax.precision.casting.model_arguments import take_models_apart
from mpjax.precision.dtype_audit import inputs_of
from mpjax.precision.dtypes import path_name
from mpjax.precision.policy import Policy
from mpjax.precision.presets import get_policy


if TYPE_CHECKING:
    import jmp


def receipt(
    fn_or_compiled: Any,
    *args: Any,
    policy: "str | Policy | jmp.Policy | None" = None,
    device: Any = None,
    params: int = 0,
) -> Receipt:
    """Compiles `fn(*args)` and reports the dtypes that its products, sums over devices and parameter updates run in.

    The function is traced and compiled, but not run. The traced function and, if given, the policy say which dtypes are
    asked for.

    >>> import jax, jax.numpy as jnp, mpjax
    >>> x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    >>> print(mpjax.receipt(jnp.dot, x, x, policy="float32").line)
    float32 as asked in 1 of 1 products

    Args:
      fn_or_compiled: a function of pytrees, jitted or not; a Flax NNX module; or a `jax.jit(fn)` that is traced,
        lowered or compiled. Lowered and compiled programs no longer say which dtypes were asked for, so give a policy.
      *args: the arguments of a function. Arrays may be abstract (`jax.ShapeDtypeStruct`).
      policy: the policy to compare with: a `Policy`, or anything that `get_policy` takes; None to compare with the
        traced function alone.
      device: the device to compile for: a `jax.Device`, "cpu", "gpu", or a GPU that need not be present, such as
        "h200", for which XLA's compiler is downloaded if it is missing; None for the device where the function would
        run.
      params: the index in `args` of the parameters, or of a training state that has `params`. If the arguments contain
        NNX modules, the parameters of all modules are checked.

    Returns:
      A `Receipt`. It prints as a table; `require()` is for tests, `to_json()` for machines.

    Raises:
      UsageError: there is nothing to compile, the device is unknown, XLA cannot compile the function for it, arguments
        or a device are given with a program that is already traced, a rule of the policy decides nothing, or `params`
        is not the index of an argument (if arguments have NNX modules, of one with a module).
    """
    requested = None if policy is None else get_policy(policy)
    if isinstance(fn_or_compiled, jax.stages.Compiled | jax.stages.Lowered | jax.stages.Traced):
        if args or device is not None:
            raise UsageError(
                f"receipt takes a {type(fn_or_compiled).__name__} alone, as it has its arguments and device; "
                "give the function to compile it for another device"
            )
        return _of_stage(fn_or_compiled, requested, params)
    if not callable(fn_or_compiled):
        raise UsageError(
            f"receipt takes a function, a Flax NNX module or a compiled program, got {type(fn_or_compiled).__name__}"
        )
    _require_index(params, len(args))
    target, trace_device, entered, compiled = _device(device)
    with entered:
        traced, modules = _traced(fn_or_compiled, args, trace_device, params)
        lowered = traced.lower()
    executable = compiled(lowered)
    index = 0 if modules else params  # with models taken apart, all parameters are in one argument
    return receipt_of(executable, traced.jaxpr, requested, target=target, params=index, modules=modules)


def _of_stage(stage: Any, policy: Policy | None, params: int) -> Receipt:
    """The receipt of a program of JAX that is traced, lowered or compiled; compiles it if it is not."""
    traced = stage if isinstance(stage, jax.stages.Traced) else None
    lowered = stage.lower() if traced is not None else stage
    executable = lowered.compile() if isinstance(lowered, jax.stages.Lowered) else lowered
    jaxpr = None if traced is None else traced.jaxpr
    _require_index(params, len(executable.args_info[0]))
    return receipt_of(executable, jaxpr, policy, params=params)


def _require_index(params: Any, count: int) -> None:
    """Raises UsageError if `params` is not the index of one of `count` arguments. 0 is valid without arguments too."""
    if isinstance(params, bool) or not isinstance(params, int):
        raise UsageError(f"params={params!r}: wanted the index of an argument, such as 0")
    if params and not 0 <= params < count:
        raise UsageError(
            f"params={params}: wanted the index of one of {count} arguments, 0 to {count - 1}"
            if count
            else f"params={params}: there are no arguments; leave it out"
        )


def _traced(fn: Callable, args: tuple, device: Any, params: int) -> tuple[Any, Mapping[Any, Any]]:
    """Traces a function for a device; returns the traced program, and the NNX modules of the arguments by path.

    With NNX modules, in `args` or as `fn` itself, the traced program has one argument, a dict: `params` has the
    variables of the modules, and `rest` all other arrays. It returns the variables after the call in the same form, and
    `result`. Without modules, the arguments stay as they are, and no module is returned.

    Raises:
      UsageError: the argument at `params` has no module, and another argument has one.
    """
    models = take_models_apart({"": fn, "args": args})
    if not models.originals:
        jitted = fn if isinstance(fn, jax.stages.Wrapped) else jax.jit(fn)
        return jitted.trace(*_on(args, device)), {}
    inputs, with_inputs = inputs_of(models)
    places = tuple(models.originals)

    roots = tuple(f"{path_name(path)}/".lstrip("/") for path in models.modules)
    if params and not any(root.startswith(f"args/{params}/") for root in roots):
        raise UsageError(
            f"params={params} has no Flax NNX module, and other arguments have: updates are looked for in modules; "
            "leave params out, or give the state of the module in its place (nnx.split)"
        )

    def parted(variables: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Separates the variables of modules, `params`, from those of other arguments, such as an optimizer's state."""
        inside = {name: leaf for name, leaf in variables.items() if name.startswith(roots)}
        return {"params": inside, "rest": {name: leaf for name, leaf in variables.items() if name not in inside}}

    def of_inputs(variables: dict[str, dict[str, Any]]) -> Any:
        values = variables["params"] | variables["rest"]
        called, changed = models.join(with_inputs([values[name] for name in inputs]))
        result = called[""](*called["args"])
        after = {_name(path, places): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(changed())}
        return {**parted(after), "result": result}

    return jax.jit(of_inputs).trace(*_on((parted(inputs),), device)), models.modules


def _name(path: tuple, places: tuple) -> str:
    """Names a variable of an NNX object by its path among the arguments, such as `args/0/conv1/kernel`.

    Args:
      path: the key path of the variable: the index of its object, then the names inside the object.
      places: the key paths of the objects among the arguments.
    """
    number, *names = path
    inner = names[:-1] if isinstance(names[-1], jax.tree_util.GetAttrKey) else names  # the `value` of a variable
    return path_name((*places[number.key], *inner)).removeprefix("/")


def _on(args: tuple, device: Any) -> tuple:
    """Replaces each array by its shape and dtype on a device; other leaves stay. Without a device, nothing changes."""
    if device is None:
        return args
    sharding = SingleDeviceSharding(device)

    def moved(leaf: Any) -> Any:
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            return leaf
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding, weak_type=getattr(leaf, "weak_type", False)
        )

    return jax.tree.map(moved, args)


def _device(
    device: Any,
) -> tuple[Target | None, Any, contextlib.AbstractContextManager, Callable[[jax.stages.Lowered], Any]]:
    """Finds a device: returns its target, the `jax.Device`, a context to trace in, and a function that compiles.

    The function maps a lowered program to a compiled one. The target is None unless `device` names a GPU of
    `GPUS`, which need not be present. The `jax.Device` is None if `device` is None.

    Args:
      device: as in `receipt`.

    Raises:
      UsageError: there is no such device.
    """

    def plainly(lowered: jax.stages.Lowered) -> Any:
        return lowered.compile()

    if device is None:
        return None, None, contextlib.nullcontext(), plainly
    if not isinstance(device, jax.Device | str) or not device:
        raise UsageError(
            f'device {device!r}: wanted a jax.Device, or a name such as "cpu" or "h200"; None for where the '
            "function would run"
        )
    if isinstance(device, jax.Device):
        return None, device, jax.default_device(device), plainly
    # Imported late: only an absent GPU needs the modules of a plan.
    from mpjax.plan.compiled import compiled_for
    from mpjax.plan.devices import GPUS
    from mpjax.plan.target import mesh_of, target_of_gpu, traced_for

    if device in GPUS:
        gpu, there = GPUS[device], mesh_of(device, 1).devices.flat[0]
        return target_of_gpu(gpu), there, traced_for(gpu, there, "auto"), lambda lowered: compiled_for(lowered, device)
    try:
        there = jax.devices(device)[0]
    except RuntimeError as error:
        near = difflib.get_close_matches(device.lower(), GPUS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(
            f"device {device!r}: wanted a jax.Device, a platform of JAX that is here, or a GPU to compile for: "
            f"{', '.join(GPUS)}{hint}"
        ) from error
    return None, there, jax.default_device(there), plainly

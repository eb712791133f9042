"""Update rules that mpjax does not build itself: optimizers of optax by name, and functions of the user.

A rule is known only by its signature and its trace. A required argument that neither mpjax nor the settings pass is an
error.
"""

import dataclasses
import difflib
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from mpjax.config import schema
from mpjax.config.choices import SETTINGS_OF_RULES
from mpjax.config.user_calls import parameters_of, read_arguments
from mpjax.config.user_code import load_function
from mpjax.errors import UsageError, first_line
from mpjax.precision.dtypes import FLOAT32, widest
from mpjax.precision.moments import MOMENTS, SUBTRACTED, has_moments, subtracts_moments
from mpjax.precision.skip_step import optax_promotion
from mpjax.training.kernels import Kernels


OWN = tuple(SETTINGS_OF_RULES)
"""The update rules that mpjax builds itself; their settings are fields of the `optimizer` section."""

_OF_OWN = tuple(dict.fromkeys(name for names in SETTINGS_OF_RULES.values() for name in names))
_DEFAULTS = schema.Optimizer()
_FLAG = "--optimizer.arguments"

_FUNCTIONS = (types.FunctionType, functools.partial)

TINY = {"kernel": jax.ShapeDtypeStruct((3, 2), FLOAT32), "bias": jax.ShapeDtypeStruct((2,), FLOAT32)}
"""Small parameters that a rule is traced on."""

_MOVED: Mapping[str, str] = {
    "ScheduleFreeState": "the parameters to evaluate are not those that it trains, which mpjax evaluates and saves",
    "SAMState": "it takes several gradients for one step, and parameters in between are not those to evaluate",
}
"""The states of refused optimizers, which train other parameters than are evaluated, and the reason in the error."""

_MATRICES = "muon_weight_dimension_numbers"
_MUON = (
    "muon orthogonalizes the updates of the kernels of linear layers, except the head; AdamW updates all other "
    "parameters, such as embeddings and filters of convolutions, and decays none of them unless you write "
    f"{_FLAG} adam_weight_decay VALUE"
)


@functools.cache
def optax_rules() -> dict[str, Callable]:
    """Collects the optimizers of optax and optax.contrib by name; the dict is cached.

    They are the public functions with a parameter `learning_rate`, without `scale_by_...`. A name in optax precedes
    the same name in optax.contrib.
    """
    rules = {}
    for module in (contrib, optax):
        for name, function in vars(module).items():
            # Some are functools.partial. Each `scale_by_...` is a part of an optimizer, and some of them ascend the
            # gradient.
            is_public = isinstance(function, _FUNCTIONS) and not name.startswith(("_", "scale_by_"))
            if is_public and "learning_rate" in inspect.signature(function).parameters:
                rules[name] = function
    return rules


@dataclasses.dataclass(frozen=True)
class NamedRule:
    """An optimizer of optax or of the user, with its arguments from the settings.

    Attributes:
      name: its name in messages.
      function: `(learning_rate, ...) -> optax.GradientTransformation`.
      is_users: whether the function is the user's own.
      arguments: values by name, without those that `build` adds.
      notes: sentences of advice for the user, such as that no weight decay is applied.
    """

    name: str
    function: Callable
    is_users: bool
    arguments: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def takes_matrices(self) -> bool:
        """True if the function takes the axes of matrices, as `optax.contrib.muon` does, and no argument sets them."""
        return _MATRICES in parameters_of(self.function, self.name) and _MATRICES not in self.arguments

    @property
    def updates_rows_apart(self) -> bool:
        """True for Muon, whose update of a block in a stack depends on no other block."""
        return self.function is contrib.muon and self.takes_matrices and not self.arguments.get("adaptive")

    def build(
        self,
        config: schema.Optimizer,
        learning_rate: optax.Schedule,
        kernels: Kernels,
        *,
        params: Mapping[str, Any] | None = None,
        steps: int = 1,
        warmup: int = 0,
    ) -> optax.GradientTransformation:
        """Builds the rule, and traces one update to check it.

        A rule that takes only a number as learning rate gets `config.learning_rate`, if the schedule is constant and
        has no warm-up. The state of the rule keeps random keys as uint32 words.

        Args:
          config: the `optimizer` section.
          learning_rate: the learning rate of each step.
          kernels: the kernels of the model.
          params: the shapes of the parameters; by default of two small ones.
          steps: the length of training in steps, for a function of the user that takes it.
          warmup: the length of the warm-up in steps, likewise.

        Raises:
          UsageError: an argument is missing, the rule takes only a number as learning rate and the schedule is not
            constant, its updates or state have wrong shapes, dtypes or fields, or the rule fails on shapes. Or its
            first steps are not finite, because the schedule begins at 0.
        """
        names = parameters_of(self.function, self.name)
        known: dict[str, Any] = {}
        if "weight_decay" in names:
            known |= {"mask": kernels.mask, "weight_decay_mask": kernels.mask}
        if self.takes_matrices and kernels.matrices is not None:
            if not any(kernels.matrices if params is None else kernels.dimension_numbers(params).values()):
                raise UsageError(
                    f"{self.name} orthogonalizes the updates of linear layers, and none besides a head is trained: "
                    "write --optimizer.name adamw"
                )
            known |= {_MATRICES: kernels.dimension_numbers}
        known |= {"peak": config.learning_rate, "steps": steps, "warmup": warmup} if self.is_users else {}
        arguments = {**{key: value for key, value in known.items() if key in names}, **self.arguments}
        missing = [
            key
            for key, parameter in names.items()
            if parameter.default is parameter.empty and key not in arguments and key != "learning_rate"
        ]
        if missing:
            raise UsageError(
                f"{self.name} wants {', '.join(missing)}: write {_FLAG} "
                + " ".join(f"{key} VALUE" for key in missing)
                + " if these are Python literals, else a function of your own around it"
            )
        make = functools.partial(self.function, **arguments)
        shapes = _in_float32(TINY if params is None else params)
        try:
            rule = make(learning_rate=learning_rate)
            self._require_fit(rule, shapes, config)
        except UsageError:
            raise
        except Exception as error:
            if not self._takes_number(make, config, shapes):
                raise UsageError(
                    f"{self.name} cannot be used: {first_line(error)}. An update is given gradients, parameters, and "
                    "the loss as `value`"
                ) from error
            if config.schedule != "constant" or config.warmup.amount:
                raise UsageError(
                    f"{self.name} takes a number as learning rate, not a schedule: write --optimizer.schedule constant "
                    "--optimizer.warmup 0, or another optimizer"
                ) from error
            rule = make(learning_rate=config.learning_rate)
        else:
            self._require_finite(make, learning_rate, config, shapes)
        return _with_plain_keys(rule, shapes)

    def _require_finite(
        self, make: Callable, schedule: optax.Schedule, config: schema.Optimizer, shapes: Mapping[str, Any]
    ) -> None:
        """Raises UsageError if a learning rate that begins at 0 makes the first steps infinite or NaN.

        Rules that estimate a step size, such as prodigy, divide by a value that a rate of 0 leaves at 0.
        """
        if schedule(0) != 0 or begins_finite(make(learning_rate=schedule), TINY, shapes):
            return
        if not begins_finite(make(learning_rate=optax.constant_schedule(config.learning_rate or 1.0)), TINY, shapes):
            return  # the schedule is not the cause
        instead = "a schedule and a learning rate that begin above 0"
        if config.warmup.amount and config.learning_rate:
            instead = "--optimizer.warmup 0, or another optimizer"
        raise UsageError(
            f"{self.name}: its parameters become NaN or inf if the learning rate begins at 0, as in a warm-up; write "
            + instead
        )

    def _takes_number(self, make: Callable, config: schema.Optimizer, shapes: Mapping[str, Any]) -> bool:
        try:
            self._require_fit(make(learning_rate=config.learning_rate), shapes, config)
        except Exception:
            return False
        return True

    def _require_fit(self, rule: Any, params: Mapping[str, Any], config: schema.Optimizer) -> None:
        """Traces one update; raises UsageError unless its updates fit the parameters and its state keeps its shapes.

        Also raises it for the optimizers of `_MOVED`, and if `config.moments` is not "float32" and the state has no
        moments, or none that can be rounded.
        """
        if not isinstance(rule, optax.GradientTransformation):
            raise UsageError(
                f"{self.name} returned {type(rule).__name__}: wanted an optax.GradientTransformation, as optax.chain "
                "returns"
            )
        tx, loss = optax.with_extra_args_support(rule), jax.ShapeDtypeStruct((), FLOAT32)
        with optax_promotion():
            state = jax.eval_shape(tx.init, params)
            for kind in _kinds_in(state):
                if kind in _MOVED:
                    raise UsageError(f"{self.name} cannot be used: {_MOVED[kind]}; write another optimizer")
            updates, after = jax.eval_shape(
                lambda g, s, p, loss: tx.update(g, s, p, value=loss), params, state, params, loss
            )
        if _described(updates) != _described(params):
            raise UsageError(f"{self.name} cannot be used: its updates have other shapes or dtypes than the parameters")
        if _described(after) != _described(state):
            raise UsageError(f"{self.name} cannot be used: an update changes the shapes or dtypes of its state")
        if config.moments != "float32" and not has_moments(state, params):
            raise UsageError(
                f"--optimizer.moments {config.moments}: the state of {self.name} has no field {', '.join(MOMENTS)}, in "
                "which optax keeps moments; write --optimizer.moments float32"
            )
        if config.moments != "float32" and subtracts_moments(state):
            raise UsageError(
                f"--optimizer.moments {config.moments}: {SUBTRACTED}; write --optimizer.moments float32, or leave "
                "centered out"
            )


def find_rule(config: schema.Optimizer) -> NamedRule | None:
    """Finds the optimizer of optax or of the user that `config.name` names; None for one that mpjax builds itself.

    Raises:
      UsageError: no optimizer has this name, it has no learning rate, or a setting does not apply to it.
    """
    if config.name in OWN:
        if config.arguments:
            setting = "momentum" if config.name == "sgd" else "b2"
            raise UsageError(
                f"{_FLAG} {next(iter(config.arguments))}: {config.name} has settings of its own, such as "
                f"--optimizer.{setting}; arguments are for optimizers of optax: --optimizer.name optax:{config.name}"
            )
        return None
    is_users = ":" in (code := str(config.name))
    name = f"--optimizer.name {config.name}"
    function = load_function(config.name, flag="--optimizer.name") if is_users else _in_optax(code)
    names = parameters_of(function, name)
    if "learning_rate" not in names:
        raise UsageError(
            f"{name} has no parameter learning_rate: wanted a function (learning_rate, ...) that returns an "
            f"optax.GradientTransformation; it takes {', '.join(names) or 'nothing'}"
        )
    if "learning_rate" in config.arguments:
        raise UsageError(f"{_FLAG} learning_rate: write --optimizer.learning_rate {config.arguments['learning_rate']}")
    for field in _OF_OWN:
        if (value := getattr(config, field)) != getattr(_DEFAULTS, field):
            others = f"{_FLAG} {field} {value}" if field in names else f"one that it has: {', '.join(names)}"
            raise UsageError(f"--optimizer.{field} {value} is for {', '.join(OWN)}; for {config.name} write {others}")
    arguments = read_arguments(_FLAG, config.arguments, function, code)
    decay, notes = _decay(config, names, arguments)
    notes += [_MUON] if function is contrib.muon and _MATRICES not in arguments else []
    return NamedRule(name, function, is_users, decay | arguments, tuple(notes))


def _decay(config: schema.Optimizer, names: Mapping[str, Any], arguments: Mapping[str, Any]) -> tuple[dict, list[str]]:
    """Chooses the argument for weight decay, a dict that is empty if the function takes none, and notes for the user.

    Raises UsageError if the settings ask for a weight decay twice, or the function does not take the one that is set.
    """
    is_default = config.weight_decay == _DEFAULTS.weight_decay
    if "weight_decay" in arguments and not is_default:
        raise UsageError(f"--optimizer.weight_decay {config.weight_decay} and {_FLAG} weight_decay: wanted one of them")
    if "weight_decay" not in names:
        similar = [name for name in names if "decay" in name and "weight" in name and "mask" not in name]
        hint = f"; it takes {', '.join(similar)}: write {_FLAG} {similar[0]} {config.weight_decay}" if similar else ""
        if not is_default and config.weight_decay:
            raise UsageError(
                f"--optimizer.weight_decay {config.weight_decay}: {config.name} takes no weight_decay"
                + (hint or "; leave it out, or write another optimizer")
            )
        is_set = any(name in arguments for name in similar)
        note = f"no weight decay: {config.name} takes no weight_decay{hint}"
        return {}, [note] if config.weight_decay and not is_set else []
    value = arguments.get("weight_decay", config.weight_decay)
    without = f"weight decay {value} is of all parameters, norms and biases too: {config.name} takes no mask"
    has_mask = bool({"mask", "weight_decay_mask"} & names.keys())
    return {"weight_decay": config.weight_decay}, [without] if value and not has_mask else []


def _in_optax(name: str) -> Callable:
    """Finds an optimizer of optax by name; raises UsageError, which names the nearest ones, if there is none."""
    rules = optax_rules()
    if name in rules:
        return rules[name]
    near = difflib.get_close_matches(name, [*OWN, *rules], n=3)
    hint = f"nearest: {', '.join(near)}; " if near else ""
    module = next((module for module in (optax, contrib) if callable(getattr(module, name, None))), None)
    fault = f"{module.__name__}.{name} is no optimizer with a learning rate" if module else f"no optimizer {name!r}"
    raise UsageError(
        f"--optimizer.name: {fault}; {hint}wanted {', '.join(OWN)}, an optimizer of optax (such as lion, adam, "
        "adafactor), or FILE.py:NAME or package.module:NAME of a function (learning_rate, ...)"
    )


def _with_plain_keys(rule: optax.GradientTransformation, params: Mapping[str, Any]) -> optax.GradientTransformation:
    """Wraps a rule to keep random keys in its state as uint32 words, since checkpoints cannot hold keys.

    A rule without random keys is returned as it is.
    """

    def is_key(leaf: Any) -> bool:
        return jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)

    if not any(map(is_key, jax.tree.leaves(jax.eval_shape(rule.init, params)))):
        return rule
    inner = optax.with_extra_args_support(rule)

    def plain(state: Any) -> Any:
        return jax.tree.map(lambda leaf: jax.random.key_data(leaf) if is_key(leaf) else leaf, state)

    def update(updates, state, params=None, **extra):
        shapes = jax.eval_shape(inner.init, updates if params is None else params)
        keyed = jax.tree.map(lambda s, leaf: jax.random.wrap_key_data(leaf) if is_key(s) else leaf, shapes, state)
        updates, keyed = inner.update(updates, keyed, params, **extra)
        return updates, plain(keyed)

    return optax.GradientTransformationExtraArgs(lambda params: plain(inner.init(params)), update)


def _in_float32(params: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct(p.shape, widest(p.dtype, FLOAT32)) for name, p in params.items()}


def _kinds_in(state: Any) -> Iterator[str]:
    if hasattr(state, "_fields"):
        yield type(state).__name__
    inner = state.values() if isinstance(state, Mapping) else state if isinstance(state, tuple | list) else ()
    for child in inner:
        yield from _kinds_in(child)


def _described(tree: Any) -> tuple:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(leaf.shape, jnp.result_type(leaf)) for leaf in leaves]


_STEPS = 3  # a fault of the first step may show only in a later one


def begins_finite(rule: optax.GradientTransformation, *tried: Mapping[str, Any]) -> bool:
    """True if parameters, ones at the start, are finite after three steps of a rule, which this function runs.

    Args:
      rule: the update rule, with its schedule.
      tried: shapes of parameters by name; axes are cut to 2. The first for which the rule can be computed decides,
        since a rule of the user may expect the names of a run's parameters. If the rule fails for all, the result is
        True.
    """
    tx = optax.with_extra_args_support(rule)

    @jax.jit
    def step(params, state):
        grads = jax.tree.map(lambda p: p / 4, params)
        updates, state = tx.update(grads, state, params, value=jnp.float32(1))
        return optax.apply_updates(params, updates), state

    for shapes in tried:
        params = {name: jnp.ones([min(size, 2) for size in x.shape], x.dtype) for name, x in shapes.items()}
        try:
            with optax_promotion():
                state = tx.init(params)
                for _ in range(_STEPS):
                    params, state = step(params, state)
        except Exception:  # any error of the rule: it does not fit these parameters
            continue
        return all(bool(jnp.all(jnp.isfinite(p))) for p in params.values())
    return True

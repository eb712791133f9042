"""Every layer class that flax.nnx, equinox.nn, Haiku and linen export: products in half, outputs and gradients near.

The table is made from what the libraries export. A new class is built from the names of its constructor's and its
call's arguments; one for which that does not do fails here until it has a recipe or is excluded with a reason.
"""

import functools
import inspect
import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import mpjax
from mpjax.precision.casting import equations


BATCH, SPATIAL, WIDTH = 2, 4, 8
EXPORTS = {"nnx": (nnx, nnx.Module), "equinox": (eqx.nn, eqx.Module), "haiku": (hk, hk.Module)}
EXPORTS["linen"] = (linen, linen.Module)

EXCLUDED = {
    "nnx.RNNCellBase": "abstract: what cells inherit from",
    "haiku.RNNCore": "abstract: what cells inherit from",
    "equinox.Shared": "a container: its call gives the layers that it holds, which compute",
}


# --- Arguments by name -----------------------------------------------------------------------------------------------


def numbers(shape, phase=0.0):
    """Values of both signs, none special."""
    return (0.6 * np.sin(phase + 1.7 * np.arange(np.prod(shape, dtype=int)))).astype(np.float32).reshape(shape)


def filled(tree, *, positive=False):
    """An abstract tree with values: `positive` ones may stand for variances and scales. Nothing is compiled for it."""

    def value(index, leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return np.zeros(leaf.shape, leaf.dtype)
        values = numbers(leaf.shape, 0.3 + index)
        return 0.7 + 0.5 * values if positive else values

    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten([value(index, leaf) for index, leaf in enumerate(leaves)])


def nnx_lstm():
    return nnx.LSTMCell(WIDTH, WIDTH, rngs=nnx.Rngs(0))


SIZES = {
    **dict.fromkeys(["features", "in_features", "out_features", "hidden_features", "num_features", "channels"], WIDTH),
    **dict.fromkeys(["num_embeddings", "embedding_size", "vocab_size", "embed_dim", "max_seq_len"], WIDTH),
    **dict.fromkeys(["in_size", "out_size", "width_size", "input_size", "hidden_size", "output_size", "shape"], WIDTH),
    **dict.fromkeys(["in_channels", "out_channels", "output_channels", "query_size"], WIDTH),
    **dict.fromkeys(["num_heads", "groups", "num_groups", "depth", "lora_rank", "target_shape"], 2),
    **dict.fromkeys(["num_spatial_dims", "channel_multiplier"], 1),
    **dict.fromkeys(["rate", "decay", "decay_rate"], 0.5),
    **dict.fromkeys(["create_scale", "create_offset"], True),
    **dict.fromkeys(["deterministic", "use_running_average", "decode"], False),
}
# Arguments that are given though they have defaults: these would not do for layers this small, or not compute.
OPTIONAL = {"num_groups", "channels", "deterministic", "use_running_average", "decode", "mode", "einsum_str", "key"}
OPTIONAL |= {"rngs", "num_embeddings", "embedding_size", "vocab_size", "embed_dim", "max_seq_len"}

# What libraries call differently, or give in their own types.
CONSTRUCTOR: dict[str, dict[str, Any]] = {
    "nnx": {
        "rngs": lambda: nnx.Rngs(0),
        "kernel_size": lambda: (3,),
        "einsum_str": lambda: "abc,cd->abd",
        "kernel_shape": lambda: (WIDTH, WIDTH),
        "cell": nnx_lstm,
        "forward_rnn": lambda: nnx.RNN(nnx_lstm()),
        "backward_rnn": lambda: nnx.RNN(nnx_lstm()),
        "layer_instance": lambda: nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)),
    },
    "equinox": {
        "key": lambda: jax.random.key(0),
        "kernel_size": lambda: 3,
        "axis_name": lambda: "batch",
        "mode": lambda: "batch",
        "weight_name": lambda: "weight",
        "layer": lambda: eqx.nn.Linear(WIDTH, WIDTH, key=jax.random.key(0)),
        "fn": lambda: jnp.tanh,
        "layers": lambda: [eqx.nn.Linear(WIDTH, WIDTH, key=jax.random.key(0)), eqx.nn.Lambda(jnp.tanh)],
    },
    "haiku": {
        "kernel_shape": lambda: 3,
        "window_shape": lambda: (1, 2, 1),
        "strides": lambda: (1, 2, 1),
        "padding": lambda: "SAME",
        "axis": lambda: -1,
        "output_shape": lambda: (SPATIAL * WIDTH,),
        "core": lambda: hk.GRU(WIDTH),
        "layers": lambda: [hk.Linear(WIDTH), jnp.tanh],
    },
    "linen": {
        "kernel_size": lambda: (3,),
        "shape": lambda: (WIDTH, WIDTH),
        "einsum_str": lambda: "abc,cd->abd",
        "cell": lambda: linen.LSTMCell(WIDTH),
        "forward_rnn": lambda: linen.RNN(linen.LSTMCell(WIDTH)),
        "backward_rnn": lambda: linen.RNN(linen.LSTMCell(WIDTH)),
        "layer_instance": lambda: linen.Dense(WIDTH),
        "layers": lambda: [linen.Dense(WIDTH), jnp.tanh],
    },
}


class Recipe(NamedTuple):
    """How to make a layer whose arguments' names do not say it, and what to call it with; None as the names say."""

    make: Callable | None = None
    inputs: tuple | None = None


VECTORS, SEQUENCES = (BATCH, WIDTH), (BATCH, SPATIAL, WIDTH)
TREE = {"layer": {"w": numbers((WIDTH, WIDTH))}}
THROUGH_DENSE = Recipe(lambda cls: linen.Dense(WIDTH, dot_general_cls=cls))

RECIPES = {
    "nnx.Sequential": Recipe(lambda cls: cls(nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)), jnp.tanh)),
    "equinox.AdaptivePool": Recipe(lambda cls: cls(2, 1, jnp.max)),
    "equinox.Pool": Recipe(lambda cls: cls(-np.inf, jax.lax.max, 1, 2)),
    "equinox.Dropout": Recipe(lambda cls: cls(0.5)),  # it takes `deterministic` too, and warns of it
    "equinox.LSTMCell": Recipe(inputs=(numbers(VECTORS), (numbers(VECTORS, 1.0), numbers(VECTORS, 2.0)))),
    "equinox.RotaryPositionalEmbedding": Recipe(inputs=(numbers(SEQUENCES),)),
    "haiku.DeepRNN": Recipe(lambda cls: cls([hk.VanillaRNN(WIDTH), jnp.tanh])),
    "haiku.MultiHeadAttention": Recipe(lambda cls: cls(2, 4, w_init=hk.initializers.RandomNormal())),
    "haiku.ResetCore": Recipe(inputs=((numbers(VECTORS), np.array([True, False])),)),
    "haiku.EMAParamsTree": Recipe(inputs=(TREE,)),
    "haiku.SNParamsTree": Recipe(inputs=(TREE,)),
    "linen.Fp8DirectDotGeneralOp": THROUGH_DENSE,
    "linen.Fp8DotGeneral": THROUGH_DENSE,
    "linen.Fp8DotGeneralOp": THROUGH_DENSE,
    "linen.NANOOFp8DotGeneralOp": THROUGH_DENSE,
    "linen.Fp8Einsum": Recipe(inputs=("ab,bc->ac", numbers(VECTORS), numbers((WIDTH, WIDTH)))),
}


def exported(library):
    module, base = EXPORTS[library]
    classes = {name: getattr(module, name) for name in dir(module)}
    return {
        f"{library}.{name}": cls
        for name, cls in classes.items()
        if inspect.isclass(cls) and issubclass(cls, base) and any("__call__" in vars(parent) for parent in cls.__mro__)
    }


LAYERS = {name: cls for library in EXPORTS for name, cls in exported(library).items()}


def parameters_of(function):
    found = list(inspect.signature(function).parameters.values())[1:]
    return {p.name: p for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def dimensions(name, cls):
    """How many spatial dimensions a layer has; none if neither its name nor its arguments speak of them."""
    digit = re.search("[123](?=[dD])", name)
    return int(digit[0]) if digit else int("num_spatial_dims" in parameters_of(cls.__init__))


def made(name, cls):
    recipe = RECIPES.get(name, Recipe())
    if recipe.make:
        return recipe.make(cls)
    known = CONSTRUCTOR[name.split(".")[0]]
    arguments = {}
    for key, parameter in parameters_of(cls.__init__).items():
        if parameter.default is not parameter.empty and key not in OPTIONAL:
            continue
        if key in known:
            arguments[key] = known[key]()
        elif key in SIZES:
            arguments[key] = SIZES[key]
        elif key == "input_shape":
            arguments[key] = (SPATIAL,) * dimensions(name, cls)
        else:
            raise TypeError(f"a constructor's argument of unknown meaning: {key}")
    return cls(**arguments)


FLAGS = {"is_training": True, "update_stats": True}
CARRIED = {"carry", "state", "prev_state"}  # what the layer or its library makes
INPUTS = {"x", "input", "inputs", "inputs_q", "value", "ids", "hidden", "query", "key", "key_"}


def called_with(name, cls):
    """The arrays and the flags for a layer's call."""
    required = [key for key, parameter in parameters_of(cls.__call__).items() if parameter.default is parameter.empty]
    flags = {key: value for key, value in FLAGS.items() if key in required}
    if inputs := RECIPES.get(name, Recipe()).inputs:
        return inputs, flags
    names = [key for key in required if key not in flags and key not in CARRIED] or ["x"]
    if unknown := set(names) - INPUTS:
        raise TypeError(f"a call's arguments of unknown meaning: {', '.join(sorted(unknown))}")
    of_one_example = name.startswith("equinox")  # the batch is mapped over
    if {"num_embeddings", "vocab_size"} & parameters_of(cls.__init__).keys():
        return (np.array([3, 5] if of_one_example else [[0, 3], [5, 3]]),), flags
    spatial = (SPATIAL,) * dimensions(name, cls)
    if spatial:
        shape = (BATCH, WIDTH, *spatial) if of_one_example else (BATCH, *spatial, WIDTH)
    else:
        shape = VECTORS if (of_one_example and "query" not in names) or CARRIED & set(required) else SEQUENCES
    return tuple(numbers(shape, phase) for phase, _ in enumerate(names)), flags


# --- Each library's layers as functions ------------------------------------------------------------------------------


class Layer(NamedTuple):
    """A layer as a function of its parameters, its state and its inputs to its outputs and its new state."""

    call: Callable
    params: Any
    state: Any
    inputs: tuple


def nnx_layer(name, cls, policy):
    inputs, flags = called_with(name, cls)
    graph, params, state = jax.eval_shape(lambda: nnx.split(made(name, cls), nnx.Param, ...))
    model = nnx.merge(graph, filled(params), filled(state, positive=True))
    if isinstance(model, nnx.RNNCellBase):
        inputs = (filled(jax.eval_shape(lambda: made(name, cls).initialize_carry(VECTORS, nnx.Rngs(0)))), *inputs)
    if policy:
        mpjax.apply_policy(model, policy)
    graph, params, state = nnx.split(model, nnx.Param, ...)

    def call(params, state, *inputs):
        model = nnx.merge(graph, params, state, copy=True)
        return model(*inputs, **flags), nnx.state(model, nnx.Not(nnx.Param))

    return Layer(call, params, state, inputs)


def is_abstract(leaf):
    return isinstance(leaf, jax.ShapeDtypeStruct)


def equinox_layer(name, cls, policy):
    inputs, flags = called_with(name, cls)
    model, state = eqx.filter_eval_shape(eqx.nn.make_with_state(lambda: made(name, cls)))
    params, static = eqx.partition(model, is_abstract)
    state, markers = eqx.partition(state, is_abstract)
    accepted = parameters_of(cls.__call__)
    stateful = "state" in accepted and accepted["state"].default is inspect.Parameter.empty

    def call(params, state, *inputs):
        options = {**flags, "key": jax.random.key(0)} if "key" in accepted else flags
        model = eqx.combine(params, static)
        if not stateful:
            return jax.vmap(lambda *one: model(*one, **options))(*inputs), state
        run = jax.vmap(lambda x, state: model(x, state, **options), (0, None), (0, None), axis_name="batch")
        out, new = run(*inputs, eqx.combine(state, markers))
        return out, eqx.filter(new, eqx.is_array)

    call = mpjax.autocast(call, policy) if policy else call
    return Layer(call, filled(params), filled(state, positive=True), inputs)


def haiku_layer(name, cls, policy):
    inputs, flags = called_with(name, cls)

    def forward(*inputs):
        layer = made(name, cls)
        if not issubclass(cls, hk.RNNCore):
            return layer(*inputs, **flags)
        return layer(*inputs, jax.tree.map(lambda leaf: leaf + 0.3, layer.initial_state(BATCH)))

    model = hk.transform_with_state(forward)
    params, state = jax.eval_shape(model.init, jax.random.key(0), *inputs)

    def call(params, state, *inputs):
        return model.apply(params, state, jax.random.key(0), *inputs)

    call = mpjax.autocast(call, policy) if policy else call
    return Layer(call, filled(params), filled(state, positive=True), inputs)


def linen_layer(name, cls, policy):
    inputs, flags = called_with(name, cls)
    static, inputs = inputs[: isinstance(inputs[0], str)], inputs[isinstance(inputs[0], str) :]
    model = made(name, cls)
    if isinstance(model, linen.RNNCellBase):
        inputs = (filled(jax.eval_shape(lambda: model.initialize_carry(jax.random.key(0), VECTORS))), *inputs)
    state = dict(jax.eval_shape(lambda *inputs: model.init(jax.random.key(0), *static, *inputs, **flags), *inputs))
    params = state.pop("params", {})

    def call(params, state, *inputs):
        variables, rngs = {"params": params, **state}, {"dropout": jax.random.key(0)}
        return model.apply(variables, *static, *inputs, rngs=rngs, mutable=list(state), **flags)

    call = mpjax.autocast(call, policy) if policy else call
    return Layer(call, filled(params), filled(state, positive=True), inputs)


LIBRARIES = {"nnx": nnx_layer, "equinox": equinox_layer, "haiku": haiku_layer, "linen": linen_layer}


def built(name, policy=None):
    try:
        return LIBRARIES[name.split(".")[0]](name, LAYERS[name], policy)
    except Exception as error:
        raise AssertionError(
            f"{name} cannot be built from the names of its arguments ({type(error).__name__}: {error}): add a "
            "recipe to RECIPES, or the names to CONSTRUCTOR, SIZES or INPUTS, or to EXCLUDED why it computes nothing"
        ) from error


# --- What a layer computes -------------------------------------------------------------------------------------------


def floats(tree):
    """The floating leaves of a tree, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)}


class Computed(NamedTuple):
    products: list[set[str]]
    outputs: dict[str, np.ndarray]
    grads: dict[str, np.ndarray]


def computed(layer):
    """What one compiled program gives, forward and backward, and the dtypes that each of its products is given."""

    def loss(params, inputs, state):
        out, state = layer.call(params, state, *inputs)
        weighted = [(leaf.astype(jnp.float32) * numbers(leaf.shape, 0.1)).sum() for leaf in floats(out).values()]
        return sum(weighted), (out, state)

    # Integer inputs and the keys among them have no gradients that count.
    grad = jax.grad(loss, (0, 1), has_aux=True, allow_int=True)
    traced = jax.jit(grad).trace(layer.params, layer.inputs, layer.state)
    products = [
        {var.aval.dtype.name for var in eqn.invars}
        for _, eqn in equations(traced.jaxpr)
        if eqn.primitive.name in ("dot_general", "conv_general_dilated")
    ]
    grads, outputs = traced.lower().compile()(layer.params, layer.inputs, layer.state)
    return Computed(products, *(jax.tree.map(np.asarray, floats(tree)) for tree in (outputs, grads)))


# The library's own code mixes dtypes: without a policy Haiku's averages a float and a count, and with one NNX's cells
# gates in half precision and the float32 carry that they are given.
MIXED = {"nnx.GRUCell", "nnx.LSTMCell", "nnx.OptimizedLSTMCell", "nnx.RNN", "nnx.Bidirectional"}
MIXED |= {"haiku.BatchNorm", "haiku.EMAParamsTree", "haiku.ExponentialMovingAverage"}


def computed_as_the_library_expects(name, policy=None):
    promotion = "standard" if name in MIXED else "strict"
    with jax.numpy_dtype_promotion(promotion), jax.numpy_rank_promotion("raise"), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # deprecated layers are exported, and used, until they go
        return computed(built(name, policy))


in_float32 = functools.lru_cache(maxsize=1)(computed_as_the_library_expects)


# --- What each must hold ---------------------------------------------------------------------------------------------


IN_BOTH = {"nnx.Linear", "nnx.Conv", "nnx.BatchNorm", "nnx.LayerNorm", "nnx.MultiHeadAttention", "nnx.RNN", "nnx.Embed"}
"""What apply_policy does with a layer is the same for both; these show that both are set."""


def quick(name, half):
    """One layer of each kind: autocast sees the operations of all libraries alike, `apply_policy` the layers of one."""
    kinds = IN_BOTH - {"nnx.RNN"} | {"nnx.LSTMCell", "nnx.ConvTranspose", "nnx.Einsum", "nnx.LoRALinear"}
    return half == "float16" and name in kinds


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((name, half), id=f"{name}-{half}", marks=[] if quick(name, half) else [pytest.mark.slow])
        for name in LAYERS
        if name not in EXCLUDED
        for half in (("float16", "bfloat16") if name in IN_BOTH else ("float16",))
    ],
)
def layer(request):
    """A layer's name, the half precision that it is under, what it computes there and what in float32."""
    name, half = request.param
    return name, half, computed_as_the_library_expects(name, f"mixed_{half}"), in_float32(name)


FLOAT8 = {"float8_e4m3fn", "float8_e5m2"}

# Layers with products in other dtypes than the policy's.
PRODUCTS: dict[str, Callable[[str], set[str]]] = {
    # A norm, in float32 by policy, and with it its power iteration; the layer that it wraps is in half.
    "nnx.SpectralNorm": lambda half: {half, "float32"},
    # These quantise what they multiply, and JAX takes the float8 as it is.
    "linen.Fp8DirectDotGeneralOp": lambda half: FLOAT8,
    "linen.Fp8DotGeneral": lambda half: FLOAT8,
    "linen.Fp8Einsum": lambda half: FLOAT8,
}


def test_every_product_is_in_half_precision(layer):
    name, half, actual, expected = layer
    wanted = PRODUCTS.get(name, lambda half: {half})(half)
    assert len(actual.products) == len(expected.products)
    assert set().union(*actual.products) == (wanted if expected.products else set())
    assert all(len(dtypes) == 1 or dtypes == FLOAT8 for dtypes in actual.products)


def test_outputs_and_state_are_near_those_of_float32(layer):
    _, _, actual, expected = layer
    assert actual.outputs.keys() == expected.outputs.keys() != set()
    for path, wanted in expected.outputs.items():
        error = np.abs(actual.outputs[path].astype(np.float32) - wanted).max()
        assert error <= 2e-2 * np.abs(wanted).max(), path


def test_gradients_are_float32_and_near_those_of_float32(layer):
    _, _, actual, expected = layer
    assert actual.grads.keys() == expected.grads.keys()
    assert {grad.dtype.name for grad in actual.grads.values()} <= {"float32"}
    # Some gradients are zero but for rounding, as that of the bias of attention's keys.
    least = 0.1 * max(map(np.linalg.norm, map(np.ravel, expected.grads.values())), default=0.0)
    for path, wanted in expected.grads.items():
        error = np.linalg.norm((actual.grads[path] - wanted).ravel())
        assert error <= 5e-2 * max(np.linalg.norm(wanted.ravel()), least), path


@pytest.mark.parametrize(
    "table", [EXCLUDED, RECIPES, PRODUCTS, MIXED], ids=["EXCLUDED", "RECIPES", "PRODUCTS", "MIXED"]
)
def test_no_table_names_a_class_that_is_not_exported(table):
    assert set(table) - LAYERS.keys() == set()


@pytest.mark.parametrize("library", EXPORTS)
def test_a_new_layer_that_cannot_be_built_is_named(library, monkeypatch):
    class Surprise(EXPORTS[library][1]):
        def __init__(self, novelty):
            self.novelty = novelty

        def __call__(self, x):
            return x

    monkeypatch.setattr(EXPORTS[library][0], "Surprise", Surprise, raising=False)
    layers = exported(library)
    monkeypatch.setitem(LAYERS, f"{library}.Surprise", layers[f"{library}.Surprise"])
    with pytest.raises(
        AssertionError, match=rf"{library}\.Surprise cannot be built .*novelty\): add a recipe to RECIPES"
    ):
        built(f"{library}.Surprise")

"""Wrappers around a module's call: values on the module, and no class made."""

import copy
import dataclasses
import pickle
import subprocess
import sys
from typing import ClassVar

import jax.numpy as jnp
import pytest
from flax import nnx

from mpjax.precision import apply_policy, has_call, name_scopes, unwrap, wrap, wrapper_of


class Block(nnx.Module):
    def __call__(self, x, *, twice=False):
        return 2 * x if twice else x


class Inner(Block):
    """Inherits its call."""


class Outer(Block):
    """Has a call of its own, which uses that of its parent."""

    def __call__(self, x, **kwargs):
        return 100 * super().__call__(x, **kwargs)


@dataclasses.dataclass(frozen=True)
class Add:
    number: int
    depth: ClassVar[int] = 5

    def __call__(self, call, module, x, **kwargs):
        return call(module, x + self.number, **kwargs)


@dataclasses.dataclass(frozen=True)
class Negate:
    depth: ClassVar[int] = 4

    def __call__(self, call, module, x, **kwargs):
        return -call(module, x, **kwargs)


def test_what_can_be_called():
    class Bare(nnx.Module):
        pass

    assert has_call(Block)
    assert has_call(Inner)
    assert not has_call(Bare)
    bare = Bare()
    wrap(bare, Add(1))
    assert wrapper_of(bare, Add) is None


@pytest.mark.parametrize(("cls", "result"), [(Block, 22), (Inner, 22), (Outer, 2200)])
def test_a_wrapper_is_around_the_outermost_call_of_its_own_module_alone(cls, result):
    module, other = cls(), cls()
    wrap(module, Add(10))
    assert module(1, twice=True) == result
    assert other(1) == result // 22


def test_one_of_each_kind_in_the_order_of_their_depths():
    module = Block()
    for wrapper in (Add(10), Negate(), Add(3)):
        wrap(module, wrapper)
    assert module(1) == -4
    assert wrapper_of(module, Add) == Add(3)
    unwrap(module, Add)
    assert module(1) == -1
    unwrap(module, Negate)
    unwrap(module, Negate)
    assert module(1) == 1
    assert nnx.graphdef(module) == nnx.graphdef(Block())


def pickled(module):
    return pickle.loads(pickle.dumps(module))


@pytest.mark.parametrize("again", [copy.deepcopy, nnx.clone, pickled, lambda module: nnx.merge(*nnx.split(module))])
def test_a_module_takes_its_wrappers_along(again):
    module = Inner()
    wrap(module, Add(10))
    assert again(module)(1) == 11
    assert nnx.graphdef(again(module)) == nnx.graphdef(module)
    assert type(again(module)) is Inner


@pytest.mark.slow
def test_an_unpickled_model_casts_in_a_process_that_never_set_a_policy(tmp_path):
    model = nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.LayerNorm(2, rngs=nnx.Rngs(0)))
    apply_policy(model, "params=float32,compute=float16,output=bfloat16")
    (tmp_path / "model").write_bytes(pickle.dumps(model))
    code = "import pickle, sys, jax; print(pickle.load(open(sys.argv[1], 'rb'))(jax.numpy.ones((1, 2))).dtype)"
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "model"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "bfloat16"


def test_no_code_of_a_users_class_runs_and_no_class_is_made():
    registry, made = {}, []

    class Meta(type(nnx.Module)):
        def __new__(cls, name, bases, members, **kwargs):
            made.append(name)
            return super().__new__(cls, name, bases, members, **kwargs)

    class Registered(nnx.Module, metaclass=Meta):
        def __init_subclass__(cls, *, key, **kwargs):
            super().__init_subclass__(**kwargs)
            registry[key] = cls

    class Layer(Registered, key="layer"):
        def __init__(self):
            self.inner = nnx.LayerNorm(2, rngs=nnx.Rngs(0))
            self.dtype = jnp.float32

        def __call__(self, x):
            return self.inner(x)

    before = list(made)
    model = Layer()
    apply_policy(model, "mixed_float16")
    name_scopes(model)
    assert (made, registry, Registered.__subclasses__(), Layer.__subclasses__()) == (
        before,
        {"layer": Layer},
        [Layer],
        [],
    )
    assert (type(model), type(model.inner)) == (Layer, nnx.LayerNorm)
    assert registry["layer"]()(jnp.ones((1, 2))).dtype == jnp.float32  # a later model, with no policy

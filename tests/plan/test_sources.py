"""Source lines of kernels, from the text of a program."""

import pathlib

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.plan import Instruction, Sources, module_of, parse, with_sources
from mpjax.precision import name_scopes


def named(stack, frame=0):
    return Instruction("add.1", "f32[]", "add", (), f', metadata={{op_name="{stack}" stack_frame_id={frame}}}')


TEXT = """HloModule m

FileNames
1 "/home/me/train.py"
2 "/lib/site-packages/flax/nnx/linear.py"

FunctionNames
1 "main"
2 "__call__"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=1 end_column=2}
2 {file_name_id=2 function_name_id=2 line=400 end_line=400 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

"""


def test_the_line_is_the_innermost_outside_of_libraries():
    """XLA counts callers from 2: frame 2 says that its caller is frame 2, and means frame 1."""
    sources = Sources(TEXT)
    assert sources.line_of(named("f", 1)) == "/home/me/train.py:12"
    assert sources.line_of(named("f", 2)) == "/home/me/train.py:12"
    assert sources.line_of(named("f", 3)) == ""


def test_a_program_without_tables_has_no_lines():
    assert Sources("HloModule m\n").line_of(named("f", 1)) == ""


class Net(nnx.Module):
    def __init__(self):
        self.layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return jnp.tanh(self.layer(x))


def test_in_a_compiled_program_a_layer_is_found_with_the_line_that_calls_it():
    name_scopes(net := Net())
    graph, state = nnx.split(net)
    with with_sources():
        text = jax.jit(lambda state, x: nnx.merge(graph, state)(x)).lower(state, jnp.ones((2, 4))).compile().as_text()
    sources, instructions = Sources(text), [each for part in parse(text).computations.values() for each in part]
    products = [each for each in instructions if each.opcode in ("dot", "custom-call")]
    rows = pathlib.Path(__file__).read_text().splitlines()
    line = 1 + next(number for number, row in enumerate(rows) if "jnp.tanh(self.layer(x))" in row)
    assert {(module_of(each).path, sources.line_of(each)) for each in products} == {("layer", f"{__file__}:{line}")}

"""One equation: run on arrays of other dtypes, and the line of code it comes from."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from mpjax.precision.casting import SourceLine, bind, first_outside, source_of, standing_at


X = jnp.asarray([1, 2, 4], jnp.float32)


def equation(name, fn, *args):
    (eqn,) = [eqn for eqn in jax.make_jaxpr(fn)(*args).eqns if eqn.primitive.name == name]
    return eqn


def from_lines(*files):
    """What stands for an equation with these lines, innermost first, each the line of its place."""
    frames = [
        SimpleNamespace(file_name=file, line_num=line, function_name="f") for line, file in enumerate(files, start=1)
    ]
    return SimpleNamespace(source_info=SimpleNamespace(traceback=SimpleNamespace(frames=frames)))


@pytest.mark.parametrize(
    ("name", "fn", "expected"),
    [
        ("scatter-add", lambda x, y: x.at[jnp.array([1, 1])].add(y), [1, 13, 4]),
        ("scatter-sub", lambda x, y: x.at[jnp.array([1, 1])].subtract(y), [1, -9, 4]),
        ("scatter-mul", lambda x, y: x.at[jnp.array([1, 1])].mul(y), [1, 48, 4]),
        ("scatter-min", lambda x, y: x.at[jnp.array([1, 1])].min(y), [1, 2, 4]),
        ("scatter-max", lambda x, y: x.at[jnp.array([1, 1])].max(y), [1, 8, 4]),
        ("scatter", lambda x, y: x.at[jnp.array([0, 2])].set(y), [3, 2, 8]),
    ],
)
def test_a_scatter_traced_in_float32_combines_in_the_dtype_it_is_given(name, fn, expected):
    updates = jnp.asarray([3, 8], jnp.float32)
    eqn = equation(name, fn, X, updates)
    indices = jnp.array([[0], [2]] if name == "scatter" else [[1], [1]])
    (out,) = bind(eqn.primitive, [X.astype("float16"), indices, updates.astype("float16")], eqn.params)
    assert (out.dtype, out.tolist()) == (jnp.float16, expected)


def test_results_come_as_a_sequence_whether_one_or_several():
    one = equation("neg", jnp.negative, X)
    assert [out.tolist() for out in bind(one.primitive, [X], one.params)] == [[-1, -2, -4]]
    two = equation("sort", lambda x: jax.lax.sort((-x, x), num_keys=1), X)
    assert [out.tolist() for out in bind(two.primitive, [-X, X], two.params)] == [[-4, -2, -1], [4, 2, 1]]


def test_what_is_traced_in_place_of_an_equation_has_its_scopes_below_those_open_and_its_line():
    @jax.named_scope("layer")
    def original(x):
        return jnp.tanh(x)

    eqn = equation("tanh", original, X)

    def again(x):
        with jax.named_scope("outer"), standing_at(eqn):
            return jnp.tanh(x)

    stood = equation("tanh", again, X)
    assert str(stood.source_info.name_stack) == "outer/layer"
    line = original.__wrapped__.__code__.co_firstlineno + 2
    assert source_of([stood]) == source_of([eqn]) == f"{__file__}:{line}"


@pytest.mark.parametrize(
    ("eqns", "expected"),
    [
        (
            [from_lines("/a/jax/lax.py", "/a/flax/nnx.py", "/home/me/train.py", "/home/me/main.py")],
            "/home/me/train.py:3",
        ),
        ([from_lines("/a/jax/lax.py"), from_lines("/a/jax/scan.py", "/home/me/train.py")], "/home/me/train.py:2"),
        ([from_lines("/a/jax/lax.py", "/a/flax/nnx.py"), from_lines("/home/me/train.py")], "/home/me/train.py:1"),
        ([from_lines("/a/jax/lax.py", "/a/mpjax/precision/x.py", "/a/flax/nnx.py")], "/a/flax/nnx.py:3"),
        ([from_lines("/a/jax/lax.py")], "(no source line)"),
        ([SimpleNamespace(source_info=SimpleNamespace(traceback=None))], "(no source line)"),
        ([], "(no source line)"),
    ],
    ids=["user", "user around a loop", "user before library", "library", "jax alone", "no traceback", "nothing"],
)
def test_the_users_innermost_line_is_told_or_else_a_librarys_that_is_neither_jax_nor_this(eqns, expected):
    assert source_of(eqns) == expected


@pytest.mark.parametrize(
    ("files", "count"),
    [
        (("/jax/a.py", "/jax/b.py", "/me.py", "/jax/c.py"), 2),
        (("/me.py", "/jax/a.py"), 0),
        (("/jax/a.py",), 1),
        ((), 0),
    ],
)
def test_lines_inside_are_counted_up_to_the_first_outside(files, count):
    assert first_outside([SourceLine(file, 1, "f") for file in files], ("/jax/", "/flax/")) == count

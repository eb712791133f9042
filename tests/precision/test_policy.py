"""Policy: defaults, casts, the jmp grammar, and a string that parses back."""

import dataclasses

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpjax.errors import UsageError
from mpjax.precision import Policy, from_jmp, get_policy, parse_policy, parse_rules


NAMES = ("float16", "bfloat16", "float32", "float64")
HALF = Policy("float32", "float16", "float32")


def names(policy):
    fields = (policy.param_dtype, policy.compute_dtype, policy.output_dtype, policy.reduce_dtype)
    return tuple(dtype.name for dtype in fields)


def batch():
    return {
        "image": jnp.full((1, 2, 2, 1), 2049.0, jnp.float32),
        "label": np.array([2049], np.int64),
        "pixels": np.array([255], np.uint8),
        "nested": [(jnp.ones(2, jnp.bfloat16), {"weight": np.array([0.1], np.float64)}), None],
        "valid": np.array([True]),
        "key": jax.random.key(7),
        "number": 0.1,
        "text": "cat",
    }


@pytest.mark.parametrize(
    ("given_dtypes", "settled"),
    [
        ({}, ("float32", "float32", "float32", "float32")),
        ({"param_dtype": "f16"}, ("float16", "float16", "float16", "float32")),
        ({"compute_dtype": "bf16"}, ("float32", "bfloat16", "bfloat16", "float32")),
        ({"compute_dtype": "f16", "output_dtype": "f32"}, ("float32", "float16", "float32", "float32")),
        ({"param_dtype": "f64"}, ("float64", "float64", "float64", "float64")),
        ({"param_dtype": "f64", "compute_dtype": jnp.float32}, ("float64", "float32", "float32", "float64")),
        ({"reduce_dtype": np.float16}, ("float32", "float32", "float32", "float16")),
    ],
)
def test_missing_dtypes_follow_the_ones_before(given_dtypes, settled):
    assert names(Policy(**given_dtypes)) == settled


def test_casting_a_batch_casts_floats_once_and_nothing_else():
    before, after = batch(), HALF.cast_to_compute(batch())
    assert after["image"].dtype == jnp.float16
    assert after["nested"][0][0].dtype == jnp.float16
    assert after["nested"][0][1]["weight"].dtype == np.float16
    assert after["label"].dtype == np.int64
    assert after["label"][0] == 2049
    assert after["pixels"].dtype == np.uint8
    assert after["valid"].dtype == bool
    assert after["key"].dtype == before["key"].dtype
    assert (after["nested"][1], after["number"], after["text"]) == (None, 0.1, "cat")
    assert after["image"][0, 0, 0, 0] == 2048.0  # the nearest float16, so the label above was not cast


@pytest.mark.parametrize(
    ("cast", "dtype"),
    [("cast_to_param", "bfloat16"), ("cast_to_compute", "float16"), ("cast_to_output", "float32")],
)
def test_each_cast_goes_to_its_own_dtype(cast, dtype):
    policy = Policy("bfloat16", "float16", "float32")
    assert getattr(policy, cast)({"w": jnp.ones(2, jnp.float32)})["w"].dtype == np.dtype(dtype)


@pytest.mark.parametrize("cast", ["cast_to_param", "cast_to_compute", "cast_to_output"])
@pytest.mark.parametrize("text", ["p=f32,c=f16,o=f32", "p=f16,c=bf16,o=f16"])
def test_casts_equal_those_of_jmp(cast, text):
    ours, theirs = getattr(get_policy(text), cast)(batch()), getattr(jmp.get_policy(text), cast)(batch())
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert type(a) is type(b)
        assert getattr(a, "dtype", None) == getattr(b, "dtype", None)
        assert np.all(a == b)


def test_a_cast_inside_jit_equals_one_outside():
    x = jnp.array([1.0001, 70000.0], jnp.float32)
    np.testing.assert_array_equal(jax.jit(HALF.cast_to_compute)(x), np.array([1.0, np.inf], np.float16))


@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize(
    "parts",
    [
        ("f16", None, None),
        (None, "f16", None),
        (None, None, "bf16"),
        ("bf16", "f16", None),
        ("f64", None, "f32"),
        (None, "bf16", "f32"),
        ("full", "f16", "full"),
        ("float32", "bfloat16", "float16"),
    ],
)
def test_the_grammar_is_that_of_jmp(parts, short):
    keys = ("p", "c", "o") if short else ("params", "compute", "output")
    text = ",".join(f"{key}={part}" for key, part in zip(keys, parts, strict=True) if part)
    assert get_policy(text) == from_jmp(jmp.get_policy(text))
    assert names(get_policy(text))[:3] == tuple(
        np.dtype(getattr(jmp.get_policy(text), field)).name
        for field in ("param_dtype", "compute_dtype", "output_dtype")
    )


@pytest.mark.parametrize("text", ["p=f32,c=f16,o=f32", "p=f64,c=f32,o=bf16"])
def test_the_string_of_a_jmp_policy_is_accepted(text):
    theirs = jmp.get_policy(text)
    assert get_policy(str(theirs)) == get_policy(theirs)
    assert get_policy(theirs).jmp == theirs
    assert str(get_policy(theirs).jmp) == str(theirs)


def test_case_and_spaces_are_forgiven():
    assert get_policy(" Params = Float32 , COMPUTE=bf16,output= f32 ") == Policy("float32", "bfloat16", "float32")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("params=float32,params=float16", "contradictory policy .*param_dtype is given twice"),
        ("p=float32,params=float32", "param_dtype is given twice"),
        ("params=float32,weights=float16", "bad part 'weights=float16'.*wanted params=, compute=, output= or reduce="),
        ("params=float32,compute=", "bad part 'compute='"),
        ("params=float32,compute", "bad part 'compute'"),
        ("params=float32,compute=float17", "unknown dtype 'float17'"),
        ("compute=half", "write 'float16' or 'bfloat16'"),
        ("params=float32;stem", "bad rule 'stem': wanted pattern=dtype"),
        ("params=float32;stem=", "unknown dtype ''"),
        ("params=float32;=float32", "bad rule pattern ''"),
        ("params=float32;stem=f32;stem=f16", "rule given twice: stem"),
    ],
)
def test_a_contradictory_or_unknown_policy_string_is_an_error(text, message):
    with pytest.raises(UsageError, match=message):
        get_policy(text)


def test_rules_stand_behind_semicolons_in_order():
    policy = parse_policy("compute=f16;stem/*=float32;type:Attention=params=f32,compute=bf16")
    assert list(policy.rules.items()) == [
        ("stem/*", np.dtype("float32")),
        ("type:Attention", Policy("float32", "bfloat16")),
    ]
    assert list(parse_rules(["b = f32", "a=f16"])) == ["b", "a"]


@pytest.mark.parametrize(
    ("value", "settled"),
    [
        ("f16", np.dtype("float16")),
        (jnp.bfloat16, np.dtype(jnp.bfloat16)),
        ("params=f32,compute=f16", Policy("float32", "float16")),
        (jmp.get_policy("p=f32,c=f16,o=f32"), HALF),
        (HALF, HALF),
    ],
)
def test_a_rule_takes_a_dtype_or_a_policy(value, settled):
    assert Policy(rules={"stem": value}).rules["stem"] == settled


@pytest.mark.parametrize("value", [None, "float17", np.int32, Policy(rules={"inner": "float32"})])
def test_a_bad_rule_value_is_an_error(value):
    with pytest.raises(UsageError):
        Policy(rules={"stem": value})


def test_a_policy_is_a_frozen_value():
    assert Policy(np.float32, "f16", "FP32") == HALF
    assert hash(HALF) == hash(Policy(np.float32, "f16", "FP32"))
    assert Policy(rules={"a": "f16", "b": "f32"}) != Policy(rules={"b": "f32", "a": "f16"})
    with pytest.raises(dataclasses.FrozenInstanceError):
        HALF.compute_dtype = "float32"


def test_the_string_of_a_policy():
    assert str(HALF) == "params=float32,compute=float16,output=float32"
    assert str(Policy("float16", reduce_dtype="float16", rules={"stem/*": "f32"})) == (
        "params=float16,compute=float16,output=float16,reduce=float16;stem/*=float32"
    )


DTYPES = st.sampled_from(NAMES)
PLAIN = st.builds(Policy, DTYPES, DTYPES, DTYPES, DTYPES)
PATTERNS = st.text(st.characters(exclude_characters="=;", codec="utf-8"), min_size=1).filter(str.strip)
RULED = st.builds(
    Policy,
    DTYPES,
    DTYPES,
    DTYPES,
    DTYPES,
    st.lists(st.tuples(PATTERNS, DTYPES | PLAIN), unique_by=lambda p: p[0].strip()),
)


def test_a_notebook_shows_dtypes_rules_in_order_and_the_text_that_parses_back():
    policy = Policy("float32", "bfloat16", rules={"stem/*": "float32", "head": "float16"})
    html = policy._repr_html_()
    assert ">compute_dtype</td>" in html
    assert html.index(">stem/*</td>") < html.index(">head</td>")
    assert f"<pre>{policy}</pre>" in html
    assert "rule" not in Policy()._repr_html_()


@given(RULED)
def test_the_string_of_any_policy_parses_back_to_an_equal_policy(policy):
    again = get_policy(str(policy))
    assert again == policy
    assert hash(again) == hash(policy)
    assert str(again) == str(policy)

"""Which outputs are parameters, and the dtypes that they are updated in."""

import jax
import jax.numpy as jnp

from mpjax.plan import parameters_of, parse, rows_of_updates, updates_of


X = jax.ShapeDtypeStruct((64, 32), jnp.float32)


def test_parameters_are_outputs_with_the_path_shape_and_dtype_of_an_input():
    given = {"params": {"w": X, "b": X}, "count": X}
    result = ({"params": {"w": X, "b": jax.ShapeDtypeStruct((1,), jnp.float32)}, "count": X}, X)
    assert {path: known.output for path, known in parameters_of(given, result).items()} == {"w": 2}


def test_a_history_of_scales_is_no_parameter():
    given = {"blocks/1": {"kernel": X, "amax_history": X}}
    assert parameters_of(given, given).keys() == {"blocks/1/kernel"}


TEXT = """HloModule m, num_partitions=2

%add (p: f32[], q: f32[]) -> f32[] {
  %p = f32[] parameter(0)
  %q = f32[] parameter(1)
  ROOT %s = f32[] add(%p, %q)
}

%most (p: f32[], q: f32[]) -> f32[] {
  %p = f32[] parameter(0)
  %q = f32[] parameter(1)
  ROOT %s = f32[] maximum(%p, %q)
}

%fused (w: f16[4], g: f32[4], ok: pred[4]) -> (f16[4], f32[4]) {
  %w = f16[4]{0} parameter(0)
  %g = f32[4]{0} parameter(1)
  %ok = pred[4]{0} parameter(2)
  %wide = f32[4]{0} convert(%w)
  %new = f32[4]{0} subtract(%wide, %g)
  %rounded = f16[4]{0} convert(%new)
  %kept = f16[4]{0} select(%ok, %rounded, %w)
  ROOT %t = (f16[4]{0}, f32[4]{0}) tuple(%kept, %g)
}

ENTRY %main (w: f16[4], g: f32[4], h: bf16[2,4], ok: pred[4]) -> (f16[4], f16[4], f16[4], f32[4]) {
  %w = f16[4]{0} parameter(0)
  %g = f32[4]{0} parameter(1)
  %h = bf16[2,4]{1,0} parameter(2)
  %ok = pred[4]{0} parameter(3)
  %total = f32[4]{0} all-reduce(%g), replica_groups={{0,1}}, to_apply=%add, metadata={op_name="jit(f)/shard_map/psum"}
  %added = bf16[2,4]{1,0} all-reduce-start(%h), to_apply=%add, metadata={op_name="transpose(jvp(up))/dot_general"}
  %largest = f32[4]{0} all-reduce(%g), to_apply=%most
  %both = (f16[4]{0}, f32[4]{0}) fusion(%w, %total, %ok), kind=kLoop, calls=%fused
  %first = f16[4]{0} get-tuple-element(%both), index=0
  %second = f32[4]{0} get-tuple-element(%both), index=1
  %half = f16[4]{0} add(%w, %w)
  ROOT %out = (f16[4]{0}, f16[4]{0}, f16[4]{0}, f32[4]{0}) tuple(%first, %half, %w, %second)
}
"""


def test_an_update_has_the_dtype_of_its_last_arithmetic_behind_casts_and_selections():
    """The last output is what a library or another device computed, of which the text has no arithmetic."""
    found = updates_of(parse(TEXT), [0, 1, 2, 3])
    assert found == [frozenset({"float32"}), frozenset({"float16"}), frozenset(), None]


CASTS = """HloModule m

ENTRY %main (w: f32[4], h: bf16[4]) -> (f32[4], f32[4], f32[4], bf16[4], f32[4]) {
  %w = f32[4]{0} parameter(0)
  %h = bf16[4]{0} parameter(1)
  %new = f32[4]{0} multiply(%w, %w)
  %half = bf16[4]{0} convert(%new)
  %wide = f32[4]{0} convert(%half)
  %few = f32[4]{0} reduce-precision(%new), exponent_bits=8, mantissa_bits=7
  %old = bf16[4]{0} convert(%w)
  %again = f32[4]{0} convert(%old)
  %stored = bf16[4]{0} convert(%few)
  ROOT %out = (f32[4]{0}, f32[4]{0}, f32[4]{0}, bf16[4]{0}, f32[4]{0}) tuple(%wide, %few, %again, %stored, %new)
}
"""


def test_a_dtype_that_an_update_is_rounded_to_on_its_way_counts_if_it_is_narrower_than_the_output():
    """The fourth is stored in bfloat16, to which it is rounded once."""
    both, wide = frozenset({"float32", "bfloat16"}), frozenset({"float32"})
    assert updates_of(parse(CASTS), [0, 1, 2, 3, 4]) == [both, both, frozenset({"bfloat16"}), wide, wide]


LOOP = """HloModule m

%body (t: (s32[], bf16[4])) -> (s32[], bf16[4]) {
  %t = (s32[], bf16[4]{0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %w = bf16[4]{0} get-tuple-element(%t), index=1
  %new = bf16[4]{0} multiply(%w, %w)
  ROOT %out = (s32[], bf16[4]{0}) tuple(%i, %new)
}

%cond (t: (s32[], bf16[4])) -> pred[] {
  %t = (s32[], bf16[4]{0}) parameter(0)
  ROOT %go = pred[] constant(true)
}

ENTRY %main (s: (s32[], bf16[4])) -> bf16[4] {
  %s = (s32[], bf16[4]{0}) parameter(0)
  %loop = (s32[], bf16[4]{0}) while(%s), condition=%cond, body=%body
  ROOT %w = bf16[4]{0} get-tuple-element(%loop), index=1
}
"""


def test_an_update_in_a_loop_is_read_in_its_body():
    assert updates_of(parse(LOOP), [0]) == [frozenset({"bfloat16"})]


def test_updates_are_as_asked_or_wider_or_told():
    rows = rows_of_updates(
        {
            "same": ("float32", frozenset({"float32"})),
            "wide": ("float16", frozenset({"float32"})),
            "narrow": ("float32", frozenset({"float32", "float16"})),
            "frozen": ("float32", frozenset()),
            "dark": ("float32", None),
        }
    )
    assert [(row.path, row.operands, row.verdict) for row in rows] == [
        ("same", "float32", "as asked"),
        ("wide", "float32", "as asked"),
        ("narrow", "float16", "narrower"),
        ("dark", "", "unknown"),
    ]


def test_a_parameter_that_the_function_itself_rounds_is_narrower_whatever_the_program_shows():
    found = {name: ("float32", dtypes) for name, dtypes in {"a": frozenset({"float32"}), "b": None}.items()}
    rows = rows_of_updates(found, {"a": "bfloat16", "b": "bfloat16"})
    assert [(row.operands, row.verdict) for row in rows] == [("bfloat16", "narrower")] * 2
    assert rows[0].reason == "the function itself rounds the new parameter to bfloat16"

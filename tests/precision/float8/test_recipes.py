"""Recipes by their names, and GPUs without units for them."""

import pytest

from mpjax.errors import UsageError
from mpjax.precision.float8 import (
    FLOAT8,
    MXFP8,
    ROWWISE,
    as_recipe,
    emulated_reason,
    require_undivided,
    require_units,
)


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("float8", FLOAT8),
        ("FP8", FLOAT8),
        ("tensorwise", FLOAT8),
        ("float8-rowwise", ROWWISE),
        ("mxfp8", MXFP8),
        ("MXFP8BlockScaling", MXFP8),
        (ROWWISE, ROWWISE),
    ],
)
def test_a_recipe_has_the_names_of_torchao_and_transformer_engine(name, recipe):
    assert as_recipe(name) is recipe


def test_a_misspelt_recipe_names_the_nearest():
    with pytest.raises(
        UsageError, match=r"unknown recipe of products 'rowise': wanted one of .*; did you mean 'float8_rowwise'"
    ):
        as_recipe("rowise")


@pytest.mark.parametrize(
    ("recipe", "capability", "instead"),
    [(FLOAT8, (8, 0), "mixed_bfloat16"), (ROWWISE, (8, 6), "mixed_bfloat16"), (MXFP8, (9, 0), "mixed_float8")],
)
def test_a_gpu_without_units_is_refused_with_what_to_write(recipe, capability, instead):
    with pytest.raises(UsageError, match=rf"has no units for {recipe}, .* write --precision.policy {instead}$"):
        require_units([recipe], capability, "a GPU")


@pytest.mark.parametrize(
    ("recipe", "capability"), [(FLOAT8, (8, 9)), (ROWWISE, (9, 0)), (MXFP8, (10, 0)), (MXFP8, None)]
)
def test_a_gpu_with_units_and_another_device_are_not_refused(recipe, capability):
    require_units([recipe], capability, "a GPU")


def test_float8_over_tensor_is_refused_before_xla_ends_the_process():
    with pytest.raises(UsageError, match=r"^float8_rowwise over --mesh.tensor 2: .* with --mesh.tensor 1, or write"):
        require_undivided([ROWWISE, MXFP8], 2)
    require_undivided([ROWWISE], 1)
    require_undivided([MXFP8], 2)


def test_a_cpu_says_that_it_emulates():
    assert str(emulated_reason(FLOAT8, "cpu")).startswith("a CPU emulates float8: it rounds the operands")
    assert emulated_reason(FLOAT8, "gpu") is None

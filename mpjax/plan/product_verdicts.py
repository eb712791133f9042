"""Compares the products of a compiled program with the dtypes asked for: one row for each product."""

from collections.abc import Callable, Collection, Sequence

from mpjax.plan.compiled_products import BLOCK_SCALED, CompiledProduct, Target, in_order
from mpjax.plan.pairing import NOWHERE, PairedProduct
from mpjax.plan.traced_products import TracedProduct
from mpjax.plan.verdicts import (
    AS_ASKED,
    HALF,
    MISSING,
    NARROWER,
    NOT_TRACED,
    RECIPE,
    UNKNOWN,
    WIDER,
    ReceiptRow,
    compared,
    counted,
    narrowest,
    written,
)
from mpjax.precision.casting.flops import TENSORFLOAT32
from mpjax.precision.dtypes import widest
from mpjax.precision.float8.recipes import Recipe
from mpjax.precision.product_dtypes import AskedDtypes


NO_NAME = "XLA kept no name of it, so the module and its rule are not known"
NOT_ASKED = "neither a traced function nor a policy says what was asked for"

Wanted = Callable[[str], AskedDtypes | None]
"""A function from module path to the dtypes that a policy asks for in products there; None without a policy."""


def rows_of_products(
    pairs: Sequence[PairedProduct], wanted: Wanted, target: Target, *, traced: bool, rounds: Collection[str] = ()
) -> list[ReceiptRow]:
    """Builds a receipt's rows of products, convolutions, attentions and kernels, each with its verdict.

    A row has the dtypes that are asked for and the dtypes that run. Equal rows are merged and counted.

    A policy applies to differentiated functions. Other products, such as the optimizer's, and products in
    `mpjax.full_precision` are asked for as traced, and so are all products without a policy. If nothing is
    differentiated, the policy applies to all products outside `full_precision`. In a program that differentiates,
    tensorfloat32 counts as asked for in undifferentiated products of float32.

    Args:
      pairs: the products asked for and the products that run.
      wanted: `(module path) -> dtypes` that the policy asks for; None of a path without a policy.
      target: the device that the program was compiled for.
      traced: whether the traced program is known; if not, the policy alone says which dtypes are asked for.
      rounds: the dtypes that the policy names; operands and results may be rounded to any of them, except float8.
    """
    gradients = any(pair.traced.differentiated for pair in pairs if pair.traced)
    return counted([_row_of_pair(pair, wanted, target, gradients, traced, rounds) for pair in pairs])


def paths_of(pairs: Sequence[PairedProduct]) -> list[str]:
    """Lists the module path of each product that a policy applies to; a path may occur several times."""
    gradients = any(pair.traced.differentiated for pair in pairs if pair.traced)
    apart = [pair.traced is not None and (pair.traced.kept or _is_apart(pair, gradients)) for pair in pairs]
    abouts = (pair.traced or pair.compiled for pair, free in zip(pairs, apart, strict=True) if not free)
    return [about.module.path for about in abouts if about]


def rows_of_recipe(
    recipe: Recipe | None, products: Sequence[ReceiptRow], target: Target, *, traced: bool
) -> list[ReceiptRow]:
    """Builds one row that says that float8 is missing, if a recipe is asked for and no row of a product has float8.

    The verdict is "missing" or, on a CPU without the traced program, "unknown". In all other cases the list is empty.

    Args:
      recipe: the float8 recipe of the policy; None if no product has to be in float8.
      products: the rows of products.
      target: the device that the program was compiled for.
      traced: whether the traced program is known.
    """
    if recipe is None or any("float8" in row.asked or "float8" in row.operands for row in products):
        return []
    dtype = str(recipe.forward)
    if not traced and target.platform == "cpu":
        verdict, reason = UNKNOWN, f"a CPU emulates {recipe}, and a compiled program does not say what was asked for"
    else:
        verdict, reason = MISSING, f"the policy asks for products by {recipe}, and the function has none in float8"
    return [ReceiptRow("*", "forward", RECIPE, dtype, "", "", "", "", 1, verdict, reason)]


def _is_float8(dtypes: Sequence[str]) -> bool:
    return any(dtype.startswith("float8") for dtype in dtypes)


def _is_apart(pair: PairedProduct, gradients: bool) -> bool:
    """True for a traced product outside of differentiated functions, in a program that has `gradients`."""
    return gradients and pair.traced is not None and not pair.traced.differentiated


def _row_of_pair(
    pair: PairedProduct, wanted: Wanted, target: Target, gradients: bool, traced: bool, rounds: Collection[str]
) -> ReceiptRow:
    """Builds the row of one product for `rows_of_products`; `gradients` is true if the program differentiates."""
    product, compiled = pair.traced, pair.compiled
    about = product or compiled
    assert about is not None
    module, policy = about.module, wanted(about.module.path)
    apart = _is_apart(pair, gradients)
    if apart or (product is not None and product.kept):
        policy = None
    operands = product.operands if product else ()
    requested = operands if policy is None else _asked_by_policy(policy, product, about.operands, module.backward)
    if compiled is None:
        verdict, reason, limit = MISSING if pair.note == NOWHERE else UNKNOWN, pair.note, False
    elif product is None and (traced or not compiled.named):
        verdict, reason, limit = UNKNOWN, NOT_TRACED if traced else NO_NAME, False
    elif not requested:
        verdict, reason, limit = UNKNOWN, NOT_ASKED, False
    elif apart and "float32" in requested and set(compiled.operands) == {TENSORFLOAT32}:
        verdict, reason, limit = AS_ASKED, "", False  # JAX's default precision; no policy applies here
    else:
        verdict, reason, limit = _verdict(product, compiled, requested, target)
        early = _early(product, requested, policy, rounds) if product and policy else ""
        other = _other_recipe(product, compiled, requested, policy, target) if policy else None
        if early and (verdict != NARROWER or limit):
            verdict, reason, limit = NARROWER, early, False
        elif other and (verdict == AS_ASKED or limit):
            verdict, reason, limit = *other, False
    made_equal = (
        f"XLA widens operands to {written(compiled.operands)}"
        if compiled and _only_made_equal(requested, compiled)
        else ""
    )
    notes = [
        pair.note if compiled else "",
        made_equal,
        "in a loop, counted once" if product and product.in_loop else "",
    ]
    if policy and policy.unknown and policy.recipe is not None and not _is_float8(requested):
        notes.append(f"a product by {policy.recipe} would be as asked too: its module is not known")
    return ReceiptRow(
        path=module.path,
        direction="backward" if module.backward else "other" if apart else "forward",
        kind=about.kind,
        asked=written(requested),
        operands=written(compiled.operands) if compiled else "",
        accumulation=compiled.accumulation if compiled else "",
        result=compiled.result if compiled else "",
        by=compiled.by if compiled else "",
        count=1,
        verdict=verdict,
        reason=reason,
        note=", ".join(filter(None, notes)),
        device_limit=limit,
    )


def _asked_by_policy(
    policy: AskedDtypes, traced: TracedProduct | None, operands: Sequence[str], backward: bool
) -> Sequence[str]:
    """The dtypes that a policy asks for in a product with `operands`: the traced dtypes or, without a trace, compiled.

    For a recipe, these are the float8 dtypes of its pass. Otherwise it is the compute dtype for each operand.
    """
    float8 = _is_float8(operands)
    if float8 and policy.users_product:
        return operands
    if policy.recipe is not None and (float8 or policy.required):
        forward, gradient = str(policy.recipe.forward), str(policy.recipe.gradient)
        # A recomputed forward product is in the backward pass. Without a trace, only its dtypes set it apart there.
        again = traced.recomputed if traced else compared([forward, forward], operands) == AS_ASKED
        return in_order((gradient if backward and not again else forward, forward))
    return (str(policy.compute),) * len(operands)


def _early(traced: TracedProduct, requested: Sequence[str], policy: AskedDtypes, rounds: Collection[str]) -> str:
    """Explains how the traced function computes or rounds in fewer bits than the policy asks for; empty if it does not.

    A device that widens its operands does not restore these bits. `requested` are the dtypes that the policy asks for.
    Operands and results may be rounded to any dtype in `rounds` except float8.
    """
    if compared(requested, traced.operands) == NARROWER:
        done = "quantises it to" if traced.quantised else "computes it in"
        return f"the function itself {done} {written(traced.operands)}"

    def fits(dtype: str) -> bool:
        allowed = dtype in rounds or policy.users_product
        return (allowed and not _is_float8([dtype])) or any(compared([goal], [dtype]) != NARROWER for goal in requested)

    before = [dtype for dtype in traced.rounded if not fits(dtype)]
    if before:
        return f"the function itself rounds an operand to {narrowest(before)}"
    return "" if fits(traced.result) else f"the function itself rounds the result to {traced.result}"


_FINER = ("delayed", "tensor", "row", "block")
"""The scalings of a recipe, from coarse to fine."""


def _other_recipe(
    traced: TracedProduct | None,
    compiled: CompiledProduct,
    requested: Sequence[str],
    policy: AskedDtypes,
    target: Target,
) -> tuple[str, str] | None:
    """The verdict and reason for a float8 product with the scales of another recipe; None if there is no such fault.

    `traced` is None without the traced program. Outside of GPUs, scales of blocks are then unknown, and not compared.
    """
    recipe = policy.recipe
    if recipe is None or policy.users_product or not _is_float8(requested):
        return None
    if policy.applied is not None and policy.applied != recipe:
        actual, expected = _FINER.index(policy.applied.scaling), _FINER.index(recipe.scaling)
        verdict = NARROWER if actual < expected else WIDER
        return verdict, f"the layer was made to multiply by {policy.applied}, and the policy asks for {recipe}"
    blocks = compiled.by in BLOCK_SCALED if target.platform == "gpu" else traced.blocks if traced else None
    if blocks is None or blocks == (recipe.scaling == "block"):
        return None
    if blocks:
        return WIDER, f"its operands have a scale for each block, and the policy asks for {recipe}"
    return NARROWER, f"its operands have no scale for each block, and the policy asks for {recipe}"


def _verdict(
    traced: TracedProduct | None, compiled: CompiledProduct, requested: Sequence[str], target: Target
) -> tuple[str, str, bool]:
    """Compares a compiled product with the dtypes asked for, `requested`.

    It returns the verdict, the reason (empty if as asked), and whether no program for the device could run as asked.
    `traced`, the product of the traced program, is None without one. Then the dtype of the result is not compared.
    """
    verdict = compared(requested, compiled.operands)
    if verdict != AS_ASKED and not _only_made_equal(requested, compiled):
        return (verdict, *_why(traced, compiled, requested, target))
    if compiled.accumulation in HALF:
        return NARROWER, f"adds up in {compiled.accumulation}", False
    if traced and compared([traced.result], [compiled.result]) == NARROWER:
        return NARROWER, f"rounds the result to {compiled.result}; the function asks for {traced.result}", False
    return AS_ASKED, "", False


def _only_made_equal(requested: Sequence[str], compiled: CompiledProduct) -> bool:
    """True if operands of two dtypes, none of them float8, are both widened to the dtype that holds both.

    That is no fault, because no device multiplies two dtypes.
    """
    return len(set(requested)) > 1 and not _is_float8(requested) and set(compiled.operands) == {str(widest(*requested))}


def _why(
    traced: TracedProduct | None, compiled: CompiledProduct, requested: Sequence[str], target: Target
) -> tuple[str, bool]:
    """Explains why operands are not in the dtypes asked for, `requested`.

    It returns the reason, and whether no program for the device could compute in these dtypes.
    `traced`, the product of the traced program, is None without one.
    """
    runs = written(compiled.operands)
    if traced and traced.quantised and not traced.blocks:
        return f"quantised to {written(traced.operands)} and widened again: the product itself is in {runs}", False
    if traced and compared(requested, traced.operands) != AS_ASKED:
        return f"the function itself computes it in {written(traced.operands)}", False
    if TENSORFLOAT32 in compiled.operands and "float32" in requested:
        return (
            "JAX's default precision rounds float32 operands to tensorfloat32; "
            'jax.config.update("jax_default_matmul_precision", "highest") keeps them'
        ), False
    narrow = all(dtype in HALF or dtype.startswith("float8") for dtype in requested)
    if target.platform == "cpu" and narrow and compared(requested, compiled.operands) == WIDER:
        return f"XLA computes {written(requested)} products of a CPU in {runs}", True
    return f"XLA computes it in {runs}", False

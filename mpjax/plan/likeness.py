"""Compares products of a traced program with each other and with those of the compiled program, by size and dtype."""

from collections.abc import Iterable, Sequence

from mpjax.plan.compiled_products import CompiledProduct
from mpjax.plan.hlo import Module
from mpjax.plan.traced_products import TracedProduct
from mpjax.plan.verdicts import bits_of
from mpjax.precision.casting.flops import TENSORFLOAT32


def libraries_of(compiled: Iterable[CompiledProduct]) -> str:
    """Names the libraries that compute several products, each once: "Triton or cuBLAS"."""
    return " or ".join(sorted({product.by for product in compiled}))


def extent_of(product: TracedProduct | CompiledProduct) -> int:
    """The multiplications of a matrix product; of any other kind, the elements of the result."""
    return product.size if product.size else product.elements


def nearest(product: TracedProduct, candidates: Sequence[CompiledProduct]) -> CompiledProduct:
    """The candidate with a result as wide as asked for, then in the dtypes of the operands, then the narrowest."""
    asked = bits_of(product.result)

    def rank(each: CompiledProduct) -> tuple[bool, bool, tuple[int, int]]:
        return bits_of(each.result) < asked, not have_same_dtypes(product, each), bits_of(each.result)

    return min(candidates, key=rank)


def shape_of(product: TracedProduct | CompiledProduct) -> tuple[str, int, int]:
    """The kind, the multiplications and the elements of the result."""
    return product.kind, product.size, product.elements


def size_without_padding(compiled: CompiledProduct, product: TracedProduct) -> int:
    """The multiplications of a compiled product before XLA split and padded its sums, as long as those of `product`.

    A sum of 136 terms becomes 4 sums of 40, one of 400 terms 8 sums of 64, and their results are added.
    """
    terms, padded = product.size // product.elements, compiled.size // compiled.elements
    if terms % padded and padded <= terms:
        fewest = -(-terms // padded)
        whole = (parts for parts in range(fewest, 2 * fewest) if compiled.elements % (parts * product.elements) == 0)
        return compiled.elements // next(whole, fewest) * terms
    return compiled.size


def have_same_dtypes(traced: TracedProduct, compiled: CompiledProduct) -> bool:
    """True if the operands have the same dtypes as traced and as compiled; tensorfloat32 counts as float32."""
    return tuple("float32" if dtype == TENSORFLOAT32 else dtype for dtype in compiled.operands) == traced.operands


def are_alike(first: TracedProduct, second: TracedProduct) -> bool:
    """True if XLA may have merged two products: they have the same pass, sizes and operand dtypes."""
    return (first.module.backward, first.size, first.elements, first.operands) == (
        second.module.backward,
        second.size,
        second.elements,
        second.operands,
    )


def share_operand(first: TracedProduct, second: TracedProduct) -> bool:
    """True if two products of one pass sum over the same axes of a common operand, as products that XLA merges do."""
    return first.module.backward == second.module.backward and not set(first.values).isdisjoint(second.values)


def common_names(first: Module, second: Module) -> int:
    """The number of names that the paths of two modules have in common from the start on."""
    count = 0
    for one, other in zip(first.path.split("/"), second.path.split("/"), strict=False):
        if one != other:
            break
        count += 1
    return count

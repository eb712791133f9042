"""Pairs each product of a traced program with the instruction of the compiled program that computes it.

XLA keeps the name of most products, merges products that share an operand, computes equal products once, writes small
ones as multiplications and sums, and loses the names of some. Products that no rule pairs are never guessed.
"""

import collections
import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from mpjax.plan.compiled_products import CompiledProduct
from mpjax.plan.likeness import (
    are_alike,
    common_names,
    extent_of,
    have_same_dtypes,
    libraries_of,
    nearest,
    shape_of,
    share_operand,
    size_without_padding,
)
from mpjax.plan.traced_products import TracedProduct
from mpjax.plan.verdicts import NARROWER, UNCLEAR, bits_of, compared


T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

MERGED = "in one product with"
SHARED = "computed once for two"
AMONG = "one of {count} without names, which run in several dtypes"
CONSTANT = "XLA computed it while compiling: its operands are constants"
NOWHERE = "nothing in the program computes it"
INSIDE = "what a kernel of its own computes inside is not in the program's text"


@dataclasses.dataclass(frozen=True)
class PairedProduct:
    """A product of the traced program and the product of the compiled program that computes it.

    Attributes:
      traced: the product of the traced program; None if none is known for `compiled`.
      compiled: the product of the compiled program; None if there is none, or if it is not known.
      note: how the two belong together if XLA merged or shared products, or why `compiled` is None; else empty.
    """

    traced: TracedProduct | None
    compiled: CompiledProduct | None
    note: str = ""


def paired(
    traced: Sequence[TracedProduct],
    compiled: Sequence[CompiledProduct],
    loops: Callable[[], Sequence[CompiledProduct]],
    *,
    partitions: int = 1,
) -> list[PairedProduct]:
    """Pairs the products of a traced program with the products of its compiled program.

    Args:
      traced: the products of the traced program.
      compiled: the products of the compiled program.
      loops: returns the products that XLA wrote as multiplications and sums; called only if traced products other than
        Pallas kernels are left over.
      partitions: the number of devices that the program is divided over.

    Returns:
      A pair for each of `traced`, in its order. Then a pair for each of `compiled` that is left over, unless it repeats
      a paired one.
    """
    matching = _Matching(list(traced), list(compiled))
    # The compiler may divide a product over some of the devices.
    for shards in [count for count in range(1, partitions + 1) if partitions % count == 0]:
        # Before the next rule, for which both gradients of a square layer are the same.
        matching.joined(shards, share_operand)
        matching.by(
            lambda t: (t.module, t.kind, extent_of(t)), lambda c, p=shards: (c.module, c.kind, p * extent_of(c))
        )
        matching.joined(shards, are_alike)
    matching.joined(1, lambda product, seed: product.module.backward == seed.module.backward)
    matching.by_module()
    matching.by(lambda t: (t.kind, extent_of(t)), lambda c: (c.kind, extent_of(c)), alike=True)
    # XLA writes convolutions with a window of one pixel as matrix products, which may have lost their name.
    matching.by(
        lambda t: (t.kind, t.elements), lambda c: ("convolution", c.elements) if not c.named else (), alike=True
    )
    matching.as_many()
    matching.shared()
    matching.remaining()
    if any(product.kind != "kernel" for product in matching.traced):
        matching.in_loops(loops())
    matching.rest()
    order = {id(product): number for number, product in enumerate(traced)}
    return sorted(matching.pairs, key=lambda pair: order.get(id(pair.traced), len(order)))


class _Matching:
    """The products that are not paired yet, traced (`traced`) and compiled (`compiled`), and the pairs so far.

    Its methods add to `pairs`, and remove what they pair from `traced` and `compiled`.
    """

    def __init__(self, traced: list[TracedProduct], compiled: list[CompiledProduct]):
        self.traced, self.compiled, self.pairs = traced, compiled, []
        self.in_unclear_loops: set[int] = set()

    def by(
        self,
        of_traced: Callable[[TracedProduct], Hashable],
        of_compiled: Callable[[CompiledProduct], Hashable],
        *,
        alike: bool = False,
    ):
        """Pairs each traced product with a compiled product of the same key, preferably one in the same dtypes.

        Args:
          of_traced: the key of a traced product.
          of_compiled: the key of a compiled product.
          alike: True to pair only if all compiled products with the key have the same dtypes. The pair then names the
            libraries of all of them, because any may be the right one.
        """
        candidates = _grouped(self.compiled, of_compiled)
        by = {key: libraries_of(alternatives) for key, alternatives in candidates.items()}
        unclear = {
            key
            for key, alternatives in candidates.items()
            if alike and len({compiled.dtypes for compiled in alternatives}) > 1
        }
        left, matched = [], []
        for product in self.traced:
            key = of_traced(product)
            if candidates.get(key) and key not in unclear:
                # A program's products are not in the order of its trace.
                near = [
                    (not have_same_dtypes(product, compiled), compiled.result != product.result)
                    for compiled in candidates[key]
                ]
                matched.append(compiled := candidates[key].pop(near.index(min(near))))
                self.pairs.append(
                    PairedProduct(product, dataclasses.replace(compiled, by=by[key]) if alike else compiled)
                )
            else:
                left.append(product)
        self.traced, self.compiled = left, _without(self.compiled, matched)

    def as_many(self) -> None:
        """Pairs the traced products of one kind and shape with the compiled ones without a name, if they are as many.

        The traced ones have operands of one dtype, and no compiled one has narrower operands, so that the number of
        products that run in a wider dtype is right whichever belong together; the note says that it is one of several.
        Wide results go to the products that ask for them.
        """
        compiled = _grouped((each for each in self.compiled if not each.named), shape_of)
        for key, traced in _grouped(self.traced, shape_of).items():
            candidates = compiled.get(key, [])
            if not self._as_many_as(traced, candidates):
                continue
            note = AMONG.format(count=len(traced))
            for product in sorted(traced, key=lambda product: bits_of(product.result), reverse=True):
                candidates.remove(taken := nearest(product, candidates))
                self.pairs.append(PairedProduct(product, taken, note))
                self.compiled = _without(self.compiled, [taken])
            self.traced = _without(self.traced, traced)

    def joined(self, shards: int, alike: Callable[[TracedProduct, TracedProduct], bool]) -> None:
        """Pairs a compiled product with several traced products whose multiplications add up to its own.

        XLA merged them. One of them has the module of the compiled product. The others are taken in order of their
        distance by path, and left out if they exceed what is missing. If the sum is not exact, nothing is paired.
        Nothing is paired either if the module has as many traced products of the compiled product's size as compiled
        ones: the inner products of two adapters share an operand, and together may be as large as an outer one.

        Args:
          shards: the number of devices that the product is divided over. The compiled product has this fraction of the
            multiplications.
          alike: `(product, other) -> bool`, whether XLA may have merged two traced products.
        """
        whole_products = collections.Counter((product.module, product.size) for product in self.traced)
        alone = collections.Counter((compiled.module, shards * compiled.size) for compiled in self.compiled)
        for compiled in [compiled for compiled in self.compiled if compiled.size]:
            if (
                whole_products[compiled.module, shards * compiled.size]
                >= alone[compiled.module, shards * compiled.size]
            ):
                continue
            for seed in [product for product in self.traced if product.module == compiled.module and product.size]:
                whole = shards * size_without_padding(compiled, seed)
                if whole <= seed.size:
                    continue
                near = [
                    product for product in self.traced if product.size and product is not seed and alike(product, seed)
                ]
                near.sort(key=lambda product, seed=seed: -common_names(product.module, seed.module))
                missing, merged = whole - seed.size, [seed]
                for product in near:
                    if product.size <= missing:
                        missing -= product.size
                        merged.append(product)
                if missing == 0:
                    note = f"{MERGED} {compiled.module.path or 'another'}"
                    self.pairs += [
                        PairedProduct(product, compiled, "" if product is seed else note) for product in merged
                    ]
                    self.traced, self.compiled = _without(self.traced, merged), _without(self.compiled, [compiled])
                    break

    def by_module(self) -> None:
        """Pairs traced and compiled products of the same module, pass and kind, by `all_of`.

        Outside of modules, it does so only if there is a single traced product of the pass and kind.
        """
        compiled = _grouped(self.compiled, lambda product: (product.module, product.kind))
        for key, traced in _grouped(self.traced, lambda product: (product.module, product.kind)).items():
            if key[0].path or len(traced) == 1:
                self.all_of(traced, compiled.get(key, []))

    def remaining(self) -> None:
        """Pairs the traced products that are left with the compiled products without a name, by `all_of`.

        It does so for convolutions, and then for matrix products. XLA computes the gradient of a grouped convolution by
        a convolution of another size.
        """
        for kind in ("convolution", "product"):
            traced = [product for product in self.traced if product.kind == kind]
            self.all_of(traced, [product for product in self.compiled if product.kind == kind and not product.named])

    def all_of(self, traced: list[TracedProduct], compiled: list[CompiledProduct]) -> None:
        """Pairs the two lists one by one if they are equally long, and all compiled products have the same dtypes.

        Otherwise it pairs nothing.
        """
        if len(traced) == len(compiled) and len({counterpart.dtypes for counterpart in compiled}) == 1:
            by = libraries_of(compiled)
            pairs = zip(traced, compiled, strict=True)
            self.pairs += [
                PairedProduct(product, dataclasses.replace(counterpart, by=by)) for product, counterpart in pairs
            ]
            self.traced, self.compiled = _without(self.traced, traced), _without(self.compiled, compiled)

    def shared(self) -> None:
        """Pairs traced products with the compiled product of another pair, if XLA computes both at once.

        The other traced product has the same operands, or is the forward product that a product of the backward pass
        recomputes.
        """
        same = {pair.traced.same: pair.compiled for pair in self.pairs}
        forward = {
            (pair.traced.module.path, pair.traced.kind, extent_of(pair.traced), pair.traced.operands): pair.compiled
            for pair in self.pairs
            if not pair.traced.module.backward
        }
        left = []
        for product in self.traced:
            again = (product.module.path, product.kind, extent_of(product), product.operands)
            compiled = same.get(product.same) or (forward.get(again) if product.recomputed else None)
            if compiled:
                self.pairs.append(PairedProduct(product, compiled, SHARED))
            else:
                left.append(product)
        self.traced = left

    def in_loops(self, loops: Sequence[CompiledProduct]) -> None:
        """Pairs traced products with `loops`, the multiplications in loop fusions, of the same module, pass and kind.

        It does so if all of these have the same operands, and add up in one dtype if they add up; several products may
        be paired with one of them. It also does so if they are as many as the traced ones and none is narrower: the
        note then says that which of them is which is not known. Other products are put into `in_unclear_loops`.
        """
        groups = _grouped(loops, lambda multiplication: (multiplication.module, multiplication.kind))
        for key, traced in _grouped(self.traced, lambda product: (product.module, product.kind)).items():
            candidates = groups.get(key, [])
            sums = {each.accumulation for each in candidates} - {""}
            if candidates and len({each.operands for each in candidates}) == 1 and len(sums) < 2:
                self.pairs += [PairedProduct(product, nearest(product, candidates)) for product in traced]
            elif candidates and self._as_many_as(traced, candidates):
                note = AMONG.format(count=len(traced))
                self.pairs += [PairedProduct(*both, note) for both in zip(traced, candidates, strict=True)]
            else:
                self.in_unclear_loops |= {id(product) for product in traced} if candidates else set()
                continue
            self.traced = _without(self.traced, traced)

    def _as_many_as(self, traced: Sequence[TracedProduct], candidates: Sequence[CompiledProduct]) -> bool:
        """True if there are as many, the traced ones have operands of one dtype, and no candidate has narrower ones."""
        asked = {product.operands for product in traced}
        return (
            len(traced) == len(candidates)
            and len(asked) == 1
            and all(compared(traced[0].operands, each.operands) != NARROWER for each in candidates)
        )

    def rest(self) -> None:
        """Adds a pair for each product that is left.

        A traced product gets the `compiled` None, and a note that says why. A compiled product gets a traced product of
        its module, if there is one; if it repeats a paired one, it gets no pair.
        """
        modules = {pair.traced.module: pair.traced for pair in self.pairs if pair.traced}
        for product in self.traced:
            if product.kind == "kernel":
                note = INSIDE
            elif product.constant:
                note = CONSTANT
            else:
                candidates = [
                    compiled
                    for compiled in self.compiled
                    if (compiled.kind == "attention") == (product.kind == "attention")
                ]
                note = UNCLEAR if candidates or id(product) in self.in_unclear_loops else NOWHERE
            self.pairs.append(PairedProduct(product, None, note))
        ran = {(pair.traced.module, pair.compiled.dtypes) for pair in self.pairs if pair.traced and pair.compiled}
        sizes = {
            (pair.compiled.kind, extent_of(pair.compiled), pair.compiled.dtypes) for pair in self.pairs if pair.compiled
        }
        for compiled in self.compiled:
            # XLA computes some products twice instead of keeping them, and unrolls short loops.
            again = (
                (compiled.module, compiled.dtypes) in ran
                if compiled.named
                else (compiled.kind, extent_of(compiled), compiled.dtypes) in sizes
            )
            if not again or (not compiled.named and any(product.kind == compiled.kind for product in self.traced)):
                self.pairs.append(PairedProduct(modules.get(compiled.module) if compiled.named else None, compiled))


def _grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    groups: dict[K, list[T]] = collections.defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups


def _without(items: list[T], taken: Iterable[T]) -> list[T]:
    """Copies a list without some objects, compared by identity."""
    gone = set(map(id, taken))
    return [item for item in items if id(item) not in gone]

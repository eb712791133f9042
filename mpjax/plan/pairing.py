"""Pairs each product of a traced program with the instruction of the compiled program that computes it.

XLA keeps the name of most products, merges products that share an operand, computes equal products once, writes small
ones as multiplications and sums, and loses the names of some. Products that no rule pairs are never guessed.
"""

import collections
import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from mpjax.plan.asked import Asked
from mpjax.plan.hlo import Module
from mpjax.plan.runs import CompiledProduct
from mpjax.plan.verdicts import UNCLEAR
from mpjax.precision.casting.flops import TENSORFLOAT32


T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

MERGED = "in one product with"
SHARED = "computed once for two"
CONSTANT = "XLA computed it while compiling: its operands are constants"
NOWHERE = "nothing in the program computes it"
INSIDE = "what a kernel of its own computes inside is not in the program's text"


@dataclasses.dataclass(frozen=True)
class PairedProduct:
    """A product of the traced program and the product of the compiled program that computes it.

    Attributes:
      asked: the product of the traced program; None if none is known for `run`.
      run: the product of the compiled program; None if there is none, or if it is not known.
      note: how the two belong together if XLA merged or shared products, or why `run` is None; else empty.
    """

    asked: Asked | None
    run: CompiledProduct | None
    note: str = ""


def paired(
    asked: Sequence[Asked],
    runs: Sequence[CompiledProduct],
    loops: Callable[[], Sequence[CompiledProduct]],
    *,
    partitions: int = 1,
) -> list[PairedProduct]:
    """Pairs the products of a traced program with the products of its compiled program.

    Args:
      asked: the products of the traced program.
      runs: the products of the compiled program.
      loops: returns the products that XLA wrote as multiplications and sums; called only if traced products other than
        Pallas kernels are left over.
      partitions: the number of devices that the program is divided over.

    Returns:
      A pair for each of `asked`, in its order. Then a pair for each of `runs` that is left over, unless it repeats a
      paired one.
    """
    matching = _Matching(list(asked), list(runs))
    # The compiler may divide a product over some of the devices.
    for shards in [count for count in range(1, partitions + 1) if partitions % count == 0]:
        # Before the next rule, for which both gradients of a square layer are the same.
        matching.joined(shards, _share)
        matching.by(lambda a: (a.module, a.kind, _extent(a)), lambda r, p=shards: (r.module, r.kind, p * _extent(r)))
        matching.joined(shards, _alike)
    matching.joined(1, lambda product, seed: product.module.backward == seed.module.backward)
    matching.by_module()
    matching.by(lambda a: (a.kind, _extent(a)), lambda r: (r.kind, _extent(r)), alike=True)
    # XLA writes convolutions with a window of one pixel as matrix products, which may have lost their name.
    matching.by(
        lambda a: (a.kind, a.elements), lambda r: ("convolution", r.elements) if not r.named else (), alike=True
    )
    matching.shared()
    matching.remaining()
    if any(product.kind != "kernel" for product in matching.asked):
        matching.in_loops(loops())
    matching.rest()
    order = {id(product): number for number, product in enumerate(asked)}
    return sorted(matching.pairs, key=lambda pair: order.get(id(pair.asked), len(order)))


class _Matching:
    """The products that are not paired yet, traced (`asked`) and compiled (`runs`), and the pairs so far.

    Its methods add to `pairs`, and remove what they pair from `asked` and `runs`.
    """

    def __init__(self, asked: list[Asked], runs: list[CompiledProduct]):
        self.asked, self.runs, self.pairs = asked, runs, []

    def by(
        self,
        of_asked: Callable[[Asked], Hashable],
        of_run: Callable[[CompiledProduct], Hashable],
        *,
        alike: bool = False,
    ):
        """Pairs each traced product with a compiled product of the same key, preferably one in the same dtypes.

        Args:
          of_asked: the key of a traced product.
          of_run: the key of a compiled product.
          alike: True to pair only if all compiled products with the key have the same dtypes. The pair then names the
            libraries of all of them, because any may be the right one.
        """
        candidates = _grouped(self.runs, of_run)
        by = {key: _by(runs) for key, runs in candidates.items()}
        unclear = {key for key, runs in candidates.items() if alike and len({run.dtypes for run in runs}) > 1}
        left, matched = [], []
        for product in self.asked:
            key = of_asked(product)
            if candidates.get(key) and key not in unclear:
                # A program's products are not in the order of its trace.
                near = [(not _same_dtypes(product, run), run.result != product.result) for run in candidates[key]]
                matched.append(run := candidates[key].pop(near.index(min(near))))
                self.pairs.append(PairedProduct(product, dataclasses.replace(run, by=by[key]) if alike else run))
            else:
                left.append(product)
        self.asked, self.runs = left, _without(self.runs, matched)

    def joined(self, parts: int, alike: Callable[[Asked, Asked], bool]) -> None:
        """Pairs a compiled product with several traced products whose multiplications add up to its own.

        XLA merged them. One of them has the module of the compiled product. The others are taken in order of their
        distance by path, and left out if they exceed what is missing. If the sum is not exact, nothing is paired.
        Nothing is paired either if the module has as many traced products of the compiled product's size as compiled
        ones: the inner products of two adapters share an operand, and together may be as large as an outer one.

        Args:
          parts: the number of devices that the product is divided over. The compiled product has this fraction of the
            multiplications.
          alike: `(product, other) -> bool`, whether XLA may have merged two traced products.
        """
        whole_products = collections.Counter((product.module, product.size) for product in self.asked)
        alone = collections.Counter((run.module, parts * run.size) for run in self.runs)
        for run in [run for run in self.runs if run.size]:
            whole = parts * run.size
            if whole_products[run.module, whole] >= alone[run.module, whole]:
                continue
            for seed in [
                product for product in self.asked if product.module == run.module and 0 < product.size < whole
            ]:
                near = [
                    product for product in self.asked if product.size and product is not seed and alike(product, seed)
                ]
                near.sort(key=lambda product, seed=seed: -_common(product.module, seed.module))
                missing, ours = whole - seed.size, [seed]
                for product in near:
                    if product.size <= missing:
                        missing -= product.size
                        ours.append(product)
                if missing == 0:
                    note = f"{MERGED} {run.module.path or 'another'}"
                    self.pairs += [PairedProduct(product, run, "" if product is seed else note) for product in ours]
                    self.asked, self.runs = _without(self.asked, ours), _without(self.runs, [run])
                    break

    def by_module(self) -> None:
        """Pairs traced and compiled products of the same module, pass and kind, by `all_of`.

        Outside of modules, it does so only if there is a single traced product of the pass and kind.
        """
        runs = _grouped(self.runs, lambda run: (run.module, run.kind))
        for key, ours in _grouped(self.asked, lambda product: (product.module, product.kind)).items():
            if key[0].path or len(ours) == 1:
                self.all_of(ours, runs.get(key, []))

    def remaining(self) -> None:
        """Pairs the traced products that are left with the compiled products without a name, by `all_of`.

        It does so for convolutions, and then for matrix products. XLA computes the gradient of a grouped convolution by
        a convolution of another size.
        """
        for kind in ("convolution", "product"):
            ours = [product for product in self.asked if product.kind == kind]
            self.all_of(ours, [run for run in self.runs if run.kind == kind and not run.named])

    def all_of(self, asked: list[Asked], runs: list[CompiledProduct]) -> None:
        """Pairs the two lists one by one if they are equally long, and all compiled products have the same dtypes.

        Otherwise it pairs nothing.
        """
        if len(asked) == len(runs) and len({run.dtypes for run in runs}) == 1:
            by = _by(runs)
            pairs = zip(asked, runs, strict=True)
            self.pairs += [PairedProduct(product, dataclasses.replace(run, by=by)) for product, run in pairs]
            self.asked, self.runs = _without(self.asked, asked), _without(self.runs, runs)

    def shared(self) -> None:
        """Pairs traced products with the compiled product of another pair, if XLA computes both at once.

        The other traced product has the same operands, or is the forward product that a product of the backward pass
        recomputes.
        """
        same = {pair.asked.same: pair.run for pair in self.pairs}
        forward = {
            (pair.asked.module.path, pair.asked.kind, _extent(pair.asked), pair.asked.operands): pair.run
            for pair in self.pairs
            if not pair.asked.module.backward
        }
        left = []
        for product in self.asked:
            again = (product.module.path, product.kind, _extent(product), product.operands)
            run = same.get(product.same) or (forward.get(again) if product.recomputed else None)
            if run:
                self.pairs.append(PairedProduct(product, run, SHARED))
            else:
                left.append(product)
        self.asked = left

    def in_loops(self, loops: Sequence[CompiledProduct]) -> None:
        """Pairs traced products with `loops`, the multiplications in loop fusions, of the same module, pass and kind.

        It does so only if all of these have the same dtypes. Several products may be paired with one of them.
        """
        groups = _grouped(loops, lambda run: (run.module, run.kind))
        left = []
        for product in self.asked:
            theirs = groups.get((product.module, product.kind), [])
            if len({run.dtypes for run in theirs}) == 1:
                self.pairs.append(PairedProduct(product, theirs[0]))
            else:
                left.append(product)
        self.asked = left

    def rest(self) -> None:
        """Adds a pair for each product that is left.

        A traced product gets the `run` None, and a note that says why. A compiled product gets a traced product of its
        module, if there is one; if it repeats a paired one, it gets no pair.
        """
        modules = {pair.asked.module: pair.asked for pair in self.pairs if pair.asked}
        for product in self.asked:
            if product.kind == "kernel":
                note = INSIDE
            elif product.constant:
                note = CONSTANT
            else:
                candidates = [run for run in self.runs if (run.kind == "attention") == (product.kind == "attention")]
                note = UNCLEAR if candidates else NOWHERE
            self.pairs.append(PairedProduct(product, None, note))
        ran = {(pair.asked.module, pair.run.dtypes) for pair in self.pairs if pair.asked and pair.run}
        sizes = {(pair.run.kind, _extent(pair.run), pair.run.dtypes) for pair in self.pairs if pair.run}
        for run in self.runs:
            # XLA computes some products twice instead of keeping them, and unrolls short loops.
            again = (run.module, run.dtypes) in ran if run.named else (run.kind, _extent(run), run.dtypes) in sizes
            if not again or (not run.named and any(product.kind == run.kind for product in self.asked)):
                self.pairs.append(PairedProduct(modules.get(run.module) if run.named else None, run))


def _by(runs: Iterable[CompiledProduct]) -> str:
    """Names the libraries that compute several products, each once: "Triton or cuBLAS"."""
    return " or ".join(sorted({run.by for run in runs}))


def _extent(each: Asked | CompiledProduct) -> int:
    """The multiplications of a matrix product; of any other kind, the elements of the result."""
    return each.size if each.size else each.elements


def _same_dtypes(asked: Asked, run: CompiledProduct) -> bool:
    """True if the operands have the same dtypes as traced and as compiled; tensorfloat32 counts as float32."""
    return tuple("float32" if dtype == TENSORFLOAT32 else dtype for dtype in run.operands) == asked.operands


def _alike(first: Asked, second: Asked) -> bool:
    """True if XLA may have merged two products: they have the same pass, sizes and operand dtypes."""
    return (first.module.backward, first.size, first.elements, first.operands) == (
        second.module.backward,
        second.size,
        second.elements,
        second.operands,
    )


def _share(first: Asked, second: Asked) -> bool:
    """True if two products of one pass sum over the same axes of a common operand, as products that XLA merges do."""
    return first.module.backward == second.module.backward and not set(first.values).isdisjoint(second.values)


def _common(first: Module, second: Module) -> int:
    """The number of names that the paths of two modules have in common from the start on."""
    count = 0
    for one, other in zip(first.path.split("/"), second.path.split("/"), strict=False):
        if one != other:
            break
        count += 1
    return count


def _grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    groups: dict[K, list[T]] = collections.defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups


def _without(items: list[T], taken: Iterable[T]) -> list[T]:
    """Copies a list without some objects, compared by identity."""
    gone = set(map(id, taken))
    return [item for item in items if id(item) not in gone]

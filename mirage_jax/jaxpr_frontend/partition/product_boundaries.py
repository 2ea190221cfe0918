"""Matrix products that are better kept apart: what lies between them is a border of regions.

One kernel of two products, the second of which reads what is made of the first, makes tiles of what lies between them
anew for every block, or keeps whole rows of it on the chip. Where it can do neither for less than it costs to write
and read the tensor, no kernel for both is faster than one for each, and a region of both is only longer to search. So
queries, keys and values come from memory to an attention, which keeps its scores; the two products of a wide MLP are
apart, each with what is pointwise around it. A large product with nothing around it is left to XLA's libraries.

Two products that take less in another order ((A B) v), or with a common factor (X W + (X A) B), are not kept apart.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from mirage_jax.hardware.gpus import LARGE_BANDWIDTH, LARGE_FLOPS
from mirage_jax.jaxpr_frontend.partition.program import FlatEqn, FlatProgram, bytes_of
from mirage_jax.jaxpr_frontend.translate import rules

# A large accelerator. What matters is the order of magnitude, so programs are cut alike on all devices.
FLOPS, BANDWIDTH = LARGE_FLOPS, LARGE_BANDWIDTH
LAUNCH_SECONDS = 2e-6  # seconds of one kernel more
MAX_ON_CHIP_ELEMENTS = 512  # elements of an axis that a block keeps at most
MIN_OPERAND_TRAFFIC_FRACTION = (
    0.75  # of the time of a product: what writing and reading its operand must take to be worth avoiding
)
MIN_SURROUNDING_FRACTION = 0.1  # the same for what is around a product, to have it in a region at all
SCALES = rules.VIEWS | {"neg"}  # what products may be exchanged with, beside factors
SUMS = frozenset({"add", "sub", "add_any"})


@dataclass(frozen=True)
class DotSizes:
    """Sizes of a `dot_general`: elements of its operands and result, of what is summed, of the axes that all three
    have, and of each free side.
    """

    operands: tuple[int, int]
    result: int
    summed: int
    batch: int
    free: tuple[int, int]
    width: int  # bytes of an operand's element

    @classmethod
    def of(cls, eqn: FlatEqn) -> DotSizes:
        (over, _), (batch, _) = eqn.params["dimension_numbers"]
        x, y = eqn.in_avals
        summed = math.prod(x.shape[d] for d in over)
        shared = math.prod(x.shape[d] for d in batch)
        free = (x.size // (summed * shared), y.size // (summed * shared))
        return cls((x.size, y.size), eqn.out_avals[0].size, summed, shared, free, x.dtype.itemsize)

    @property
    def flops(self) -> float:
        return 2.0 * self.result * self.summed

    @property
    def computing(self) -> float:
        """Seconds at full speed."""
        return self.flops * max(1, self.width / 2) / FLOPS

    @property
    def reading(self) -> float:
        """Seconds to read the operands. The result is not counted: that may be what stays on the chip."""
        return self.width * sum(self.operands) / BANDWIDTH

    @property
    def seconds(self) -> float:
        return max(self.computing, self.reading)


def traffic(size: float) -> float:
    """Seconds to write and read so many bytes."""
    return 2 * size / BANDWIDTH + LAUNCH_SECONDS


class Borders:
    """Finds products to be kept apart. `members`: positions of the equations that a region may have."""

    def __init__(self, program: FlatProgram, members: Collection[int]) -> None:
        self.program, self.eqns, self.avals = program, program.eqns, program.avals
        self.members = set(members)
        self.made = {v: n for n in self.members for v in self.eqns[n].outputs}
        self.products = {n: DotSizes.of(e) for n in self.members if (e := self.eqns[n]).primitive == "dot_general"}
        self._last: dict[int, int] = {}
        self._scaled: dict[int, int] = {}
        self._find_last()

    @cached_property
    def pairs(self) -> list[tuple[int, int, int]]:
        """(an earlier product, the equation that makes an operand of a later one, the later product), to be apart."""
        return [
            (first, self.made[v], then)
            for then in sorted(self.products)
            for v in self.eqns[then].reads
            if (first := self.last(v)) >= 0 and self._apart(first, then, v)
        ]

    def at_operand(self, product: int) -> bool:
        """Whether a product has its border where it reads: what makes its operand would be made anew for each block
        that keeps a part of it.
        """
        p = self.products[product]
        return p.summed <= MAX_ON_CHIP_ELEMENTS

    def pays(self, piece: Sequence[int]) -> bool:
        """Might a kernel for these equations be faster than products by a library and the rest by XLA?"""
        products = [self.products[n] for n in piece if n in self.products]
        if not products or any(p.computing < p.reading for p in products):
            return True
        if any(self.eqns[n].primitive in SUMS and self._sums_products(n) for n in piece):
            return True
        # What XLA keeps in memory between its kernels: results of products and reductions, and what products read.
        stored = {self._source(v) for n in piece if n in self.products for v in self.eqns[n].reads}
        stored |= {
            v for n in piece if self.eqns[n].primitive in rules.CONTRACTION_PRIMITIVES for v in self.eqns[n].outputs
        }
        stored &= {v for n in piece for v in self.eqns[n].outputs}
        saved = sum(traffic(bytes_of(self.avals[v])) for v in stored.difference(self.program.crossing(piece)))
        return saved >= MIN_SURROUNDING_FRACTION * sum(p.seconds for p in products)

    def last(self, value: int, scaled: bool = False) -> int:
        """The last product that a value is made of, with no other in between; -1 for none. scaled: only by views
        and factors.
        """
        return (self._scaled if scaled else self._last).get(value, -1)

    def _find_last(self) -> None:
        for n in sorted(self.members):
            eqn = self.eqns[n]
            if n in self.products:
                found = scaled = n
            else:
                found = max([self._last.get(v, -1) for v in eqn.reads], default=-1)
                scaled = max([self._scaled.get(v, -1) for v in eqn.reads]) if found >= 0 else -1
                if scaled >= 0 and not self._scales(n):
                    scaled = -1
            for v in eqn.outputs:
                self._last[v], self._scaled[v] = found, scaled

    def _scales(self, n: int) -> bool:
        """Whether an equation is a view, or multiplies by what is the same all along some axis."""
        eqn = self.eqns[n]
        if eqn.primitive not in ("mul", "div"):
            return eqn.primitive in SCALES
        size = eqn.out_avals[0].size
        return any(not isinstance(a, int) or self.avals[self._source(a)].size < size for a in eqn.inputs)

    def _apart(self, first: int, then: int, operand: int) -> bool:
        p, q = self.products[first], self.products[then]
        if self.last(operand, scaled=True) == first and self._rearranges(first, then):
            return False
        free = q.free[1] if operand == self.eqns[then].inputs[0] else q.free[0]
        if free <= MAX_ON_CHIP_ELEMENTS and p.batch == q.batch:
            return False  # a block makes each tile of the operand once, and needs it no longer
        fits = q.summed <= MAX_ON_CHIP_ELEMENTS or free <= MAX_ON_CHIP_ELEMENTS
        return not fits or traffic(bytes_of(self.avals[operand])) < MIN_OPERAND_TRAFFIC_FRACTION * max(
            p.seconds, q.seconds
        )

    def _rearranges(self, first: int, then: int) -> bool:
        """Might algebra do with less than both products as they are: in another order, or with a common factor?"""
        p, q = self.products[first], self.products[then]
        other = q.operands[1] if self.last(self._operand(then, 0), True) == first else q.operands[0]
        if sum(p.operands) * other / q.summed < (p.flops + q.flops) / 2:
            return True
        return any(self._sums_products(n) for n in self._sums(then))

    def _operand(self, n: int, side: int) -> int:
        atom = self.eqns[n].inputs[side]
        return atom if isinstance(atom, int) else -1

    def _sums(self, product: int) -> Iterator[int]:
        """Sums that a product's result is a term of, but for views and factors."""
        todo, seen = list(self.eqns[product].outputs), set[int]()
        while todo:
            for n in self.members.intersection(self.program.readers[todo.pop()]) - seen:
                seen.add(n)
                if self.eqns[n].primitive in SUMS:
                    yield n
                elif self._scales(n):
                    todo += self.eqns[n].outputs

    def _sums_products(self, n: int) -> bool:
        """Whether an equation adds products that have an operand in common, or whose first products have."""
        found = [self.last(v, scaled=True) for v in self.eqns[n].reads]
        if len(found) < 2 or min(found) < 0 or found[0] == found[1]:
            return False
        a, b = map(self._factors, found)
        return not a.isdisjoint(b)

    def _factors(self, product: int) -> set[int]:
        """What a product, and the one that it reads, are made of, seen through views."""
        own = {self._source(v) for v in self.eqns[product].reads}
        before = {self.last(v, scaled=True) for v in self.eqns[product].reads} - {-1}
        return own | {self._source(v) for n in before for v in self.eqns[n].reads}

    def _source(self, value: int) -> int:
        while (n := self.made.get(value)) is not None and self.eqns[n].primitive in rules.VIEWS and self.eqns[n].reads:
            value = self.eqns[n].reads[0]
        return value

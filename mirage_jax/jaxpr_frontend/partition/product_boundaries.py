"""Matrix products that are better kept apart, with a border of regions between them.

Suppose a product reads a tensor made of another product. A kernel of both recomputes tiles of the tensor for every
block, or keeps whole rows on the chip. If neither costs less than writing and reading the tensor, two kernels are as
fast, and a region of both only takes longer to search. So an attention reads queries, keys and values from memory and
keeps its scores on the chip. The two products of a wide MLP are apart, each with the pointwise operators around it. A
large product with nothing around it is left to XLA's libraries.

Two products that take less in another order ((A B) v), or with a common factor (X W + (X A) B), are not kept apart.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mirage_jax.hardware.gpus import LARGE_BANDWIDTH, LARGE_FLOPS
from mirage_jax.jaxpr_frontend.partition.program import FlatEqn, FlatProgram, bytes_of
from mirage_jax.jaxpr_frontend.translate import rules

# A large accelerator. What matters is the order of magnitude, so programs are cut alike on all devices.
FLOPS, BANDWIDTH = LARGE_FLOPS, LARGE_BANDWIDTH
LAUNCH_SECONDS = 2e-6  # seconds of one kernel more
MAX_ON_CHIP_ELEMENTS = 512  # elements of an axis that a block keeps at most
MIN_OPERAND_TRAFFIC_FRACTION = 0.75  # of the time of a product: worth a kernel that avoids its operand's traffic
MIN_SURROUNDING_FRACTION = 0.1  # of the time of a product: worth a region of it and the operators around it
SUMS = frozenset({"add", "sub", "add_any"})


@dataclass(frozen=True)
class DotSizes:
    """Numbers of elements in a product: operands, result, summed axes, batch axes, and each free side."""

    operands: tuple[int, int]
    result: int
    summed: int
    batch: int
    free: tuple[int, int]
    width: int  # bytes of an operand's element

    @classmethod
    def of(cls, eqn: FlatEqn) -> DotSizes:
        """Read the sizes off an equation."""
        x, y = eqn.in_avals
        summed = summed_elements(eqn.primitive, eqn.in_avals, eqn.params)
        shared = 1
        if eqn.primitive == "dot_general":
            shared = math.prod(x.shape[d] for d in eqn.params["dimension_numbers"][1][0])
        free = (x.size // (summed * shared), y.size // (summed * shared))
        return cls((x.size, y.size), eqn.out_avals[0].size, summed, shared, free, x.dtype.itemsize)

    @property
    def flops(self) -> float:
        """Count multiplications and additions."""
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
        """Estimate the seconds that a library takes."""
        return max(self.computing, self.reading)


def summed_elements(primitive: str, operands: Sequence[Any], params: Mapping[str, Any]) -> int:
    """How many numbers a product sums for each result."""
    numbers = params["dimension_numbers"]
    if primitive == "dot_general":
        return math.prod(operands[0].shape[d] for d in numbers[0][0])
    weights = operands[1].shape
    return math.prod(weights) // weights[numbers.rhs_spec[0]]


def traffic(size: float) -> float:
    """Seconds to write and read so many bytes."""
    return 2 * size / BANDWIDTH + LAUNCH_SECONDS


class ProductBoundaries:
    """Finds products to be kept apart. `members`: positions of the equations that a region may have."""

    def __init__(self, program: FlatProgram, members: Collection[int]) -> None:
        self.program, self.eqns, self.avals = program, program.eqns, program.avals
        self.members = set(members)
        self.made = {v: n for n in self.members for v in self.eqns[n].outputs}
        self.products = {
            n: DotSizes.of(e) for n in self.members if (e := self.eqns[n]).primitive in rules.PRODUCT_PRIMITIVES
        }
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
        """Whether a product has its border at its operand, which each block of a joint kernel would recompute."""
        p = self.products[product]
        return p.summed <= MAX_ON_CHIP_ELEMENTS

    def pays(self, piece: Sequence[int]) -> bool:
        """Might a kernel for these equations be faster than products by a library and the rest by XLA?"""
        products = [self.products[n] for n in piece if n in self.products]
        is_compute_bound = all(p.computing >= p.reading for p in products)
        if not products or not is_compute_bound or any(map(self._sums_products, piece)):
            return True
        saved_values = self._stored(piece).difference(self.program.crossing(piece))
        saved = sum(traffic(bytes_of(self.avals[v])) for v in saved_values)
        return saved >= MIN_SURROUNDING_FRACTION * sum(p.seconds for p in products)

    def _stored(self, piece: Sequence[int]) -> set[int]:
        """Values of a piece that XLA stores between its kernels: operands of products, results of contractions."""
        operands = self.program.read_by(n for n in piece if n in self.products)
        results = self.program.made_by(n for n in piece if self.eqns[n].primitive in rules.CONTRACTION_PRIMITIVES)
        return {*map(self._source, operands), *results}.intersection(self.program.made_by(piece))

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
        """Whether an equation is a view, or multiplies by something constant along some axis."""
        eqn = self.eqns[n]
        if eqn.primitive not in ("mul", "div"):
            return eqn.primitive in rules.VIEWS or eqn.primitive == "neg"
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
        min_traffic = MIN_OPERAND_TRAFFIC_FRACTION * max(p.seconds, q.seconds)
        return not fits or traffic(bytes_of(self.avals[operand])) < min_traffic

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
        if self.eqns[n].primitive not in SUMS:
            return False
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

"""Where the digits of numbers come from that a graph compares, or whose difference is zero where they are equal.

    t = sum(x);  m = max(t);  t == m            ->    t on both sides
    t = sum(x);  m = max(t / 3);  t - 3 m       ->    t on both sides, but m was rounded twice since

A value that is computed twice may be rounded in two ways, and so may one that is scaled back: a maximum then equals no
element, and the difference to it is not 0 where it should be. So `verify.types` asks where both sides were computed,
and `compiler.winner` keeps XLA from computing them again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce

from mirage_jax.mugraph.dtypes import FLOATS, is_power_of_two
from mirage_jax.mugraph.graph import Kernel, KernelGraph, Library, Op, Tensor
from mirage_jax.mugraph.operators import COMPARISONS

UNROUNDED = frozenset({"max", "last", "maximum", "minimum", "where", "mask", "abs", "rounded"})  # equal if operands are


@dataclass(frozen=True)
class Origin:
    """An operator that computes a number, or an input, whose kernel is "". Outside of kernels `name` is a tensor's."""

    kernel: str
    name: str

    def __str__(self) -> str:
        return f"{self.name} in {self.kernel}" if self.kernel else self.name


@dataclass(frozen=True)
class Digits:
    """The digits of ``factor * x + offset``, where x was computed at `origin`. `roundings` are the factors and offsets
    on the way at which a float is rounded: all but powers of two.
    """

    origin: Origin
    roundings: tuple[tuple[Fraction, Fraction], ...] = ()
    factor: Fraction = Fraction(1)
    offset: Fraction = Fraction(0)

    def scaled(self, factor: Fraction, offset: Fraction = Fraction(0)) -> Digits:
        """The digits of a multiple, plus a constant."""
        is_exact = offset == 0 and is_power_of_two(abs(factor))
        step = (factor, offset) if factor > 0 else (-factor, -offset)  # a sign changes no rounding
        steps = self.roundings if is_exact else (*self.roundings, step)
        return Digits(self.origin, steps, factor * self.factor, factor * self.offset + offset)

    def cancels(self, other: Digits) -> bool:
        """Whether the sum of both is zero, but for rounding."""
        return self.origin == other.origin and (self.factor, self.offset) == (-other.factor, -other.offset)


@dataclass(frozen=True)
class Sides:
    """A comparison or a difference of floats, and the digits of each side; a constant has none."""

    kernel: Kernel
    op: Op
    digits: tuple[Set[Digits], ...]

    @property
    def shared(self) -> Set[Origin]:
        """The origins of both sides."""
        return reduce(lambda a, b: a & b, ({d.origin for d in side} for side in self.digits))

    @property
    def is_torn(self) -> bool:
        """Whether sides that should be equal need not be. In a comparison, each has digits that the other has not."""
        if self.op.op not in COMPARISONS:
            pairs = itertools.product(*self.digits)
            return any(x.cancels(y) and x.roundings != y.roundings for x, y in pairs)
        rounded = [{(d.origin, d.roundings) for d in side} for side in self.digits]
        everywhere = reduce(lambda a, b: a & b, rounded)
        return all(side - everywhere for side in rounded)


def comparisons(graph: KernelGraph) -> Iterator[Sides]:
    """All comparisons of floats, in order."""
    return (sides for sides in _followed(graph)[0] if sides.op.op in COMPARISONS)


def torn(graph: KernelGraph) -> Iterator[Sides]:
    """Comparisons and differences whose sides need not be equal where they should be."""
    return (sides for sides in _followed(graph)[0] if sides.is_torn)


def compared_with_themselves(graph: KernelGraph) -> Set[str]:
    """Inputs and results of library operators whose digits are on both sides of a comparison."""
    outside = {"", *(k.name for k in graph.kernels if isinstance(k, Library))}
    return {origin.name for c in comparisons(graph) for origin in c.shared if origin.kernel in outside}


def shared_digits(graph: KernelGraph) -> Set[tuple[int, int]]:
    """Pairs of places among the inputs and outputs, in this order, where the same digits stand: numbers and their
    maximum, for one. Whoever reads both may compare them.
    """
    _, found = _followed(graph)
    digits = [{(d.origin, d.roundings) for d in found[name]} for name in interface(graph)]
    pairs = itertools.combinations(range(len(digits)), 2)
    return {(m, n) for m, n in pairs if not digits[m].isdisjoint(digits[n])}


def interface(graph: KernelGraph) -> tuple[str, ...]:
    """The names of a graph's inputs and outputs."""
    return (*(t.name for t in graph.inputs), *graph.outputs)


def _followed(graph: KernelGraph) -> tuple[list[Sides], dict[str, Set[Digits]]]:
    """All comparisons and differences in order, and the digits of all tensors by name."""
    found: list[Sides] = []
    stored = {t.name: _of_tensor(t, {Digits(Origin("", t.name))}) for t in graph.inputs}
    for kernel in graph:
        digits = {x.name: stored[x.tensor] for x in kernel.loads}
        for op in kernel.ops:
            operands = tuple(digits[a] for a in op.args)
            if sides := _sides(op, operands):
                found.append(Sides(kernel, op, sides))
            digits[op.name] = _digits(op, kernel, operands)
        stored |= {s.tensor.name: _of_tensor(s.tensor, digits[s.value]) for s in kernel.stores}
    return found, stored


def _of_tensor(tensor: Tensor, digits: Set[Digits]) -> Set[Digits]:
    return digits if tensor.dtype in FLOATS else frozenset()


def _sides(op: Op, operands: Sequence[Set[Digits]]) -> tuple[Set[Digits], ...]:
    """What an operator compares, or adds up if one of two terms may cancel the other."""

    def term(n: int, factor: Fraction) -> Set[Digits]:
        return {d.scaled(factor) for d in operands[n]}

    match op.op:
        case comparison if comparison in COMPARISONS:
            return tuple(operands)
        case "add":
            return term(0, op.number("ca")), term(1, op.number("cb"))
        case "exps":
            return term(0, op.number("scale")), term(1, Fraction(-1))
        case "lesslogs":
            return term(0, Fraction(1)), term(2, -op.number("degree"))
        case _:
            return ()


def _digits(op: Op, kernel: Kernel, operands: Sequence[Set[Digits]]) -> Set[Digits]:
    """The digits of an operator's number: its own or an operand's; a constant has none."""
    if not op.args or op.op in COMPARISONS:
        return frozenset()
    if op.op in UNROUNDED:
        return frozenset[Digits]().union(*operands)
    if op.op in ("affine", "shift"):
        return {d.scaled(op.number("scale"), op.number("offset", 0)) for d in operands[0]}
    return {Digits(Origin(kernel.name, kernel.result.name if isinstance(kernel, Library) else op.name))}

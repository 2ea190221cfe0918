"""Where the digits of numbers that a graph compares come from.

    t = sum(x);  m = max(t);  t == m    ->    t on both sides

A value that is computed twice may be rounded in two ways, and a maximum then equals no element. So `verify.types` asks
where both sides were computed, and `compiler.winner` keeps XLA from computing them again.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass
from functools import reduce

from mirage_jax.mugraph.dtypes import FLOATS
from mirage_jax.mugraph.graph import Kernel, KernelGraph, Library, Op
from mirage_jax.mugraph.operators import COMPARISONS

UNROUNDED = frozenset({"affine", "max", "last", "maximum", "minimum", "where", "mask", "abs"})  # equal if operands are


@dataclass(frozen=True)
class Origin:
    """An operator that computes a number, or an input, whose kernel is "". Outside of kernels `name` is a tensor's."""

    kernel: str
    name: str

    def __str__(self) -> str:
        return f"{self.name} in {self.kernel}" if self.kernel else self.name


@dataclass(frozen=True)
class ComparisonSides:
    """A comparison of floats, and the origins of the digits of each side; a constant has none."""

    kernel: Kernel
    op: Op
    sides: tuple[Set[Origin], ...]

    @property
    def shared(self) -> Set[Origin]:
        """The origins of both sides."""
        return reduce(lambda a, b: a & b, self.sides)

    @property
    def is_of_unrelated(self) -> bool:
        """Whether both sides have origins, and none in common."""
        return all(self.sides) and not self.shared


def comparisons(graph: KernelGraph) -> Iterator[ComparisonSides]:
    """All comparisons of floats, in order."""
    floats = {name for name, t in graph.tensors.items() if t.dtype in FLOATS}
    stored: dict[str, Set[Origin]] = {t.name: {Origin("", t.name)} for t in graph.inputs}
    for kernel in graph:
        origins = {x.name: stored[x.tensor] if x.tensor in floats else set[Origin]() for x in kernel.loads}
        for op in kernel.ops:
            sides = tuple(origins[a] for a in op.args)
            if op.op in COMPARISONS:
                yield ComparisonSides(kernel, op, sides)
            origins[op.name] = _made_by(op, kernel) or set[Origin]().union(*sides)
        stored |= {s.tensor.name: origins[s.value] for s in kernel.stores}


def compared_with_themselves(graph: KernelGraph) -> Set[str]:
    """Inputs and results of library operators whose digits are on both sides of a comparison."""
    outside = {"", *(k.name for k in graph.kernels if isinstance(k, Library))}
    return {origin.name for c in comparisons(graph) for origin in c.shared if origin.kernel in outside}


def _made_by(op: Op, kernel: Kernel) -> Set[Origin]:
    """The origin of an operator's number; none if the number is a constant, or has the digits of an operand."""
    if not op.args or op.op in UNROUNDED or op.op in COMPARISONS:
        return frozenset()
    return {Origin(kernel.name, kernel.result.name if isinstance(kernel, Library) else op.name)}

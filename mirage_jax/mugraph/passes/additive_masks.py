"""Masks that are added: a sum with a choice between two numbers is the choice between two sums.

Many models mask the logits of a softmax by adding zero or a huge negative number:

before -> after:  b = where c 0 -3e38; t = s + b    ->    t = where c s (s - 3e38)

This is the same number over the reals and in floats, whatever the logits are. But exp(s + b) is the product
exp(s) exp(b) to the search, which would then divide the factors of a softmax among kernels in many useless ways.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from mirage_jax.mugraph.builder import library
from mirage_jax.mugraph.graph import Kernel, KernelGraph, Library, Load, Tensor, seen_from, unused_name, without_unread
from mirage_jax.mugraph.passes.sentinels import HIGHEST_SENTINEL


def with_masks_chosen(graph: KernelGraph) -> KernelGraph:
    """The same program, with its added masks as choices; a graph of library operators."""
    return _Masks(graph).run()


class _Masks:
    def __init__(self, graph: KernelGraph) -> None:
        self.graph = graph
        self.made = {k.name: k for k in graph.kernels if isinstance(k, Library)}
        self.out: list[Kernel] = []
        self.taken = {*graph.tensors}

    def run(self) -> KernelGraph:
        """Choose instead of adding, and drop the masks that nothing reads any more."""
        for k in self.graph.kernels:
            self.out.append((isinstance(k, Library) and self._chosen(k)) or k)
        has_changed = len(self.out) > len(self.graph.kernels)
        return without_unread(replace(self.graph, kernels=tuple(self.out))) if has_changed else self.graph

    def _chosen(self, k: Library) -> Library | None:
        """A sum with a mask as a choice; None for other operators."""
        if k.op.op != "add":
            return None
        (x, y), (ca, cb) = k.operands, (k.op.number("ca"), k.op.number("cb"))
        for value, c, mask, of_mask in ((x, ca, y, cb), (y, cb, x, ca)):
            if (choice := self._choice(mask)) is None:
                continue
            condition, numbers = choice
            offsets = [of_mask * n for n in numbers]
            if min(offsets) <= HIGHEST_SENTINEL:
                read = [condition, *(self._sum(k, value, c, n) for n in offsets)]
                return library("where", [(x.tensor, x.axes) for x in read], k.result)
        return None

    def _choice(self, x: Load) -> tuple[Load, list[Fraction]] | None:
        """The condition of a choice between two numbers, and the numbers; None if a tensor is none."""
        k = self.made.get(x.tensor)
        if k is None or k.op.op != "where":
            return None
        condition, *others = k.operands
        numbers = [n for n in map(self._number, others) if n is not None]
        return (seen_from(x, k, condition), numbers) if len(numbers) == len(others) else None

    def _number(self, x: Load) -> Fraction | None:
        k = self.made.get(x.tensor)
        value = k.op.attributes["value"] if k is not None and k.op.op == "const" else None
        return Fraction(value) if isinstance(value, int | Fraction) else None

    def _sum(self, k: Library, x: Load, scale: Fraction, offset: Fraction) -> Load:
        """Load a multiple of a value plus a number, in the type of the sum k."""
        attrs = {name: n for name, n, plain in (("scale", scale, 1), ("offset", offset, 0)) if n != plain}
        if not attrs:
            return x
        result = Tensor(unused_name("s", self.taken), x.axes, k.result.dtype)
        self.taken.add(result.name)
        self.out.append(library("affine", [(x.tensor, x.axes)], result, **attrs))
        return replace(x, tensor=result.name)

"""Sums of products with differences: a kernel that has the differences multiplies by them.

A search expands ``sum(w (x - y))``, and may compute it as ``x sum(w) - sum(w y)``: matrix units are made for that, but
the digits that cancel are lost. A kernel that has x - y in its registers, for a distance, keeps them at hardly a cost.

before -> after:  x[i] acc(sum{j} w[i,j]) - acc(dot{j} w[i,j] y[j,k])  ->  acc(dot{j} w[i,j] d[i,j,k]), d = x - y

The search may add another value u to y first, as in ``sum(w (u + c (x - y)))``. Then u gets a product of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

from mirage_jax.mugraph.graph import BlockGraph, KernelGraph, Op, unused_name


def with_differences_multiplied(graph: KernelGraph) -> KernelGraph:
    """The same program, its kernels with one sum for each such pair of sums."""
    kernels = tuple(_Sums(k).run() if isinstance(k, BlockGraph) else k for k in graph.kernels)
    return graph if kernels == graph.kernels else replace(graph, kernels=kernels)


type Term = tuple[str, Fraction]  # the name of a value, and its factor


class _Sums:
    def __init__(self, kernel: BlockGraph) -> None:
        self.kernel = kernel
        self.ops = {op.name: op for op in kernel.ops}
        self.taken = set(kernel.axes_of)
        self.known = {frozenset(op.args): op for op in kernel.ops if _signs(op) in ((1, -1), (-1, 1))}

    def run(self) -> BlockGraph:
        """Rewrite each pair of sums, and drop what nothing reads any more."""
        ops = tuple(new for op in self.kernel.ops for new in self._rewritten(op))
        if ops == self.kernel.ops:
            return self.kernel
        kernel = replace(self.kernel, ops=ops)
        read = kernel.below(s.value for s in kernel.stores)
        return replace(
            kernel,
            ops=tuple(op for op in ops if op.name in read),
            loads=tuple(x for x in kernel.loads if x.name in read),
        )

    def _rewritten(self, op: Op) -> list[Op]:
        """The operators in the place of one: itself, or a sum of products with a difference, and its scale."""
        if op.op != "add" or len(set(op.args)) < 2:
            return [op]
        factors = op.number("ca"), op.number("cb")
        for (first, second), (of_products, of_multiple) in ((op.args, factors), (op.args[::-1], factors[::-1])):
            for weight, x, z in self._sums(first, second):
                for y, factor, rest in self._terms(z):
                    difference = self.known.get(frozenset((x, y)))
                    cancels = of_multiple == -of_products * factor
                    if difference is not None and cancels and set(op.axes) == set(self.ops[first].axes):
                        scale = of_products * factor * _sign_of(difference, y)
                        return self._of_difference(op, first, weight, (difference.name, scale), rest, of_products)
        return [op]

    def _terms(self, name: str) -> Iterator[tuple[str, Fraction, Term | None]]:
        """Each term of a sum of two values, with its factor and the other term; or the value itself."""
        yield name, Fraction(1), None
        op = self.ops.get(name)
        if op is not None and op.op == "add":
            (a, b), (ca, cb) = op.args, (op.number("ca"), op.number("cb"))
            yield a, ca, (b, cb)
            yield b, cb, (a, ca)

    def _sums(self, products: str, multiple: str) -> Iterator[tuple[str, str, str]]:
        """Names of w, x and y where two values are sums of ``w y`` and x times the sum of w."""
        by_sum, (product, *steps) = self.ops.get(multiple), self._summed(products)
        if product is None or product.op != "dot" or by_sum is None or by_sum.op != "mul":
            return
        for total, x in (by_sum.args, by_sum.args[::-1]):
            plain, *plain_steps = self._summed(total)
            if plain is None or plain.op != "sum" or (_axes(plain), plain_steps) != (_axes(product), steps):
                continue
            (weight,) = plain.args
            for w, y in (product.args, product.args[::-1]):
                if w == weight:
                    yield w, x, y

    def _summed(self, name: str) -> tuple[Op | None, bool]:
        """The operator whose results a loop adds up, and True; or the operator itself, and False."""
        op = self.ops.get(name)
        return (self.ops.get(op.args[0]), True) if op is not None and op.op == "acc" else (op, False)

    def _of_difference(
        self, op: Op, products: str, weight: str, difference: Term, rest: Term | None, of_rest: Fraction
    ) -> list[Op]:
        """Operators for a sum of products with a difference, and for one of products with the rest, if there is any."""
        value, scale = difference
        out = self._sum_of(products, weight, value)
        if rest is None:
            attrs = (("scale", scale),) if scale != 1 else ()
            return [*out, Op(op.name, "affine", (out[-1].name,), op.axes, attrs)]
        other = self._sum_of(products, weight, rest[0])
        factors = (("ca", scale), ("cb", of_rest * rest[1]))
        attrs = tuple((name, number) for name, number in factors if number != 1)
        return [*out, *other, Op(op.name, "add", (out[-1].name, other[-1].name), op.axes, attrs)]

    def _sum_of(self, products: str, weight: str, value: str) -> list[Op]:
        """The sum of products of weights and a value, like another such sum."""
        product, is_added_up = self._summed(products)
        assert product is not None
        out = [replace(product, name=self._named(), args=(weight, value))]
        if is_added_up:
            out.append(replace(self.ops[products], name=self._named(), args=(out[-1].name,)))
        return out

    def _named(self) -> str:
        self.taken.add(name := unused_name("", self.taken))
        return name


def _signs(op: Op) -> tuple[Fraction, Fraction] | None:
    """The factors of a sum of two values that cancels where these are equal."""
    if op.op != "add" or (factors := (op.number("ca"), op.number("cb")))[0] != -factors[1]:
        return None
    return factors


def _sign_of(difference: Op, y: str) -> Fraction:
    """What a difference is of ``y - x``."""
    return difference.number("ca" if difference.args[0] == y else "cb")


def _axes(op: Op) -> frozenset[object]:
    axes = op.attributes["axes"]
    assert isinstance(axes, tuple)
    return frozenset(axes)

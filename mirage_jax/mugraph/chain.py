"""Writes a chain of matrix products as a formula, ``(x0 x1ᵀ) x2``: for people.

Input: a kernel graph of library operators. Output: text, empty if the graph is anything but products and scales.
"""

from __future__ import annotations

from fractions import Fraction

from mirage_jax.mugraph.graph import Axis, KernelGraph, Library, Load, Op

type Axes = tuple[Axis, ...]

MAX_FACTORS = 12  # of a formula that a reader can take in


class _NotAChainError(Exception):
    """The graph is anything but products and scales."""


def formula(graph: KernelGraph) -> str:
    """Write the only output as a scaled product of inputs; empty if it is anything else."""
    if len(graph.outputs) != 1:
        return ""
    chain = _Chain(graph)
    try:
        text = chain.output(graph.outputs[0])
    except _NotAChainError:
        return ""
    return text if chain.scale == 1 else f"{chain.scale} {text}"


class _Chain:
    """Writes values as matrices of given rows and columns; either may have no axis."""

    def __init__(self, graph: KernelGraph) -> None:
        self.graph = graph
        self.made = {k.name: k for k in graph.kernels if isinstance(k, Library)}
        self.scale = Fraction(1)
        self.factors = 0
        self.products = 0

    def output(self, name: str) -> str:
        """Write the output; which of its axes are rows is up to the product that makes it."""
        axes = self.graph.tensors[name].axes
        kernel = self._scaled(name)
        if not (isinstance(kernel, Library) and kernel.op.op == "dot"):
            raise _NotAChainError
        batch = set(kernel.loads[0].axes) & set(kernel.loads[1].axes) if len(kernel.loads) == 2 else set[Axis]()
        kept = tuple(a for a, own in zip(axes, kernel.result.axes, strict=True) if own not in batch)
        return self._written(name, axes, kept[:1], kept[1:], is_operand=False)

    def _scaled(self, name: str) -> Library | None:
        """Find the operator behind scales."""
        kernel = self.made.get(name)
        while kernel is not None and kernel.op.op == "affine":
            kernel = self.made.get(kernel.loads[0].tensor)
        return kernel

    def _written(self, tensor: str, seen: Axes, rows: Axes, columns: Axes, is_operand: bool = True) -> str:
        """Write a tensor whose axes are seen under the names `seen`."""
        kernel = self.made.get(tensor)
        if kernel is None:
            return self._input(tensor, tuple(a for a in seen if a in rows or a in columns), rows, columns)
        names = dict(zip(kernel.result.axes, seen, strict=True))
        if kernel.op.op == "affine":
            self.scale *= _factor(kernel.op)
            (load,) = kernel.loads
            return self._written(load.tensor, _seen(load, names), rows, columns, is_operand)
        text = self._product(kernel, names, rows, columns)
        return f"({text})" if is_operand else text

    def _input(self, tensor: str, have: Axes, rows: Axes, columns: Axes) -> str:
        self.factors += 1
        is_known = tensor in {t.name for t in self.graph.inputs}  # and no result of a kernel with a grid
        if not is_known or self.factors > MAX_FACTORS or have not in (rows + columns, columns + rows):
            raise _NotAChainError
        is_row = not rows and bool(columns)
        return f"{tensor}ᵀ" if is_row or have != rows + columns else tensor

    def _product(self, kernel: Library, names: dict[Axis, Axis], rows: Axes, columns: Axes) -> str:
        summed = _summed(kernel)
        self.products += 1
        names = names | {a: f"{a}~{self.products}" for a in summed}  # a name that no other product has
        inner = tuple(names[a] for a in summed)
        left, right = kernel.operands
        own = [set(_seen(x, names)) - set(_seen(y, names)) for x, y in ((left, right), (right, left))]
        if own != [set(rows), set(columns)]:
            left, right, own = right, left, own[::-1]
        if own != [set(rows), set(columns)]:
            raise _NotAChainError
        before = self._written(left.tensor, _seen(left, names), rows, inner)
        return f"{before} {self._written(right.tensor, _seen(right, names), inner, columns)}"


def _seen(load: Load, names: dict[Axis, Axis]) -> Axes:
    if not names.keys() >= set(load.axes):
        raise _NotAChainError
    return tuple(names[a] for a in load.axes)


def _factor(op: Op) -> Fraction:
    """The factor of an operator that only scales."""
    scale = op.attributes.get("scale", 1)
    if len(op.args) != 1 or op.attributes.keys() - {"scale"} or not isinstance(scale, int | Fraction):
        raise _NotAChainError
    return Fraction(scale)


def _summed(kernel: Library) -> Axes:
    """Axes over which a product of two operands sums, and which both have."""
    summed = kernel.op.attributes.get("axes")
    is_product = kernel.op.op == "dot" and len(kernel.op.args) == 2 and kernel.op.attributes.keys() == {"axes"}
    if not is_product or not isinstance(summed, tuple) or not all(set(summed) <= set(x.axes) for x in kernel.loads):
        raise _NotAChainError
    return summed

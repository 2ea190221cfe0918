"""Diagonals: the one term of a sum that a mask of equal indices keeps is read, or computed, where it lies.

JAX's `diagonal` and `x[arange(n), arange(n)]` are translated to a sum over all columns. It is as large as the matrix,
and it would tie all kernels to that matrix.

before -> after:  d[k] = sum{axes=(i)} where (i == k) f[i,k] 0    ->  d[k] = f[k,k]

A value that lacks one of both axes is read along the other one. A value that has both is computed again, on the
diagonal alone. All other terms are zeros, so that the sum is the same in floats too.
"""

from __future__ import annotations

from dataclasses import replace

from mirage_jax.mugraph.graph import (
    Axis,
    KernelGraph,
    Library,
    Load,
    Op,
    Tensor,
    renamed_axes,
    seen_from,
    unused_name,
    without_unread,
)


def with_diagonals_read(graph: KernelGraph) -> KernelGraph:
    """The same program, with its diagonals read; a graph of library operators."""
    return _Diagonals(graph).run() if any(op.op == "eq" for k in graph.kernels for op in k.ops) else graph


class _Diagonals:
    def __init__(self, graph: KernelGraph) -> None:
        self.graph = graph
        self.made = {k.name: k for k in graph.kernels if isinstance(k, Library)}
        self.out: dict[str, Library] = {}
        self.read: dict[str, tuple[Library, Load]] = {}  # sums that are a diagonal, and where it lies
        self.known: dict[tuple[str, tuple[Axis, ...], Axis, Axis], Load] = {}

    def run(self) -> KernelGraph:
        """Read each diagonal, and drop what nothing reads any more."""
        for name, k in self.made.items():
            self.out[name] = self._read(replace(k, loads=tuple(map(self._renamed, k.loads))))
        return without_unread(replace(self.graph, kernels=tuple(self.out.values()))) if self.read else self.graph

    def _read(self, k: Library) -> Library:
        """A sum that keeps a diagonal, as the diagonal itself; other kernels as they are."""
        if (kept := self._kept(k)) is None:
            return k
        value, gone, row = kept
        diagonal = self._along(value, gone, row)
        if diagonal is None or set(diagonal.axes) != set(k.result.axes):
            return k
        self.read[k.name] = (k, diagonal)
        return Library((diagonal,), Op(k.op.name, "affine", (diagonal.name,), k.result.axes), k.result)

    def _renamed(self, x: Load) -> Load:
        """A load of a diagonal from where it lies."""
        if x.tensor not in self.read:
            return x
        k, diagonal = self.read[x.tensor]
        return replace(seen_from(x, k, diagonal), name=x.name)

    def _kept(self, k: Library) -> tuple[Load, Axis, Axis] | None:
        """What a sum keeps one term of for each row: the value, the axis that is summed, and the axis of the rows."""
        axes = k.op.attributes.get("axes")
        if k.op.op != "sum" or not isinstance(axes, tuple) or len(axes) != 1:
            return None
        choice = self._choice(k.loads[0])
        if choice is None:
            return None
        condition, value, _ = choice
        equal = self._equal_indices(condition)
        if axes[0] not in equal:
            return None
        (row,) = set(equal) - set(axes)
        return value, axes[0], row

    def _choice(self, x: Load) -> list[Load] | None:
        """Condition, value and zero of a choice between a value and zero; None if a tensor is none."""
        k = self.made.get(x.tensor)
        if k is None or k.op.op != "where":
            return None
        operands = [seen_from(x, k, load) for load in k.operands]
        return operands if self._is_zero(operands[2].tensor) else None

    def _is_zero(self, tensor: str) -> bool:
        k = self.made.get(tensor)
        return k is not None and k.op.op == "const" and k.op.attributes["value"] == 0

    def _equal_indices(self, condition: Load) -> tuple[Axis, ...]:
        """The two axes, of equal extents, whose indices a condition wants to be equal; empty if it is another one."""
        k = self.made.get(condition.tensor)
        if k is None or k.op.op != "eq" or k.op.attributes:
            return ()
        axes = [a for x in k.operands for a in self._counted(seen_from(condition, k, x))]
        if len(set(axes)) < 2:
            return ()
        one, other = axes
        return (one, other) if self.graph.extent(one) == self.graph.extent(other) else ()

    def _counted(self, x: Load) -> tuple[Axis, ...]:
        """The axis along which a tensor counts; empty if it does not count."""
        k = self.made.get(x.tensor)
        is_index = k is not None and k.op.op == "iota"
        return x.axes if is_index else ()

    def _along(self, x: Load, gone: Axis, row: Axis) -> Load | None:
        """A value where both indices are equal; None if it is an input with both axes, whose diagonal no load reads."""
        if gone not in x.axes or row not in x.axes:
            return replace(x, axes=renamed_axes(x.axes, {gone: row}))
        key = (x.tensor, x.axes, gone, row)
        if key not in self.known:
            k = self.made.get(x.tensor)
            made = None if k is None else self._computed(x, k, gone, row)
            if made is None:
                return None
            self.known[key] = made
        return replace(self.known[key], name=x.name)

    def _computed(self, x: Load, k: Library, gone: Axis, row: Axis) -> Load | None:
        """The diagonal of what a kernel makes, from the diagonals of its operands."""
        inner = k.op.attributes.get("axes", ())
        if not isinstance(inner, tuple) or not set(inner).isdisjoint(x.axes):
            return None  # an axis that is reduced there has the name of one that is there here
        loads = [self._along(seen_from(x, k, load), gone, row) for load in k.loads]
        if any(load is None for load in loads):
            return None
        axes = tuple(a for a in x.axes if a != gone)
        name = unused_name("d", {*self.graph.tensors, *self.out})
        op = replace(k.op, name=name, axes=axes)
        self.out[name] = Library(tuple(load for load in loads if load), op, Tensor(name, axes, k.result.dtype))
        return Load(x.name, name, axes)

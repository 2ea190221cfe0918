"""Axes of a few elements, such as the coordinates of a point, are written out: each element is a value of its own.

before -> after:  %0[i,k,j] = add{cb=-1} %x %y         %0#0[i,k] = add{cb=-1} %x#0 %y#0    (and #1, #2: j has 3)
                  %1[i,k] = dot{axes=(j)} %0 %0        %1[i,k] = %0#0 * %0#0 + %0#1 * %0#1 + %0#2 * %0#2

As a dimension of a tile such an axis would be padded to a power of two, all of its elements would be held at once, and
sums over it would go through other threads. As the inner axis of a matrix product it would be padded to 16, and its
numbers rounded to TF32. Written out, a thread multiplies and adds in float32 what lies in its registers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import chain

from mirage_jax.lower.tiling import Tiling, element_number, element_of
from mirage_jax.lower.triton.expressions import reduced
from mirage_jax.mugraph.dtypes import BYTES
from mirage_jax.mugraph.graph import Axis, BlockGraph, Load, Op, Store, is_part, part_axis
from mirage_jax.mugraph.operators import MAX_NARROW_DEPTH, MAX_NARROW_SIDE, operator

MAX_NARROW = 16  # elements of an axis that is written out
SEPARABLE = frozenset({"dot", "sum", "max", "acc", "accs"})  # element by element, besides pointwise operators
JOINED_BY = {"dot": "add", "sum": "add", "max": "maximum"}  # what reduces an axis that is written out


def with_narrow_axes_written_out(tiling: Tiling) -> BlockGraph:
    """Write out all axes of a kernel for which that is possible and pays."""
    kernel = tiling.kernel
    for axis in tiling.names:
        if is_narrow(kernel, tiling, axis):
            kernel = _Elements(kernel, axis, tiling.axes[axis].size).kernel()
    return kernel


def is_narrow(kernel: BlockGraph, tiling: Tiling, axis: Axis) -> bool:
    """Can an axis be written out, and does it pay?

    It does where there are many values for each number that is read: one for each pair of two other axes. Numbers of 16
    bits are left to matrix units.
    """
    if _is_divided(kernel, axis) or _reads_halves(kernel, tiling, axis):
        return False
    touching = [op for op in kernel.ops if axis in _axes_seen(kernel, op)]
    paying = [op for op in touching if _is_beside_two(kernel, tiling, axis, op)]
    has_pairs = any(axis in op.axes for op in paying)
    most = min((_most(kernel, op, axis, has_pairs) for op in touching), default=0)
    return bool(paying) and 1 < tiling.axes[axis].size <= most


def _is_divided(kernel: BlockGraph, axis: Axis) -> bool:
    """Does a block, or a step of the loop, see a tile of an axis, or one of its parts?"""
    return axis in kernel.divided or is_part(axis) or part_axis(axis) in kernel.grid


def _axes_seen(kernel: BlockGraph, op: Op) -> set[Axis]:
    return set(op.axes).union(*(kernel.axes_of[a] for a in op.args))


def _most(kernel: BlockGraph, op: Op, axis: Axis, has_pairs: bool) -> int:
    """Up to how many elements an axis is worth writing out for an operator: fewer where it is a matrix product.

    A tile with all elements for each pair (`has_pairs`) takes as many operations as a product with them as a side.
    """
    if op.op != "dot":
        return MAX_NARROW if op.op in SEPARABLE or operator(op.op).pointwise else 0
    x, y = (set(kernel.axes_of[a]) for a in op.args)
    is_product = x - y and y - x
    return MAX_NARROW if not is_product else MAX_NARROW_DEPTH if axis in x & y or has_pairs else MAX_NARROW_SIDE


def _is_beside_two(kernel: BlockGraph, tiling: Tiling, axis: Axis, op: Op) -> bool:
    """Is an operator evaluated for each pair of elements of two other axes?"""
    others = (a for a in _axes_seen(kernel, op) - {axis} if element_number(a) is None)
    return sum(tiling.axes[a].block > 1 for a in others) > 1


def _reads_halves(kernel: BlockGraph, tiling: Tiling, axis: Axis) -> bool:
    """Does a kernel read 16-bit numbers along an axis?"""
    loads = (load for load in kernel.loads if axis in load.axes)
    return any(BYTES[tiling.graph.tensors[load.tensor].dtype] <= 2 for load in loads)


class _Elements:
    """A kernel with an axis of `count` elements, element by element."""

    def __init__(self, kernel: BlockGraph, axis: Axis, count: int) -> None:
        self.before, self.axis, self.numbers = kernel, axis, range(count)
        self.divided = {name for name, axes in kernel.axes_of.items() if axis in axes}

    def kernel(self) -> BlockGraph:
        """The kernel with the axis written out."""
        parts = (
            map(self._load, self.before.loads),
            map(self._op, self.before.ops),
            map(self._store, self.before.stores),
        )
        loads, ops, stores = (tuple(chain.from_iterable(each)) for each in parts)
        return replace(self.before, loads=loads, ops=ops, stores=stores)

    def _name(self, value: str, n: int) -> str:
        """The value that holds element n of another, or that one if it lacks the axis."""
        return element_of(value, n) if value in self.divided else value

    def _axes(self, axes: tuple[Axis, ...], n: int) -> tuple[Axis, ...]:
        """The axes of a tensor, where element n is read or written."""
        return tuple(element_of(a, n) if a == self.axis else a for a in axes)

    def _load(self, load: Load) -> Iterator[Load]:
        for n in self.numbers if load.name in self.divided else ():
            yield Load(self._name(load.name, n), load.tensor, self._axes(load.axes, n))
        if load.name not in self.divided:
            yield load

    def _store(self, store: Store) -> Iterator[Store]:
        tensor = store.tensor
        for n in self.numbers if self.axis in tensor.axes else ():
            yield Store(replace(tensor, axes=self._axes(tensor.axes, n)), self._name(store.value, n))
        if self.axis not in tensor.axes:
            yield store

    def _op(self, op: Op) -> Iterator[Op]:
        if op.name in self.divided:
            yield from (self._element(op, n) for n in self.numbers)
        elif self.divided.isdisjoint(op.args):
            yield op
        else:
            yield from self._reduced(op)

    def _element(self, op: Op, n: int) -> Op:
        """Element n of an operator that has the axis."""
        name, axes = self._name(op.name, n), tuple(a for a in op.axes if a != self.axis)
        if op.op == "iota":
            return Op(name, "const", (), axes, (("value", Fraction(n)),))
        return replace(op, name=name, args=tuple(self._name(a, n) for a in op.args), axes=axes)

    def _reduced(self, op: Op) -> Iterator[Op]:
        """An operator that reduces the axis: of each element, then of all."""
        parts = [self._part(op, n) for n in self.numbers]
        yield from (part for part in parts if part is not None)
        names = [part.name if part else self._name(op.args[0], n) for n, part in enumerate(parts)]
        total, last = names[0], len(names) - 1
        for n, name in enumerate(names[1:], 1):
            result = op.name if n == last else f"{op.name}+{n}"
            yield Op(result, JOINED_BY[op.op], (total, name), op.axes)
            total = result

    def _part(self, op: Op, n: int) -> Op | None:
        """What an operator that reduces the axis makes of element n; None: that element itself."""
        name, args = element_of(op.name, n), tuple(self._name(a, n) for a in op.args)
        if rest := tuple(a for a in reduced(op) if a != self.axis):
            attrs = tuple((k, rest if k == "axes" else v) for k, v in op.attrs)
            return replace(op, name=name, args=args, attrs=attrs)
        return Op(name, "mul", args, op.axes) if op.op == "dot" else None

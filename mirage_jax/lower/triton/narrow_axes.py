"""Axes of a few elements, such as the coordinates of a point, are written out: each element is a value of its own.

before -> after:  %0[i,k,j] = add{cb=-1} %x %y         %0#0[i,k] = add{cb=-1} %x#0 %y#0    (and #1, #2: j has 3)
                  %1[i,k] = dot{axes=(j)} %0 %0        %1[i,k] = %0#0 * %0#0 + %0#1 * %0#1 + %0#2 * %0#2

As a dimension of a tile such an axis would be padded to a power of two, all of its elements would be held at once, and
sums over it would go through other threads. As the inner axis of a matrix product it would be padded to 16, and its
numbers rounded to TF32. Written out, a thread multiplies and adds in float32 what lies in its registers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction

from mirage_jax.lower.tiling import Tiling, element_number, element_of
from mirage_jax.lower.triton.expressions import reduced
from mirage_jax.mugraph.dtypes import BYTES
from mirage_jax.mugraph.graph import Axis, BlockGraph, Load, Op, Store, is_part, part_axis
from mirage_jax.mugraph.operators import operator

MAX_NARROW = 16  # elements of an axis that is written out
MAX_NARROW_IN_PRODUCTS = 8  # the same where a matrix product has it
SEPARABLE = frozenset({"dot", "sum", "max", "acc", "accs"})  # element by element, besides pointwise operators
JOINED_BY = {"dot": "add", "sum": "add", "max": "maximum"}  # what reduces an axis that is written out


def with_narrow_axes_written_out(tiling: Tiling) -> BlockGraph:
    """Write out all axes of a kernel for which that is possible and pays."""
    kernel = tiling.kernel
    for axis in tiling.names:
        if is_narrow(kernel, tiling, axis):
            kernel = _written_out(kernel, axis, tiling.axes[axis].size)
    return kernel


def is_narrow(kernel: BlockGraph, tiling: Tiling, axis: Axis) -> bool:
    """Can an axis be written out, and does it pay?

    It does where there are many values for each number that is read: one for each pair of two other axes. Numbers of 16
    bits are left to matrix units.
    """
    if axis in kernel.divided or is_part(axis) or part_axis(axis) in kernel.grid:
        return False
    tensors = [tiling.graph.tensors[load.tensor] for load in kernel.loads if axis in load.axes]
    touching = [op for op in kernel.ops if axis in _axes_seen(kernel, op)]
    most = MAX_NARROW_IN_PRODUCTS if any(_is_product(kernel, op) for op in touching) else MAX_NARROW
    others = [{a for a in _axes_seen(kernel, op) - {axis} if _lanes(tiling, a) > 1} for op in touching]
    return (
        1 < tiling.axes[axis].size <= most
        and any(len(axes) > 1 for axes in others)
        and all(BYTES[t.dtype] > 2 for t in tensors)
        and all(op.op in SEPARABLE or operator(op.op).pointwise for op in touching)
    )


def _lanes(tiling: Tiling, axis: Axis) -> int:
    """Lanes of an axis; one element of another axis has one."""
    return 1 if element_number(axis) is not None else tiling.axes[axis].block


def _axes_seen(kernel: BlockGraph, op: Op) -> set[Axis]:
    return set(op.axes).union(*(kernel.axes_of[a] for a in op.args))


def _is_product(kernel: BlockGraph, op: Op) -> bool:
    """Has a dot, on each side, an axis of its own?"""
    if op.op != "dot":
        return False
    x, y = (set(kernel.axes_of[a]) for a in op.args)
    return bool(x - y and y - x)


def _written_out(kernel: BlockGraph, axis: Axis, count: int) -> BlockGraph:
    has_axis = {name for name, axes in kernel.axes_of.items() if axis in axes}

    def element(name: str, n: int) -> str:
        """The value that holds element n of another, or that one if it lacks the axis."""
        return f"{name}#{n}" if name in has_axis else name

    def loads() -> Iterator[Load]:
        for load in kernel.loads:
            if load.name in has_axis:
                for n in range(count):
                    yield Load(element(load.name, n), load.tensor, _at(load.axes, axis, n))
            else:
                yield load

    def ops() -> Iterator[Op]:
        for op in kernel.ops:
            if op.name in has_axis:
                yield from (_element_of_op(op, axis, n, element) for n in range(count))
            elif any(a in has_axis for a in op.args):
                yield from _joined(op, axis, [tuple(element(a, n) for a in op.args) for n in range(count)])
            else:
                yield op

    def stores() -> Iterator[Store]:
        for store in kernel.stores:
            tensor = store.tensor
            if axis in tensor.axes:
                for n in range(count):
                    yield Store(replace(tensor, axes=_at(tensor.axes, axis, n)), element(store.value, n))
            else:
                yield store

    return replace(kernel, loads=tuple(loads()), ops=tuple(ops()), stores=tuple(stores()))


def _at(axes: tuple[Axis, ...], axis: Axis, n: int) -> tuple[Axis, ...]:
    return tuple(element_of(axis, n) if a == axis else a for a in axes)


def _element_of_op(op: Op, axis: Axis, n: int, element: Callable[[str, int], str]) -> Op:
    axes = tuple(a for a in op.axes if a != axis)
    if op.op == "iota":
        return Op(element(op.name, n), "const", (), axes, (("value", Fraction(n)),))
    return replace(op, name=element(op.name, n), args=tuple(element(a, n) for a in op.args), axes=axes)


def _joined(op: Op, axis: Axis, operands: list[tuple[str, ...]]) -> Iterator[Op]:
    """An operator that reduces the axis: of each element, then of all."""
    rest = tuple(a for a in reduced(op) if a != axis)
    names = [f"{op.name}#{n}" for n in range(len(operands))]
    if rest:
        attrs = tuple((k, rest if k == "axes" else v) for k, v in op.attrs)
        yield from (replace(op, name=name, args=args, attrs=attrs) for name, args in zip(names, operands, strict=True))
    elif op.op == "dot":
        yield from (Op(name, "mul", args, op.axes) for name, args in zip(names, operands, strict=True))
    else:
        names = [arg for (arg,) in operands]
    total = names[0]
    for n, name in enumerate(names[1:], 1):
        result = op.name if n == len(names) - 1 else f"{op.name}+{n}"
        yield Op(result, JOINED_BY[op.op], (total, name), op.axes)
        total = result

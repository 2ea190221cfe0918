"""A stable name for the structure of a muGraph: the same for graphs that differ only in names.

Axes, tensors, kernels and values are renamed in order of appearance (copies ``k'`` and parts ``k.g`` follow their
axis), then the text form is hashed. Order of operators and of arguments counts: this tells *written* programs apart,
it does not decide equivalence.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import replace

from mirage_jax.mugraph.graph import Attr, Axis, BlockGraph, Kernel, KernelGraph, Library, Load, Op, Store, Tensor

_AXIS = re.compile(r"(.*?)((?:'|\.g)*)")


def structure_hash(graph: KernelGraph, extents: bool = True) -> str:
    """sha256, in hex, of the graph with canonical names; `extents` False: of its structure at any size."""
    return hashlib.sha256(str(canonical(graph, extents)).encode()).hexdigest()


def canonical(graph: KernelGraph, extents: bool = True) -> KernelGraph:
    """The graph with canonical names; axes that nothing uses are dropped from the extents."""
    names = _CanonicalNames()
    inputs = tuple(names.tensor(t) for t in graph.inputs)
    kernels = tuple(names.kernel(k, n) for n, k in enumerate(graph))
    outputs = tuple(names.tensors[name] for name in graph.outputs)
    sizes = graph.sizes
    used = tuple((new, sizes[old]) for old, new in names.axes.items() if old in sizes) if extents else ()
    return KernelGraph(inputs, kernels, outputs, used)


class _CanonicalNames:
    def __init__(self) -> None:
        self.axes: dict[Axis, Axis] = {}
        self.tensors: dict[str, str] = {}

    def axis(self, axis: Axis) -> Axis:
        """Rename an axis, with its marks of copies and parts."""
        found = _AXIS.fullmatch(axis)
        base, suffix = (found[1], found[2]) if found else (axis, "")
        return self.axes.setdefault(base, f"a{len(self.axes)}") + suffix

    def all(self, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        """Rename several axes."""
        return tuple(self.axis(a) for a in axes)

    def tensor(self, t: Tensor) -> Tensor:
        """Rename a tensor and its axes."""
        name = self.tensors.setdefault(t.name, f"t{len(self.tensors)}")
        return Tensor(name, self.all(t.axes), t.dtype)

    def attr(self, key: str, value: Attr) -> Attr:
        """Rename the axes that an attribute names; sets of axes are sorted."""
        if isinstance(value, tuple):
            return tuple(sorted(self.all(value)))
        return self.axis(value) if key == "axis" and isinstance(value, str) else value

    def load(self, load: Load, values: dict[str, str]) -> Load:
        """Rename a load, and remember its value's new name in `values`."""
        values[load.name] = f"v{len(values)}"
        return Load(values[load.name], self.tensors[load.tensor], self.all(load.axes))

    def op(self, op: Op, values: Mapping[str, str], name: str) -> Op:
        """Rename an operator's axes and arguments; its value becomes `name`."""
        attrs = tuple((k, self.attr(k, v)) for k, v in op.attrs)
        return Op(name, op.op, tuple(values[a] for a in op.args), self.all(op.axes), attrs)

    def kernel(self, kernel: Kernel, number: int) -> Kernel:
        """Rename everything in the kernel at position `number`."""
        values: dict[str, str] = {}
        loads = tuple(self.load(x, values) for x in kernel.loads)
        if isinstance(kernel, Library):
            result = self.tensor(kernel.result)
            return Library(loads, self.op(kernel.op, values, result.name), result)
        ops: list[Op] = []
        for op in kernel.ops:
            ops.append(self.op(op, values, f"v{len(values)}"))
            values[op.name] = ops[-1].name
        stores = tuple(Store(self.tensor(s.tensor), values[s.value]) for s in kernel.stores)
        loop = None if kernel.loop is None else self.axis(kernel.loop)
        loop_bounds = kernel.loop_bounds and replace(kernel.loop_bounds, axis=self.axis(kernel.loop_bounds.axis))
        return BlockGraph(f"k{number}", self.all(kernel.grid), loop, loads, tuple(ops), stores, loop_bounds)

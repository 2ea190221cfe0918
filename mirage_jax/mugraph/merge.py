"""Merge axes that always go together: a batch of sequences ``[b,t,k]`` is as good as a list of rows ``[i,k]``.

before -> after:  input X: f32[b,t,k]; dot{axes=(k)} X[b,t,k] W[k,j]  ->  input X: f32[b,k]; ... with |b| := |b| * |t|

Two axes merge if they are neighbours, in the same order, in every input and output that has either, if every value has both or
neither, and if no operator tells them apart (reduces one of them, or asks for its index). Arrays only change their shape, row-major,
so merging costs nothing; a graph with fewer axes has smaller tiles to choose and fewer programs equal to it.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from mirage_jax.errors import GraphError
from mirage_jax.mugraph.graph import Axis, KernelGraph, Library, Load, Tensor


def merge_axes(graph: KernelGraph) -> KernelGraph:
    """The same program over as few axes as possible; a graph of library operators. Inputs and outputs keep order and names."""
    while (pair := _mergeable(graph)) is not None:
        graph = _merge(graph, *pair)
    return graph


def _mergeable(graph: KernelGraph) -> tuple[Axis, Axis] | None:
    border = [*graph.inputs, *(graph.tensors[name] for name in graph.outputs)]
    pairs = dict.fromkeys(p for t in border for p in pairwise(t.axes))
    return next((p for p in pairs if _goes_together(graph, border, *p)), None)


def _goes_together(graph: KernelGraph, border: list[Tensor], a: Axis, b: Axis) -> bool:
    def together(axes: tuple[Axis, ...]) -> bool:
        return (a in axes) == (b in axes)

    if any((a in t.axes or b in t.axes) and (a, b) not in pairwise(t.axes) for t in border):
        return False
    for k in graph.kernels:
        for load in k.loads:
            names = graph.tensors[load.tensor].axes
            if any((x in (a, b) or y in (a, b)) and x != y for x, y in zip(names, load.axes, strict=True)):
                return False  # the tensor is read under other names
        for op in k.ops:
            values = op.attributes.values()
            if not together(op.axes) or any(v in (a, b) or isinstance(v, tuple) and not together(v) for v in values):
                return False
    return not any(x.startswith((a + "'", b + "'")) for k in graph.kernels for v in (*k.loads, *k.ops) for x in v.axes)


def _merge(graph: KernelGraph, a: Axis, b: Axis) -> KernelGraph:
    def drop(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        return tuple(x for x in axes if x != b)

    def tensor(t: Tensor) -> Tensor:
        return replace(t, axes=drop(t.axes))

    kernels: list[Library] = []
    for k in graph.kernels:
        if not isinstance(k, Library):
            raise GraphError(f"axes are merged before kernels are formed; {k.name} is a graph-defined kernel")
        attrs = tuple((name, drop(v) if isinstance(v, tuple) else v) for name, v in k.op.attrs)
        op = replace(k.op, axes=drop(k.op.axes), attrs=attrs)
        loads = tuple(Load(x.name, x.tensor, drop(x.axes)) for x in k.loads)
        kernels.append(replace(k, loads=loads, op=op, result=tensor(k.result)))
    sizes = dict(graph.extents)
    sizes[a] *= sizes.pop(b)
    return KernelGraph(tuple(map(tensor, graph.inputs)), tuple(kernels), graph.outputs, tuple(sorted(sizes.items())))

"""Axes in their simplest form before a search: neighbours merged, copies made axes of their own.

`merge_axes`: a batch of sequences ``[b,t,k]`` is as good as a list of rows ``[i,k]``.

before -> after:  input X: f32[b,t,k]; dot{axes=(k)} X[b,t,k] W[k,j]  ->  input X: f32[b,k]; ... with |b| := |b| * |t|

Two axes merge if they are neighbours, in the same order, in every input and output that has either, if every value
has both or neither, and if no operator tells them apart (reduces one of them, or asks for its index). Arrays only
change their shape, row-major, so merging costs nothing; a graph with fewer axes has smaller tiles to choose and fewer
programs equal to it.

`separate_copies`: where a tensor is read a second time under copies of its axes (q and k of self-attention come from
one x[i,c], k read as x[i',c]), the copy becomes an axis of its own, so that it can be looped over while i is divided
over the grid.

before -> after:  dot{axes=(c)} q[i,c] k[i',c]  ->  dot{axes=(c)} q[i,c] k[a,c], |a| = |i|

`sink_renames`: an intermediate that is only ever read under other names gets these names, and so does what it is made
from, up to the inputs; equal values then have equal names, whatever names the frontend met them under.

before -> after:  t: f32[i,j] = exp s[i,j];  dot{axes=(i)} t[j,i] v[i,e]
              ->  t: f32[j,i] = exp s[j,i];  dot{axes=(i)} t[j,i] v[i,e]

`divide_axes` goes the other way as `merge_axes`, where a graph is compared with one whose axes are divided.

before -> after:  dot{axes=(k)} x[i,k] w[k,j]  ->  dot{axes=(k0,k1)} x[i,k0,k1] w[k0,k1,j]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from string import ascii_lowercase

from mirage_jax.errors import GraphError, UnsupportedError
from mirage_jax.mugraph.graph import Attr, Axis, KernelGraph, Library, Load, Tensor, origin


def simplify_axes(graph: KernelGraph) -> KernelGraph:
    """All three: the form in which a region is searched, verified and keyed."""
    return separate_copies(merge_axes(sink_renames(graph)))


def sink_renames(graph: KernelGraph) -> KernelGraph:
    """The same program with other names for the axes of intermediates; a graph of library operators."""
    kernels = list(_libraries(graph))
    for n in reversed(range(len(kernels))):
        name, axes = kernels[n].name, kernels[n].result.axes
        if name in graph.outputs:
            continue
        readings = {x.axes for k in kernels for x in k.loads if x.tensor == name}
        if len(readings) == 1 and (reading := readings.pop()) != axes:
            kernels[n] = _renamed(kernels[n], _bijection(axes, reading))
    return replace(graph, kernels=tuple(kernels))


def _bijection(source: tuple[Axis, ...], target: tuple[Axis, ...]) -> dict[Axis, Axis]:
    """A permutation of axes that takes `source` to `target`: names that come in send the ones there out."""
    m = dict(zip(source, target, strict=True))
    inverse = {b: a for a, b in m.items()}
    for b in target:
        if b not in m:  # follow the chain that ends in b back to its beginning
            a = b
            while a in inverse:
                a = inverse[a]
            m[b] = a
    return m


def _renamed(k: Library, m: Mapping[Axis, Axis]) -> Library:
    """A kernel with every axis renamed by a permutation; its loads read their tensors under the new names."""

    def rename(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        return tuple(m.get(a, a) for a in axes)

    def attr(value: Attr) -> Attr:
        return rename(value) if isinstance(value, tuple) else m.get(value, value) if isinstance(value, str) else value

    op = replace(k.op, axes=rename(k.op.axes), attrs=tuple((n, attr(v)) for n, v in k.op.attrs))
    loads = tuple(replace(x, axes=rename(x.axes)) for x in k.loads)
    return Library(loads, op, replace(k.result, axes=rename(k.result.axes)))


def separate_copies(graph: KernelGraph) -> KernelGraph:
    """The same program without copies of axes; a graph of library operators."""
    used = [a for t in graph.tensors.values() for a in t.axes] + [
        a for k in graph.kernels for x in k.loads for a in x.axes
    ]
    names = (c for c in (*ascii_lowercase, *map("a{}".format, range(1, 1000))) if c not in graph.sizes)
    m = {a: next(names) for a in dict.fromkeys(used) if a != origin(a)}
    if not m:
        return graph

    kernels = tuple(_renamed(k, m) for k in _libraries(graph))
    inputs = tuple(replace(t, axes=tuple(m.get(a, a) for a in t.axes)) for t in graph.inputs)
    extents = dict(graph.extents) | {new: graph.extent(old) for old, new in m.items()}
    return KernelGraph(inputs, kernels, graph.outputs, tuple(sorted(extents.items())))


def merge_axes(graph: KernelGraph) -> KernelGraph:
    """The same program over as few axes as possible; of library operators. Inputs and outputs keep order and names."""
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
            if not together(op.axes) or any(v in (a, b) or (isinstance(v, tuple) and not together(v)) for v in values):
                return False
    return not any(x.startswith((a + "'", b + "'")) for k in graph.kernels for v in (*k.loads, *k.ops) for x in v.axes)


def _merge(graph: KernelGraph, a: Axis, b: Axis) -> KernelGraph:
    def drop(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        return tuple(x for x in axes if x != b)

    def tensor(t: Tensor) -> Tensor:
        return replace(t, axes=drop(t.axes))

    kernels: list[Library] = []
    for k in _libraries(graph):
        attrs = tuple((name, drop(v) if isinstance(v, tuple) else v) for name, v in k.op.attrs)
        op = replace(k.op, axes=drop(k.op.axes), attrs=attrs)
        loads = tuple(Load(x.name, x.tensor, drop(x.axes)) for x in k.loads)
        kernels.append(replace(k, loads=loads, op=op, result=tensor(k.result)))
    sizes = dict(graph.extents)
    sizes[a] *= sizes.pop(b)
    return KernelGraph(tuple(map(tensor, graph.inputs)), tuple(kernels), graph.outputs, tuple(sorted(sizes.items())))


def divide_axes(graph: KernelGraph, parts: Mapping[Axis, tuple[Axis, ...]], sizes: Mapping[Axis, int]) -> KernelGraph:
    """The same program with each axis in `parts` as several; `sizes` are their extents. Of library operators."""

    def divided(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        return tuple(p for a in axes for p in parts.get(a, (a,)))

    def attr(value: Attr) -> Attr:
        if isinstance(value, str) and parts.get(value, (value,)) != (value,):
            raise UnsupportedError(f"axis {value} cannot be divided: the program asks for its index")
        return divided(value) if isinstance(value, tuple) else value

    extents = {p: sizes.get(p, graph.extent(a)) for a in graph.sizes for p in parts.get(a, (a,))}
    kernels: list[Library] = []
    for k in _libraries(graph):
        for load in k.loads:
            for a, b in zip(graph.tensors[load.tensor].axes, load.axes, strict=True):
                if [extents[p] for p in divided((a,))] != [extents[p] for p in divided((b,))]:
                    raise UnsupportedError(f"axis {a} cannot be divided: the program reads {load.tensor} also as {b}")
        op = replace(k.op, axes=divided(k.op.axes), attrs=tuple((n, attr(v)) for n, v in k.op.attrs))
        loads = tuple(replace(x, axes=divided(x.axes)) for x in k.loads)
        kernels.append(Library(loads, op, replace(k.result, axes=divided(k.result.axes))))
    inputs = tuple(replace(t, axes=divided(t.axes)) for t in graph.inputs)
    return KernelGraph(inputs, tuple(kernels), graph.outputs, tuple(sorted(extents.items())))


def _libraries(graph: KernelGraph) -> Iterator[Library]:
    for k in graph.kernels:
        if not isinstance(k, Library):
            raise GraphError(f"axes are simplified before kernels are formed; {k.name} is a graph-defined kernel")
        yield k

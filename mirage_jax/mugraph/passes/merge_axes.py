"""Axes in their simplest form before a search: neighbours merged, copies made axes of their own.

`merge_axes`: a batch of sequences ``[b,t,k]`` is as good as a list of rows ``[i,k]``.

before -> after:  input X: f32[b,t,k]; dot{axes=(k)} X[b,t,k] W[k,j]  ->  input X: f32[b,k]; ... with |b| := |b| * |t|

Two axes merge if they are neighbours, in the same order, in every input and output that has either, if every value
has both or neither, and if no operator tells them apart (reduces only one, or asks for its index). Arrays only
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

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise
from string import ascii_lowercase

from mirage_jax.errors import GraphError, UnsupportedError
from mirage_jax.mugraph.graph import Attr, Axis, Kernel, KernelGraph, Library, Load, Tensor, origin, renamed_axes

type NewAxes = Callable[[tuple[Axis, ...]], tuple[Axis, ...]]


def simplify_axes(graph: KernelGraph) -> KernelGraph:
    """Apply all three: the form in which a region is searched, verified and keyed."""
    return separate_copies(merge_axes(sink_renames(graph)))


def sink_renames(graph: KernelGraph) -> KernelGraph:
    """Rename the axes of intermediates, in a graph of library operators."""
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
    """Rename every axis of a kernel; its loads read their tensors under the new names."""
    return _over(k, partial(renamed_axes, names=m))


def _over(k: Library, new: NewAxes) -> Library:
    """Put a kernel over new axes. An attribute that names one axis gets its one successor."""

    def _attr(value: Attr) -> Attr:
        if isinstance(value, tuple):
            return new(value)
        return new((value,))[0] if isinstance(value, str) else value

    op = replace(k.op, axes=new(k.op.axes), attrs=tuple((name, _attr(value)) for name, value in k.op.attrs))
    loads = tuple(replace(x, axes=new(x.axes)) for x in k.loads)
    return Library(loads, op, replace(k.result, axes=new(k.result.axes)))


def _graph_over(graph: KernelGraph, new: NewAxes, extents: Mapping[Axis, int]) -> KernelGraph:
    """Put a graph of library operators over new axes, whose full sizes are `extents`."""
    inputs = tuple(replace(t, axes=new(t.axes)) for t in graph.inputs)
    kernels = tuple(_over(k, new) for k in _libraries(graph))
    return KernelGraph(inputs, kernels, graph.outputs, tuple(sorted(extents.items())))


def renamed(graph: KernelGraph, axes: Mapping[Axis, Axis], tensors: Mapping[str, str]) -> KernelGraph:
    """Rename axes, by the names of their originals, and tensors, in a graph of library operators without copies."""
    sizes = {axes.get(a, a): n for a, n in graph.extents}
    graph = _graph_over(graph, partial(renamed_axes, names=axes), sizes)
    name = {t: tensors.get(t, t) for t in graph.tensors}

    def _named(k: Library) -> Library:
        loads = tuple(replace(x, tensor=name[x.tensor]) for x in k.loads)
        own = name[k.result.name]
        return Library(loads, replace(k.op, name=own), replace(k.result, name=own))

    inputs = tuple(replace(t, name=name[t.name]) for t in graph.inputs)
    outputs = tuple(name[t] for t in graph.outputs)
    return KernelGraph(inputs, tuple(map(_named, _libraries(graph))), outputs, graph.extents)


def separate_copies(graph: KernelGraph) -> KernelGraph:
    """Make every copy of an axis an axis of its own, in a graph of library operators."""
    used = dict.fromkeys(chain(*(t.axes for t in graph.tensors.values()), *(x.axes for x in _loads(graph))))
    names = (c for c in (*ascii_lowercase, *map("a{}".format, range(1, 1000))) if c not in graph.sizes)
    m = {a: next(names) for a in used if a != origin(a)}
    extents = dict(graph.extents) | {new: graph.extent(old) for old, new in m.items()}
    return _graph_over(graph, partial(renamed_axes, names=m), extents) if m else graph


def _loads(graph: KernelGraph) -> Iterator[Load]:
    return chain.from_iterable(k.loads for k in graph.kernels)


def merge_axes(graph: KernelGraph) -> KernelGraph:
    """Merge axes until none can be, in a graph of library operators. Inputs and outputs keep their order and names."""
    while (pair := _mergeable(graph)) is not None:
        graph = _merge(graph, *pair)
    return graph


def _mergeable(graph: KernelGraph) -> tuple[Axis, Axis] | None:
    border = [*graph.inputs, *(graph.tensors[name] for name in graph.outputs)]
    pairs = dict.fromkeys(p for t in border for p in pairwise(t.axes))
    return next((p for p in pairs if _goes_together(graph, border, *p)), None)


def _goes_together(graph: KernelGraph, border: list[Tensor], a: Axis, b: Axis) -> bool:
    """Decide whether axes a and b, neighbours in a tensor of the border, can be one axis."""
    neighbours = all((a, b) in pairwise(t.axes) or {a, b}.isdisjoint(t.axes) for t in border)
    return neighbours and not _has_copies(graph, a, b) and all(_keeps_together(graph, k, a, b) for k in graph.kernels)


def _has_copies(graph: KernelGraph, a: Axis, b: Axis) -> bool:
    values = (v for k in graph.kernels for v in (*k.loads, *k.ops))
    return any(x.startswith((a + "'", b + "'")) for v in values for x in v.axes)


def _keeps_together(graph: KernelGraph, k: Kernel, a: Axis, b: Axis) -> bool:
    """Decide whether no load renames one of the axes and no operator tells them apart."""
    values = (v for op in k.ops for v in op.attributes.values())
    return (
        not any(_renames(graph, load, a, b) for load in k.loads)
        and all((a in op.axes) == (b in op.axes) for op in k.ops)
        and not any(_parts(v, a, b) for v in values)
    )


def _renames(graph: KernelGraph, load: Load, a: Axis, b: Axis) -> bool:
    names = zip(graph.tensors[load.tensor].axes, load.axes, strict=True)
    return any(x != y and not {a, b}.isdisjoint((x, y)) for x, y in names)


def _parts(value: Attr, a: Axis, b: Axis) -> bool:
    """Decide whether an attribute is about one of two axes only."""
    return (a in value) != (b in value) if isinstance(value, tuple) else value in (a, b)


def _merge(graph: KernelGraph, a: Axis, b: Axis) -> KernelGraph:
    sizes = dict(graph.extents)
    sizes[a] *= sizes.pop(b)
    return _graph_over(graph, lambda axes: tuple(x for x in axes if x != b), sizes)


def divide_axes(graph: KernelGraph, parts: Mapping[Axis, tuple[Axis, ...]], sizes: Mapping[Axis, int]) -> KernelGraph:
    """Divide each axis in `parts` into several, whose extents are `sizes`, in a graph of library operators.

    Raises:
        UnsupportedError: the program asks for the index of such an axis, or reads it as one that is divided otherwise.
    """

    def _divided(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        return tuple(p for a in axes for p in parts.get(a, (a,)))

    extents = {p: sizes.get(p, graph.extent(a)) for a in graph.sizes for p in _divided((a,))}
    for k in _libraries(graph):
        for load in k.loads:
            _check_readings(graph, load, lambda a: [extents[p] for p in _divided((a,))])
        for value in k.op.attributes.values():
            if isinstance(value, str) and _divided((value,)) != (value,):
                raise UnsupportedError(f"axis {value} cannot be divided: the program asks for its index")
    return _graph_over(graph, _divided, extents)


def _check_readings(graph: KernelGraph, load: Load, sizes: Callable[[Axis], list[int]]) -> None:
    for a, b in zip(graph.tensors[load.tensor].axes, load.axes, strict=True):
        if sizes(a) != sizes(b):
            raise UnsupportedError(f"axis {a} cannot be divided: the program reads {load.tensor} also as {b}")


def _libraries(graph: KernelGraph) -> Iterator[Library]:
    for k in graph.kernels:
        if not isinstance(k, Library):
            raise GraphError(f"axes are simplified before kernels are formed; {k.name} is a graph-defined kernel")
        yield k

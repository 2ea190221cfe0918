"""A program of library operators under the names of a muGraph that somebody wrote, so that the two can be compared.

before -> after:  input x: f32[b,t,k]; ..  ->  input x: f32[rows,k]; ..   for a graph with the input x: f32[rows,k]
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from mirage_jax.errors import GraphError
from mirage_jax.mugraph.graph import Axis, KernelGraph, Tensor
from mirage_jax.mugraph.passes.merge_axes import merge_axes, renamed


def aligned(reference: KernelGraph, graph: KernelGraph) -> KernelGraph:
    """The program under the names of a graph, so that the two can be compared.

    Its axes are merged if the graph has fewer: arrays are the same in row-major order.

    Raises:
        GraphError: inputs have other shapes, or an axis of one is two axes of the other.
    """
    if [len(t.axes) for t in reference.inputs] != [len(t.axes) for t in graph.inputs]:
        reference = merge_axes(reference)
    for a, b in zip(reference.inputs, graph.inputs, strict=True):
        theirs, own = shape_of(reference, a.axes), shape_of(graph, b.axes)
        if (theirs, a.dtype) != (own, b.dtype):
            raise GraphError(f"input {b} has shape {list(own)}, in the program {a.dtype}{list(theirs)}")
    axes = _axis_names(reference, graph)
    tensors = {a.name: b.name for a, b in zip(reference.inputs, graph.inputs, strict=True)}
    free = filter(lambda name: name not in graph.tensors, map("program{}".format, itertools.count()))
    return renamed(reference, axes, tensors | {k.name: next(free) for k in reference.kernels})


def _axis_names(reference: KernelGraph, graph: KernelGraph) -> dict[Axis, Axis]:
    """The graph's name for each axis of the program; names that the graph does not have for the rest."""
    names = _names_of_inputs(reference, graph)
    for a, b in _pairs(reference, graph, _outputs(reference), _outputs(graph)):
        is_taken = b in names.values()
        if not is_taken:
            names.setdefault(a, b)
    free = filter(lambda name: name not in graph.sizes, map("p{}".format, itertools.count()))
    for a in reference.sizes:
        if a not in names:
            names[a] = next(free)
    return names


def _outputs(graph: KernelGraph) -> list[Tensor]:
    return [graph.tensors[name] for name in graph.outputs]


def _names_of_inputs(reference: KernelGraph, graph: KernelGraph) -> dict[Axis, Axis]:
    names: dict[Axis, Axis] = {}
    for a, b in _pairs(reference, graph, reference.inputs, graph.inputs):
        is_taken = b in names.values() and names.get(a) != b
        if is_taken or names.get(a, b) != b:
            raise GraphError(f"axis {b} of the graph and axis {a} of the program do not match one to one in the inputs")
        names[a] = b
    return names


def _pairs(
    reference: KernelGraph, graph: KernelGraph, ours: Sequence[Any], theirs: Sequence[Any]
) -> Iterator[tuple[Axis, Axis]]:
    """Axes at the same places of tensors, where their sizes are equal."""
    for a, b in zip(ours, theirs, strict=False):
        pairs = zip(a.axes, b.axes, strict=False)
        yield from ((x, y) for x, y in pairs if reference.extent(x) == graph.extent(y))


def shape_of(graph: KernelGraph, axes: Sequence[Axis]) -> tuple[int, ...]:
    """Sizes of axes, in order."""
    return tuple(map(graph.extent, axes))

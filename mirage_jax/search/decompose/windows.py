"""Divide a large region into windows that can each be searched exhaustively.

The number of subexpressions of a product grows as 2^factors, so what matters is not how many operators a region has
but how wide its products get: three normalized projections inside one linear attention multiply twelve factors. Where
a region has too many values, it is *cut* at tensors: results of contractions, and values that several operators read.
Kernels between cuts form windows. Large tensors are cut last, for keeping them from memory is what a kernel is good
for.

A window is a muGraph of its own; `replace_windows` puts found graphs in the place of some of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from mirage_jax.mugraph.graph import BlockGraph, Kernel, KernelGraph, Library, Store, Tensor


@dataclass(frozen=True)
class KernelWindow:
    """Kernels of a reference, by position, and the muGraph that they form."""

    positions: tuple[int, ...]
    graph: KernelGraph


def divide(reference: KernelGraph, fits: Callable[[KernelGraph], bool]) -> list[KernelWindow]:
    """Windows that fit, none of which could be joined with its neighbours, in execution order; the whole graph if it
    fits.

    Everything that may be cut is cut first; then cuts are taken back, largest tensors first, as long as what is joined
    fits. A window that does not fit even so is left as it is.
    """
    whole = [KernelWindow(tuple(range(len(reference.kernels))), reference)]
    if fits(reference):
        return whole
    sizes = _cuttable(reference)
    cut = set(sizes)
    parts = _cut(reference, cut)
    if parts is None:
        return whole
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        joined = _cut(reference, cut - {name})
        if joined is not None and all(w in parts or fits(w.graph) for w in joined):
            cut, parts = cut - {name}, joined
    return parts


def _cuttable(reference: KernelGraph) -> dict[str, int]:
    """Sizes of the tensors at which a graph may be cut: results of contractions, and what several operators read."""
    readers = Counter(name for k in _libraries(reference) for name in {x.tensor for x in k.loads})
    inner = [k for k in _libraries(reference) if k.name not in reference.outputs]
    return {
        k.name: math.prod(map(reference.extent, k.result.axes))
        for k in inner
        if k.op.op == "dot" or readers[k.name] > 1
    }


def _libraries(graph: KernelGraph) -> Iterator[Library]:
    for k in graph.kernels:
        assert isinstance(k, Library), "windows are cut before kernels are formed"
        yield k


def _cut(reference: KernelGraph, cut: set[str]) -> list[KernelWindow] | None:
    """Windows between the cuts; None if windows would depend on each other in a circle."""
    maker = {k.name: i for i, k in enumerate(reference.kernels)}
    targets = [n for n in maker if n in cut or n in reference.outputs]

    def below(target: str) -> set[int]:
        seen, todo = set[int](), [maker[target]]
        while todo:
            i = todo.pop()
            if i not in seen:
                seen.add(i)
                reads = (x.tensor for x in reference.kernels[i].loads)
                todo += [maker[t] for t in reads if t in maker and t not in targets]
        return seen

    groups: list[tuple[set[int], set[str]]] = []  # targets that share kernels are one window
    for target in targets:
        kernels, names = below(target), {target}
        for g in [g for g in groups if g[0] & kernels]:
            kernels, names = kernels | g[0], names | g[1]
            groups.remove(g)
        groups.append((kernels, names))
    graphs = [_window(reference, sorted(kernels), names) for kernels, names in groups]
    order: list[KernelWindow] = []
    known = {t.name for t in reference.inputs}
    while graphs:
        ready = next((w for w in graphs if all(t.name in known for t in w.graph.inputs)), None)
        if ready is None:
            return None
        graphs.remove(ready)
        order.append(ready)
        known.update(ready.graph.outputs)
    return order


def _window(reference: KernelGraph, positions: list[int], targets: set[str]) -> KernelWindow:
    kernels = tuple(reference.kernels[i] for i in positions)
    own = {k.name for k in kernels}
    reads = dict.fromkeys(x.tensor for k in kernels for x in k.loads if x.tensor not in own)
    used = {a for k in kernels for v in (*k.loads, *k.ops) for a in v.axes}
    used |= {a for k in kernels for s in k.stores for a in s.tensor.axes}
    used |= {a for t in reads for a in reference.tensors[t].axes}  # that a load may show under other names
    attributes = [v for k in kernels for op in k.ops for v in op.attributes.values()]
    used |= {a for v in attributes if isinstance(v, tuple) for a in v}  # a sum may count an axis that no value has
    extents = tuple((a, n) for a, n in reference.extents if any(u.rstrip("'") == a for u in used))
    outputs = tuple(k.name for k in kernels if k.name in targets)
    return KernelWindow(
        tuple(positions), KernelGraph(tuple(reference.tensors[t] for t in reads), kernels, outputs, extents)
    )


def replace_windows(
    reference: KernelGraph, found: Mapping[int, KernelGraph], parts: list[KernelWindow]
) -> tuple[KernelGraph, list[tuple[int, int]]]:
    """The reference with the graphs `found` (by number of window) in place of windows.

    Also returns, for every kernel, (window, position in the window's found graph), position -1 where the reference's
    own kernel stays.
    """
    kernels: list[Kernel] = []
    places: list[tuple[int, int]] = []
    for n, w in enumerate(parts):
        if n in found:
            made = [
                prefixed(k, f"w{n}", {*(t.name for t in reference.inputs), *reference.tensors})
                for k in found[n].kernels
            ]
            places += [(n, i) for i in range(len(made))]
            kernels += made
        else:
            kernels += w.graph.kernels
            places += [(n, -1)] * len(w.graph.kernels)
    return KernelGraph(reference.inputs, tuple(kernels), reference.outputs, reference.extents), places


def prefixed(kernel: Kernel, prefix: str, keep: set[str], known: Mapping[str, str] | None = None) -> Kernel:
    """Intermediates of a part get names that no other part has; `known`: those that have others."""
    names = known or {}

    def tensor(t: Tensor) -> Tensor:
        return t if t.name in keep else replace(t, name=prefix + t.name)

    def source(name: str) -> str:
        return names.get(name, name if name in keep else prefix + name)

    loads = tuple(replace(x, tensor=source(x.tensor)) for x in kernel.loads)
    if isinstance(kernel, BlockGraph):
        stores = tuple(Store(tensor(s.tensor), s.value) for s in kernel.stores)
        return replace(kernel, name=prefix + kernel.name, loads=loads, stores=stores)
    result = tensor(kernel.result)
    return replace(kernel, loads=loads, result=result, op=replace(kernel.op, name=result.name))

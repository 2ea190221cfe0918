"""Kernels side by side: two kernels that do not depend on each other, over the same grid and loop, as one.

What several outputs of a region need is found for each of them alone (`output_slices`), so that two kernels may compute the
same tiles: the gradients of keys and values both need the weights. In one kernel these are computed, and their
operands read, once. `fuse` writes that kernel; `fused` takes the fusions that the cost model likes, best first.

And one after the other: what a pointwise kernel makes can be computed by the kernels that read it (`inline`), where
windows were cut because several do. Where it is small, that saves a launch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, count

from mirage_jax.hardware.device_model import DeviceModel
from mirage_jax.mugraph.graph import BlockGraph, Kernel, KernelGraph, Library, Load, Op, Store, is_part
from mirage_jax.mugraph.operators import operator
from mirage_jax.search.candidates import Candidate, tiled
from mirage_jax.search.decompose.output_slices import joined

SYMMETRIC = ("dot", "mul")
MAX_FUSED_CANDIDATES = 8  # candidates of each output_slice that are joined with the best ones of the others


def combined(reference: KernelGraph, found: Sequence[Sequence[Candidate]], device: DeviceModel) -> list[Candidate]:
    """Candidates of all output_slices as one, as they are and fused, best first; none if some output_slice has none.

    What is fastest for each output alone need not share the most, so each output_slice's next best are tried too, one output_slice
    after the other, from the first to the last and from the last to the first: what suits the first output_slice decides what
    the others share with it.
    """
    whole: dict[str, Candidate] = {}
    seconds: dict[str, float] = {}  # by the graph that is to be fused

    def add(chosen: Sequence[Sequence[Candidate]]) -> float:
        if (candidate := joined(reference, chosen)) is None:
            return math.inf
        text = str(candidate.graph)
        if text not in seconds:
            best = fused(candidate, device)
            whole.setdefault(text, candidate)
            whole.setdefault(str(best.graph), best)
            seconds[text] = best.seconds
        return seconds[text]

    output_slices = range(len(found))
    for order in (output_slices, reversed(output_slices)):
        chosen = [candidates[:MAX_FUSED_CANDIDATES] for candidates in found]
        for n in order:
            chosen[n] = sorted(chosen[n], key=lambda c: add([*chosen[:n], [c], *chosen[n + 1 :]]))
    return sorted(whole.values(), key=lambda c: c.seconds)


def fused(candidate: Candidate, device: DeviceModel) -> Candidate:
    """The candidate with pairs of kernels fused as long as that makes it faster, by the model."""
    return _improved(candidate, device, _all_fusions)


def inlined(candidate: Candidate, device: DeviceModel) -> Candidate:
    """The candidate with pointwise kernels inlined as long as that makes it faster, by the model."""
    return _improved(candidate, device, _all_inlinings)


def _improved(
    candidate: Candidate, device: DeviceModel, changes: Callable[[KernelGraph], Iterator[KernelGraph]]
) -> Candidate:
    best = candidate
    while True:
        found = (tiled(g, best.family, best.single, device) for g in changes(best.graph))
        better = [c for c in found if c is not None and c.seconds < best.seconds]
        if not better:
            return best
        best = min(better, key=lambda c: c.seconds)


def _all_fusions(graph: KernelGraph) -> Iterator[KernelGraph]:
    for a, b in combinations(range(len(graph.kernels)), 2):
        if (both := fuse(graph, a, b)) is not None:
            yield both


def _all_inlinings(graph: KernelGraph) -> Iterator[KernelGraph]:
    for n in range(len(graph.kernels)):
        if (without := inline(graph, n)) is not None:
            yield without


def inline(graph: KernelGraph, n: int) -> KernelGraph | None:
    """The graph without its kernel number n, which is pointwise: what reads it computes it. None if that cannot be."""
    kernel = graph.kernels[n]
    if isinstance(kernel, Library) or not all(operator(op.op).pointwise and not _names_axes(op) for op in kernel.ops):
        return None
    stores = {s.tensor.name: s for s in kernel.stores}
    readers = [k for k in graph.kernels if any(x.tensor in stores for x in k.loads)]
    if not readers or not stores.keys().isdisjoint(graph.outputs) or any(isinstance(k, Library) for k in readers):
        return None
    others = (*graph.kernels[:n], *graph.kernels[n + 1 :])
    kernels = (k if isinstance(k, Library) else _computing(k, kernel, stores) for k in others)
    return replace(graph, kernels=tuple(kernels))


def _names_axes(op: Op) -> bool:
    return any(isinstance(value, tuple) or key == "axis" for key, value in op.attrs)


def _computing(kernel: BlockGraph, small: BlockGraph, stores: Mapping[str, Store]) -> BlockGraph:
    """A kernel that computes what it has read of a pointwise kernel, if it has."""
    for x in [x for x in kernel.loads if x.tensor in stores]:
        store = stores[x.tensor]
        axes = dict(zip(store.tensor.axes, x.axes, strict=True))  # the small kernel's in the words of this one
        needed = small.below([store.value])
        taken = {v.name for v in (*kernel.loads, *kernel.ops)}
        fresh = (name for i in count() if (name := f"z{i}") not in taken)
        loads = [v for v in kernel.loads if v != x]
        names: dict[str, str] = {}
        for v in (v for v in small.loads if v.name in needed):
            seen = tuple(axes[a] for a in v.axes)
            known = next((u for u in loads if (u.tensor, u.axes) == (v.tensor, seen)), None)
            loads += [] if known else [Load(next(fresh), v.tensor, seen)]
            names[v.name] = known.name if known else loads[-1].name
        ops: list[Op] = []
        for v in (v for v in small.ops if v.name in needed):
            names[v.name] = next(fresh)
            args, seen = tuple(names[a] for a in v.args), tuple(axes[a] for a in v.axes)
            ops.append(replace(v, name=names[v.name], args=args, axes=seen))
        value = {x.name: names[store.value]}
        ops += [replace(v, args=tuple(value.get(a, a) for a in v.args)) for v in kernel.ops]
        outs = tuple(Store(s.tensor, value.get(s.value, s.value)) for s in kernel.stores)
        kernel = replace(kernel, loads=tuple(loads), ops=tuple(ops), stores=outs)
    return kernel


def fuse(graph: KernelGraph, a: int, b: int) -> KernelGraph | None:
    """The graph with kernels a < b, by position, as one; None if that cannot be.

    An axis that only one of them has in its grid is inside the tiles of both.
    """
    first, second = graph.kernels[a], graph.kernels[b]
    if isinstance(first, Library) or isinstance(second, Library):
        return None
    grid = tuple(x for x in first.grid if x in second.grid)
    inside = {*first.grid, *second.grid} - {*grid}
    if not grid or any(map(is_part, inside)) or (first.loop, first.span) != (second.loop, second.span):
        return None
    above = _above(graph, b)
    if a in above:
        return None
    between = range(a + 1, b)
    kernel, same = _Merge(first).add(second)
    order: list[Kernel] = [*graph.kernels[:a], *(graph.kernels[n] for n in between if n in above)]
    order += [replace(kernel, grid=grid), *(graph.kernels[n] for n in between if n not in above)]
    order += graph.kernels[b + 1 :]
    if set(same) & set(graph.outputs):
        return None
    return replace(graph, kernels=tuple(_reading(k, same) for k in order))


def _above(graph: KernelGraph, position: int) -> set[int]:
    """Positions of the kernels that one depends on."""
    maker = {s.tensor.name: n for n, k in enumerate(graph.kernels) for s in k.stores}
    found, todo = set[int](), [position]
    while todo:
        more = {maker[x.tensor] for x in graph.kernels[todo.pop()].loads if x.tensor in maker} - found
        found |= more
        todo += more
    return found


def _reading(kernel: Kernel, same: Mapping[str, str]) -> Kernel:
    """A kernel that reads tensors under other names."""
    return replace(kernel, loads=tuple(replace(x, tensor=same.get(x.tensor, x.tensor)) for x in kernel.loads))


class _Merge:
    """The loads, operators and stores of a kernel, and those of another that it does not have yet."""

    def __init__(self, kernel: BlockGraph) -> None:
        self.kernel = kernel
        self.loads, self.ops, self.stores = list(kernel.loads), list(kernel.ops), list(kernel.stores)
        self.known = {_meaning(x, {}): x.name for x in (*kernel.loads, *kernel.ops)}

    def add(self, other: BlockGraph) -> tuple[BlockGraph, dict[str, str]]:
        """The kernel of both, and the tensors of `other` that are the same as one of the first kernel's."""
        names: dict[str, str] = {}
        for x in (*other.loads, *other.ops):
            meaning = _meaning(x, names)
            if meaning not in self.known:
                self.known[meaning] = name = self._fresh()
                if isinstance(x, Load):
                    self.loads.append(replace(x, name=name))
                else:
                    self.ops.append(replace(x, name=name, args=tuple(names[a] for a in x.args)))
            names[x.name] = self.known[meaning]
        same: dict[str, str] = {}
        for s in other.stores:
            value = names[s.value]
            twin = next((t.tensor for t in self.stores if t.value == value and _alike(t, s)), None)
            if twin is None:
                self.stores.append(Store(s.tensor, value))
            else:
                same[s.tensor.name] = twin.name
        parts = {"loads": tuple(self.loads), "ops": tuple(self.ops), "stores": tuple(self.stores)}
        return replace(self.kernel, **parts), same

    def _fresh(self) -> str:
        taken = {x.name for x in (*self.loads, *self.ops)}
        return next(name for n in range(len(taken) + 1) if (name := f"y{n}") not in taken)


def _alike(a: Store, b: Store) -> bool:
    return (a.tensor.axes, a.tensor.dtype) == (b.tensor.axes, b.tensor.dtype)


def _meaning(x: Load | Op, names: Mapping[str, str]) -> object:
    """Equal for loads and operators of one kernel that make the same value, but for the order of its axes."""
    if isinstance(x, Load):
        return x.tensor, x.axes
    args: Sequence[str] = [names.get(a, a) for a in x.args]
    return x.op, tuple(sorted(args)) if x.op in SYMMETRIC else tuple(args), frozenset(x.axes), x.attrs

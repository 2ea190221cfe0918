"""Kernels side by side: two kernels that do not depend on each other, over the same grid and loop, as one.

Each output's kernels are found alone (`output_slices`), so two kernels may compute the same tiles: the gradients of
keys and values both need the weights. One fused kernel computes these, and reads their operands, once. `fuse` writes
that kernel; `fused` takes the fusions that the cost model likes, best first.

And one after the other: a pointwise kernel can move into the kernels that read its results (`inline`), where windows
were cut because several kernels do. If it is small, that saves a launch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, count

from mirage_jax.cost.roofline import estimate
from mirage_jax.cost.tilings import KnownTilings
from mirage_jax.hardware.device_model import DeviceModel
from mirage_jax.mugraph.graph import (
    Axis,
    BlockGraph,
    Kernel,
    KernelGraph,
    Library,
    Load,
    Op,
    Store,
    is_part,
    unused_name,
)
from mirage_jax.mugraph.operators import operator
from mirage_jax.search.candidates import Candidate, keeping_digits, tiled
from mirage_jax.search.decompose.output_slices import joined

SYMMETRIC = ("dot", "mul")
MAX_FUSED_CANDIDATES = 8  # of each output slice, joined with the best ones of the others


def combined(
    reference: KernelGraph, found: Sequence[Sequence[Candidate]], device: DeviceModel, until: float = math.inf
) -> list[Candidate]:
    """Combine the candidates of all output slices, as they are and fused, best first; none if some slice has none.

    The fastest candidates for each output alone need not share the most work, so each slice's next best are tried too,
    `until` a time of `time.monotonic`. Slices are taken one after the other, in both directions: the choice for the
    first decides what the others share.
    """
    whole: dict[str, Candidate] = {}
    seconds: dict[str, float] = {}  # by the graph that is to be fused
    known: KnownTilings = {}

    def add(chosen: Sequence[Sequence[Candidate]]) -> float:
        """Join and fuse these candidates; seconds of the result."""
        is_late = bool(seconds) and time.monotonic() > until
        if is_late or (candidate := joined(reference, chosen)) is None:
            return math.inf
        text = str(candidate.graph)
        if text not in seconds:
            candidate = replace(candidate, seconds=estimate(candidate.graph, candidate.schedule, device))
            best = fused(candidate, device, known)
            whole.setdefault(text, candidate)
            whole.setdefault(str(best.graph), best)
            seconds[text] = best.seconds
        return seconds[text]

    slices = range(len(found))
    for order in (slices, reversed(slices)):
        chosen = [keeping_digits(candidates)[:MAX_FUSED_CANDIDATES] for candidates in found]
        for n in order:
            chosen[n] = sorted(chosen[n], key=lambda c: add([*chosen[:n], [c], *chosen[n + 1 :]]))
    return sorted(whole.values(), key=lambda c: c.seconds)


def fused(candidate: Candidate, device: DeviceModel, known: KnownTilings) -> Candidate:
    """Fuse pairs of kernels as long as that makes the candidate faster, by the model."""
    return _improved(candidate, device, known, _all_fusions)


def inlined(candidate: Candidate, device: DeviceModel, known: KnownTilings) -> Candidate:
    """Inline pointwise kernels as long as that makes the candidate faster, by the model."""
    return _improved(candidate, device, known, _all_inlinings)


def _improved(
    candidate: Candidate,
    device: DeviceModel,
    known: KnownTilings,
    changes: Callable[[KernelGraph], Iterator[KernelGraph]],
) -> Candidate:
    best = candidate
    while True:
        found = (tiled(g, best.family, best.single, device, known) for g in changes(best.graph))
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
    """Move pointwise kernel number n into the kernels that read its results; None if that cannot be."""
    kernel = graph.kernels[n]
    if isinstance(kernel, Library) or not _is_pointwise(kernel):
        return None
    stores = {s.tensor.name: s for s in kernel.stores}
    readers = [k for k in graph.kernels if any(x.tensor in stores for x in k.loads)]
    has_blocks_only = bool(readers) and not any(isinstance(k, Library) for k in readers)
    if not has_blocks_only or not stores.keys().isdisjoint(graph.outputs):
        return None
    others = (*graph.kernels[:n], *graph.kernels[n + 1 :])
    kernels = (k if isinstance(k, Library) else _computing(k, kernel, stores) for k in others)
    return replace(graph, kernels=tuple(kernels))


def _is_pointwise(kernel: BlockGraph) -> bool:
    """Are all operators pointwise, and none names an axis?"""
    return all(operator(op.op).pointwise and not _names_axes(op) for op in kernel.ops)


def _names_axes(op: Op) -> bool:
    return any(isinstance(value, tuple) or key == "axis" for key, value in op.attrs)


def _computing(kernel: BlockGraph, small: BlockGraph, stores: Mapping[str, Store]) -> BlockGraph:
    """The kernel with results of a small pointwise kernel computed instead of loaded."""
    for x in [x for x in kernel.loads if x.tensor in stores]:
        kernel = _with_operators_of(small, kernel, x, stores[x.tensor])
    return kernel


def _with_operators_of(small: BlockGraph, kernel: BlockGraph, load: Load, store: Store) -> BlockGraph:
    """The kernel with one load replaced by the operators that compute the loaded tensor; equal operators exist once."""
    axes = dict(zip(store.tensor.axes, load.axes, strict=True))  # the small kernel's -> this kernel's
    needed = small.below([store.value])
    taken = {v.name for v in (*kernel.loads, *kernel.ops)}
    fresh = (name for i in count() if (name := f"z{i}") not in taken)
    loads = [v for v in kernel.loads if v != load]
    names: dict[str, str] = {}
    for v in filter(lambda v: v.name in needed, small.loads):
        names[v.name] = _loaded(loads, v.tensor, tuple(axes[a] for a in v.axes), fresh)
    ops: list[Op] = []
    for v in filter(lambda v: v.name in needed, small.ops):
        names[v.name] = next(fresh)
        args = tuple(names[a] for a in v.args)
        ops.append(replace(v, name=names[v.name], args=args, axes=tuple(axes[a] for a in v.axes)))

    new = {load.name: names[store.value]}
    _add_others(ops, kernel.ops, new)
    outs = tuple(Store(s.tensor, new.get(s.value, s.value)) for s in kernel.stores)
    return replace(kernel, loads=tuple(loads), ops=tuple(ops), stores=outs)


def _add_others(ops: list[Op], others: Iterable[Op], new: dict[str, str]) -> None:
    """Add operators that are none of these yet; `new` has the names of operands that changed, and gets some more."""
    known = {_meaning(v, {}): v.name for v in ops}
    for v in others:
        changed = replace(v, args=tuple(new.get(a, a) for a in v.args))
        if (same := known.get(_meaning(changed, {}))) is None:
            ops.append(changed)
        else:
            new[v.name] = same


def _loaded(loads: list[Load], tensor: str, axes: tuple[Axis, ...], fresh: Iterator[str]) -> str:
    """Name of a load of this tensor; one is added if there is none yet."""
    for u in loads:
        if (u.tensor, u.axes) == (tensor, axes):
            return u.name
    loads.append(Load(next(fresh), tensor, axes))
    return loads[-1].name


def fuse(graph: KernelGraph, a: int, b: int) -> KernelGraph | None:
    """Fuse kernels a < b, by position; None if that cannot be.

    An axis that only one of the two has in its grid is inside the tiles of the fused kernel.
    """
    first, second = graph.kernels[a], graph.kernels[b]
    if isinstance(first, Library) or isinstance(second, Library) or not _tiles_match(first, second):
        return None
    above = _above(graph, b)
    if a in above:
        return None
    kernel, same = _Merge(first).add(second)
    if not same.keys().isdisjoint(graph.outputs):
        return None
    kernel = replace(kernel, grid=tuple(x for x in first.grid if x in second.grid))
    before = [graph.kernels[n] for n in range(a + 1, b) if n in above]
    after = [graph.kernels[n] for n in range(a + 1, b) if n not in above]
    order: list[Kernel] = [*graph.kernels[:a], *before, kernel, *after, *graph.kernels[b + 1 :]]
    return replace(graph, kernels=tuple(_reading(k, same) for k in order))


def _tiles_match(first: BlockGraph, second: BlockGraph) -> bool:
    """Do two kernels have the same loop, and grids that differ in tile axes only?"""
    different = {*first.grid} ^ {*second.grid}
    shares_grid = not {*first.grid}.isdisjoint(second.grid) and not any(map(is_part, different))
    return shares_grid and (first.loop, first.loop_bounds) == (second.loop, second.loop_bounds)


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
    if not any(x.tensor in same for x in kernel.loads):
        return kernel
    return replace(kernel, loads=tuple(replace(x, tensor=same.get(x.tensor, x.tensor)) for x in kernel.loads))


class _Merge:
    """Merges loads, operators and stores of another kernel into a kernel; equal ones exist once."""

    def __init__(self, kernel: BlockGraph) -> None:
        self.kernel = kernel
        self.loads, self.ops, self.stores = list(kernel.loads), list(kernel.ops), list(kernel.stores)
        self.known = {_meaning(x, {}): x.name for x in (*kernel.loads, *kernel.ops)}

    def add(self, other: BlockGraph) -> tuple[BlockGraph, dict[str, str]]:
        """Add a kernel; returns the kernel of both, and which tensors of `other` equal one of the first kernel's."""
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
            equal = next((t.tensor for t in self.stores if t.value == value and _alike(t, s)), None)
            if equal is None:
                self.stores.append(Store(s.tensor, value))
            else:
                same[s.tensor.name] = equal.name
        parts = {"loads": tuple(self.loads), "ops": tuple(self.ops), "stores": tuple(self.stores)}
        return replace(self.kernel, **parts), same

    def _fresh(self) -> str:
        return unused_name("y", {x.name for x in (*self.loads, *self.ops)})


def _alike(a: Store, b: Store) -> bool:
    return (a.tensor.axes, a.tensor.dtype) == (b.tensor.axes, b.tensor.dtype)


def _meaning(x: Load | Op, names: Mapping[str, str]) -> object:
    """Equal for loads and operators of one kernel that make the same value, but for the order of its axes."""
    if isinstance(x, Load):
        return x.tensor, x.axes
    args: Sequence[str] = [names.get(a, a) for a in x.args]
    return x.op, tuple(sorted(args)) if x.op in SYMMETRIC else tuple(args), frozenset(x.axes), x.attrs

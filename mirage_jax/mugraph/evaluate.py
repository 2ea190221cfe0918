"""What a muGraph computes: one walk over kernels, blocks and loop steps, for every domain of arrays.

Input: a kernel graph, the values of its inputs, a domain, and a schedule. Output: the values of its outputs. With a
schedule each kernel runs block by block and step by step, exactly as a GPU would: this is the meaning of a schedule,
and what the verifier tests. Without one every axis is a single tile and every kernel is straight-line code (traceable
by JAX): this is the portable lowering, and the meaning of a captured program.

The rules (Mirage, section 2, with named axes):

* a grid axis ``a`` with tile T gives block i the indices [i*T, min((i+1)*T, extent)); tails are shorter slices, not
  masks;
* a part axis ``k.g`` in the grid gives part g the indices [g*L, min((g+1)*L, N)) of axis ``k``, L = ceil(N / parts);
  a count of parts that leaves one empty is refused. Copies (``k'``) are axes of their own and are not cut
  along with ``k``;
* the loop cuts the loop axis (inside the part, if split) into tiles; all other axes are whole. Steps outside of the
  kernel's loop bounds are left out, except in blocks where a guard says that they count (`mugraph.passes.sentinels`).
  Where none is left, ``acc`` and ``accs`` are 0 and a shift is any number (here: the first step's), since right graphs
  do not depend on it;
* a value of the loop body that a later loop needs is computed again there;
* ``acc`` sums over the steps. A ``shift`` or ``max`` over the loop axis is carried: its value at step t is the
  maximum of its tile and its value at step t-1. ``accs x m`` keeps its state relative to the current m: state =
  rescale(state, m before, m) + x;
* every element of a stored tensor is written exactly once. Without a schedule a split axis has one part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import islice, product
from typing import Any, Protocol, Self

import numpy

from mirage_jax.errors import GraphError
from mirage_jax.mugraph.comparisons import compared_with_themselves
from mirage_jax.mugraph.domains.floats import FloatDomain, NamedArray
from mirage_jax.mugraph.domains.protocol import Domain
from mirage_jax.mugraph.graph import (
    Axis,
    BlockGraph,
    Kernel,
    KernelGraph,
    KernelSchedule,
    Library,
    Load,
    Op,
    Schedule,
    Stage,
    Tensor,
    carried,
    is_part,
    mentioned_axes,
    origin,
    split_axis,
)
from mirage_jax.mugraph.operators import ACCUMULATORS, ZERO, operator
from mirage_jax.mugraph.passes.sentinels import Guard, forms_of, with_short_steps

type Ranges = Mapping[Axis, range]
type StoredTile = tuple[tuple[range, ...], Any]  # indices along each axis, and the values there
type StoredTiles = dict[str, list[StoredTile]]  # by tensor


class ArrayDomain[V](Domain[V], Protocol):
    """A domain whose values can be cut into tiles and put together again."""

    @property
    def representative(self) -> bool:
        """Does the first block stand for all? (True for domains of bounds, which need no others.)"""
        ...

    def within(self, ranges: Ranges) -> Self:
        """The domain as seen by one tile: `ranges` gives the indices of every axis."""
        ...

    def load(self, x: V, axes: tuple[Axis, ...]) -> V:
        """The tile of `x`, its dimensions called `axes`."""
        ...

    def store(self, x: V, tensor: Tensor) -> V:
        """`x` with the axes (part axes inserted, of length 1) and the type of `tensor`."""
        ...

    def assemble(self, tensor: Tensor, shape: tuple[int, ...], stored: Sequence[tuple[tuple[range, ...], V]]) -> V:
        """Put tiles together; each comes with its indices along the axes of `tensor`, whose extents are `shape`."""
        ...

    def all_allowed(self, x: V, bound: Fraction | None, limit: Fraction | None) -> bool:
        """Is every element as a `Guard` asks? (True where elements have no order: then it is assumed.)"""
        ...


def evaluate[V](
    graph: KernelGraph, inputs: Sequence[V], domain: ArrayDomain[V], schedule: Schedule | None = None
) -> list[V]:
    """Values of the outputs of `graph`, in order."""
    if len(inputs) != len(graph.inputs):
        raise GraphError(f"the graph has {len(graph.inputs)} inputs, got {len(inputs)} values")
    if schedule is not None and len(schedule.kernels) != len(graph.kernels):
        raise GraphError(f"the graph has {len(graph.kernels)} kernels, the schedule {len(schedule.kernels)}")
    sizes = _Extents(graph, schedule)
    tensors = dict(zip((t.name for t in graph.inputs), inputs, strict=True))
    for number, kernel in enumerate(graph):
        if schedule is None or isinstance(kernel, Library):
            tensors.update(_whole(kernel, domain.within(sizes.whole(kernel)), tensors))
        else:
            tensors.update(_tiled(kernel, domain, sizes, schedule.kernels[number], tensors))
    return [tensors[name] for name in graph.outputs]


def evaluate_kernel[V](
    kernel: BlockGraph, graph: KernelGraph, schedule: Schedule, tensors: Mapping[str, V], domain: ArrayDomain[V]
) -> list[V]:
    """Evaluate one kernel of `graph`, given the tensors that it loads; the values in the order of its stores.

    schedule: the sizes of this kernel alone, and the parts of split axes.
    """
    (tiles,) = schedule.kernels
    stored = _tiled(kernel, domain, _Extents(graph, schedule), tiles, tensors)
    return [stored[s.tensor.name] for s in kernel.stores]


def run(
    graph: KernelGraph,
    arrays: Sequence[Any],
    schedule: Schedule | None = None,
    xp: Any = numpy,
    dtype: str | None = "float64",
    widen: bool = False,
    domain: Callable[..., FloatDomain] = FloatDomain,
) -> list[Any]:
    """Evaluate on plain arrays: the float64 oracle, or, with ``xp=jax.numpy, dtype=None``, the portable lowering."""
    floats = domain(xp, dtype, widen=widen)
    if xp is not numpy:
        floats = replace(floats, once=compared_with_themselves(graph))
    pairs = zip(graph.inputs, arrays, strict=True)
    inputs = [NamedArray(t.axes, floats.held(t.name, xp.asarray(a))) for t, a in pairs]
    for tensor, x in zip(graph.inputs, inputs, strict=True):
        want = tuple(graph.extent(a) for a in tensor.axes)
        if x.array.shape != want:
            raise GraphError(f"input {tensor} has shape {want}, got {x.array.shape}")
    return [x.array for x in evaluate(graph, inputs, floats, schedule)]


def part_length(extent: int, parts: int) -> int:
    """Elements per part of a split axis; the last part may be shorter but not empty."""
    length = -(-extent // parts)
    if parts < 1 or (parts - 1) * length >= extent:
        raise GraphError(
            f"cannot split an axis of extent {extent} into {parts} parts of {length}: some part would be empty"
        )
    return length


class _Extents:
    """Extents of all axes, part axes included."""

    def __init__(self, graph: KernelGraph, schedule: Schedule | None):
        self.graph = graph
        self.parts = schedule.part_counts if schedule else {}
        self.scheduled = schedule is not None

    def __call__(self, axis: Axis) -> int:
        if not is_part(axis):
            return self.graph.extent(axis)
        split = split_axis(origin(axis))
        if split not in self.parts and self.scheduled:
            raise GraphError(f"the schedule does not say into how many parts axis {split} is split")
        return self.parts.get(split, 1)

    def whole(self, kernel: Kernel) -> dict[Axis, range]:
        """All axes of a kernel, each as one tile."""
        return {a: range(self(a)) for a in mentioned_axes(kernel)}


def _apply(domain: Domain[Any], op: Op, env: Mapping[str, Any]) -> Any:
    return operator(op.op).meaning(domain, *(env[a] for a in op.args), **op.attributes)


def _whole(kernel: Kernel, domain: ArrayDomain[Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    env = {load.name: domain.load(tensors[load.tensor], load.axes) for load in kernel.loads}
    for op in kernel.ops:
        env[op.name] = _apply(domain, op, env)
    return {s.tensor.name: domain.store(env[s.value], s.tensor) for s in kernel.stores}


def _tiled(
    kernel: BlockGraph, domain: ArrayDomain[Any], sizes: _Extents, tiles: KernelSchedule, tensors: Mapping[str, Any]
) -> dict[str, Any]:
    stored: StoredTiles = {s.tensor.name: [] for s in kernel.stores}
    whole = sizes.whole(kernel)
    form = None if domain.representative else forms_of(kernel, sizes.graph)
    skips = form is not None and all(domain.all_allowed(tensors[x], b, None) for x, b in form.tensor_bounds.items())
    blocks = _blocks(kernel, sizes, tiles)
    for cut in islice(blocks, 1) if domain.representative else blocks:
        run = partial(_run_block, domain=domain, ranges=whole | cut, tensors=tensors, stored=stored)
        if form is None:
            run(kernel, tiles)
        elif not (skips and run(form.usual, tiles, form.guards)):
            run(form.complete, with_short_steps(tiles, kernel))
    return {s.tensor.name: _assembled(domain, s.tensor, sizes, stored[s.tensor.name]) for s in kernel.stores}


def _assembled(domain: ArrayDomain[Any], tensor: Tensor, sizes: _Extents, stored: Sequence[StoredTile]) -> Any:
    shape = tuple(map(sizes, tensor.axes))
    if not domain.representative:
        _check_cover(tensor.name, shape, [where for where, _ in stored])
    return domain.assemble(tensor, shape, stored)


def _run_block(
    kernel: BlockGraph,
    tiles: KernelSchedule,
    guards: Sequence[Guard] = (),
    *,
    domain: ArrayDomain[Any],
    ranges: Ranges,
    tensors: Mapping[str, Any],
    stored: StoredTiles,
) -> bool:
    """Add what a block stores to `stored`, unless one of its guards does not hold."""
    own: StoredTiles = {name: [] for name in stored}
    values = _Block(kernel, domain, ranges, tiles, tensors, own).run()
    if not all(domain.all_allowed(values[g.shift], g.bound, g.limit) for g in guards):
        return False
    for name, more in own.items():
        stored[name] += more
    return True


def _blocks(kernel: BlockGraph, sizes: _Extents, tiles: KernelSchedule) -> Iterator[dict[Axis, range]]:
    """Indices of the divided axes, block by block."""
    choices: list[list[dict[Axis, range]]] = []
    for axis in kernel.grid:
        if is_part(axis):
            split, parts = split_axis(axis), sizes(axis)
            length = part_length(sizes(split), parts)
            inside = _cut(range(sizes(split)), length)
            choices.append([{axis: range(g, g + 1), split: r} for g, r in enumerate(inside)])
        else:
            choices.append([{axis: r} for r in _cut(range(sizes(axis)), tiles.tile(axis))])
    for choice in product(*choices):
        yield {a: r for part in choice for a, r in part.items()}


def _cut(whole: range, tile: int) -> list[range]:
    if tile < 1:
        raise GraphError(f"a tile of {tile} elements")
    return [range(s, min(s + tile, whole.stop)) for s in range(whole.start, whole.stop, tile)]


def _check_cover(name: str, shape: tuple[int, ...], stored: Sequence[tuple[range, ...]]) -> None:
    count = numpy.zeros(shape, numpy.int32)
    for where in stored:
        count[tuple(slice(r.start, r.stop) for r in where)] += 1
    if (count != 1).any():
        at = tuple(int(i) for i in numpy.argwhere(count != 1)[0])
        raise GraphError(
            f"element {at} of tensor {name} is written {count[at]} times; the store must cover each element once"
        )


class _Block:
    """One block of a kernel: straight-line code of depth 0, loop 0, straight-line code of depth 1, loop 1, ..."""

    def __init__(
        self,
        kernel: BlockGraph,
        domain: ArrayDomain[Any],
        ranges: Ranges,
        tiles: KernelSchedule,
        tensors: Mapping[str, Any],
        stored: StoredTiles,
    ):
        self.kernel, self.domain, self.ranges, self.tensors, self.stored = kernel, domain, ranges, tensors, stored
        loop, bounds = kernel.loop, None if domain.representative else kernel.loop_bounds
        self.steps = [] if loop is None else [{**ranges, loop: r} for r in _cut(ranges[loop], tiles.tile(loop))]
        within = [s for s in self.steps if bounds is None or bounds.meets(s[loop or ""], ranges[bounds.axis])]
        self.idle = not within and bool(self.steps)  # nothing to do, but values have axes and types
        self.steps = self.steps[:1] if self.idle else within

    def run(self) -> Mapping[str, Any]:
        """Compute the values outside of the loop, by name; stores add to `stored`."""
        kernel, stages = self.kernel, self.kernel.stages
        here = self.domain.within(self.ranges)
        env = {x.name: here.load(self.tensors[x.tensor], x.axes) for x in kernel.loads if not stages[x.name].body}
        straight = [op for op in kernel.ops if not stages[op.name].body and op.op not in ACCUMULATORS]
        for depth in range(max((s.depth for s in stages.values()), default=0) + 1):
            for op in straight:
                if stages[op.name].depth == depth:
                    env[op.name] = _apply(here, op, env)
            env |= self._loop(depth, env)
        self._store(here, self.ranges, env, [s.value for s in kernel.stores if not stages[s.value].body])
        return env

    def _loop(self, depth: int, env: Mapping[str, Any]) -> dict[str, Any]:
        """Run loop number `depth`; values of its accumulators."""
        kernel, stages = self.kernel, self.kernel.stages
        accumulators = [op for op in kernel.ops if op.op in ACCUMULATORS and stages[op.name].depth == depth + 1]
        stored = [s.value for s in kernel.stores if stages[s.value] == Stage(depth, body=True)]
        loads, ops = _body(kernel, [a for op in accumulators for a in op.args] + stored)
        state: dict[str, Any] = {}
        before: dict[str, Any] = {}  # values of the previous step
        for ranges in self.steps if accumulators or stored else ():
            here = self.domain.within(ranges)
            now = self._step(here, loads, ops, env, before)
            for op in accumulators:
                state[op.name] = _accumulate(here, op, state.get(op.name), before, now)
            self._store(here, ranges, now, stored)
            before = now
        if self.idle:
            zero = self.domain.constant(ZERO)
            state |= {op.name: self.domain.mul(zero, state[op.name]) for op in accumulators if op.op != "last"}
        return state

    def _step(
        self,
        here: ArrayDomain[Any],
        loads: Sequence[Load],
        ops: Sequence[Op],
        env: Mapping[str, Any],
        before: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Compute the values of one step of a loop; `env` has the values from outside."""
        now = dict(env)
        for x in loads:
            now[x.name] = here.load(self.tensors[x.tensor], x.axes)
        for op in ops:
            now[op.name] = _apply(here, op, now)
            if before and carried(self.kernel, op):
                now[op.name] = here.function("maximum", (before[op.name], now[op.name]))
        return now

    def _store(self, here: ArrayDomain[Any], ranges: Ranges, env: Mapping[str, Any], values: Sequence[str]) -> None:
        for s in self.kernel.stores:
            if s.value in values:
                where = tuple(ranges[a] for a in s.tensor.axes)
                self.stored[s.tensor.name].append((where, here.store(env[s.value], s.tensor)))


def _accumulate(domain: ArrayDomain[Any], op: Op, state: Any, before: Mapping[str, Any], now: Mapping[str, Any]) -> Any:
    x = now[op.args[0]]
    if state is None or op.op == "last":
        return x
    if op.op == "accs":
        m = op.args[1]
        state = operator("rescale").meaning(domain, state, before[m], now[m], **op.attributes)
    return domain.add(state, x)


def _body(kernel: BlockGraph, targets: Sequence[str]) -> tuple[list[Load], list[Op]]:
    """Loads and operators of the loop body that `targets` need, in order."""
    needed = set(targets)
    for op in reversed(kernel.ops):
        if op.name in needed and op.op not in ACCUMULATORS:
            needed.update(op.args)
    body = {n for n in needed if kernel.stages[n].body}
    return [x for x in kernel.loads if x.name in body], [op for op in kernel.ops if op.name in body]

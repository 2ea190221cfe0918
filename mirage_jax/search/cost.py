"""The cost model: what a kernel should take, from bytes, operations, launches and how well it fills the device.

It orders candidates before anything is measured; it never decides that a candidate is used.

A kernel is priced from its `Outline`: what it loads, computes and stores, each as a list of axes. `Terms` are then
products and quotients of extents and tile sizes, written once over an arithmetic: `Numbers`, `Arrays` (all tilings of
a kernel priced at once) or `formula.Symbols` (sympy expressions, for people, and for reuse over shapes). `seconds` is a
roofline with wave quantization, whose terms hide each other in part:

    launch + exposed + sqrt(shortest^2 + memory^2 + compute^2 + latency^2)

Memory is the larger of compulsory bytes over the bandwidth and of all loads over the cache's, where rows of a tile that
are shorter than a sector fetch all of it. Compute is arithmetic, or what warps read of products' operands in shared
memory, each for itself unless the tile is large enough for instructions of several warps; it is divided by the part of
the device that the blocks keep busy. Latency is that of loop steps that wait for loads, less with more stages and more
blocks at a time, and exposed in part where blocks load nothing ahead. A product that rounds a computed operand costs
half as much again if its result is not only scaled: where the float gate asks for more, it takes two. Constants were
fitted to times of 4,200 kernels on one GPU (bench/calibration.py); ones that only move all estimates together do not
matter for an order.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from itertools import product
from typing import Any

import numpy as np

from mirage_jax.hardware import THREAD_REGISTERS, WGMMA_ROWS
from mirage_jax.mugraph.footprint import BYTES, iteration_spaces
from mirage_jax.mugraph.graph import (
    HALF,
    PART,
    Axis,
    BlockGraph,
    KernelGraph,
    KernelSchedule,
    Library,
    Op,
    Schedule,
    Span,
    is_part,
    origin,
    part_axis,
    split_axis,
)
from mirage_jax.mugraph.operators import ACCUMULATORS, operator
from mirage_jax.mugraph.sentinels import masks_among
from mirage_jax.search.axioms import LOOP, Step, kind
from mirage_jax.search.devices import Device
from mirage_jax.search.frontier import Cheapest, Dag, Frontiers, Leaves, Weight
from mirage_jax.search.normal_form import Poly
from mirage_jax.search.spans import span_of

GRID_TILES = (1, 16, 32, 64, 128, 256)
LOOP_TILES = (16, 32, 64, 128, 256)
MUCH = 0.35  # of a program's time
LARGEST_TILE = 32768  # elements of one value: 128 f32 registers for each of 256 threads
SMALLEST_PRODUCT = 16  # rows, columns and depth of a matrix product are padded to this
WIDE_ROWS, WIDE_WARPS = WGMMA_ROWS, 4  # of a product whose warps read operands from shared memory together
SECTOR = 64  # bytes that are fetched at once: shorter rows of a tile fetch what other blocks need too
STEP_LATENCY = 0.7e-6  # seconds of a loop step that waits for memory
EXPOSED = 0.5  # of that where a block loads nothing ahead: what it does then hides no load of its own
WARPS = (4, 8, 2)  # per block, and
STAGES = (2, 3, 4)  # of the pipeline of a loop's loads: where the tuner starts
# Where warps are specialized: of pointwise work what no product hides; the time of matrix units, which wait less, and
# of copies, of which many are under way, over what it is elsewhere.
BESIDE, AT_WORK, COPIED = 0.18, 0.92, 0.5
BLOCK = 1.5e-6  # seconds in which a processor begins and ends a block, unless it does the next one meanwhile
RESIDENT = 8  # blocks at a time on one processor, at most
DRAWN = 1.5  # times its share of the bandwidth: what one processor can draw while others have no block
ENOUGH_WARPS = 8  # to keep one processor's pointwise units busy
LIVE = 2.2  # as many values as the largest take registers at a time
TYPICAL_TILE, TYPICAL_PARTS = 64, 8  # for which operators are chosen
ROUNDED = 1.5  # times the cost of a product that rounds a computed operand, which may turn out to need a second one
KEPT = 64  # tilings kept per kernel, for the tuner

type Axes = tuple[Axis, ...]
type Tiles = tuple[tuple[Axis, int], ...]
type Number = Any  # int, array of tilings, or sympy expression


# ---------------------------------------------------------------------- what a kernel does


@dataclass(frozen=True)
class Read:
    """One load: the axes under which a tensor is read, bytes per element, how many loops read all of it, and the axis
    along which neighbours lie side by side.
    """

    tensor: str
    axes: Axes
    width: int
    passes: int = 1
    last: Axis | None = None


@dataclass(frozen=True)
class Work:
    """One operator: the axes it is evaluated over, FLOPs per point in all loops that make it, and whether in a loop's
    body. `product`: the axes of rows, of columns and of the depth of a matrix product.
    """

    axes: Axes
    result: Axes
    flops: float
    in_body: bool
    product: tuple[Axes, ...] = ()
    narrow: bool = False  # 16-bit operands
    sums_product: bool = False  # adds matrix products up, which matrix units do on their own


@dataclass(frozen=True)
class Outline:
    """What pricing needs to know of a kernel. Axes are those of the muGraph: a loop step is not an axis."""

    grid: Axes
    loop: Axis | None
    reads: tuple[Read, ...]
    work: tuple[Work, ...]
    writes: tuple[tuple[Axes, int], ...]
    span: Span | None = None

    @property
    def divided(self) -> Axes:
        return (*self.grid, self.loop) if self.loop else self.grid


def outline(kernel: BlockGraph, graph: KernelGraph) -> Outline:
    """The outline of a block graph."""
    stages = kernel.stages
    args = {op.name: op.args for op in kernel.ops}
    body = {n for n, stage in stages.items() if stage.body}
    ends = [(stages[op.name].depth - 1, op.args) for op in kernel.ops if op.op in ACCUMULATORS]
    ends += [(stages[x.value].depth, (x.value,)) for x in kernel.stores if stages[x.value].body]
    passes = _passes(ends, lambda n: args.get(n, ()) if n in body else ())
    widths = {x.name: BYTES[graph.tensors[x.tensor].dtype] for x in kernel.loads}
    inputs = {t.name for t in graph.inputs}
    kept = {x.name for x in kernel.loads if x.tensor in inputs or widths[x.name] <= 2}  # a product rounds all others
    reads = tuple(
        Read(x.tensor, x.axes, widths[x.name], max(1, passes[x.name]), x.axes[-1] if x.axes else None)
        for x in kernel.loads
    )
    work: list[Work] = []
    products = set[str]()
    for op in kernel.ops:
        gone = op.attributes.get("axes", ())
        assert isinstance(gone, tuple)
        space = tuple(dict.fromkeys((*op.axes, *gone)))
        in_body = stages[op.name].body or op.op in ACCUMULATORS
        sides = [set(kernel.axes_of[a]) for a in op.args]
        narrow = any(widths.get(a, 4) <= 2 for a in op.args)
        ready = [a in widths or not stages[a].body for a in op.args]
        half = [widths.get(a) == 2 and x for a, x in zip(op.args, reversed(ready), strict=True)]
        flops = operator(op.op).flops * max(1, passes[op.name])
        own = matrix_product(op.op, sides, gone, half)
        products |= {op.name} if own else set()
        if own and narrow and not kept.issuperset(op.args) and not _forgives(kernel, op.name):
            flops *= ROUNDED
        sums = op.op == "acc" and op.args[0] in products
        work.append(Work(space, op.axes, flops, in_body, own, narrow, sums))
    writes = tuple((s.tensor.axes, BYTES[s.tensor.dtype]) for s in kernel.stores)
    return Outline(kernel.grid, kernel.loop, reads, tuple(work), writes, kernel.span)


def _forgives(kernel: BlockGraph, name: str) -> bool:
    """Does rounding before a value not matter to what is stored of it: tensors of 16 bits, or parts of a sum?"""
    values = kernel.only_scaled(name)
    stored = [s.tensor for s in kernel.stores if s.value in values]
    return bool(values) and all(t.dtype in HALF or any(map(is_part, t.axes)) for t in stored)


def _passes[N](ends: Iterable[tuple[int, Iterable[N]]], below: Callable[[N], Iterable[N]]) -> Counter[N]:
    """In how many loops each value is needed. `ends` are what loop number d is run for, `below` the values of its
    body under one.
    """
    loops: dict[int, set[N]] = {}
    for depth, names in ends:
        seen, todo = loops.setdefault(depth, set()), list(names)
        while todo:
            n = todo.pop()
            if n not in seen:
                seen.add(n)
                todo += below(n)
    return Counter(n for seen in loops.values() for n in seen)


def matrix_product(
    op: str, sides: Sequence[set[Axis]], gone: Axes, half: Sequence[bool] = (False, False)
) -> tuple[Axes, ...]:
    """Axes of rows, of columns and of the depth of a matrix product (free rows on one side, free columns on the
    other), or none. Rows may be of several axes: queries and heads that share keys. `half`: which operands are tensors
    of 16 bits beside one that no step of a loop computes: a vector is a matrix then (`lower.tiling.SINGLE`).
    """
    if op != "dot":
        return ()
    rows, columns = tuple(sorted(sides[0] - sides[1])), tuple(sorted(sides[1] - sides[0]))
    product = (rows and columns) or (rows and half[0]) or (columns and half[1])
    return (rows, columns, gone) if product else ()


# ---------------------------------------------------------------------- formulas


class Numbers:
    """Arithmetic on numbers."""

    @staticmethod
    def ceil(a: Number, b: Number) -> Number:
        return -(-a // b)

    maximum = staticmethod(max)
    minimum = staticmethod(min)


class Arrays(Numbers):
    """The same on arrays of tilings."""

    maximum = staticmethod(np.maximum)
    minimum = staticmethod(np.minimum)


@dataclass(frozen=True)
class Terms:
    """What a kernel costs in units of hardware; numbers, arrays over tilings, or sympy expressions."""

    blocks: Number
    steps: Number
    traffic: Number  # bytes through device memory, each tensor once
    fetched: Number  # bytes that blocks load, all together
    narrow_flops: Number  # of 16-bit matrix products, all blocks
    wide_flops: Number  # of f32 matrix products
    vector_flops: Number
    operands: Number  # bytes of matrix products' operands, all blocks
    wide_operands: Number  # of these those of products that warps can do together
    shared: Number  # bytes that one loop step holds
    streamed: Number  # bytes of these that the next step loads anew
    largest: Number  # elements of the largest value in a block
    sums: Number = 0  # of the vector FLOPs those that add matrix products up


def terms(o: Outline, extent: Callable[[Axis], Number], tile: Callable[[Axis], Number], math_: Any = Arrays) -> Terms:
    """The formulas. `extent` gives whole sizes (of a split axis: in its part), `tile` those of grid and loop axes."""
    divided = o.divided

    def whole(axes: Iterable[Axis]) -> Number:
        """Elements in memory: all parts of a split axis, whether or not it is one of the tensor's."""
        axes = list(axes)
        parts = [part_axis(a) for a in axes if part_axis(a) in o.grid and part_axis(a) not in axes]
        return math.prod(map(extent, (*axes, *parts)))

    block: dict[Axis, Number] = {}  # elements that one has along an axis
    inside: dict[Axes, Number] = {}

    def held(axes: Axes) -> Number:
        if axes not in inside:
            for a in axes:
                if a not in block:
                    block[a] = math_.minimum(tile(a), extent(a)) if a in divided else extent(a)
            inside[axes] = math.prod([block[a] for a in axes])
        return inside[axes]

    def sizes(w: Work) -> tuple[Number, ...]:
        """Of a matrix product in a block: how many there are, rows, columns and depth."""
        batch = held(tuple(a for a in w.axes if not any(a in side for side in w.product)))
        return batch, *(math_.maximum(held(side), SMALLEST_PRODUCT) for side in w.product)

    blocks = math.prod(math_.ceil(extent(a), tile(a)) for a in o.grid)
    steps = math_.ceil(extent(o.loop), tile(o.loop)) if o.loop else 1
    share = _share(o, extent, tile, math_)
    steps = steps * share
    seen = {r.tensor: r for r in o.reads}
    traffic = sum(whole(r.axes) * r.width for r in seen.values()) + sum(
        math.prod(map(extent, axes)) * w for axes, w in o.writes
    )
    fetched: Number = 0
    for r in o.reads:
        copies = math.prod(
            math_.ceil(extent(a), tile(a))
            for a in o.grid
            if a not in r.axes and not (is_part(a) and split_axis(a) in r.axes)
        )
        row = SECTOR if r.last is None else held((r.last,)) * r.width
        times = r.passes * copies * (share if o.loop in r.axes else 1) * math_.maximum(SECTOR, row) / row
        fetched = fetched + whole(r.axes) * r.width * times
    flops: dict[str, Number] = {"narrow": 0, "wide": 0, "vector": 0}
    operands: Number = 0
    sums: Number = 0
    wide_operands: Number = 0
    for w in o.work:
        unit = "vector" if not w.product else "narrow" if w.narrow else "wide"
        per_step = math.prod(sizes(w)) if w.product else held(w.axes)
        times = (steps if w.in_body else 1) * blocks
        flops[unit] = flops[unit] + w.flops * per_step * times
        sums = sums + (w.flops * per_step * times if w.sums_product else 0)
        if w.product:
            batch, rows, columns, depth = sizes(w)
            read = batch * (rows + columns) * depth * (2 if w.narrow else 4) * times
            operands = operands + read
            wide_operands = wide_operands + read * math_.minimum(math_.maximum(rows, columns) // WIDE_ROWS, 1)
    shared = sum((held(r.axes) * r.width for r in o.reads), start=0)
    streamed = sum((held(r.axes) * r.width for r in o.reads if o.loop in r.axes), start=0)
    largest: Number = 1
    for w in o.work:
        largest = math_.maximum(largest, held(w.result))
    units = (flops["narrow"], flops["wide"], flops["vector"])
    return Terms(blocks, steps, traffic, fetched, *units, operands, wide_operands, shared, streamed, largest, sums)


def _share(o: Outline, extent: Callable[[Axis], Number], tile: Callable[[Axis], Number], math_: Any) -> Number:
    """The part of the loop's steps that its span leaves: that of the block in the middle stands for all."""
    if o.loop is None or o.span is None:
        return 1
    rows, part = o.span.axis, part_axis(o.loop)
    whole = extent(o.loop) * (extent(part) if part in o.grid else 1)
    middle, half = extent(rows) / 2, math_.minimum(tile(rows), extent(rows)) / 2
    end = whole if o.span.high is None else math_.minimum(middle + half + o.span.high, whole)
    start = 0 if o.span.low is None else math_.maximum(middle - half + o.span.low, 0)
    return math_.minimum(math_.maximum(end - start, tile(o.loop)) / whole, 1)


def seconds(t: Terms, d: Device, math_: Any = Arrays, warps: Number = WARPS[0], stages: Number = STAGES[1]) -> Number:
    """The estimate. `warps` per block and `stages` of the pipeline are numbers or arrays."""
    held = t.shared + t.streamed * math_.maximum(stages - 2, 0)
    resident = math_.minimum(d.shared_bytes // math_.maximum(held, 1024), d.resident_warps // warps)
    resident = math_.minimum(math_.maximum(resident, 1), RESIDENT)
    fill = t.blocks / (math_.ceil(t.blocks, d.blocks) * d.blocks)
    drawn = math_.minimum(DRAWN * t.blocks / d.blocks, 1)
    memory = math_.maximum(t.traffic / d.bandwidth, t.fetched / d.cache_bandwidth) / drawn
    at_once = math_.minimum(math_.maximum(t.blocks / d.blocks, 1), resident)
    busy = math_.minimum(at_once * warps / ENOUGH_WARPS, 1)
    spills = math_.maximum(LIVE * t.largest / (32 * warps) / THREAD_REGISTERS, 1)
    products = t.narrow_flops / d.matrix_flops + t.wide_flops / d.matrix_flops_f32
    together = t.wide_operands * math_.minimum(warps // WIDE_WARPS, 1) if d.reads_together else 0
    read = (together + (t.operands - together) * (1 + warps)) / d.shared_bandwidth
    compute = (math_.maximum(products, read) + t.vector_flops / d.vector_flops / busy) / fill * spills
    waves = math_.ceil(t.blocks, d.blocks * resident)
    ahead = math_.maximum(math_.minimum(stages - 1, t.steps), 1)
    waiting = t.steps * waves * STEP_LATENCY
    exposed = EXPOSED * waiting * math_.maximum(2 - ahead, 0)
    return (memory**2 + compute**2 + (waiting / ahead) ** 2 + d.shortest**2) ** 0.5 + exposed + d.launch


def extents_inside(kernel: BlockGraph, graph: KernelGraph, parts: Mapping[Axis, int]) -> Callable[[Axis], int]:
    """Extents as a kernel's blocks see them: of a split axis, its part."""

    def extent(a: Axis) -> int:
        if is_part(a):
            return parts[split_axis(origin(a))]
        n = graph.extent(a)
        return -(-n // parts[a]) if a in parts and part_axis(a) in kernel.grid else n

    return extent


@dataclass
class Known:
    """What pricing found out about kernels of one graph, for other schedules of it with the same parts."""

    outlines: dict[int, Outline] = field(default_factory=dict[int, Outline])
    terms: dict[tuple[int, Tiles], Terms] = field(default_factory=dict[tuple[int, Tiles], Terms])


def estimate(graph: KernelGraph, schedule: Schedule, device: Device, known: Known | None = None) -> float:
    """Seconds of a scheduled graph; library operators as XLA would run them alone, pointwise ones fused. A launch of
    several kernels is one with the work of all of them.
    """
    known = known or Known()

    def work(n: int, kernel: BlockGraph) -> Terms:
        tiles = schedule.kernels[n].tiles
        if (n, tiles) not in known.terms:
            if n not in known.outlines:
                known.outlines[n] = outline(kernel, graph)
            extent = extents_inside(kernel, graph, schedule.part_counts)
            known.terms[n, tiles] = _of_tiles(known.outlines[n], extent, tiles)
        return known.terms[n, tiles]

    def launch(wave: Sequence[int]) -> float:
        found = {n: work(n, k) for n in wave if isinstance(k := graph.kernels[n], BlockGraph)}
        if not found:
            return sum(library_estimate(k, graph, device) for n in wave if isinstance(k := graph.kernels[n], Library))
        widest = max(found, key=lambda n: found[n].traffic)
        t = _together(list(found.values())) if len(found) > 1 else found[widest]
        return _scheduled(t, schedule.kernels[widest], device)

    return sum(map(launch, schedule.waves(graph)))


def _together(kernels: Sequence[Terms]) -> Terms:
    """What a launch of several kernels costs: all of their work, the longest of their loops, their largest block."""
    longest = {"steps", "shared", "streamed", "largest"}
    values = {f.name: [getattr(t, f.name) for t in kernels] for f in fields(Terms)}
    return Terms(**{name: max(own) if name in longest else sum(own) for name, own in values.items()})


def _of_tiles(o: Outline, extent: Callable[[Axis], int], tiles: Tiles) -> Terms:
    tile = dict(tiles)
    return terms(o, extent, lambda a: tile.get(a, 1), Numbers)


def kernel_estimate(
    kernel: BlockGraph, graph: KernelGraph, sizes: KernelSchedule, parts: Mapping[Axis, int], device: Device
) -> float:
    """Seconds of one of a graph's kernels at given sizes."""
    t = _of_tiles(outline(kernel, graph), extents_inside(kernel, graph, parts), sizes.tiles)
    return _scheduled(t, sizes, device)


def _scheduled(t: Terms, sizes: KernelSchedule, device: Device) -> float:
    if sizes.specialized:
        return float(specialized_seconds(t, device, sizes))
    return float(seconds(t, device, Numbers, sizes.num_warps, sizes.num_stages))


def specialized_seconds(t: Terms, d: Device, sizes: KernelSchedule) -> float:
    """The estimate for a kernel whose warps have different tasks (`lower.specialized`): loads wait for nothing but room
    to load into, and pointwise work of one warpgroup stands beside products of others, if there are others, or takes
    longer than these.
    """
    waves = -(-t.blocks // d.blocks)
    fill, beside = t.blocks / (waves * d.blocks), BESIDE if sizes.num_warps > WIDE_WARPS else 1
    memory = max(t.traffic / d.bandwidth, COPIED * t.fetched / d.cache_bandwidth)
    products = max(AT_WORK * t.narrow_flops / d.matrix_flops, t.wide_operands / d.shared_bandwidth)
    pointwise = (t.vector_flops - t.sums) / d.vector_flops
    compute = max(products + beside * pointwise, pointwise) / fill
    return max(memory, compute) + (1 if sizes.programs else waves) * BLOCK + d.shortest + d.launch


def fused_estimate(reference: KernelGraph, device: Device) -> float:
    """Seconds of a program of library operators as XLA runs it: products and reductions are kernels, and what is
    pointwise is fused into those that read it; but results and what products read is written first.
    """
    operators = [k for k in reference.kernels if isinstance(k, Library)]
    written = {x.tensor for k in operators if k.op.op == "dot" for x in k.loads} | set(reference.outputs)
    return sum(
        max(library_estimate(k, reference, device), device.shortest)
        for k in operators
        if not operator(k.op.op).pointwise or k.name in written
    )


def bound_by_products(reference: KernelGraph, device: Device) -> bool:
    """Does XLA spend much of the program's time in matrix products that keep its units busy?"""
    busy = 0.0
    for k in reference.kernels:
        if isinstance(k, Library) and k.op.op == "dot":
            seconds_of_it = library_estimate(k, reference, device)
            if arithmetic(k, reference, device) >= seconds_of_it - device.launch:
                busy += seconds_of_it
    return busy >= MUCH * fused_estimate(reference, device)


def library_estimate(kernel: Library, graph: KernelGraph, device: Device) -> float:
    record = operator(kernel.op.op)
    work = arithmetic(kernel, graph, device)
    read = [] if record.pointwise else [graph.tensors[x.tensor] for x in kernel.loads]
    moved = sum(math.prod(map(graph.extent, t.axes)) * BYTES[t.dtype] for t in (*read, kernel.result))
    return max(work, moved / device.bandwidth) + (0.0 if record.pointwise else device.launch)


def arithmetic(kernel: Library, graph: KernelGraph, device: Device) -> float:
    """Seconds of the arithmetic of an operator."""
    ((_, space),) = iteration_spaces(kernel)
    sides = [set(x.axes) for x in kernel.loads]
    is_product = bool(matrix_product(kernel.op.op, sides, ()))
    narrow = all(BYTES[graph.tensors[x.tensor].dtype] <= 2 for x in kernel.loads)
    peak = device.vector_flops if not is_product else device.matrix_flops if narrow else device.matrix_flops_f32
    return operator(kernel.op.op).flops * math.prod(map(graph.extent, space)) / peak


# ---------------------------------------------------------------------- tilings


@dataclass(frozen=True)
class Tiled:
    """A tiling and its estimate in seconds."""

    seconds: float
    schedule: KernelSchedule


def tilings(o: Outline, extent: Callable[[Axis], int], single: frozenset[Axis], device: Device) -> list[Tiled]:
    """Tilings of a kernel that fit the device, best estimate first; axes in `single` have tiles of one element."""

    def options(a: Axis) -> list[int]:
        n = extent(a)
        if a in single or is_part(a):
            return [1]
        if a == o.loop:
            return [t for t in LOOP_TILES if t < n] or [1 << (n - 1).bit_length()]
        whole = {1 << (n - 1).bit_length()} if n <= 4096 else set[int]()
        return sorted({t for t in GRID_TILES if t < n} | whole) or [1]

    axes = o.divided
    choices = list(product(*map(options, axes)))
    table = np.array(choices, dtype=np.int64).reshape(len(choices), len(axes))
    column = {a: table[:, i] for i, a in enumerate(axes)}
    t = terms(o, extent, column.__getitem__)
    # Of every tiling the best launch; all stages of a pipeline have their own buffers, beside what is at work.
    launches = np.array(list(product(WARPS, STAGES if o.loop else (1,))), dtype=np.int64)
    warps, stages = launches[:, :1], launches[:, 1:]
    rows = len(table)
    room = (t.shared + stages * t.streamed <= device.shared_bytes) | (stages <= STAGES[0])
    priced = np.where(room, seconds(t, device, Arrays, warps, stages), np.inf)
    priced = np.broadcast_to(priced, (len(launches), rows))
    best = priced.argmin(0)
    cost = priced[best, np.arange(rows)]
    work = np.broadcast_to(
        np.asarray(t.vector_flops / device.vector_flops + (t.narrow_flops + t.wide_flops) / device.matrix_flops, float),
        rows,
    )
    fits = np.broadcast_to(
        (np.asarray(t.shared) * 2 <= device.shared_bytes) & (np.asarray(t.largest) <= LARGEST_TILE), rows
    )
    fetched = np.broadcast_to(np.asarray(t.fetched, float), rows)
    order = [i for i in np.lexsort((fetched, work, cost)) if fits[i]][:KEPT]
    out: list[Tiled] = []
    for i in order:
        num_warps, num_stages = map(int, launches[best[i]])
        tiles = tuple(sorted(zip(axes, map(int, table[i]), strict=True)))
        out.append(Tiled(float(cost[i]), KernelSchedule(tiles, num_warps, num_stages)))
    return out


# ---------------------------------------------------------------------- kernels of a search


@dataclass(frozen=True)
class Priced:
    """One kernel with its best loop axis, operator DAG and sizes under the model."""

    outs: Leaves
    leaves: Leaves
    loop: Axis | None
    grid: Axes
    dag: Dag
    tilings: tuple[Tiled, ...]

    @property
    def seconds(self) -> float:
        return self.tilings[0].seconds

    @property
    def schedule(self) -> KernelSchedule:
        return self.tilings[0].schedule


@dataclass
class Model:
    """Prices kernels of one search variant; `parts` gives the split axis its number of parts. `halves`: values that the
    program itself rounds to 16 bits.
    """

    frontiers: Frontiers
    device: Device
    extents: Mapping[Axis, int]
    widths: Mapping[str, int]  # bytes per element of the region's inputs
    halves: frozenset[Poly] = frozenset()
    split: Axis | None = None
    parts: int = 1
    dags: dict[Any, Mapping[Leaves, Dag]] = field(default_factory=dict[Any, Mapping[Leaves, Dag]])  # for any `parts`
    tables: dict[Any, tuple[Weight, Cheapest]] = field(default_factory=dict[Any, tuple[Weight, Cheapest]])

    def __post_init__(self) -> None:
        self._kernels: dict[tuple[Leaves, Leaves], Priced | None] = {}
        self._visible: dict[Axes, dict[Poly, Axes]] = {}  # of values, by the axes of a grid
        self._spaces: dict[tuple[Poly, Step], tuple[float, Axes, tuple[frozenset[Axis], ...], float]] = {}

    def extent(self, axis: Axis, parts: int | None = None) -> int:
        a, parts = origin(axis), parts or self.parts
        if self.split is not None:
            if a == self.split + PART:
                return parts
            if a == self.split:
                return math.ceil(self.extents[a] / parts)
        return self.extents[a]

    def width(self, p: Poly) -> int:
        """Bytes per element as stored: inputs as they are, partial or shifted values in f32, other intermediates
        narrow.
        """
        f = self.frontiers
        if f.axioms.is_input(p):
            return self.widths[f.axioms.atom(p)[0]]
        partial = any(kind(a) == "g" for a in f.axioms.e.axes(p))
        return 4 if partial or f.grading.degree(p) else min(self.widths.values(), default=4)

    def bytes(self, p: Poly) -> int:
        return math.prod(map(self.extent, self.frontiers.axioms.e.axes(p))) * self.width(p)

    def bound(self, outs: Leaves, leaves: Leaves) -> float:
        """No kernel with these outputs and loaded intermediates is faster."""
        traffic = sum(self.bytes(p) for p in (*outs, *leaves))
        return math.hypot(self.device.shortest, traffic / self.device.bandwidth) + self.device.launch

    # ------------------------------------------------------------------ one operator

    def work(self, p: Poly, s: Step, size: Mapping[Axis, int], rounded: float = 1.0) -> float:
        """Seconds of one application at given axis sizes, on the whole device; of a matrix product that rounds what was
        computed, so many times that.
        """
        key = (p, s)
        if key not in self._spaces:
            self._spaces[key] = self._space(p, s)
        flops, space, sides, peak = self._spaces[key]
        for a in space:
            flops *= size[a]
        if sides:
            x, y = ({a for a in side if size[a] > 1} for side in sides)
            if x - y and y - x:
                return flops / peak * (rounded if self._rounds(s) else 1.0)
        return flops / self.device.vector_flops

    def _space(self, p: Poly, s: Step) -> tuple[float, Axes, tuple[frozenset[Axis], ...], float]:
        """FLOPs per point, axes of the points; for a dot, the free axes of its operands and the matrix unit's speed."""
        e, d = self.frontiers.axioms.e, self.device
        space = tuple(origin(a) for a in {*e.axes(p), *s.reduced})
        if s.op != "dot":
            return s.record.flops, space, (), 0.0
        sides = tuple(frozenset(map(origin, e.axes(o) - set(s.reduced))) for o in s.args)
        narrow = any(self.frontiers.axioms.is_input(o) and self.width(o) <= 2 for o in s.args)
        return s.record.flops, space, sides, d.matrix_flops if narrow else d.matrix_flops_f32

    def _rounds(self, s: Step) -> bool:
        """Does a matrix product round an operand, which was computed, to the type of the other?"""
        given = [o for o in s.args if self.frontiers.axioms.is_input(o)]
        return len(given) == 1 and self.width(given[0]) <= 2

    def library(self, p: Poly, s: Step) -> float:
        """Seconds of one operator over whole tensors, assuming that XLA fuses pointwise chains."""
        size = {origin(a): self.extent(a) for a in {*self.frontiers.axioms.e.axes(p), *s.reduced}}
        fused = operator(s.op).pointwise
        traffic = self.bytes(p) + (0 if fused else sum(self.bytes(o) for o in {*s.args}))
        return max(self.work(p, s, size), traffic / self.device.bandwidth) + (0.0 if fused else self.device.launch)

    # ------------------------------------------------------------------ one kernel

    def kernel(self, outs: Leaves, leaves: Leaves) -> Priced | None:
        """The best loop axis, operator DAG and tile sizes for a kernel; None if no tile fits."""
        if (outs, leaves) not in self._kernels:
            found = [
                k
                for loop in self.frontiers.loops_of(outs, leaves)
                if (k := self._with_loop(outs, leaves, loop)) is not None
            ]
            self._kernels[outs, leaves] = min(found, key=lambda k: k.seconds, default=None)
        return self._kernels[outs, leaves]

    def _with_loop(self, outs: Leaves, leaves: Leaves, loop: Axis | None) -> Priced | None:
        f = self.frontiers
        must, optional = f.grid_for(outs, leaves)
        plain = must | optional
        # Axes that some DAGs reduce and others need not, since they load what it takes.
        others = sorted(f.free_axes(outs) - plain - {loop})
        avoided = [self._on_grid(outs, leaves, loop, plain | {a}, {a}) for a in others]
        found = [k for k in (self._on_grid(outs, leaves, loop, plain, set()), *avoided) if k is not None]
        wide = frozenset(a for k in found for a in k.grid)
        if len(found) > 2:
            found += [k for k in [self._on_grid(outs, leaves, loop, wide, wide - plain)] if k is not None]
        return min(found, key=lambda k: k.seconds, default=None)

    def _on_grid(
        self, outs: Leaves, leaves: Leaves, loop: Axis | None, axes: Set[Axis], kept: Set[Axis]
    ) -> Priced | None:
        """The cheapest kernel with these axes on its grid, no operator of which reduces those in `kept`."""
        f = self.frontiers
        if f.batch & f.free_axes(outs) - axes - {loop}:
            return None  # as below, but before a DAG is looked for
        must = frozenset(a for a in axes if kind(a) == "g")
        grid = tuple(sorted(axes, key=lambda a: (kind(a) != "g" and a not in f.batch, a)))
        single = must | f.batch
        dag = self._cheapest(outs, leaves, loop, grid, single, frozenset(kept))
        if dag is None:
            return None
        o = self._outline(outs, leaves, loop, grid, dag)
        if loop is not None and not any(loop in w.axes for w in o.work):
            return None  # what has the axis is loaded without it
        if not all(f.batch & set(w.axes) <= {*grid, loop} for w in o.work):
            return None  # a tile would have more than one element of a batch axis
        found = tilings(o, self.extent, single, self.device)
        return Priced(outs, leaves, loop, grid, dag, tuple(found)) if found else None

    def _cheapest(
        self,
        outs: Leaves,
        leaves: Leaves,
        loop: Axis | None,
        grid: Axes,
        single: frozenset[Axis],
        kept: frozenset[Axis],
    ) -> Dag | None:
        """The DAG that does the least work at typical tiles; found for all `leaves` and any number of parts at once."""
        most = self.frontiers.space.max_loaded if leaves else 0
        key = (outs, loop, most, frozenset(grid), single, kept)
        if key not in self.dags:
            like = (loop, self.frontiers.parts_of(outs), *key[2:])
            if like not in self.tables:
                self.tables[like] = self._weight(loop, grid, single), {}
            weight, table = self.tables[like]
            self.dags[key] = self.frontiers.cheapest(outs, loop, weight, most, kept=kept, table=table)
        return self.dags[key].get(leaves)

    def _weight(self, loop: Axis | None, grid: Axes, single: frozenset[Axis]) -> Weight:
        """Seconds of one operator at typical tiles."""
        whole = {a: self.extent(a, TYPICAL_PARTS) for a in self.extents}
        size = {a: min(TYPICAL_TILE, n) if a in grid or a == loop else n for a, n in whole.items()}
        size |= dict.fromkeys(single, 1)
        if loop is not None:
            size[loop + LOOP] = math.ceil(whole[loop] / size[loop])
        if self.split is not None:
            size.setdefault(self.split + PART, TYPICAL_PARTS)
        halves = {self.frontiers.in_loop(p, loop) for p in self.halves}

        @functools.cache
        def weight(p: Poly, s: Step) -> float:
            return self.work(p, s, size, ROUNDED if halves.isdisjoint(s.args) else 1.0) + 1e-15

        return weight

    def _outline(self, outs: Leaves, leaves: Leaves, loop: Axis | None, grid: Axes, dag: Dag) -> Outline:
        """The outline of a kernel that is not written yet."""
        f = self.frontiers
        loaded = {f.in_loop(p, loop): p for p in leaves}

        shown = self._visible.setdefault(grid, {})

        def visible(p: Poly) -> Axes:
            if p not in shown:
                axes = (a for a in f.axioms.e.axes(p) if kind(a) == "t" or (kind(a) == "g" and a not in grid))
                shown[p] = tuple(sorted(axes))
            return shown[p]

        steps = dict(dag)
        depth: dict[Poly, int] = {}
        for p, s in dag:
            depth[p] = max((depth.get(o, 0) for o in s.args), default=0) + s.accumulates
        ends = [(depth[p] - 1, s.args) for p, s in dag if s.accumulates]
        ends += [(depth[p], (p,)) for p in (f.in_loop(o, loop) for o in outs) if f.in_body(p)]
        passes = _passes(ends, lambda p: steps[p].args if p in steps and f.in_body(p) else ())
        reads: dict[Poly, Read] = {}
        work: list[Work] = []
        for p, s in dag:
            for o in s.args:
                if f.axioms.is_input(o) or o in loaded:
                    name, stored = f.axioms.atom(o) if f.axioms.is_input(o) else (f"%{o}", visible(o))
                    again = max(1, passes[o]) if f.in_body(o) else 1
                    reads[o] = Read(
                        name, visible(o), self.width(loaded.get(o, o)), again, stored[-1] if stored else None
                    )
            sides = [set(visible(o)) for o in s.args]
            gone = tuple(a for a in s.reduced if kind(a) != "l")
            space = tuple(dict.fromkeys((*visible(p), *gone)))
            narrow = any(f.axioms.is_input(o) and self.width(o) <= 2 for o in s.args)
            ready = [o in reads or not f.in_body(o) for o in s.args]
            half = [o in reads and reads[o].width == 2 and x for o, x in zip(s.args, reversed(ready), strict=True)]
            body = f.in_body(p) or s.accumulates
            flops = s.record.flops * max(1, passes[p])
            work.append(Work(space, visible(p), flops, body, matrix_product(s.op, sides, gone, half), narrow))
        writes = tuple((tuple(sorted(f.axioms.e.axes(o))), self.width(o)) for o in outs)
        if loop is None or any(f.in_body(f.in_loop(o, loop)) for o in outs):
            span = None
        else:
            ops = [Op(str(p), s.op, tuple(map(str, s.args)), (), s.attrs) for p, s in dag]
            span = span_of(masks_among(ops, set(map(str, outs))), grid, loop)
        return Outline(grid, loop, tuple(reads.values()), tuple(work), writes, span)

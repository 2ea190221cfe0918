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

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import product
from typing import Any

import numpy as np

from mirage_jax.hardware.device_model import DeviceModel
from mirage_jax.hardware.gpus import MAX_THREAD_REGISTERS, WGMMA_ROWS
from mirage_jax.mugraph.dtypes import BYTES, SIXTEEN_BIT_FLOATS
from mirage_jax.mugraph.footprint import iteration_spaces
from mirage_jax.mugraph.graph import (
    Axis,
    BlockGraph,
    KernelGraph,
    KernelSchedule,
    Library,
    LoopBounds,
    Schedule,
    is_part,
    origin,
    part_axis,
    split_axis,
)
from mirage_jax.mugraph.operators import ACCUMULATORS, operator

GRID_TILES = (1, 16, 32, 64, 128, 256)
LOOP_TILES = (16, 32, 64, 128, 256)
DOMINANT_FRACTION = 0.35  # of a program's time
MAX_TILE_ELEMENTS = 32768  # elements of one value: 128 f32 registers for each of 256 threads
MIN_PRODUCT_EXTENT = 16  # rows, columns and depth of a matrix product are padded to this
WIDE_ROWS, WIDE_WARPS = WGMMA_ROWS, 4  # of a product whose warps read operands from shared memory together
SECTOR_BYTES = 64  # bytes that are fetched at once: shorter rows of a tile fetch what other blocks need too
STEP_LATENCY_SECONDS = 0.7e-6  # seconds of a loop step that waits for memory
EXPOSED_LATENCY_FRACTION = 0.5  # of that where a block loads nothing ahead: what it does then hides no load of its own
WARPS = (4, 8, 2)  # per block, and
STAGES = (2, 3, 4)  # of the pipeline of a loop's loads: where the tuner starts
# Where warps are specialized: of pointwise work what no product hides; the time of matrix units, which wait less, and
# of copies, of which many are under way, over what it is elsewhere.
POINTWISE_EXPOSED_FRACTION, SPECIALIZED_MATRIX_FRACTION, SPECIALIZED_COPY_FRACTION = 0.18, 0.92, 0.5
BLOCK_SECONDS = 1.5e-6  # seconds in which a processor begins and ends a block, unless it does the next one meanwhile
MAX_RESIDENT_BLOCKS = 8  # blocks at a time on one processor, at most
MAX_BANDWIDTH_SHARE = 1.5  # times its share of the bandwidth: what one processor can draw while others have no block
BUSY_WARPS = 8  # to keep one processor's pointwise units busy
LIVE_VALUES = 2.2  # as many values as the largest take registers at a time
TYPICAL_TILE, TYPICAL_PARTS = 64, 8  # for which operators are chosen
ROUNDED_PRODUCT_COST = (
    1.5  # times the cost of a product that rounds a computed operand, which may turn out to need a second one
)
MAX_TILINGS_PER_KERNEL = 64  # tilings kept per kernel, for the tuner

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
    loop_bounds: LoopBounds | None = None

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
    passes = loop_passes(ends, lambda n: args.get(n, ()) if n in body else ())
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
            flops *= ROUNDED_PRODUCT_COST
        sums = op.op == "acc" and op.args[0] in products
        work.append(Work(space, op.axes, flops, in_body, own, narrow, sums))
    writes = tuple((s.tensor.axes, BYTES[s.tensor.dtype]) for s in kernel.stores)
    return Outline(kernel.grid, kernel.loop, reads, tuple(work), writes, kernel.loop_bounds)


def _forgives(kernel: BlockGraph, name: str) -> bool:
    """Does rounding before a value not matter to what is stored of it: tensors of 16 bits, or parts of a sum?"""
    values = kernel.only_scaled(name)
    stored = [s.tensor for s in kernel.stores if s.value in values]
    return bool(values) and all(t.dtype in SIXTEEN_BIT_FLOATS or any(map(is_part, t.axes)) for t in stored)


def loop_passes[N](ends: Iterable[tuple[int, Iterable[N]]], below: Callable[[N], Iterable[N]]) -> Counter[N]:
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
        return batch, *(math_.maximum(held(side), MIN_PRODUCT_EXTENT) for side in w.product)

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
        row = SECTOR_BYTES if r.last is None else held((r.last,)) * r.width
        times = r.passes * copies * (share if o.loop in r.axes else 1) * math_.maximum(SECTOR_BYTES, row) / row
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
    """The part of the loop's steps that its loop bounds leave: that of the block in the middle stands for all."""
    if o.loop is None or o.loop_bounds is None:
        return 1
    rows, part = o.loop_bounds.axis, part_axis(o.loop)
    whole = extent(o.loop) * (extent(part) if part in o.grid else 1)
    middle, half = extent(rows) / 2, math_.minimum(tile(rows), extent(rows)) / 2
    end = whole if o.loop_bounds.high is None else math_.minimum(middle + half + o.loop_bounds.high, whole)
    start = 0 if o.loop_bounds.low is None else math_.maximum(middle - half + o.loop_bounds.low, 0)
    return math_.minimum(math_.maximum(end - start, tile(o.loop)) / whole, 1)


def seconds(
    t: Terms, d: DeviceModel, math_: Any = Arrays, warps: Number = WARPS[0], stages: Number = STAGES[1]
) -> Number:
    """The estimate. `warps` per block and `stages` of the pipeline are numbers or arrays."""
    held = t.shared + t.streamed * math_.maximum(stages - 2, 0)
    resident = math_.minimum(d.shared_bytes // math_.maximum(held, 1024), d.resident_warps // warps)
    resident = math_.minimum(math_.maximum(resident, 1), MAX_RESIDENT_BLOCKS)
    fill = t.blocks / (math_.ceil(t.blocks, d.blocks) * d.blocks)
    drawn = math_.minimum(MAX_BANDWIDTH_SHARE * t.blocks / d.blocks, 1)
    memory = math_.maximum(t.traffic / d.bandwidth, t.fetched / d.cache_bandwidth) / drawn
    at_once = math_.minimum(math_.maximum(t.blocks / d.blocks, 1), resident)
    busy = math_.minimum(at_once * warps / BUSY_WARPS, 1)
    spills = math_.maximum(LIVE_VALUES * t.largest / (32 * warps) / MAX_THREAD_REGISTERS, 1)
    products = t.narrow_flops / d.matrix_flops + t.wide_flops / d.matrix_flops_f32
    together = t.wide_operands * math_.minimum(warps // WIDE_WARPS, 1) if d.reads_together else 0
    read = (together + (t.operands - together) * (1 + warps)) / d.shared_bandwidth
    compute = (math_.maximum(products, read) + t.vector_flops / d.vector_flops / busy) / fill * spills
    waves = math_.ceil(t.blocks, d.blocks * resident)
    ahead = math_.maximum(math_.minimum(stages - 1, t.steps), 1)
    waiting = t.steps * waves * STEP_LATENCY_SECONDS
    exposed = EXPOSED_LATENCY_FRACTION * waiting * math_.maximum(2 - ahead, 0)
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
class PricedKernels:
    """What pricing found out about kernels of one graph, for other schedules of it with the same parts."""

    outlines: dict[int, Outline] = field(default_factory=dict[int, Outline])
    terms: dict[tuple[int, Tiles], Terms] = field(default_factory=dict[tuple[int, Tiles], Terms])


def estimate(graph: KernelGraph, schedule: Schedule, device: DeviceModel, known: PricedKernels | None = None) -> float:
    """Seconds of a scheduled graph; library operators as XLA would run them alone, pointwise ones fused. A launch of
    several kernels is one with the work of all of them.
    """
    known = known or PricedKernels()

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
    kernel: BlockGraph, graph: KernelGraph, sizes: KernelSchedule, parts: Mapping[Axis, int], device: DeviceModel
) -> float:
    """Seconds of one of a graph's kernels at given sizes."""
    t = _of_tiles(outline(kernel, graph), extents_inside(kernel, graph, parts), sizes.tiles)
    return _scheduled(t, sizes, device)


def _scheduled(t: Terms, sizes: KernelSchedule, device: DeviceModel) -> float:
    if sizes.specialized:
        return float(specialized_seconds(t, device, sizes))
    return float(seconds(t, device, Numbers, sizes.num_warps, sizes.num_stages))


def specialized_seconds(t: Terms, d: DeviceModel, sizes: KernelSchedule) -> float:
    """The estimate for a kernel whose warps have different tasks (`lower.hopper.kernel`): loads wait for nothing but
    room to load into, and pointwise work of one warpgroup stands beside products of others, if there are others, or
    takes longer than these.
    """
    waves = -(-t.blocks // d.blocks)
    fill, beside = t.blocks / (waves * d.blocks), POINTWISE_EXPOSED_FRACTION if sizes.num_warps > WIDE_WARPS else 1
    memory = max(t.traffic / d.bandwidth, SPECIALIZED_COPY_FRACTION * t.fetched / d.cache_bandwidth)
    products = max(SPECIALIZED_MATRIX_FRACTION * t.narrow_flops / d.matrix_flops, t.wide_operands / d.shared_bandwidth)
    pointwise = (t.vector_flops - t.sums) / d.vector_flops
    compute = max(products + beside * pointwise, pointwise) / fill
    return max(memory, compute) + (1 if sizes.programs else waves) * BLOCK_SECONDS + d.shortest + d.launch


def fused_estimate(reference: KernelGraph, device: DeviceModel) -> float:
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


def bound_by_products(reference: KernelGraph, device: DeviceModel) -> bool:
    """Does XLA spend much of the program's time in matrix products that keep its units busy?"""
    busy = 0.0
    for k in reference.kernels:
        if isinstance(k, Library) and k.op.op == "dot":
            seconds_of_it = library_estimate(k, reference, device)
            if arithmetic(k, reference, device) >= seconds_of_it - device.launch:
                busy += seconds_of_it
    return busy >= DOMINANT_FRACTION * fused_estimate(reference, device)


def library_estimate(kernel: Library, graph: KernelGraph, device: DeviceModel) -> float:
    record = operator(kernel.op.op)
    work = arithmetic(kernel, graph, device)
    read = [] if record.pointwise else [graph.tensors[x.tensor] for x in kernel.loads]
    moved = sum(math.prod(map(graph.extent, t.axes)) * BYTES[t.dtype] for t in (*read, kernel.result))
    return max(work, moved / device.bandwidth) + (0.0 if record.pointwise else device.launch)


def arithmetic(kernel: Library, graph: KernelGraph, device: DeviceModel) -> float:
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


def tilings(o: Outline, extent: Callable[[Axis], int], single: frozenset[Axis], device: DeviceModel) -> list[Tiled]:
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
        (np.asarray(t.shared) * 2 <= device.shared_bytes) & (np.asarray(t.largest) <= MAX_TILE_ELEMENTS), rows
    )
    fetched = np.broadcast_to(np.asarray(t.fetched, float), rows)
    order = [i for i in np.lexsort((fetched, work, cost)) if fits[i]][:MAX_TILINGS_PER_KERNEL]
    out: list[Tiled] = []
    for i in order:
        num_warps, num_stages = map(int, launches[best[i]])
        tiles = tuple(sorted(zip(axes, map(int, table[i]), strict=True)))
        out.append(Tiled(float(cost[i]), KernelSchedule(tiles, num_warps, num_stages)))
    return out

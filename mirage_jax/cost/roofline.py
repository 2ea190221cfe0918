"""The cost model: seconds that a kernel should take, from bytes, operations, launches and how well it fills the device.

It orders candidates before anything is measured; it never decides that a candidate is used.

`Terms` are products and quotients of extents and tile sizes, computed from a kernel's `Outline`. They are written once
over an arithmetic: `Numbers`, `Arrays` (all tilings of a kernel at once) or `formula.Symbols` (sympy expressions).
`seconds` is a roofline with wave quantization, whose terms hide each other in part:

    launch + exposed + sqrt(shortest^2 + memory^2 + compute^2 + latency^2)

* Memory: the larger of compulsory bytes over the bandwidth, and all loads over the cache's bandwidth. A tile's row that
  is shorter than a sector fetches a whole sector.
* Compute: the larger of arithmetic, and reads of products' operands from shared memory. Each warp reads for itself
  unless the tile is large enough for warpgroup instructions. It is divided by the busy fraction of the device.
* Registers: a thread that holds more values at a time spills them, which slows all arithmetic down (`Outline.live`).
  Operands of float32 products are such values, once for each number of TF32 that they are rounded to.
* Latency: loop steps that wait for loads; more stages and more resident blocks shorten it. It is partly exposed where
  blocks load nothing ahead.

A product that rounds a computed operand costs half as much again unless its result is only scaled: the float gate may
ask for a second product. The constants were fitted to times of 4,200 kernels on one GPU (bench/calibration.py); those
that move all estimates together do not matter for an order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from mirage_jax.cost.outline import Axes, Outline, Read, Work, matrix_product, outline
from mirage_jax.hardware.device_model import DeviceModel
from mirage_jax.hardware.gpus import MAX_THREAD_REGISTERS, WGMMA_ROWS
from mirage_jax.mugraph.dtypes import BYTES
from mirage_jax.mugraph.footprint import flops_of
from mirage_jax.mugraph.graph import (
    Axis,
    BlockGraph,
    KernelGraph,
    KernelSchedule,
    Library,
    Precision,
    Schedule,
    is_part,
    origin,
    part_axis,
    split_axis,
)
from mirage_jax.mugraph.operators import CARRIED_REGISTERS, MAX_NARROW_DEPTH, MAX_NARROW_SIDE, operator

DOMINANT_FRACTION = 0.35  # of a program's time
MIN_PRODUCT_EXTENT = 16  # rows, columns and depth of a matrix product are padded to this
WIDE_ROWS, WIDE_WARPS = WGMMA_ROWS, 4  # of a product whose warps read operands from shared memory together
SECTOR_BYTES = 64  # fetched at once: shorter rows of a tile fetch bytes that other blocks need too
STEP_LATENCY_SECONDS = 0.7e-6  # of a loop step that waits for memory
EXPOSED_LATENCY_FRACTION = 0.5  # of that latency, where a block loads nothing ahead
WARPS = (4, 8, 2)  # per block: where the tuner starts
STAGES = (2, 3, 4)  # of the pipeline of a loop's loads: where the tuner starts
# For specialized warps: pointwise time not hidden behind matrix products, and the time of matrix units and of copies
# relative to kernels without specialized warps. Matrix units wait less there, and more copies are under way.
POINTWISE_EXPOSED_FRACTION, SPECIALIZED_MATRIX_FRACTION, SPECIALIZED_COPY_FRACTION = 0.18, 0.92, 0.5
BLOCK_SECONDS = 1.5e-6  # in which a processor begins and ends a block, unless it does the next one meanwhile
MAX_RESIDENT_BLOCKS = 8  # on one processor
MAX_BANDWIDTH_SHARE = 1.5  # times its share of the bandwidth: one processor's maximum while others have no block
BUSY_WARPS = 8  # to keep one processor's pointwise units busy
ADDRESS_REGISTERS = 64  # of a thread, for where it reads and writes
REDUCTION_FLOPS = 48  # for each element of a tile that is summed over threads, which wait for each other

type Tiles = tuple[tuple[Axis, int], ...]
type Number = Any  # int, array of tilings, or sympy expression
type SizeOf = Callable[[Axis], Number]


# ---------------------------------------------------------------------- terms


class Numbers:
    """Arithmetic on numbers."""

    @staticmethod
    def ceil(a: Number, b: Number) -> Number:
        """Divide and round up."""
        return -(-a // b)

    maximum = staticmethod(max)
    minimum = staticmethod(min)


class Arrays(Numbers):
    """Arithmetic on arrays of tilings."""

    maximum = staticmethod(np.maximum)
    minimum = staticmethod(np.minimum)


@dataclass(frozen=True)
class Terms:
    """A kernel's demand on the hardware's units: numbers, arrays over tilings, or sympy expressions."""

    blocks: Number
    steps: Number
    traffic: Number  # bytes through device memory, each tensor once
    fetched: Number  # bytes that blocks load, all together
    narrow_flops: Number  # of 16-bit matrix products, all blocks
    wide_flops: Number  # of f32 matrix products
    vector_flops: Number
    operands: Number  # bytes of matrix products' operands, all blocks
    wide_operands: Number  # the part that belongs to products for a warpgroup
    shared: Number  # bytes that one loop step holds
    streamed: Number  # the part that the next step loads again
    largest: Number  # elements of the largest value in a block
    live: Number  # elements of the values that its registers hold at a time
    fragments: Number = 0  # elements of the operands of a float32 product, which registers hold too
    wide_fragments: Number = 0  # the same of a product for a warpgroup, which reads the other operand elsewhere
    sums: Number = 0  # the part of the vector FLOPs that adds matrix products up
    carried: Number = 0  # elements of all tiles that are summed over the loop's axis, in one block
    summed: Number = 0  # the same in all steps of all blocks


class _KernelSizes:
    """Sizes of one kernel's tensors, tiles and loads. `extent` gives whole sizes (of a split axis: one part's)."""

    def __init__(self, o: Outline, extent: SizeOf, tile: SizeOf, math_: Any) -> None:
        self.o, self.extent, self.tile, self.math = o, extent, tile, math_
        self.divided = o.divided
        self.along: dict[Axis, Number] = {}
        self.inside: dict[Axes, Number] = {}

    def tiles(self, axis: Axis) -> Number:
        """Tiles along an axis."""
        return self.math.ceil(self.extent(axis), self.tile(axis))

    def whole(self, axes: Axes) -> Number:
        """Elements in memory: all parts of a split axis, whether or not it is one of the tensor's."""
        parts = [part_axis(a) for a in axes if part_axis(a) in self.o.grid and part_axis(a) not in axes]
        return math.prod(map(self.extent, (*axes, *parts)))

    def held(self, axes: Axes) -> Number:
        """Elements in one block."""
        if axes not in self.inside:
            self.inside[axes] = math.prod([self._along(a) for a in axes])
        return self.inside[axes]

    def _along(self, a: Axis) -> Number:
        if a not in self.along:
            size = self.extent(a)
            self.along[a] = self.math.minimum(self.tile(a), size) if a in self.divided else size
        return self.along[a]

    def product(self, w: Work) -> tuple[Number, ...]:
        """Number, rows, columns and depth of a matrix product in one block."""
        batch = self.held(tuple(a for a in w.axes if not any(a in side for side in w.product)))
        return batch, *(self.math.maximum(self.held(side), MIN_PRODUCT_EXTENT) for side in w.product)

    def on_vector_units(self, w: Work) -> bool:
        """Is an operator no matrix product, or one of float32 so narrow that kernels write it out?"""
        if not w.product or w.narrow:
            return not w.product
        limits = (MAX_NARROW_SIDE, MAX_NARROW_SIDE, MAX_NARROW_DEPTH)
        return any(self._is_short(axes, most) for axes, most in zip(w.product, limits, strict=True))

    def _is_short(self, axes: Axes, most: int) -> bool:
        """Do axes that are not divided into tiles have so few elements?"""
        count = 0 if not set(axes).isdisjoint(self.divided) else self.held(axes)
        return isinstance(count, int) and 0 < count <= most

    def fetched(self, r: Read, share: Number) -> Number:
        """Bytes that all blocks together load. `share`: the fraction of the loop's steps that run."""
        copies = math.prod(
            self.tiles(a) for a in self.o.grid if a not in r.axes and not (is_part(a) and split_axis(a) in r.axes)
        )
        row = SECTOR_BYTES if r.last is None else self.held((r.last,)) * r.width
        steps = share if self.o.loop in r.axes else 1
        times = r.passes * copies * steps * self.math.maximum(SECTOR_BYTES, row) / row
        return self.whole(r.axes) * r.width * times

    def steps_share(self) -> Number:
        """The fraction of the loop's steps that its bounds leave to the block in the middle, which stands for all."""
        o, extent, math_ = self.o, self.extent, self.math
        if o.loop is None or o.loop_bounds is None:
            return 1
        rows, part = o.loop_bounds.axis, part_axis(o.loop)
        whole = extent(o.loop) * (extent(part) if part in o.grid else 1)
        middle, half = extent(rows) / 2, math_.minimum(self.tile(rows), extent(rows)) / 2
        end = whole if o.loop_bounds.high is None else math_.minimum(middle + half + o.loop_bounds.high, whole)
        start = 0 if o.loop_bounds.low is None else math_.maximum(middle - half + o.loop_bounds.low, 0)
        return math_.minimum(math_.maximum(end - start, self.tile(o.loop)) / whole, 1)


def terms(o: Outline, extent: SizeOf, tile: SizeOf, math_: Any = Arrays) -> Terms:
    """Evaluate the formulas. `extent` gives whole sizes (of a split axis: one part's), `tile` those along grid and loop
    axes.
    """
    size = _KernelSizes(o, extent, tile, math_)
    share = size.steps_share()
    blocks = math.prod(map(size.tiles, o.grid))
    steps = (size.tiles(o.loop) if o.loop else 1) * share
    compulsory = sum(size.whole(r.axes) * r.width for r in {r.tensor: r for r in o.reads}.values())
    written = sum(math.prod(map(extent, axes)) * width for axes, width in o.writes)
    fetched = sum(size.fetched(r, share) for r in o.reads)
    done = _arithmetic(size, steps, blocks)
    shared = sum(size.held(r.axes) * r.width for r in o.reads)
    streamed = sum(size.held(r.axes) * r.width for r in o.reads if o.loop in r.axes)
    largest: Number = functools.reduce(math_.maximum, (size.held(w.result) for w in o.work), 1)
    together = (sum(n * size.held(axes) for axes, n in values) for values in o.live)
    live: Number = functools.reduce(math_.maximum, together, 0)
    tiles = {"shared": shared, "streamed": streamed, "largest": largest, "live": live}
    return Terms(blocks, steps, compulsory + written, fetched, **done, **tiles)


def _arithmetic(size: _KernelSizes, steps: Number, blocks: Number) -> dict[str, Number]:
    """The terms of all operators together: FLOPs by unit, and bytes of matrix products' operands."""
    names = ("narrow_flops", "wide_flops", "vector_flops", "operands", "wide_operands", "sums", "carried", "summed")
    total: dict[str, Number] = dict.fromkeys((*names, "fragments", "wide_fragments"), 0)
    on_vector_units = {w: size.on_vector_units(w) for w in size.o.work}
    sums_tiles = all(on_vector_units.values())
    for w in size.o.work:
        times = (steps if w.in_body else 1) * blocks
        if on_vector_units[w]:
            flops = w.flops * size.held(w.axes) * times
            total["vector_flops"] = total["vector_flops"] + flops
            total["sums"] = total["sums"] + (flops if w.sums_product else 0)
            tile = size.held(w.axes) if w.sums_steps and sums_tiles else 0
            total["carried"], total["summed"] = total["carried"] + tile, total["summed"] + tile * times
            continue
        batch, rows, columns, depth = product = size.product(w)
        unit, width = ("narrow_flops", 2) if w.narrow else ("wide_flops", 4)
        total[unit] = total[unit] + w.flops * math.prod(product) * times
        read = batch * (rows + columns) * depth * width * times
        together = size.math.minimum(size.math.maximum(rows, columns) // WIDE_ROWS, 1)
        total["operands"] = total["operands"] + read
        total["wide_operands"] = total["wide_operands"] + read * together
        if not w.narrow:
            apart = batch * (rows + columns) * depth * (1 - together)
            total["fragments"] = size.math.maximum(total["fragments"], apart)
            taller = batch * size.math.maximum(rows, columns) * depth * together
            total["wide_fragments"] = size.math.maximum(total["wide_fragments"], taller)
    return total


def seconds(
    t: Terms,
    d: DeviceModel,
    math_: Any = Arrays,
    warps: Number = WARPS[0],
    stages: Number = STAGES[1],
    parts: int | None = None,
) -> Number:
    """Estimate a kernel's seconds. `warps` per block and `stages` of the pipeline are numbers or arrays.

    parts: numbers that make an operand of a float32 product; the device's default, if it is not given.
    """
    held = t.shared + t.streamed * math_.maximum(stages - 2, 0)
    resident = math_.minimum(d.shared_bytes // math_.maximum(held, 1024), d.resident_warps // warps)
    resident = math_.minimum(math_.maximum(resident, 1), MAX_RESIDENT_BLOCKS)
    fill = t.blocks / (math_.ceil(t.blocks, d.blocks) * d.blocks)
    drawn = math_.minimum(MAX_BANDWIDTH_SHARE * t.blocks / d.blocks, 1)
    memory = math_.maximum(t.traffic / d.bandwidth, t.fetched / d.cache_bandwidth) / drawn
    at_once = math_.minimum(math_.maximum(t.blocks / d.blocks, 1), resident)
    busy = math_.minimum(at_once * warps / BUSY_WARPS, 1)
    is_reduced = _is_reduced(t, math_, warps)
    held_by_thread = _registers(t, math_, warps, d.float32_parts if parts is None else parts)
    spills = math_.maximum(held_by_thread / MAX_THREAD_REGISTERS, 1) ** 2
    products = t.narrow_flops / d.matrix_flops + t.wide_flops / d.matrix_flops_f32
    together = t.wide_operands * math_.minimum(warps // WIDE_WARPS, 1) if d.reads_together else 0
    read = (together + (t.operands - together) * (1 + warps)) / d.shared_bandwidth
    vector_flops = t.vector_flops + is_reduced * REDUCTION_FLOPS * t.summed
    compute = (math_.maximum(products, read) + vector_flops / d.vector_flops / busy) / fill * spills
    waves = math_.ceil(t.blocks, d.blocks * resident)
    ahead = math_.maximum(math_.minimum(stages - 1, t.steps), 1)
    waiting = t.steps * waves * STEP_LATENCY_SECONDS
    exposed = EXPOSED_LATENCY_FRACTION * waiting * math_.maximum(2 - ahead, 0)
    return (memory**2 + compute**2 + (waiting / ahead) ** 2 + d.shortest**2) ** 0.5 + exposed + d.launch


def least_seconds(traffic: float, blocks: int, d: DeviceModel) -> float:
    """Bound `seconds` from below, of kernels with so many bytes of traffic and at most so many blocks."""
    drawn = min(MAX_BANDWIDTH_SHARE * blocks / d.blocks, 1)
    return math.hypot(traffic / d.bandwidth / drawn, STEP_LATENCY_SECONDS, d.shortest) + d.launch


def _is_reduced(t: Terms, math_: Any, warps: Number) -> Number:
    """1 where tiles of sums are reduced in each step: there are no registers to carry them through the loop."""
    return math_.minimum(math_.maximum(t.carried / (CARRIED_REGISTERS * 32 * warps) - 1, 0) * 1e6, 1)


def _registers(t: Terms, math_: Any, warps: Number, parts: Number) -> Number:
    """Registers that a thread needs for the values of a block, with so many warps.

    Operands of float32 products are rounded, so registers hold all of them before a product begins. Warps in a row have
    the same rows, and those in a column the same columns, unless they work as a warpgroup: it reads one operand from
    shared memory. Two warps are no group, and hold both.
    """
    values = t.live + (1 - _is_reduced(t, math_, warps)) * t.carried
    by_group = t.wide_fragments * math_.maximum(1, WIDE_WARPS - warps)
    operands = math_.maximum(t.fragments * warps**0.5, by_group)
    return ADDRESS_REGISTERS + (values + parts * operands) / (32 * warps)


def register_pressure(graph: KernelGraph, schedule: Schedule) -> float:
    """Registers that a thread needs over those that it has, of the kernel that needs most; 0 for specialized ones."""

    def pressure(kernel: BlockGraph, sizes: KernelSchedule) -> float:
        t = _terms_alone(kernel, graph, sizes, schedule.part_counts)
        return float(_registers(t, Numbers, sizes.num_warps, float32_parts(sizes, 1))) / MAX_THREAD_REGISTERS

    usual = [
        pressure(kernel, sizes)
        for kernel, sizes in zip(graph.kernels, schedule.kernels, strict=True)
        if isinstance(kernel, BlockGraph) and not sizes.specialized
    ]
    return max(usual, default=0.0)


def extents_inside(kernel: BlockGraph, graph: KernelGraph, parts: Mapping[Axis, int]) -> Callable[[Axis], int]:
    """Extents as a kernel's blocks see them: one part of a split axis."""

    def extent(a: Axis) -> int:
        """Elements along an axis."""
        if is_part(a):
            return parts[split_axis(origin(a))]
        n = graph.extent(a)
        return -(-n // parts[a]) if a in parts and part_axis(a) in kernel.grid else n

    return extent


@dataclass
class PricedKernels:
    """Outlines and terms of one graph's kernels, and seconds of its library operators, reused for other schedules of
    the graph with the same parts.
    """

    outlines: dict[int, Outline] = field(default_factory=dict[int, Outline])
    terms: dict[tuple[int, Tiles], Terms] = field(default_factory=dict[tuple[int, Tiles], Terms])
    libraries: dict[int, float] = field(default_factory=dict[int, float])


def estimate(graph: KernelGraph, schedule: Schedule, device: DeviceModel, known: PricedKernels | None = None) -> float:
    """Estimate the seconds of a scheduled graph; a launch of several kernels does the work of all.

    XLA runs library operators alone, and fuses pointwise ones.
    """
    known = known or PricedKernels()

    def work(n: int, kernel: BlockGraph) -> Terms:
        """Terms of kernel number n."""
        tiles = schedule.kernels[n].tiles
        if (n, tiles) not in known.terms:
            if n not in known.outlines:
                known.outlines[n] = outline(kernel, graph)
            extent = extents_inside(kernel, graph, schedule.part_counts)
            known.terms[n, tiles] = _of_tiles(known.outlines[n], extent, tiles)
        return known.terms[n, tiles]

    def library(n: int, kernel: Library) -> float:
        """Seconds of kernel number n, one of XLA's."""
        if n not in known.libraries:
            known.libraries[n] = library_estimate(kernel, graph, device)
        return known.libraries[n]

    def launch(wave: Sequence[int]) -> float:
        """Seconds of one launch."""
        found = {n: work(n, k) for n in wave if isinstance(k := graph.kernels[n], BlockGraph)}
        if not found:
            return sum(library(n, k) for n in wave if isinstance(k := graph.kernels[n], Library))
        widest = max(found, key=lambda n: found[n].traffic)
        t = _together(list(found.values())) if len(found) > 1 else found[widest]
        return _scheduled(t, schedule.kernels[widest], device)

    return sum(map(launch, schedule.waves(graph)))


def _together(kernels: Sequence[Terms]) -> Terms:
    """Terms of a launch of several kernels: all their work, the longest loop, the largest block."""
    longest = {"steps", "shared", "streamed", "largest", "live", "carried", "fragments", "wide_fragments"}
    values = {f.name: [getattr(t, f.name) for t in kernels] for f in fields(Terms)}
    return Terms(**{name: max(of_each) if name in longest else sum(of_each) for name, of_each in values.items()})


def _of_tiles(o: Outline, extent: Callable[[Axis], int], tiles: Tiles) -> Terms:
    tile = dict(tiles)
    return terms(o, extent, lambda a: tile.get(a, 1), Numbers)


def kernel_estimate(
    kernel: BlockGraph, graph: KernelGraph, sizes: KernelSchedule, parts: Mapping[Axis, int], device: DeviceModel
) -> float:
    """Estimate the seconds of one kernel of a graph at given sizes."""
    return _scheduled(_terms_alone(kernel, graph, sizes, parts), sizes, device)


def _terms_alone(kernel: BlockGraph, graph: KernelGraph, sizes: KernelSchedule, parts: Mapping[Axis, int]) -> Terms:
    return _of_tiles(outline(kernel, graph), extents_inside(kernel, graph, parts), sizes.tiles)


def _scheduled(t: Terms, sizes: KernelSchedule, device: DeviceModel) -> float:
    if sizes.specialized:
        return float(specialized_seconds(t, device, sizes))
    parts = float32_parts(sizes, device.float32_parts)
    return float(seconds(t, device, Numbers, sizes.num_warps, sizes.num_stages, parts))


def float32_parts(sizes: KernelSchedule, least: int) -> int:
    """How many numbers of TF32 a kernel makes of an operand of a float32 product."""
    return max(least, 2 if Precision.SPLIT_FLOAT32_RESULTS <= sizes.precise <= Precision.SPLIT_ALL else 1)


def specialized_seconds(t: Terms, d: DeviceModel, sizes: KernelSchedule) -> float:
    """Estimate the seconds of a kernel whose warps have different tasks (`lower.hopper.kernel`).

    Loads wait only for free stages. One warpgroup's pointwise work overlaps with products of other warpgroups, if there
    are others, unless it takes longer.
    """
    waves = -(-t.blocks // d.blocks)
    fill, exposed = t.blocks / (waves * d.blocks), POINTWISE_EXPOSED_FRACTION if sizes.num_warps > WIDE_WARPS else 1
    memory = max(t.traffic / d.bandwidth, SPECIALIZED_COPY_FRACTION * t.fetched / d.cache_bandwidth)
    products = max(SPECIALIZED_MATRIX_FRACTION * t.narrow_flops / d.matrix_flops, t.wide_operands / d.shared_bandwidth)
    pointwise = (t.vector_flops - t.sums) / d.vector_flops
    compute = max(products + exposed * pointwise, pointwise) / fill
    return max(memory, compute) + (1 if sizes.programs else waves) * BLOCK_SECONDS + d.shortest + d.launch


def fused_estimate(reference: KernelGraph, device: DeviceModel) -> float:
    """Estimate the seconds of a program of library operators as XLA runs it.

    Products and reductions are kernels. Pointwise operators are fused into their readers, except for results and
    operands of products, which are written. The inputs of fused chains count once, for the whole program.
    """
    operators = [k for k in reference.kernels if isinstance(k, Library)]
    written = {x.tensor for k in operators if k.op.op == "dot" for x in k.loads} | set(reference.outputs)
    kernels = [k for k in operators if not operator(k.op.op).pointwise or k.name in written]
    by_kernel = sum(max(library_estimate(k, reference, device), device.shortest) for k in kernels)
    return max(by_kernel, lower_limit(reference, device))


def lower_limit(reference: KernelGraph, device: DeviceModel) -> float:
    """Estimate the fewest seconds for a program: its products alone, or one pass over its inputs and outputs."""
    ends = (*reference.inputs, *(reference.tensors[name] for name in reference.outputs))
    moved = sum(math.prod(map(reference.extent, t.axes)) * BYTES[t.dtype] for t in ends)
    operators = [k for k in reference.kernels if isinstance(k, Library) and k.op.op == "dot"]
    return max(sum(arithmetic(k, reference, device) for k in operators), moved / device.bandwidth)


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
    """Estimate the seconds of one library operator: no less than an empty kernel takes, unless it is pointwise. Such a
    one is fused, so it only writes.
    """
    record = operator(kernel.op.op)
    work = arithmetic(kernel, graph, device)
    read = [] if record.pointwise else [graph.tensors[x.tensor] for x in kernel.loads]
    moved = sum(math.prod(map(graph.extent, t.axes)) * BYTES[t.dtype] for t in (*read, kernel.result))
    alone = max(work, moved / device.bandwidth)
    return alone if record.pointwise else max(alone + device.launch, device.shortest)


def arithmetic(kernel: Library, graph: KernelGraph, device: DeviceModel) -> float:
    """Estimate the seconds of an operator's arithmetic."""
    sides = [set(x.axes) for x in kernel.loads]
    is_product = bool(matrix_product(kernel.op.op, sides, ()))
    narrow = all(BYTES[graph.tensors[x.tensor].dtype] <= 2 for x in kernel.loads)
    peak = device.vector_flops if not is_product else device.matrix_flops if narrow else device.matrix_flops_f32
    return flops_of(kernel, graph.extent) / peak

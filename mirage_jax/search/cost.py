"""The cost model: what a kernel should take, from bytes, operations, launches and how well it fills the device.

It orders candidates before anything is measured; it never decides that a candidate is used. Three levels:

* `Model.bound`: a lower bound for any kernel with given outputs and loads (launch + compulsory bytes): orders plans;
* `Model.kernel`: the best operator DAG and tile sizes of one kernel under a roofline with wave quantization;
* `Model.library`: one operator left to XLA, for plans that are pure algebra.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product

from mirage_jax.mugraph.graph import Axis, KernelSchedule, origin
from mirage_jax.mugraph.operators import operator
from mirage_jax.search.axioms import LOOP, PART, Step, kind
from mirage_jax.search.devices import Device
from mirage_jax.search.frontier import Dag, Frontiers, Leaves
from mirage_jax.search.normal_form import Poly

GRID_TILES = (1, 16, 32, 64, 128, 256)
LOOP_TILES = (16, 32, 64, 128, 256)
LARGEST_TILE = 32768  # elements of one value: 128 f32 registers for each of 256 threads


@dataclass(frozen=True)
class Priced:
    """One kernel with its best structure and sizes under the model; `seconds` is an estimate."""

    outs: Leaves
    leaves: Leaves
    loop: Axis | None
    grid: tuple[Axis, ...]
    dag: Dag
    schedule: KernelSchedule
    seconds: float
    bytes: float
    flops: float
    alternatives: tuple[tuple[float, KernelSchedule], ...] = ()  # other sizes, best first, for the tuner


@dataclass
class Model:
    """Prices kernels of one search variant; `parts` gives split axes their number of parts."""

    frontiers: Frontiers
    device: Device
    extents: Mapping[Axis, int]
    widths: Mapping[str, int]  # bytes per element of the region's inputs
    split: Axis | None = None
    parts: int = 1

    def __post_init__(self) -> None:
        self._kernels: dict[tuple[Leaves, Leaves], Priced | None] = {}

    # ------------------------------------------------------------------ sizes

    def extent(self, axis: Axis) -> int:
        a = origin(axis)
        if self.split is not None:
            if a == self.split + PART:
                return self.parts
            if a == self.split:
                return math.ceil(self.extents[a] / self.parts)
        return self.extents[a]

    def elements(self, axes: Iterable[Axis]) -> int:
        return math.prod(self.extent(a) for a in axes)

    def width(self, p: Poly) -> int:
        """Bytes per element as stored: inputs as they are, partial or shifted values in f32, other intermediates narrow."""
        f = self.frontiers
        if f.axioms.is_input(p):
            return self.widths[f.axioms.atom(p)[0]]
        partial = any(kind(a) == "g" for a in f.axioms.e.axes(p))
        return 4 if partial or f.grading.degree(p) else min(self.widths.values())

    def bytes(self, p: Poly) -> int:
        return self.elements(self.frontiers.axioms.e.axes(p)) * self.width(p)

    # ------------------------------------------------------------------ estimates

    def bound(self, outs: Leaves, leaves: Leaves) -> float:
        """No kernel with these outputs and loaded intermediates is faster."""
        traffic = sum(self.bytes(p) for p in (*outs, *leaves))
        return max(self.device.shortest, traffic / self.device.bandwidth) + self.device.launch

    def work(self, p: Poly, s: Step, size: Mapping[Axis, int]) -> tuple[float, float]:
        """(matrix seconds, vector seconds) of one application at given axis sizes, on the whole device."""
        e = self.frontiers.axioms.e
        n = math.prod(size[origin(a)] for a in {*e.axes(p), *s.reduced})
        flops = n * operator("sum" if s.op == "acc" else s.op).flops
        if s.op == "dot" and self.is_matmul(s, size):
            narrow = any(self.frontiers.axioms.is_input(o) and self.width(o) <= 2 for o in s.args)
            return flops / (self.device.matrix_flops if narrow else self.device.matrix_flops_f32), 0.0
        return 0.0, flops / self.device.vector_flops

    def is_matmul(self, s: Step, size: Mapping[Axis, int]) -> bool:
        """Does a dot have free rows on one side and free columns on the other, so that matrix units apply?"""
        e = self.frontiers.axioms.e
        x, y = (e.axes(o) - set(s.reduced) for o in s.args)
        big = lambda axes: any(size[origin(a)] > 1 for a in axes)  # noqa: E731
        return big(x - y) and big(y - x)

    def library(self, p: Poly, s: Step) -> float:
        """Seconds of one operator over whole tensors, assuming that XLA fuses pointwise chains."""
        e = self.frontiers.axioms.e
        size = {origin(a): self.extent(a) for a in {*e.axes(p), *s.reduced}}
        matrix, vector = self.work(p, s, size)
        traffic = 0.0
        if not operator(s.op).pointwise:
            traffic = sum(self.bytes(o) for o in {*s.args}) + self.bytes(p)
        else:
            traffic = self.bytes(p)
        launch = 0.0 if operator(s.op).pointwise else self.device.launch
        return max(matrix + vector, traffic / self.device.bandwidth) + launch

    def kernel(self, outs: Leaves, leaves: Leaves) -> Priced | None:
        """The best loop axis, operator DAG and tile sizes for a kernel; None if no tile fits."""
        if (outs, leaves) not in self._kernels:
            self._kernels[outs, leaves] = self._kernel(outs, leaves)
        return self._kernels[outs, leaves]

    def _kernel(self, outs: Leaves, leaves: Leaves) -> Priced | None:
        f = self.frontiers
        must, optional = f.grid_for(outs, leaves)
        grid = tuple(sorted(must | optional, key=lambda a: (kind(a) != "g" and a not in f.batch, a)))
        found: list[tuple[tuple[float, float, float], Priced]] = []
        for loop in f.loops_for(outs):
            if leaves not in f.kernels(outs, loop):
                continue
            typical = {a: 1 if a in must or a in f.batch else min(64, self.extent(a)) for a in grid}
            if loop:
                typical[loop] = min(64, self.extent(loop))
            dag = f.cheapest(outs, leaves, loop, lambda p, s, t=typical, k=loop: sum(self.work(p, s, self._inside(t, k))) + 1e-15)
            if dag is None:
                continue
            for tiles in self._tilings(grid, must, loop):
                priced = self._price(outs, leaves, loop, grid, dag, tiles)
                if priced is not None:
                    found.append(priced)
        if not found:
            return None
        found.sort(key=lambda x: x[0])
        best = found[0][1]
        same = [(k[0], x.schedule) for k, x in found if x.loop == best.loop and x.dag == best.dag]
        return Priced(**{**best.__dict__, "alternatives": tuple(same[:64])})

    def _tilings(self, grid: tuple[Axis, ...], must: frozenset[Axis], loop: Axis | None) -> Iterable[dict[Axis, int]]:
        def options(a: Axis) -> list[int]:
            n = self.extent(a)
            if a in must or a in self.frontiers.batch:
                return [1]
            whole = {1 << (n - 1).bit_length()} if n <= 4096 else set[int]()
            return sorted({t for t in GRID_TILES if t < n} | whole) or [1]

        axes = list(grid)
        choices = [options(a) for a in grid]
        if loop:
            axes.append(loop)
            choices.append([t for t in LOOP_TILES if t < self.extent(loop)] or [1 << (self.extent(loop) - 1).bit_length()])
        for pick in product(*choices):
            yield dict(zip(axes, pick, strict=True))

    def _inside(self, tiles: Mapping[Axis, int], loop: Axis | None) -> dict[Axis, int]:
        """Size of every axis inside one block in one loop step."""
        size = {a: min(tiles.get(a, self.extent(a)), self.extent(a)) for a in self.extents}
        if self.split is not None:
            size[self.split + PART] = tiles.get(self.split + PART, self.parts)
        if loop:
            size[loop + LOOP] = 1
        return size

    def _price(
        self, outs: Leaves, leaves: Leaves, loop: Axis | None, grid: tuple[Axis, ...], dag: Dag, tiles: dict[Axis, int]
    ) -> tuple[tuple[float, float, float], Priced] | None:
        f, d = self.frontiers, self.device
        e = f.axioms.e
        size = self._inside(tiles, loop)
        loaded = {o for _, s in dag for o in s.args if f.axioms.is_input(o)} | {f.in_loop(p, loop) for p in leaves}

        def held(p: Poly) -> int:
            return math.prod(max(size[origin(a)], 1) for a in e.axes(p))

        step_bytes = sum(held(p) * self._loaded_width(p, loop) for p in loaded)
        if step_bytes * 2 > d.shared_bytes or any(held(p) > LARGEST_TILE for p, _ in dag):
            return None
        steps = math.ceil(self.extent(loop) / tiles[loop]) if loop else 1
        blocks = math.prod(math.ceil(self.extent(a) / tiles[a]) for a in grid)
        traffic = sum(self.bytes(o) for o in (*outs, *leaves))
        refetch = 0.0
        for p in loaded:
            whole = {a for a in (origin(a) for a in e.axes(p)) if not a.endswith(LOOP)}
            n = self.elements(whole) * self._loaded_width(p, loop)
            traffic += n if f.axioms.is_input(p) else 0
            refetch += n * math.prod(math.ceil(self.extent(a) / tiles[a]) for a in grid if a not in whole)
        matrix = vector = 0.0
        for p, s in dag:
            repeat = steps if loop and any(origin(a) == loop + LOOP for a in (*e.axes(p), *s.reduced)) else 1
            m, v = self.work(p, s, size)
            matrix, vector = matrix + m * repeat, vector + v * repeat
        waves = math.ceil(blocks / d.blocks)
        full = blocks / (waves * d.blocks)
        # Few blocks cannot keep enough loads in flight to use all of the bandwidth.
        memory = max(traffic / d.bandwidth, refetch / d.cache_bandwidth) / min(1.0, 0.05 + full)
        compute = (matrix + vector) * blocks / full
        latency = steps * waves * 0.4e-6 if d.is_gpu else 0.0  # a loop step cannot be faster than a trip to memory and back
        seconds = max(d.shortest, memory, compute, latency) + d.launch
        schedule = KernelSchedule(tuple(sorted(tiles.items())), num_warps=8 if max(map(held, (p for p, _ in dag))) > 8192 else 4, num_stages=3 if loop else 1)
        flops = (matrix * d.matrix_flops + vector * d.vector_flops) * blocks
        priced = Priced(outs, leaves, loop, grid, dag, schedule, seconds, traffic, flops)
        return (seconds, matrix + vector, refetch), priced

    def _loaded_width(self, p: Poly, loop: Axis | None) -> int:
        return self.width(p) if self.frontiers.axioms.is_input(p) else 4

"""Prices kernels while they are enumerated: operator DAGs that are not yet muGraphs, by the cost model's outline.

Input: leaves and outputs of one kernel as normal forms. Output: its cheapest operator DAG and its tilings, or a lower
bound of its time before any DAG is known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from mirage_jax.cost.outline import ROUNDED_PRODUCT_COST, Axes, LoadUse, OperatorUse, Outline, Read, outlined
from mirage_jax.cost.roofline import least_seconds
from mirage_jax.cost.tilings import LOOP_TILES, MAX_TILE_ELEMENTS, KnownTilings, Tiled, known_tilings
from mirage_jax.hardware.device_model import DeviceModel
from mirage_jax.mugraph.dtypes import BYTES
from mirage_jax.mugraph.graph import PART_SUFFIX, Axis, KernelSchedule, Op, origin
from mirage_jax.mugraph.operators import MAX_NARROW_DEPTH, MAX_NARROW_SIDE, operator
from mirage_jax.mugraph.passes.sentinels import masks_among
from mirage_jax.search.enumerate.axioms import LOOP, Decomposition, kind
from mirage_jax.search.enumerate.kernels import Cheapest, Dag, KernelTables, Leaves, Weight
from mirage_jax.search.enumerate.normal_form import Poly
from mirage_jax.search.loop_bounds import loop_bounds_of

TYPICAL_TILE, TYPICAL_PARTS = 64, 8  # elements along an axis, parts of a split axis: DAGs are chosen for these
PREFERRED_COST = 0.2  # times the cost of an operator whose value is preferred


@dataclass(frozen=True)
class Priced:
    """One kernel with its best loop axis, operator DAG and sizes under the model."""

    outs: Leaves
    leaves: Leaves
    loop: Axis | None
    grid: Axes
    dag: Dag
    tilings: Sequence[Tiled]

    @property
    def seconds(self) -> float:
        """Estimate at the best sizes."""
        return self.tilings[0].seconds

    @property
    def schedule(self) -> KernelSchedule:
        """The best sizes."""
        return self.tilings[0].schedule


@dataclass
class Model:
    """Prices kernels of one search variant; `parts` gives the split axis its number of parts. `halves`: values that the
    program itself rounds to 16 bits.
    """

    tables: KernelTables
    device: DeviceModel
    extents: Mapping[Axis, int]
    widths: Mapping[str, int]  # bytes per element of the region's inputs
    halves: frozenset[Poly] = frozenset()
    preferred: frozenset[Poly] = frozenset()  # values that cost less than others, for their digits
    split: Axis | None = None
    parts: int = 1
    # For any `parts`:
    dags: dict[Any, Mapping[Leaves, Dag]] = field(default_factory=dict[Any, Mapping[Leaves, Dag]])
    cheapest: dict[Any, Cheapest] = field(default_factory=dict[Any, Cheapest])
    outlines: dict[Any, Outline] = field(default_factory=dict[Any, Outline])
    tiled: KnownTilings = field(default_factory=dict[object, Sequence[Tiled]])

    def __post_init__(self) -> None:
        self._kernels: dict[tuple[Leaves, Leaves], Priced | None] = {}
        self._bounds: dict[tuple[Leaves, Leaves], float] = {}
        self._visible: dict[Axes, dict[Poly, Axes]] = {}  # of values, by the axes of a grid
        self._least_tiles: dict[tuple[Axes, Axis | None, Axes], int] = {}
        self._spaces: dict[tuple[Poly, Decomposition], tuple[float, Axes, tuple[frozenset[Axis], ...], float]] = {}

    def extent(self, axis: Axis, parts: int | None = None) -> int:
        """Elements along an axis: of a split axis, in one part."""
        a, parts = origin(axis), parts or self.parts
        if self.split is not None:
            if a == self.split + PART_SUFFIX:
                return parts
            if a == self.split:
                return math.ceil(self.extents[a] / parts)
        return self.extents[a]

    def width(self, p: Poly) -> int:
        """Bytes per element as stored: four for partial or shifted values, one for truth values, else as few as the
        narrowest input has.
        """
        f = self.tables
        if f.axioms.is_input(p):
            return self.widths[f.axioms.atom(p)[0]]
        if f.axioms.is_truth(p):
            return BYTES["bool"]
        partial = any(kind(a) == "g" for a in f.axioms.e.axes(p))
        return 4 if partial or f.shift_degrees.degree(p) else min(self.widths.values(), default=4)

    def bytes(self, p: Poly) -> int:
        """Bytes of a whole tensor."""
        return math.prod(map(self.extent, self.tables.axioms.e.axes(p))) * self.width(p)

    def bound(self, outs: Leaves, leaves: Leaves) -> float:
        """Bound the seconds of all kernels with these outputs and loaded intermediates from below: they also read the
        region's inputs that the outputs need and no leaf has. Every axis of their grids is free in all outputs.
        """
        if (outs, leaves) not in self._bounds:
            traffic = sum(self.bytes(p) for p in (*outs, *leaves)) + self._input_bytes(outs, leaves)
            blocks = math.prod(map(self.extent, self.tables.free_axes(outs)))
            self._bounds[outs, leaves] = least_seconds(traffic, blocks, self.device)
        return self._bounds[outs, leaves]

    def known_or_bound(self, outs: Leaves, leaves: Leaves) -> float:
        """The seconds of the fastest of these kernels where they are priced, else their bound."""
        if (outs, leaves) not in self._kernels:
            return self.bound(outs, leaves)
        kernel = self._kernels[outs, leaves]
        return math.inf if kernel is None else kernel.seconds

    def _input_bytes(self, outs: Leaves, leaves: Leaves) -> int:
        """Bytes of the inputs that the outputs depend on, and none of the leaves."""
        e = self.tables.axioms.e
        known = {name for p in leaves for name, _ in e.atoms(p)}
        found = {name: axes for p in outs for name, axes in e.atoms(p) if name in self.widths and name not in known}
        sizes = ((name, (self.extents[origin(a)] for a in axes if kind(a) == "t")) for name, axes in found.items())
        return sum(math.prod(extents) * self.widths[name] for name, extents in sizes)

    # ------------------------------------------------------------------ one operator

    def work(
        self, p: Poly, s: Decomposition, size: Mapping[Axis, int], rounded: float = 1.0, in_kernel: bool = False
    ) -> float:
        """Estimate the seconds of one operator at given axis sizes, on the whole device. A matrix product that rounds a
        computed operand takes `rounded` times as long. Kernels write out those of float32 that are narrow.
        """
        key = (p, s)
        if key not in self._spaces:
            self._spaces[key] = self._space(p, s)
        flops, space, sides, peak = self._spaces[key]
        for a in space:
            flops *= size[a]
        if sides:
            written_out = in_kernel and peak == self.device.matrix_flops_f32
            least, shallow = (MAX_NARROW_SIDE, MAX_NARROW_DEPTH) if written_out else (1, 0)
            x, y = ({a for a in side if size[a] > least} for side in sides)
            if x - y and y - x and math.prod(size[origin(a)] for a in s.reduced) > shallow:
                return flops / peak * (rounded if self._rounds(s) else 1.0)
        return flops / self.device.vector_flops

    def _space(self, p: Poly, s: Decomposition) -> tuple[float, Axes, tuple[frozenset[Axis], ...], float]:
        """FLOPs per point, axes of the points; for a dot, the free axes of its operands and the matrix unit's speed."""
        e, d = self.tables.axioms.e, self.device
        space = tuple(origin(a) for a in {*e.axes(p), *s.reduced})
        if s.op != "dot":
            return s.record.flops, space, (), 0.0
        sides = tuple(frozenset(map(origin, e.axes(o) - set(s.reduced))) for o in s.args)
        narrow = any(self.tables.axioms.is_input(o) and self.width(o) <= 2 for o in s.args)
        return s.record.flops, space, sides, d.matrix_flops if narrow else d.matrix_flops_f32

    def _rounds(self, s: Decomposition) -> bool:
        """Does a matrix product round a computed operand to the type of the other?"""
        given = [o for o in s.args if self.tables.axioms.is_input(o)]
        return len(given) == 1 and self.width(given[0]) <= 2

    def library(self, p: Poly, s: Decomposition) -> float:
        """Estimate the seconds of one operator over whole tensors, assuming that XLA fuses pointwise chains."""
        size = {origin(a): self.extent(a) for a in {*self.tables.axioms.e.axes(p), *s.reduced}}
        fused = operator(s.op).pointwise
        traffic = self.bytes(p) + (0 if fused else sum(self.bytes(o) for o in {*s.args}))
        return max(self.work(p, s, size), traffic / self.device.bandwidth) + (0.0 if fused else self.device.launch)

    # ------------------------------------------------------------------ one kernel

    def kernel(self, outs: Leaves, leaves: Leaves) -> Priced | None:
        """Choose the best loop axis, operator DAG and tile sizes for a kernel; None if no tile fits."""
        if (outs, leaves) not in self._kernels:
            loops = self.tables.loops_of(outs, leaves)
            self._kernels[outs, leaves] = _fastest([self._with_loop(outs, leaves, loop) for loop in loops])
        return self._kernels[outs, leaves]

    def _with_loop(self, outs: Leaves, leaves: Leaves, loop: Axis | None) -> Priced | None:
        f = self.tables
        must, optional = f.grid_for(outs, leaves)
        plain = must | optional
        # Some DAGs reduce these axes, and others need not, since they load the reduced values.
        others = sorted(f.free_axes(outs) - plain - {loop})
        found = [self._on_grid(outs, leaves, loop, plain, set())]
        found += [self._on_grid(outs, leaves, loop, plain | {a}, {a}) for a in others]
        wide = frozenset(a for k in found if k is not None for a in k.grid)
        if len(found) - found.count(None) > 2:
            found.append(self._on_grid(outs, leaves, loop, wide, wide - plain))
        return _fastest(found)

    def _on_grid(
        self, outs: Leaves, leaves: Leaves, loop: Axis | None, axes: Set[Axis], kept: Set[Axis]
    ) -> Priced | None:
        """The cheapest kernel with these axes on its grid; no operator reduces an axis in `kept`."""
        f = self.tables
        if loop in axes:
            return None  # a block has one tile of that axis, and nothing to loop over
        if f.batch & f.free_axes(outs) - axes - {loop}:
            return None  # as below, but before a DAG is looked for
        must = frozenset(a for a in axes if kind(a) == "g")
        grid = tuple(sorted(axes, key=lambda a: (kind(a) != "g" and a not in f.batch, a)))
        if not self._has_room((f.in_loop(p, loop) for p in outs), loop, grid):
            return None
        single = must | f.batch
        dag = self._cheapest(outs, leaves, loop, grid, single, frozenset(kept))
        if dag is None or not self._has_room((p for p, _ in dag), loop, grid):
            return None
        key = outs, leaves, loop, grid, frozenset(kept)
        if key not in self.outlines:
            self.outlines[key] = self._outline(outs, leaves, loop, grid, dag)
        found = self._tilings(self.outlines[key], loop, grid, single)
        return Priced(outs, leaves, loop, grid, dag, found) if found else None

    def _tilings(self, o: Outline, loop: Axis | None, grid: Axes, single: frozenset[Axis]) -> Sequence[Tiled]:
        """Tilings of a kernel; none where it may not have this loop or grid."""
        if loop is not None and not any(loop in w.axes for w in o.work):
            return ()  # what has the axis is loaded without it
        if not all(self.tables.batch & set(w.axes) <= {*grid, loop} for w in o.work):
            return ()  # a tile would have more than one element of a batch axis
        return known_tilings(o, self.extent, single, self.device, self.tiled)

    def _has_room(self, values: Iterable[Poly], loop: Axis | None, grid: Axes) -> bool:
        """Whether a block has room for a tile of each value, with tiles as small as can be."""
        return all(self._least_tile(self._inside(p, grid), loop, grid) <= MAX_TILE_ELEMENTS for p in values)

    def _least_tile(self, axes: Axes, loop: Axis | None, grid: Axes) -> int:
        """Elements of the smallest tile of a value with these axes."""
        key = axes, loop, grid
        if key not in self._least_tiles:
            size = {a: self.extent(a) for a in set(axes).difference(grid)}
            if loop in size:
                size[loop] = min(size[loop], LOOP_TILES[0])
            self._least_tiles[key] = math.prod(1 << (n - 1).bit_length() for n in size.values())
        return self._least_tiles[key]

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
        most = self.tables.space.max_loaded if leaves else 0
        key = (outs, loop, most, frozenset(grid), single, kept)
        if key not in self.dags:
            like = (loop, self.tables.parts_of(outs), *key[2:])
            table = self.cheapest.setdefault(like, Cheapest())
            weight = self._weight(loop, grid, single)
            self.dags[key] = self.tables.cheapest(outs, loop, weight, most, kept=kept, table=table)
        return self.dags[key].get(leaves)

    def _weight(self, loop: Axis | None, grid: Axes, single: frozenset[Axis]) -> Weight:
        """Seconds of one operator at typical tiles."""
        whole = {a: self.extent(a, TYPICAL_PARTS) for a in self.extents}
        size = {a: min(TYPICAL_TILE, n) if a in grid or a == loop else n for a, n in whole.items()}
        size |= dict.fromkeys(single, 1)
        if loop is not None:
            size[loop + LOOP] = math.ceil(whole[loop] / size[loop])
        if self.split is not None:
            size.setdefault(self.split + PART_SUFFIX, TYPICAL_PARTS)
        halves, preferred = ({self.tables.in_loop(p, loop) for p in own} for own in (self.halves, self.preferred))

        def weight(p: Poly, s: Decomposition) -> float:
            """Seconds of one operator."""
            rounded = ROUNDED_PRODUCT_COST if halves.isdisjoint(s.args) else 1.0
            seconds = self.work(p, s, size, rounded, in_kernel=True) + 1e-15
            return seconds * (PREFERRED_COST if p in preferred else 1.0)

        return weight

    def _outline(self, outs: Leaves, leaves: Leaves, loop: Axis | None, grid: Axes, dag: Dag) -> Outline:
        """Outline a kernel that is not written yet."""
        f = self.tables
        loaded = {f.in_loop(p, loop): p for p in leaves}
        operands = dict.fromkeys(o for _, s in dag for o in s.args if f.axioms.is_input(o) or o in loaded)
        loads = [self._load(o, loaded.get(o, o), grid) for o in operands]
        ops = [
            OperatorUse(
                p,
                s.op,
                s.args,
                self._inside(p, grid),
                tuple(a for a in s.reduced if kind(a) != "l"),
                s.record.flops,
                f.in_body(p),
            )
            for p, s in dag
        ]
        stored = [f.in_loop(o, loop) for o in outs]
        writes = tuple((tuple(sorted(f.axioms.e.axes(o))), self.width(o)) for o in outs)
        loop_bounds = None
        if loop is not None and not any(map(f.in_body, stored)):
            written = [Op(str(p), s.op, tuple(map(str, s.args)), (), s.attrs) for p, s in dag]
            loop_bounds = loop_bounds_of(masks_among(written, set(map(str, outs))), grid, loop)
        return outlined(grid, loop, loads, ops, stored, writes, loop_bounds)

    def _inside(self, p: Poly, grid: Axes) -> Axes:
        """Axes of a value as its kernel's blocks see it: loop steps and the grid's parts are implicit."""
        shown = self._visible.setdefault(grid, {})
        if p not in shown:
            axes = (a for a in self.tables.axioms.e.axes(p) if kind(a) == "t" or (kind(a) == "g" and a not in grid))
            shown[p] = tuple(sorted(axes))
        return shown[p]

    def _load(self, operand: Poly, whole: Poly, grid: Axes) -> LoadUse[Poly]:
        """Describe the load of an operand, which is the tensor `whole` outside of its kernel."""
        f, axes, width = self.tables, self._inside(operand, grid), self.width(whole)
        name, stored = f.axioms.atom(operand) if f.axioms.is_input(operand) else (f"%{operand}", axes)
        read = Read(name, axes, width, last=stored[-1] if stored else None)
        # Whether an intermediate will have 16 bits is known only once the kernels are written.
        return LoadUse(operand, read, f.axioms.is_input(operand) and width <= 2, f.in_body(operand))


def _fastest(kernels: Iterable[Priced | None]) -> Priced | None:
    return min((k for k in kernels if k is not None), key=lambda k: k.seconds, default=None)

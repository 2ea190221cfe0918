"""How one block graph at concrete sizes lies in tiles: lanes per axis, order of tile dimensions, order of blocks.

Pure arithmetic shared by all that emit text. An axis of a kernel is divided over the grid, divided over the loop, or
lies whole inside the tile. Its tile has `size` elements in `block` lanes, `block` being the next power of two (and at
least 16 where a matrix product needs it); an axis with a single lane is a scalar index and no dimension of any tile.
Lanes beyond the extent are *padded*: they are masked in loads and stores, and reductions must not see them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import permutations
from math import prod

from mirage_jax.errors import LoweringError, UnsupportedError
from mirage_jax.hardware.gpus import SURE_L2_BYTES, WGMMA_ROWS
from mirage_jax.mugraph.dtypes import BYTES
from mirage_jax.mugraph.graph import (
    Axis,
    BlockGraph,
    KernelGraph,
    KernelSchedule,
    Library,
    Op,
    Tensor,
    is_part,
    origin,
    part_axis,
    split_axis,
)

MIN_DOT = 16  # tl.dot wants every dimension at least this large
SINGLE: Axis = "*"  # the one row (or column) of a vector in a matrix product; not a name that an axis can have
ELEMENT = "#"  # between an axis and the number of one of its elements, where each is a value of its own
MAX_RANK = 3
MAX_TILE_ELEMENTS = 1 << 20  # Triton's own limit on elements of a tile
MAX_PERMUTED = 6  # axes up to which every order of tile dimensions is tried
ACROSS_WARPS_COST = 1.5  # a reduction of rows goes through all warps; a transposed load costs 1
RIGHT_OPERAND_COST = 2.0  # a right operand comes from shared memory, a left one from registers
L2_GROUP_BLOCKS = 8  # blocks along the fastest grid axis that share the operands of the next one while they are in L2


def ceil_div(n: int, d: int) -> int:
    """``n / d``, rounded up."""
    return -(-n // d)


def power_of_two(n: int) -> int:
    """The next power of two, ``5 -> 8``."""
    return 1 << max(n - 1, 0).bit_length()


def part_count(axis: Axis, parts: Mapping[Axis, int]) -> int:
    """Extent of a part axis ``k.g``."""
    split = split_axis(origin(axis))
    for name in (split, origin(split)):
        if name in parts:
            return parts[name]
    raise LoweringError(f"the schedule does not say into how many parts axis {split} is divided; it has {dict(parts)}")


def element_of(name: str, n: int) -> str:
    """The name of one element of an axis that is written out, or of a value (`triton.narrow_axes`)."""
    return f"{name}{ELEMENT}{n}"


def element_number(axis: Axis) -> int | None:
    """Which element an axis stands for; None if it is a whole axis."""
    _, mark, n = axis.partition(ELEMENT)
    return int(n) if mark else None


def extent(axis: Axis, graph: KernelGraph, parts: Mapping[Axis, int]) -> int:
    """Full extent of an axis of a device tensor."""
    whole = axis.partition(ELEMENT)[0]
    return part_count(whole, parts) if is_part(whole) else graph.extent(whole)


def stored_axes(tensor: Tensor, graph: KernelGraph) -> tuple[Axis, ...]:
    """Axes in the order of memory: the parts of a partial result come first, so that each block writes contiguously.

    Only tensors that nobody else sees are reordered: no inputs, no outputs, nothing that a library operator reads.
    """
    seen = {t.name for t in graph.inputs} | set(graph.outputs)
    seen |= {load.tensor for k in graph.kernels if isinstance(k, Library) for load in k.loads}
    seen |= {k.result.name for k in graph.kernels if isinstance(k, Library)}
    if tensor.name in seen:
        return tensor.axes
    return tuple(sorted(tensor.axes, key=lambda a: not is_part(a)))


def stored_shape(tensor: Tensor, graph: KernelGraph, parts: Mapping[Axis, int]) -> tuple[int, ...]:
    """Shape in memory, in the order of `stored_axes`."""
    return tuple(extent(a, graph, parts) for a in stored_axes(tensor, graph))


@dataclass(frozen=True, slots=True)
class TileAxis:
    """One axis of a kernel. Local means: inside the part if the axis is split over the grid, else the whole axis."""

    axis: Axis
    full: int  # extent of the whole axis
    local: int  # extent that this block's part covers
    size: int  # elements per tile
    block: int  # lanes per tile, a power of two
    part: Axis | None  # the part axis in the grid, if the axis is split
    parts: int = 1

    @property
    def count(self) -> int:
        """Tiles along the axis (inside a part)."""
        return ceil_div(self.local, self.size)

    @property
    def short_part(self) -> bool:
        """Is the last part shorter than the others (possibly empty)?"""
        return self.local * self.parts != self.full

    @property
    def ragged(self) -> bool:
        """Are there padded lanes in some tile?"""
        return self.block != self.size or self.local % self.size != 0 or self.short_part


@dataclass(frozen=True, slots=True)
class MatrixProduct:
    """A `dot` that is a matrix product: ``[row, inner] x [inner, column]``; `swapped`: its second argument has the row.

    A vector is a matrix whose only row (or column) is the axis `SINGLE`.
    """

    row: Axis
    inner: tuple[Axis, ...]
    column: Axis
    swapped: bool = False

    @property
    def dims(self) -> tuple[Axis, ...]:
        """The axes of the result: row and column."""
        return (self.row, self.column)


@dataclass(frozen=True)
class Tiling:
    """Tiles of one kernel."""

    kernel: BlockGraph
    graph: KernelGraph
    schedule: KernelSchedule
    parts: Mapping[Axis, int]
    least: int = MIN_DOT  # lanes per axis of a matrix product

    @cached_property
    def names(self) -> tuple[Axis, ...]:
        """Every axis of the kernel in order of first appearance."""
        values = [v.axes for v in (*self.kernel.loads, *self.kernel.ops)]
        stores = [s.tensor.axes for s in self.kernel.stores]
        return tuple(dict.fromkeys(a for axes in (*values, *stores, self.kernel.divided) for a in axes))

    @cached_property
    def axes(self) -> Mapping[Axis, TileAxis]:
        """Tiles by axis; axes of matrix products have at least `least` lanes."""
        plain = {a: self._tile_axis(a, 1) for a in self.names}
        wide = {a for op in self.kernel.ops for a in self._product_axes(op, plain)}
        out = {a: self._tile_axis(a, self.least if a in wide else 1) for a in self.names}
        return out | {SINGLE: TileAxis(SINGLE, 1, 1, 1, MIN_DOT, None)} if SINGLE in wide else out

    def _tile_axis(self, axis: Axis, least: int) -> TileAxis:
        if element_number(axis) is not None:
            return TileAxis(axis, 1, 1, 1, 1, None)
        full = extent(axis, self.graph, self.parts)
        if full < 1:
            raise UnsupportedError(f"axis {axis} is empty")
        part = part_axis(axis) if part_axis(axis) in self.kernel.grid else None
        count = part_count(part, self.parts) if part else 1
        local = ceil_div(full, count)
        if axis in self.kernel.grid and is_part(axis):
            size = 1
        elif axis in self.kernel.grid or axis == self.kernel.loop:
            size = min(self.schedule.tile(axis), local)
        else:
            size = local
        if size < 1:
            raise LoweringError(f"tile of axis {axis} is {size}; a tile has at least one element")
        block = 1 if size == 1 else max(power_of_two(size), least)
        return TileAxis(axis, full, local, size, block, part, count)

    def dims(self, axes: Iterable[Axis]) -> tuple[Axis, ...]:
        """Those of `axes` that are dimensions of a tile, in the kernel's order."""
        present = {a for a in axes if self.axes[a].block > 1}
        return tuple(a for a in self.order if a in present)

    def lanes(self, axes: Iterable[Axis]) -> int:
        """Elements of a tile over some axes."""
        return prod(self.axes[a].block for a in set(axes))

    def product(self, op: Op) -> MatrixProduct | None:
        """The matrix product that `op` is, oriented by the kernel's order, or None."""
        if op.name not in self._products:
            return None
        row, column, *inner = self._products[op.name]
        swapped = self.order.index(row) > self.order.index(column)
        if swapped:
            row, column = column, row
        return MatrixProduct(row, tuple(a for a in self.order if a in inner), column, swapped)

    @cached_property
    def order(self) -> tuple[Axis, ...]:
        """Order of tile dimensions, the same for every value: the one with the fewest dot operands that are
        transposed or that each step of a loop has to put into shared memory, and that reduces columns, not rows.
        """
        wide = tuple(a for a, axis in self.axes.items() if axis.block > 1)
        if len(wide) > MAX_PERMUTED:
            return wide
        return min(permutations(wide), key=self._order_cost)

    @cached_property
    def skinny(self) -> bool:
        """Does the kernel only stream a matrix past a few rows (or columns)? Then the long side gives the rows."""
        summed = {op.args[0] for op in self.kernel.ops if op.op == "acc"}
        return bool(self._products) and all(self._is_skinny(n) and n in summed for n in self._products)

    def _is_skinny(self, name: str) -> bool:
        few, many = sorted(self.axes[a].block for a in self._products[name][:2])
        return few < WGMMA_ROWS <= many

    @cached_property
    def _products(self) -> Mapping[str, tuple[Axis, ...]]:
        """``(row, column, *inner)`` of the matrix products, by name."""
        return {op.name: found for op in self.kernel.ops if (found := self._product_axes(op, self.axes))}

    def _order_cost(self, order: tuple[Axis, ...]) -> float:
        """Cost of an order of tile dimensions; a transposed load of a matrix product costs 1."""
        place = {a: n for n, a in enumerate(order)}
        cost = sum(self._operands_cost(op, place) for op in self.kernel.ops if op.name in self._products)
        if not self.skinny:
            cost += ACROSS_WARPS_COST * any(self._reduces_rows(op, place) for op in self.kernel.ops)
        for load in self.kernel.loads:
            places = [place[a] for a in load.axes if a in place]
            cost += 0.01 * sum(x > y for n, x in enumerate(places) for y in places[n + 1 :])
        return cost

    def _operands_cost(self, op: Op, place: Mapping[Axis, int]) -> float:
        """Cost of one product's operands: transposed, or computed in the loop and put into shared memory."""
        loads = {load.name for load in self.kernel.loads}
        row, column, *inner = self._products[op.name]
        cost = 0.0
        for free, arg in ((row, op.args[0]), (column, op.args[1])):
            is_left = (place[row] < place[column]) == (free == row)
            is_transposed = any((place[free] < place[k]) != is_left for k in inner)
            cost += is_transposed * (1.0 if arg in loads else 4.0)
            if not (is_left or self.skinny or arg in loads) and self.kernel.stages[arg].body:
                cost += RIGHT_OPERAND_COST
        if self.skinny:
            return cost + ((place[row] < place[column]) == (self.axes[row].block < self.axes[column].block))
        return cost + 0.5 * (place[row] > place[column])

    def _reduces_rows(self, op: Op, place: Mapping[Axis, int]) -> bool:
        """Is a tile as large as the result of a product reduced along its rows?"""
        own = {a for arg in op.args for a in self.kernel.axes_of[arg] if a in place}
        gone = own.difference(op.axes)
        is_result = any(own == set(axes[:2]) for axes in self._products.values())
        return is_result and any(place[x] < place[a] for x in gone for a in own - gone)

    def _product_axes(self, op: Op, axes: Mapping[Axis, TileAxis]) -> tuple[Axis, ...]:
        """``(row, column, *inner)`` of a dot that is a matrix product of two tiles, else ()."""
        if op.op != "dot":
            return ()
        x, y = ({a for a in self.kernel.axes_of[arg] if axes[a].block > 1} for arg in op.args)
        inner = set(op.attributes["axes"]) & (x | y)  # type: ignore[arg-type]
        row, column = x - inner, y - inner
        if not inner or not inner <= x & y or row & column:
            return ()
        if not row and self._is_row_worth_padding(*op.args):
            row = {SINGLE}
        elif not column and self._is_row_worth_padding(*op.args[::-1]):
            column = {SINGLE}
        return (*row, *column, *sorted(inner)) if len(row) == len(column) == 1 else ()

    def _is_row_worth_padding(self, vector: str, matrix: str) -> bool:
        return self._is_half(matrix) and self._is_ready(vector)

    def _is_ready(self, value: str) -> bool:
        """Is a vector loaded, or computed before the loop? In each step another one, it would go through shared memory
        before the product can begin: then a sum of products is faster (56.7 us where that took 57.6, on an H200).
        """
        return any(x.name == value for x in self.kernel.loads) or not self.kernel.stages[value].body

    def _is_half(self, value: str) -> bool:
        """Is a value the tile of a 16-bit tensor? Tensor cores are worth it for these, even for one row in sixteen."""
        tensors = [self.graph.tensors[load.tensor] for load in self.kernel.loads if load.name == value]
        return any(BYTES[t.dtype] == 2 for t in tensors)

    @cached_property
    def programs(self) -> tuple[tuple[Axis, int], ...]:
        """Grid axes with their number of blocks, fastest first: blocks that share the most bytes are neighbours."""
        count = {a: self._blocks(a) for a in self.kernel.grid}
        last = self.kernel.loop_bounds.axis if self.kernel.loop_bounds is not None and self.by_length else None
        return tuple(
            sorted(
                count.items(),
                key=lambda item: (item[0] == last, -self.shared_bytes(item[0]), self.kernel.grid.index(item[0])),
            )
        )

    @cached_property
    def by_length(self) -> bool:
        """Do blocks with long loops come before all with shorter ones? Where what the loops read stays in L2."""
        loads = {load.tensor: load.axes for load in self.kernel.loads if self.kernel.loop in load.axes}
        tensors = self.graph.tensors
        read = sum(BYTES[tensors[t].dtype] * prod(self.axes[a].full for a in axes) for t, axes in loads.items())
        return self.kernel.loop_bounds is not None and read <= SURE_L2_BYTES

    def _blocks(self, axis: Axis) -> int:
        return self.axes[axis].full if is_part(axis) else self.axes[axis].count

    def shared_bytes(self, axis: Axis) -> int:
        """Bytes of operands that blocks along `axis` have in common."""
        covered = {axis, split_axis(axis)}
        return sum(
            BYTES[self.graph.tensors[load.tensor].dtype] * prod(self.axes[a].full for a in load.axes)
            for load in self.kernel.loads
            if not covered & set(load.axes)
        )

    @property
    def grid(self) -> int:
        """Number of blocks."""
        return prod(n for _, n in self.programs)

    @property
    def launched(self) -> int:
        """Number of programs; each computes one block, or several."""
        return min(self.schedule.programs or self.grid, self.grid)

    def pointwise(self, values: Iterable[str], most: int) -> Tiling:
        """Tiles for a loop that only reads `values` and has no matrix product: no lanes for the sake of products, and
        steps along the loop axis as long as tiles of `most` lanes allow, since such a loop waits for memory in each.
        """
        loop = self.kernel.loop
        assert loop is not None
        axes = [self.kernel.axes_of[v] for v in values]
        best = self
        size = self.axes[loop].size
        while True:
            tiles = tuple((a, size if a == loop else t) for a, t in self.schedule.tiles)
            tiling = replace(self, schedule=replace(self.schedule, tiles=tiles), least=1)
            if max(tiling.lanes(a) for a in axes) > most:
                return best
            best = tiling
            if size >= self.axes[loop].local:
                return best
            size *= 2

    def check(self) -> None:
        """Refuse what no tile can hold."""
        for value in (*self.kernel.loads, *self.kernel.ops):
            dims = self.dims(value.axes)
            if len(dims) > MAX_RANK:
                raise UnsupportedError(
                    f"value {value.name} has {len(dims)} tile axes {dims}; at most {MAX_RANK} are emitted"
                )
            if self.lanes(dims) > MAX_TILE_ELEMENTS:
                raise LoweringError(
                    f"value {value.name} has {self.lanes(dims)} elements per tile, more than {MAX_TILE_ELEMENTS}"
                )
        for op in self.kernel.ops:
            gone = set(op.attributes.get("axes", ())) & set(self.kernel.grid)  # type: ignore[arg-type]
            if any(self._blocks(a) > 1 for a in gone):
                raise LoweringError(
                    f"{op} reduces {sorted(gone)}, which is divided over blocks; reduce it in a later kernel"
                )

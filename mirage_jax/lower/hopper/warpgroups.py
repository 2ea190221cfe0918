"""What a warpgroup of a kernel with specialized warps computes, and how its tiles lie in registers.

Input: the tiling of a block. Output: which products of its loop are issued when (`IssuePlan`), the tiling of the rows
that one warpgroup has, and layouts: tiles with rows lie as the results of matrix instructions (wgmma), vectors are
slices of such tiles. What cannot be divided so is refused (`UnsupportedError`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from mirage_jax.errors import UnsupportedError
from mirage_jax.hardware.gpus import WGMMA_ROWS
from mirage_jax.lower.tiling import SINGLE, MatrixProduct, TileAxis, Tiling
from mirage_jax.lower.triton.expressions import TileVariable, reduction
from mirage_jax.lower.triton.frame import PLAIN, EmitOptions, Form
from mirage_jax.lower.triton.loops import Group, Loops
from mirage_jax.lower.triton.ops.products import operand_type
from mirage_jax.mugraph.dtypes import BYTES, SIXTEEN_BIT_FLOATS
from mirage_jax.mugraph.graph import Axis, Op, Tensor

WARPGROUP_ROWS = WGMMA_ROWS  # of a warpgroup's matrix instruction
WARPGROUP_WARPS = 4  # of a warpgroup
MAX_WGMMA_COLUMNS = 256  # columns of a matrix instruction
MAX_WARPGROUPS = 3  # warpgroups that compute
MIN_WARPGROUP_BYTES = 8 << 10  # bytes of a warpgroup


class StructureError(UnsupportedError):
    """No sizes fit the kernel for specialized warps, as long as the tiles of the same axes have one element."""


@dataclass(frozen=True)
class IssuePlan:
    """Products of the loop by when they are issued: `values` and `sums` of loaded operands (first GEMM), `second` of
    operands that the step before computed (second GEMM). Each has its orientation and the accumulator that takes it
    (`values`: none).
    """

    row: Axis
    values: tuple[tuple[Op, MatrixProduct], ...]
    sums: tuple[tuple[Op, MatrixProduct, Op], ...]
    second: tuple[tuple[Op, MatrixProduct, Op], ...]

    @property
    def products(self) -> list[tuple[Op, MatrixProduct]]:
        """All products, with their orientation."""
        return [(x[0], x[1]) for x in (*self.values, *self.sums, *self.second)]


class Warpgroups(Loops):
    """The rows of a block's tile, `WARPGROUP_ROWS` for each warpgroup. `tiling` is that of the block."""

    def __init__(self, tiling: Tiling, options: EmitOptions, form: Form = PLAIN) -> None:
        super().__init__(tiling, options, form)
        self.stages = max(tiling.schedule.num_stages, 2)
        self.groups = tiling.schedule.num_warps // WARPGROUP_WARPS
        self.is_storing = False
        (self.work,) = self._loops()
        self.plan = self._plan()
        self.inner = self._inner()

    def _loops(self) -> list[Group]:
        live = self.live()
        depths = {self.graph.stages[n].depth for n in self.targets(live)}
        found = self.loops(0, live) if depths == {0} else []
        if len(found) != 1 or found[0].stores or self.options.first:
            raise UnsupportedError("a kernel with specialized warps has one loop, and stores after it")
        if not 1 <= self.groups <= MAX_WARPGROUPS or self.tiling.schedule.num_warps % WARPGROUP_WARPS:
            raise UnsupportedError("specialized warps: one to three warpgroups compute")
        return found

    @property
    def splits_loops(self) -> bool:
        """What is read as operand and as values lies in shared memory once."""
        return False

    def absorbs(self, op: Op) -> str:
        """Products only: a tile that is summed later would take registers away from them."""
        how = super().absorbs(op)
        return how if how == "dot" else ""

    def _plan(self) -> IssuePlan:
        """Sort the products of the loop by when they are issued. Raises `UnsupportedError` if there is no such plan."""
        values, sums, second = [], [], []
        by_product = {op.args[0]: op for op in self.work.accumulators if self.absorbs(op)}
        for op, product in self._checked_products():
            left, _ = self.sides(op, product)
            is_computed = left not in self.loads and self.graph.stages[left].body
            if op.name in by_product:
                (second if is_computed else sums).append((op, product, by_product[op.name]))
            elif is_computed:
                raise UnsupportedError(f"{op}: what is made of a computed operand is not summed by the loop")
            else:
                values.append((op, product))
        rows = {p.row for _, p, *_ in (*values, *sums, *second)}
        if len(rows) != 1:
            raise StructureError(f"products have the rows {sorted(rows)}; warpgroups divide one axis")
        if sums and second and not values:
            raise UnsupportedError("specialized warps: sums of products of loaded operands and of computed ones")
        return IssuePlan(rows.pop(), tuple(values), tuple(sums), tuple(second))

    def _checked_products(self) -> Iterator[tuple[Op, MatrixProduct]]:
        """Matrix products of the kernel. Raises `UnsupportedError` for one that warpgroups do not compute."""
        live = self.live()
        for op in self.graph.ops:
            product = self.tiling.product(op) if op.name in live else None
            if product is None:
                continue
            is_loaded = self.sides(op, product)[1] in self.loads
            if not self.graph.stages[op.name].body or not is_loaded or operand_type(self, op) not in SIXTEEN_BIT_FLOATS:
                raise StructureError(f"{op}: not a product in the loop whose right operand is loaded")
            if len(product.inner) != 1 or SINGLE in product.dims:
                raise StructureError(f"{op}: an operand has several inner axes, or one row")
            yield op, product

    def _inner(self) -> Tiling:
        """The tiles of one warpgroup."""
        row, tiling = self.plan.row, self.tiling
        if any(axis.ragged for axis in tiling.axes.values()):
            raise UnsupportedError("specialized warps: every tile is full")
        if tiling.axes[row].size != WARPGROUP_ROWS * self.groups or row not in self.graph.grid:
            raise UnsupportedError(
                f"specialized warps: {self.groups} warpgroups have {WARPGROUP_ROWS * self.groups} rows"
            )
        tiles = tuple((a, WARPGROUP_ROWS if a == row else n) for a, n in tiling.schedule.tiles)
        inner = replace(tiling, schedule=replace(tiling.schedule, tiles=tiles))
        if inner.order != tiling.order:
            raise UnsupportedError("specialized warps: a warpgroup's tiles lie in another order")
        for op, product in self.plan.products:
            lanes = [inner.axes[a].block for a in (*product.inner, product.column)]
            if any(n % 16 for n in lanes):
                raise UnsupportedError(f"{op}: tiles of {lanes}, not of multiples of 16")
        return inner

    def sides(self, op: Op, product: MatrixProduct) -> tuple[str, str]:
        """Left and right operand."""
        left, right = op.args[::-1] if product.swapped else op.args
        return left, right

    # --- layouts

    def columns(self, axis: Axis) -> int:
        """Columns of a matrix instruction along an axis."""
        return min(self.inner.axes[axis].block, MAX_WGMMA_COLUMNS)

    @cached_property
    def slice_of(self) -> int:
        """Columns of the tiles of which vectors along the rows are slices."""
        return max(self.columns(p.column) for _, p in self.plan.products)

    def layouts(self) -> Iterator[str]:
        """What tiles and stored tiles are laid out as."""
        row, axes = self.plan.row, self.inner.axes.values()
        for n in sorted({self.columns(x.axis) for x in axes if x.axis != row and x.block > 1}):
            yield f"mma{n}: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [{WARPGROUP_WARPS}, 1], [16, {n}, 16])"
        stored = [self.inner.dims(s.tensor.axes) for s in self.graph.stores]
        for n in sorted({self.inner.axes[dims[1]].block for dims in stored if len(dims) == 2}):
            lanes = [max(256 // n, 1), min(n // 8, 32)]  # of a warp, 8 elements each
            yield f"lines{n}: gl.constexpr = gl.BlockedLayout([1, 8], {lanes}, [{WARPGROUP_WARPS}, 1], [1, 0])"

    def layout(self, dims: tuple[Axis, ...]) -> str:
        """Of a tile with rows and columns."""
        if len(dims) != 2 or dims[0] != self.plan.row:
            raise UnsupportedError(f"specialized warps: a tile over {dims}, whose first axis is not {self.plan.row}")
        return f"lines{self.inner.axes[dims[1]].block}" if self.is_storing else f"mma{self.columns(dims[1])}"

    def vector_layout(self, axis: Axis) -> str:
        """The layout of a vector: a slice of a matrix instruction's result."""
        if axis == self.plan.row:
            return f"gl.SliceLayout(1, mma{self.slice_of})"
        return f"gl.SliceLayout(0, mma{self.columns(axis)})"

    def lanes(self, axis: TileAxis) -> str:
        """The numbers of an axis' lanes, with their layout.

        Here they are in the complete form's own registers too (`Form.fresh`). The copy engine reads in any case, and
        shared lanes made a kernel of 168 registers spill 684 bytes.
        """
        lanes = f"tl.arange(0, {axis.block}, {self.vector_layout(axis.axis)})"
        return f"{lanes} + {self.form.fresh}" if self.form.fresh else lanes

    def full(self, dims: tuple[Axis, ...], number: str, dtype: str = "tl.float32") -> str:
        """A tile of one number, with the layout of its dimensions."""
        if not dims:
            return f"gl.to_tensor({number})"
        layout = self.layout(dims) if len(dims) == 2 else self.vector_layout(*dims)
        return f"tl.full({[self.axes[a].block for a in dims]}, {number}, {dtype}, {layout})"

    def expand(self, text: str, own: tuple[Axis, ...], dims: tuple[Axis, ...]) -> str:
        """As `Frame.expand`, with the vector's layout converted where slices differ."""
        if not own or own == dims:
            return text
        place, layout = dims.index(own[0]), self.layout(dims)
        wanted = f"gl.SliceLayout({1 - place}, {layout})"
        if wanted != self.vector_layout(own[0]):
            text = f"gl.convert_layout({text}, {wanted})"
        elif not text.isidentifier():
            text = f"({text})"
        return f"{text}[{':, None' if place == 0 else 'None, :'}]"

    def reduction(self, function: str, value: TileVariable, axes: Iterable[Axis]) -> str:
        """Reduce a tile inside of the warpgroup. Raises `UnsupportedError` for a sum over rows."""
        gone = [a for a in value.dims if a in set(axes)]
        if self.plan.row in gone:
            raise UnsupportedError("specialized warps: a sum over rows, which warpgroups divide")
        text = reduction(function, value, gone)
        if len(value.dims) == 2 and gone and f"mma{self.columns(gone[0])}" != f"mma{self.slice_of}":
            text = f"gl.convert_layout({text}, {self.vector_layout(self.plan.row)})"
        return text

    @property
    def passed_on(self) -> int:
        """Bytes of shared memory through which the warps pass on results to one another, half a tile at a time."""
        wide = [(s.tensor, self.inner.dims(s.tensor.axes)) for s in self.graph.stores]
        halves = [
            WARPGROUP_ROWS * self.inner.axes[dims[1]].block * BYTES[t.dtype] // 2 for t, dims in wide if len(dims) == 2
        ]
        return self.groups * max((max(n, MIN_WARPGROUP_BYTES) for n in halves), default=0)

    def write(self, tensor: Tensor, dims: tuple[Axis, ...], text: str, mask: str) -> None:
        """What one thread holds of a result lies in several rows: it is passed on to be written line by line."""
        if len(dims) == 2:
            self.is_storing = True
            text = self.w.let("out", f"gl.convert_layout({text}, {self.layout(dims)})")
        super().write(tensor, dims, text, mask)
        self.is_storing = False

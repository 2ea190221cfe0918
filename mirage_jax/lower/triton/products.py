"""Sums and products: reductions of tiles, and matrix products on tensor cores.

Operands of a matrix product are 16-bit if one of them comes from a 16-bit tensor, else f32; sums are always f32. In a
precise schedule a computed operand is two 16-bit numbers, its rounding and that of what remains: a product for each,
together about as accurate as one of f32 (Markidis et al., 2018, section 5), if `precise` is 1 not where the result is
rounded to 16 bits anyway. A vector that no step of a loop computes becomes a matrix whose other rows are zero
(`tiling.SINGLE`).
"""

from __future__ import annotations

from fractions import Fraction
from math import prod

from mirage_jax.errors import UnsupportedError
from mirage_jax.lower.tiling import MAX_RANK, SINGLE, MatrixProduct, extent
from mirage_jax.lower.triton.expressions import Number, TileVariable, reduced
from mirage_jax.lower.triton.values import TRITON_TYPES, Values, rule
from mirage_jax.mugraph.domains.floats import SMALL_INTEGERS, lowest, numpy_dtype
from mirage_jax.mugraph.graph import SIXTEEN_BIT_FLOATS, Axis, Op, Precision


class Products(Values):
    """Values with the operators that reduce."""

    @rule("sum")
    def sum(self, op: Op) -> TileVariable:
        x = self.natural(op.args[0])
        own = self.graph.axes_of[op.args[0]]
        axes = [a for a in reduced(op) if a in own]
        x = self.zeroed(x, axes)
        text = self.reduction("tl.sum", x, axes)
        if missing := [a for a in reduced(op) if a not in own]:
            if self.graph.loop in missing and self.graph.stages[op.name].body:
                raise UnsupportedError(f"{op}: of the axis of the loop each step would count all elements")
            text = f"{text} * {self.literal(Number(Fraction(prod(map(self.elements, missing)))))}"
        return TileVariable(self.w.let(op.op, text), self.tiling.dims(op.axes), self.kept(op, x))

    def elements(self, axis: Axis) -> int:
        """Elements of an axis that a block sees."""
        if axis not in self.axes:
            return extent(axis, self.tiling.graph, self.tiling.parts)
        if self.axes[axis].short_part:
            raise UnsupportedError(f"the number of elements of axis {axis} differs from part to part")
        return self.axes[axis].local

    def kept(self, op: Op, x: TileVariable) -> dict[Axis, float]:
        """Lanes that are 0 along an axis stay 0 when other axes are summed."""
        return {a: 0.0 for a in op.axes if x.pads.get(a) == 0.0}

    @rule("dot")
    def dot(self, op: Op) -> TileVariable:
        product = self.tiling.product(op)
        if product:
            return self.single_row(TileVariable(self.w.let("dot", self.multiplied(op, product)), product.dims))
        x = self.products(op)
        return TileVariable(
            self.w.let("dot", self.reduction("tl.sum", x, reduced(op))), self.tiling.dims(op.axes), self.kept(op, x)
        )

    def products(self, op: Op) -> TileVariable:
        """``x * y`` of a dot that is no matrix product, neutral in the padded lanes of what it sums over."""
        union = tuple(dict.fromkeys(a for arg in op.args for a in self.graph.axes_of[arg]))
        dims = self.tiling.dims(union)
        if len(dims) > MAX_RANK:
            raise UnsupportedError(
                f"{op}: neither a matrix product nor a product with at most 3 tile axes, but over {dims}"
            )
        args = [self.natural(a) for a in op.args]
        mul = Op(op.name, "mul", op.args, union)
        return self.zeroed(self.made(mul, " * ".join(self.at(v, dims) for v in args), args), reduced(op))

    def single_row(self, value: TileVariable) -> TileVariable:
        """The product of a vector, without the rows (or columns) of zeros that made it a matrix."""
        if SINGLE not in value.dims:
            return value
        mask = self.mask((SINGLE,), value.dims)  # zeros times an infinite operand are not zeros
        text = f"tl.sum(tl.where({mask}, {value.text}, 0.0), axis={value.dims.index(SINGLE)})"
        return TileVariable(self.w.let("row", text), tuple(a for a in value.dims if a != SINGLE))

    def multiplied(self, op: Op, product: MatrixProduct, start: str = "") -> str:
        """``tl.dot`` of the operands, in the orientation of the kernel's order, added to `start`."""
        text = start
        for pair in self.operands(op, product):
            text = f"tl.dot({pair}{', ' if text else ''}{text}{self.precision(op)})"
        return text

    def operands(self, op: Op, product: MatrixProduct) -> list[str]:
        """``a, b`` of each tl.dot that the product takes, the smallest first."""
        dtype = self.operand_type(op)
        names = op.args[::-1] if product.swapped else op.args
        sides = ((product.row, *product.inner), (*product.inner, product.column))
        values = [self.operand(n, dtype, SINGLE in side) for n, side in zip(names, sides, strict=True)]
        most = -lowest(numpy_dtype(dtype))  # what is larger becomes infinite, and that times 0 NaN
        for a in product.inner:
            pads = [v.pads.get(a) for v in values]
            if not (0.0 in pads and all(p is not None and abs(p) <= most for p in pads)):
                values = [self.zeroed(v, (a,)) for v in values]
        rests = [
            self.rest(v, n, dtype) if self.splits_operands(op) else None for v, n in zip(values, names, strict=True)
        ]
        (a, a_rest), (b, b_rest) = (
            [x and self.oriented(x, side, product.inner) for x in (self.cast(v, n, dtype), rest)]
            for v, n, side, rest in zip(values, names, sides, rests, strict=True)
        )
        pairs = ((a_rest, b), (a, b_rest), (a, b))
        return [f"{x}, {y}" for x, y in pairs if x and y]

    def splits_operands(self, op: Op) -> bool:
        """Is a computed operand split into two 16-bit numbers?"""
        is_rounded = self.graph.ends_narrow(op.name)
        least = Precision.SPLIT_ALL if is_rounded else Precision.SPLIT_FLOAT32_RESULTS
        return self.tiling.schedule.precise >= least

    def operand_type(self, op: Op) -> str:
        """16 bits if an operand is a tensor of that type, unless the other one is an input that 16 bits do not hold."""
        tensors = [self.tiling.graph.tensors[self.loads[a].tensor] for a in op.args if a in self.loads]
        given = {t.name for t in self.tiling.graph.inputs}
        halves = {t.dtype for t in tensors if t.dtype in SIXTEEN_BIT_FLOATS}
        exact = any(t.dtype not in (*SIXTEEN_BIT_FLOATS, *SMALL_INTEGERS) and t.name in given for t in tensors)
        return halves.pop() if len(halves) == 1 and not exact else "f32"

    def operand(self, name: str, dtype: str, single: bool) -> TileVariable:
        """A dot operand before its cast; a vector (`single`) as a matrix of one row and zeros."""
        if name in self.loads and self.tiling.graph.tensors[self.loads[name].tensor].dtype == dtype:
            return self.raw(self.loads[name], "dot", single)
        value = self.natural(name)
        key = ("single", value.text)
        if single and key not in self.env:
            dims = self.tiling.dims((*value.dims, SINGLE))
            text = f"tl.where({self.mask((SINGLE,), dims)}, {self.at(value, dims)}, 0.0)"
            self.env[key] = TileVariable(self.w.let("single", text), dims, value.pads)
        return self.env[key] if single else value

    def cast(self, value: TileVariable, name: str, dtype: str) -> TileVariable:
        is_raw = name in self.loads and self.tiling.graph.tensors[self.loads[name].tensor].dtype == dtype
        if is_raw or dtype == "f32":
            return value
        key = ("cast", value.text, dtype)
        if key not in self.env:
            text = self.w.let("half", f"{value.text}.to({TRITON_TYPES[dtype]})")
            self.env[key] = TileVariable(text, value.dims, value.pads)
        return self.env[key]

    def rest(self, value: TileVariable, name: str, dtype: str) -> TileVariable | None:
        """What the cast of a computed operand leaves out, if that counts."""
        half = self.cast(value, name, dtype)
        if half is value:
            return None
        key = ("rest", value.text, dtype)
        if key not in self.env:
            rest = self.w.let("rest", f"{value.text} - {half.text}.to(tl.float32)")
            # What is infinite has no rest, or the sum of both products would be no number.
            text = f"tl.where(tl.abs({rest}) < float('inf'), {rest}, 0.0).to({TRITON_TYPES[dtype]})"
            self.env[key] = TileVariable(self.w.let("half", text), value.dims, value.pads)
        return self.env[key]

    def oriented(self, value: TileVariable, side: tuple[Axis, ...], inner: tuple[Axis, ...]) -> str:
        """A dot operand as a matrix with the dimensions `side`; several inner axes are flattened into one."""
        text = value.text
        if value.dims != side:
            order = ", ".join(str(value.dims.index(a)) for a in side)
            text = f"tl.trans({text})" if len(side) == 2 else f"tl.permute({text}, ({order}))"
        if len(inner) == 1:
            return text
        flat = self.tiling.lanes(inner)
        free = self.tiling.lanes(side) // flat
        return f"tl.reshape({text}, {(flat, free) if side[0] in inner else (free, flat)})"

    def precision(self, op: Op) -> str:
        return f', input_precision="{self.options.dot_precision}"' if self.operand_type(op) == "f32" else ""

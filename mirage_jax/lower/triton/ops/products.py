"""Contractions: matrix products on tensor cores, and sums of elementwise products.

Operands of a matrix product are 16-bit if one comes from a 16-bit tensor, else f32; sums are always f32. `Precision`
says which operands are split into two numbers, with a product for each (Markidis et al., 2018, section 5): computed
ones into 16-bit numbers, all of float32 into TF32. Below that it says whether operands of float32 are rounded to
TF32. A vector that is not computed in the loop becomes a matrix whose other rows are zero (`tiling.SINGLE`).
"""

from __future__ import annotations

from fractions import Fraction

from mirage_jax.errors import UnsupportedError
from mirage_jax.lower.tiling import MAX_RANK, SINGLE, MatrixProduct
from mirage_jax.lower.triton.context import TRITON_TYPES, Context, rule
from mirage_jax.lower.triton.expressions import Number, TileVariable, reduced, rounded_product
from mirage_jax.lower.triton.ops.reductions import zero_lanes
from mirage_jax.mugraph.dtypes import SIXTEEN_BIT_FLOATS, SMALL_INTEGERS, lowest, numpy_dtype
from mirage_jax.mugraph.graph import Axis, Op, Precision

TF32_SPLITTER = Number(Fraction(2**13 + 1))  # its product with a number of 24 bits rounds off the last 13
TF32_LARGEST = Number(Fraction(2**113))  # from here on that product might overflow


@rule("dot")
def emit_dot(c: Context, op: Op) -> TileVariable:
    """A contraction: ``tl.dot`` for matrix products, else the sum of elementwise products."""
    product = c.tiling.product(op)
    if product:
        return without_single(c, TileVariable(c.w.let("dot", matrix_product(c, op, product)), product.dims))
    x = elementwise_products(c, op)
    return TileVariable(
        c.w.let("dot", c.reduction("tl.sum", x, reduced(op))), c.tiling.dims(op.axes), zero_lanes(c, op, x)
    )


def elementwise_products(c: Context, op: Op) -> TileVariable:
    """``x * y`` of a dot that is no matrix product, with 0 in the padded lanes of the summed axes."""
    union = c.operand_axes(op)
    dims = c.tiling.dims(union)
    if len(dims) > MAX_RANK:
        raise UnsupportedError(
            f"{op}: neither a matrix product nor a product with at most 3 tile axes, but over {dims}"
        )
    args = [c.natural(a) for a in op.args]
    mul = Op(op.name, "mul", op.args, union)
    return c.zeroed(c.made(mul, c.product(*(c.at(v, dims) for v in args)), args), reduced(op))


def matrix_product(c: Context, op: Op, product: MatrixProduct, start: str = "") -> str:
    """``tl.dot`` of the operands, oriented by the kernel's order of axes, added to `start`."""
    text = start
    for pair in _operands(c, op, product):
        text = f"tl.dot({pair}{', ' if text else ''}{text}{_precision(c, op)})"
    return text


def _operands(c: Context, op: Op, product: MatrixProduct) -> list[str]:
    """``a, b`` of each tl.dot that the product takes, the smallest first."""
    dtype = operand_type(c, op)
    names = op.args[::-1] if product.swapped else op.args
    sides = ((product.row, *product.inner), (*product.inner, product.column))
    values = [operand(c, n, dtype, SINGLE in side) for n, side in zip(names, sides, strict=True)]
    values = _with_neutral_padding(c, values, product, dtype)
    if _rounds_to_tf32(c, op):
        values = [_in_tf32(c, v) for v in values]
    rests: list[TileVariable | None] = [None, None]
    if splits_operands(c, op):
        rests = [remainder(c, v, n, dtype) for v, n in zip(values, names, strict=True)]
    (a, a_rest), (b, b_rest) = (
        [x and _oriented(c, x, side, product.inner) for x in (rounded(c, v, n, dtype), rest)]
        for v, n, side, rest in zip(values, names, sides, rests, strict=True)
    )
    return [f"{x}, {y}" for x, y in ((a_rest, b), (a, b_rest), (a, b)) if x and y]


def _with_neutral_padding(
    c: Context, values: list[TileVariable], product: MatrixProduct, dtype: str
) -> list[TileVariable]:
    """Operands whose padded lanes add nothing: one has 0 there, and neither a number that `dtype` makes infinite."""
    largest = -lowest(numpy_dtype(dtype))
    for a in product.inner:
        pads = [v.pads.get(a) for v in values]
        if 0.0 not in pads or not all(p is not None and abs(p) <= largest for p in pads):
            values = [c.zeroed(v, (a,)) for v in values]
    return values


def splits_operands(c: Context, op: Op) -> bool:
    """Are operands split into two numbers, of 16 bits or TF32?"""
    is_rounded = c.graph.ends_narrow(op.name)
    least = Precision.SPLIT_ALL if is_rounded else Precision.SPLIT_FLOAT32_RESULTS
    return c.tiling.schedule.precise >= least


def _rounds_to_tf32(c: Context, op: Op) -> bool:
    """Are operands of float32 rounded to TF32, where the hardware would cut them off?"""
    is_tf32 = operand_type(c, op) == "f32" and c.options.dot_precision == "tf32"
    return is_tf32 and c.tiling.schedule.precise >= Precision.ROUNDED and not splits_operands(c, op)


def _in_tf32(c: Context, value: TileVariable) -> TileVariable:
    """A tile of float32, rounded to the 11 bits of TF32 (Dekker, 1971, section 5).

    Numbers near the end of the range, where the product would overflow, stay as they are, and so do infinities and NaN.
    """
    key = ("tf32", value.text)
    if key not in c.env:
        scaled = c.w.let("scaled", rounded_product(value.text, c.literal(TF32_SPLITTER)))
        tile = c.w.let("rounded", f"{scaled} - ({scaled} - {value.text})")
        text = f"tl.where(tl.abs({value.text}) < {c.literal(TF32_LARGEST)}, {tile}, {value.text})"
        c.env[key] = TileVariable(c.w.let("tf32", text), value.dims, value.pads)
    return c.env[key]


def operand_type(c: Context, op: Op) -> str:
    """The 16-bit type of an operand, or f32 if there is none or the other is an input that 16 bits do not hold."""
    tensors = [c.tiling.graph.tensors[c.loads[a].tensor] for a in op.args if a in c.loads]
    is_computed = len(tensors) < len(op.args)
    if is_computed and c.tiling.schedule.precise >= Precision.FLOAT32:
        return "f32"
    halves = {t.dtype for t in tensors if t.dtype in SIXTEEN_BIT_FLOATS}
    held = (*SIXTEEN_BIT_FLOATS, *SMALL_INTEGERS)
    inputs = [t for t in c.tiling.graph.inputs if t.dtype not in held]
    if len(halves) != 1 or any(t in inputs for t in tensors):
        return "f32"
    return halves.pop()


def _is_loaded_as(c: Context, name: str, dtype: str) -> bool:
    return name in c.loads and c.dtype_of(c.loads[name]) == dtype


def operand(c: Context, name: str, dtype: str, single: bool) -> TileVariable:
    """A dot operand before it is rounded; a vector (`single`) as a matrix of one row and zeros."""
    if _is_loaded_as(c, name, dtype):
        return c.raw(c.loads[name], "dot", single)
    value = c.natural(name)
    key = ("single", value.text)
    if single and key not in c.env:
        dims = c.tiling.dims((*value.dims, SINGLE))
        text = f"tl.where({c.mask((SINGLE,), dims)}, {c.at(value, dims)}, 0.0)"
        c.env[key] = TileVariable(c.w.let("single", text), dims, value.pads)
    return c.env[key] if single else value


def rounded(c: Context, value: TileVariable, name: str, dtype: str) -> TileVariable:
    """A dot operand in the 16-bit type `dtype`; itself if it is loaded in that type, or `dtype` is f32."""
    if dtype == "f32" or _is_loaded_as(c, name, dtype):
        return value
    key = ("cast", value.text, dtype)
    if key not in c.env:
        text = c.w.let("half", f"{value.text}.to({TRITON_TYPES[dtype]})")
        c.env[key] = TileVariable(text, value.dims, value.pads)
    return c.env[key]


def remainder(c: Context, value: TileVariable, name: str, dtype: str) -> TileVariable | None:
    """The 16-bit rest that rounding a computed operand leaves; None if it is not rounded."""
    half = rounded(c, value, name, dtype)
    if half is value:
        return None
    key = ("rest", value.text, dtype)
    if key not in c.env:
        rest = c.w.let("rest", f"{value.text} - {half.text}.to(tl.float32)")
        # What is infinite has no rest, or the sum of both products would be no number.
        text = f"tl.where(tl.abs({rest}) < float('inf'), {rest}, 0.0).to({TRITON_TYPES[dtype]})"
        c.env[key] = TileVariable(c.w.let("half", text), value.dims, value.pads)
    return c.env[key]


def without_single(c: Context, value: TileVariable) -> TileVariable:
    """The product of a vector, without the zero rows (or columns) that made it a matrix."""
    if SINGLE not in value.dims:
        return value
    mask = c.mask((SINGLE,), value.dims)  # zeros times an infinite operand are not zeros
    text = f"tl.sum(tl.where({mask}, {value.text}, 0.0), axis={value.dims.index(SINGLE)})"
    return TileVariable(c.w.let("row", text), tuple(a for a in value.dims if a != SINGLE))


def _oriented(c: Context, value: TileVariable, side: tuple[Axis, ...], inner: tuple[Axis, ...]) -> str:
    """A dot operand as a matrix with the dimensions `side`; several inner axes are flattened into one."""
    text = value.text
    if value.dims != side:
        order = ", ".join(str(value.dims.index(a)) for a in side)
        text = f"tl.trans({text})" if len(side) == 2 else f"tl.permute({text}, ({order}))"
    if len(inner) == 1:
        return text
    flat = c.tiling.lanes(inner)
    free = c.tiling.lanes(side) // flat
    return f"tl.reshape({text}, {(flat, free) if side[0] in inner else (free, flat)})"


def _precision(c: Context, op: Op) -> str:
    """How tl.dot rounds operands of float32: the hardware cuts numbers off for TF32, which errs up to twice as far as
    rounding. Three products of two parts each, "tf32x3", are almost as good as float32's.
    """
    if operand_type(c, op) != "f32":
        return ""
    precision = c.options.dot_precision
    if c.tiling.schedule.precise >= Precision.FLOAT32:
        precision = "ieee"
    elif precision == "tf32" and splits_operands(c, op):
        precision = "tf32x3"
    return f', input_precision="{precision}"'

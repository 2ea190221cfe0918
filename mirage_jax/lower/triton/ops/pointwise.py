"""Pointwise operators, as one line over registers each.

Operators with a Triton template in their record need no function here.
"""

from __future__ import annotations

from fractions import Fraction
from functools import partial
from itertools import accumulate

import numpy

from mirage_jax.errors import UnsupportedError
from mirage_jax.lower.triton.context import Context, rule
from mirage_jax.lower.triton.expressions import LN2, OCTAVE, PER_OCTAVE, Number, TileVariable, attr, number
from mirage_jax.mugraph.dtypes import SIXTEEN_BIT_FLOATS
from mirage_jax.mugraph.graph import Op, Precision
from mirage_jax.mugraph.operators import COMPARISONS, operator

MAX_POWER_FACTORS = 8  # factors of a power that is written as a product
LN2_REST = float(numpy.float32(LN2)) - LN2  # what the negative of ln 2 loses in float32
MAX_OCTAVES = 128.0  # beyond, float32 holds no power of two, or a few of its digits
ZERO = Number(Fraction(0))


@rule("*")
def emit_pointwise(c: Context, op: Op) -> TileVariable:
    """Any operator whose record has a Triton template.

    Raises `UnsupportedError` for a record without one.
    """
    record = operator(op.op)
    if not record.triton:
        raise UnsupportedError(f"operator {op.op} has no Triton text")
    dims = c.tiling.dims(op.axes)
    if op.op in COMPARISONS and all(map(partial(_is_int32_load, c), op.args)):  # float32 would merge some
        args = [c.raw(c.loads[a], "tile") for a in op.args]
    else:
        args = [c.natural(a) for a in op.args]
    texts = [c.at(v, dims) for v in args]
    if record.arity == 1:
        texts = [c.affine(op, args[0], dims)]
        if not texts[0].isidentifier() and record.triton != "{0}":
            texts = [c.w.let("scaled", texts[0])]
    exact_exps = partial(_with_precise_exps, c) if is_precise(c, op) else str
    names: dict[str, str] = {}
    for name, step in record.steps:
        names[name] = c.w.let(name, exact_exps(step.format(*texts, **names)))
    return c.made(op, exact_exps(record.triton.format(*texts, **names)), args)


def _is_int32_load(c: Context, name: str) -> bool:
    return name in c.loads and c.dtype_of(c.loads[name]) == "i32"


@rule("mul")
def emit_mul(c: Context, op: Op) -> TileVariable:
    """``x * y``."""
    dims, args = c.tiling.dims(op.axes), [c.natural(a) for a in op.args]
    return c.made(op, c.product(*(c.at(v, dims) for v in args)), args)


@rule("const")
def emit_const(c: Context, op: Op) -> TileVariable:
    """One number, without dimensions."""
    value = number(op, "value")
    name = c.w.let("const", c.full((), c.literal(value)))
    return TileVariable(name, constant=float(value))


@rule("iota")
def emit_iota(c: Context, op: Op) -> TileVariable:
    """The index along an axis, as float32."""
    (axis,) = op.axes
    index = c.env["index", axis]
    if index == "0":
        return TileVariable(c.w.let("iota", c.full((), "0.0")), constant=0.0)
    return TileVariable(c.w.let("iota", f"{index}.to(tl.float32)"), c.tiling.dims((axis,)))


@rule("add")
def emit_add(c: Context, op: Op) -> TileVariable:
    """``ca * x + cb * y``."""
    dims = c.tiling.dims(op.axes)
    args = [c.natural(a) for a in op.args]
    x, y = (c.at(v, dims) for v in args)
    ca, cb = number(op, "ca", 1), number(op, "cb", 1)
    left = x if float(ca) == 1.0 else f"{x} * {c.literal(ca)}"
    right = y if abs(float(cb)) == 1.0 else f"{y} * {c.literal(Number(abs(cb.value)))}"
    return c.made(op, f"{left} {'-' if cb.value < 0 else '+'} {right}", args)


@rule("pow")
def emit_pow(c: Context, op: Op) -> TileVariable:
    """``(scale * x + offset) ** exponent``."""
    x = c.natural(op.args[0])
    text = c.affine(op, x, x.dims)
    if not text.isidentifier():
        text = c.w.let("scaled", text)
    return c.made(op, _power(c, text, Fraction(attr(op, "exponent"))), [x])


def _power(c: Context, x: str, exponent: Fraction) -> str:
    """``x ** exponent`` for a name `x`: products for integers, roots for halves, else exp2 of the logarithm."""
    whole, rest = divmod(abs(exponent), 1)
    if rest not in (0, Fraction(1, 2)) or whole > MAX_POWER_FACTORS:
        times = c.literal(Number(exponent))
        if exponent.denominator == 1:
            magnitude = f"tl.exp2({times} * tl.log2(tl.abs({x})))"
            return f"tl.where({x} < 0, {magnitude} * -1.0, {magnitude})" if exponent % 2 else magnitude
        return f"tl.exp2({times} * tl.log2({x}))"
    factors = [x] * int(whole)
    if rest and exponent < 0:  # no division, which takes as long as ten products; of -0 the root is -inf
        root = f"tl.rsqrt({x} + 0.0)" if whole else f"tl.rsqrt({x})"
        return " * ".join([root] * (2 * int(whole) + 1))
    if rest:
        factors.append(f"tl.sqrt({x})")
    text = " * ".join(factors) or "1.0"
    return text if exponent > 0 else f"1.0 / ({text})"


@rule("exp")
def emit_exp(c: Context, op: Op) -> TileVariable:
    """``exp(scale * x + offset)``, as exp2 with log2(e) folded into both constants."""
    x = c.natural(op.args[0])
    if is_precise(c, op):
        return c.made(op, precise_exp(c, c.affine(op, x, x.dims)), [x])
    scale, offset = (number(op, name, default) * PER_OCTAVE for name, default in (("scale", 1), ("offset", 0)))
    text = f"{x.text} * {c.literal(scale)}" + (f" + {c.literal(offset)}" if offset.value else "")
    return c.made(op, f"tl.exp2({text})", [x])


def is_precise(c: Context, op: Op) -> bool:
    """Does an exponential keep all digits of float32? Not where its results are stored in 16 bits.

    Others do where `Precision` asks for it, and in graphs without numbers of 16 bits. Those of a softmax need not: what
    is far below the maximum of a row, and so less exact, hardly counts.
    """
    is_narrow = any(t.dtype in SIXTEEN_BIT_FLOATS for t in c.tiling.graph.tensors.values())
    least = Precision.SPLIT_FLOAT32_RESULTS if is_narrow else Precision.ROUNDED
    is_asked = c.tiling.schedule.precise >= least or (op.op != "exps" and not is_narrow)
    return is_asked and not c.graph.ends_narrow(op.name)


def _with_precise_exps(c: Context, text: str) -> str:
    """The text, with a variable for each exponential in it."""
    before, call, rest = text.partition("tl.exp(")
    if not call:
        return text
    depths = accumulate(({"(": 1, ")": -1}.get(letter, 0) for letter in rest), initial=1)
    end = next(n for n, depth in enumerate(depths) if depth == 0) - 1
    value = c.w.let("exp", precise_exp(c, _with_precise_exps(c, rest[:end])))
    return f"{before}{value}{_with_precise_exps(c, rest[end + 1 :])}"


def precise_exp(c: Context, x: str) -> str:
    """``exp(x)`` to two units in the last place, for x of any size.

    ``tl.exp(x)`` on a GPU is ``exp2(x log2(e))``, which magnifies the rounding of its argument, by x log2(e). What that
    rounding left out is made up for, as in the second step of Cody and Waite's reduction (1980, chapter 6):
    e^(x + rest) is e^x + rest e^x.
    """
    x = c.w.let("exponent", x)
    octaves = c.w.let("octaves", f"{x} * {c.literal(PER_OCTAVE)}")
    power = c.w.let("power", f"tl.exp2({octaves})")
    near = f"tl.fma({octaves}, {c.literal(-OCTAVE)}, {x})"
    lost = c.literal(ZERO, LN2_REST)  # of an exact ln 2 nothing
    rest = c.w.let("rest", f"tl.fma({octaves}, {lost}, {near})")
    return f"tl.where(tl.abs({octaves}) < {MAX_OCTAVES}, tl.fma({power}, {rest}, {power}), {power})"

"""Exponentials relative to a shift, as softmax and log-sum-exp need them.

All exponentials are ``exp2``, with log2(e) folded into the scale. A shift m is kept as ``text * unit``
(`TileVariable.unit`), in the unit in which its exponentials need no further rounding.

The largest exponential of a row must be 1. An fma does not round its product, but a maximum of products is rounded:
from logits of 2^27 on, ``fma(x, scale, -max)`` can exceed what ``exp2`` holds. Compilers make such an fma from any
product that is subtracted from, so that each difference below is exact, or rounds its product by an fma with 0, or the
sums of a row are corrected for the rounding of its maximum (`Fused`), or a form of the kernel is right for smaller
logits only (`mugraph.passes.sentinels.watched`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from mirage_jax.lower.triton.context import Context, rule
from mirage_jax.lower.triton.expressions import (
    OCTAVE,
    PER_OCTAVE,
    UNIT,
    Number,
    TileVariable,
    attr,
    literal,
    number,
    reduced,
)
from mirage_jax.lower.triton.ops.reductions import carried, maximum, own_axes
from mirage_jax.mugraph.dtypes import DTYPES
from mirage_jax.mugraph.graph import BlockGraph, Kernel, Op

LARGEST_FUSED = 2**28  # octaves: shifts up to here are rounded by 8 at most, and float16 holds factors of 2^8


@dataclass(frozen=True, slots=True)
class Fused:
    """How exponentials relative to a running maximum m are written: ``exp2(fma(x, factor, -product))``, one fma and one
    exp2 for each element.

    `factor` is scale * log2(e), and `product` is ``m * factor``, rounded. All exponentials of a row are too large by
    ``2 ** error`` then, where `error` is the rounding error, and so are their sums: they are corrected when m
    moves, and after the loop. In rows of which m is beyond `LARGEST_FUSED` octaves, neighbouring floats are at least 16
    octaves apart. There the factor is a power of two, and nothing is rounded.
    """

    factor: TileVariable
    product: TileVariable
    error: TileVariable


@rule("shift")
def emit_shift(c: Context, op: Op) -> TileVariable:
    """The maximum of ``scale * x``, in the unit of x where that rounds nothing."""
    x, scale = c.value(op.args[0]), number(op, "scale", 1)
    is_product = _from_product(c, op.args[0]) and x.unit == UNIT and scale.value > 0
    unit = scale * x.unit
    if scale.value <= 0:
        x, unit = TileVariable(c.w.let("scaled", _product(c, c.natural(op.args[0]).text, scale)), x.dims), UNIT
    text = maximum(c, x, own_axes(c, op))
    if is_product:
        text, unit = _maximum_of_products(c, op, text, scale)
    source = c.ops.get(c.unmasked(op.args[0]))
    settled = (
        is_product
        and (c.loop_bounds is None or bool(c.holding))
        and source is not None
        and source.op == "dot"
        and not any(c.axes[a].short_part for a in reduced(op) if a in c.axes)
    )
    return carried(c, op, text, unit, settled)


def _maximum_of_products(c: Context, op: Op, text: str, scale: Number) -> tuple[str, Number]:
    """The text and the unit of the maximum of products, of which `text` is the largest.

    A shift that is stored is rounded as it is stored: another kernel that divides exponentials by their sum makes
    them from what was stored, and each must be, bit for bit, what was added up here, or large logits do not cancel.

    A form that is right for small maxima only keeps them times log2(e): an exponential then costs one fma and one exp2.
    """
    if ("error", op.name) in c.env:
        return text, scale
    if _is_stored(c, op.name):
        return _product(c, text, scale), UNIT
    if _has_limit(c, op.name):
        return f"{text} * {c.literal(scale * PER_OCTAVE)}", OCTAVE
    return text, scale


def _from_product(c: Context, name: str) -> bool:
    """Is a value the result of a matrix product, possibly masked with minus infinity?"""
    op = c.ops.get(name)
    return op is not None and (op.op == "dot" or (op.op == "mask" and _from_product(c, op.args[1])))


def _is_stored(c: Context, shift: str) -> bool:
    """Do other kernels read a shift, or the last value of a running one?"""
    return not _names(c, shift).isdisjoint(s.value for s in c.graph.stores)


def _has_limit(c: Context, shift: str) -> bool:
    """Is a form of the kernel written whose results are not taken if a maximum is large (`lows`)?"""
    limited = (guard.shift for guard in c.form.guards if guard.limit is not None)
    return not _names(c, shift).isdisjoint(limited)


def _names(c: Context, shift: str) -> set[str]:
    """The names of a shift, and of the last value of a running one."""
    return {shift, *(op.name for op in c.graph.ops if op.op == "last" and op.args[0] == shift)}


def is_fused(c: Context, shift: Op) -> bool:
    """Are the exponentials relative to a running maximum of matrix products `Fused`?

    Not where another kernel makes the same exponentials from a maximum that this one stores: it rounds each logit.
    """
    specialized = c.tiling.schedule.specialized  # such kernels have no registers for it
    if specialized or not 0 < float(number(shift, "scale", 1) * PER_OCTAVE) < 2 or not _is_read_as_shift(c, shift):
        return False
    return not (_is_stored(c, shift.name) and _is_read_by_exponentials(c))


def _is_read_as_shift(c: Context, shift: Op) -> bool:
    """Do only sums, and exponentials of matrix products, read a maximum of matrix products?"""
    users = [c.ops[name] for name in c.graph.users[shift.name]]
    exponentials = [op for op in users if op.op == "exps"]
    others = {op.op for op in users} - {"exps", "accs", "last"}
    scale = number(shift, "scale", 1)
    is_product = _from_product(c, shift.args[0])
    return is_product and not others and all(_is_exponential(c, op, scale) for op in exponentials)


def _is_exponential(c: Context, op: Op, scale: Number) -> bool:
    """Is this an exponential of matrix products times that scale, in the loop?"""
    return number(op, "scale", 1) == scale and _from_product(c, op.args[0]) and c.graph.stages[op.name].body


def _is_read_by_exponentials(c: Context) -> bool:
    """May what this kernel stores be the shift of exponentials elsewhere?"""
    graph = c.tiling.graph
    stored = {s.tensor.name for s in c.graph.stores}
    others = [kernel for kernel in graph.kernels if kernel.name != c.graph.name]
    return not stored.isdisjoint(graph.outputs) or any(map(_may_have_exponentials, others))


def _may_have_exponentials(kernel: Kernel) -> bool:
    return not isinstance(kernel, BlockGraph) or any(op.op == "exps" for op in kernel.ops)


def fused(c: Context, shift: str) -> Fused:
    """`Fused`, of the shift of this step."""
    key = ("fused", shift)
    if key not in c.env:
        m = finite(c, c.value(shift))
        factor = _factor(c, m)
        product = c.w.let("product", f"tl.fma({m.text}, {factor.text}, 0.0)")
        error = c.w.let("error", f"tl.fma({m.text}, {factor.text}, {product} * -1.0)")
        c.env[key] = Fused(factor, TileVariable(product, m.dims), TileVariable(error, m.dims))
    return c.env[key]


def _factor(c: Context, m: TileVariable) -> TileVariable:
    """The factor of logits, for each row."""
    scale = m.unit * PER_OCTAVE
    bound, usual = LARGEST_FUSED / float(scale), c.literal(scale)
    power = 2.0 ** math.floor(math.log2(float(scale)))
    if bound > DTYPES["f32"].range[1] or power == float(scale):
        return TileVariable(usual)
    ratio = power / float(scale)
    c.numbers.setdefault(ratio, set()).add(UNIT)  # on exact numbers all rows have the same factor
    limit = c.literal(Number(LARGEST_FUSED / scale.value, -scale.logs))
    text = f"tl.where(tl.abs({m.text}) < {limit}, {usual}, {usual} * {literal(ratio)})"
    return TileVariable(c.w.let("factor", text), m.dims)


@rule("exps")
def emit_exp_shifted(c: Context, op: Op) -> TileVariable:
    """``exp(scale * x - m)`` for a shift m."""
    dims = c.tiling.dims(op.axes)
    if ("error", op.args[1]) in c.env:  # the shift runs
        x, m = c.natural(op.args[0]), fused(c, op.args[1])
        text = f"tl.fma({c.at(x, dims)}, {c.at(m.factor, dims)}, {c.at(m.product, dims)} * -1.0)"
        return c.made(op, f"tl.exp2({text})", [x, m.product])
    x, m = c.natural(op.args[0]), finite(c, c.value(op.args[1]))
    scale, text, shift = number(op, "scale", 1), c.at(x, dims), c.at(m, dims)
    if m.unit == UNIT and (scale != UNIT or _is_multiplied(c, op.args[0])):
        moved = f"({_product(c, text, scale)} - {shift}) * {c.literal(PER_OCTAVE)}"
    else:
        moved = difference(c, text, scale, shift, m.unit)
    return c.made(op, f"tl.exp2({moved})", [x, m])


@rule("rescale")
def emit_rescale(c: Context, op: Op) -> TileVariable:
    """``x * exp(degree * (old - new))``: a sum of exponentials, moved from one shift to another."""
    dims = c.tiling.dims(op.axes)
    x, old, new = c.natural(op.args[0]), c.value(op.args[1]), finite(c, c.value(op.args[2]))
    degree = number(op, "degree", 1)
    moved = difference(c, c.at(old, dims), old.unit, c.at(new, dims), new.unit, degree)
    return c.made(op, f"{c.at(x, dims)} * tl.exp2({moved})", [x, old, new])


@rule("logs")
def emit_log_shifted(c: Context, op: Op) -> TileVariable:
    """``log(x) + degree * m``: the logarithm of a sum of exponentials relative to m."""
    dims = c.tiling.dims(op.axes)
    x, m = map(c.natural, op.args)
    shift = c.at(m, dims)
    total = f"tl.log({c.at(x, dims)}) + {_times_degree(shift, op)}"
    return c.made(op, f'tl.where({shift} == float("inf"), {shift}, {total})', [x, m])


@rule("lesslogs")
def emit_less_log_shifted(c: Context, op: Op) -> TileVariable:
    """``(y - degree * m) - log(x)``, subtracted in the program's order."""
    dims = c.tiling.dims(op.axes)
    y, x, m = map(c.natural, op.args)
    log = TileVariable(c.w.let("log", f"tl.log({x.text})"), x.dims)
    moved = f"{c.at(y, dims)} - {_times_degree(c.at(m, dims), op)}"
    text, scale = f"({moved}) - {c.at(log, dims)}", number(op, "scale", 1)
    return c.made(op, text if scale == UNIT else f"({text}) * {c.literal(scale)}", [y, x, m])


def decay(c: Context, shift: str, old: str, degree: Number) -> TileVariable:
    """The factor of a sum of exponentials when a running maximum moves on from `old`."""
    value = c.value(shift)
    if ("error", shift) in c.env:
        m = fused(c, shift)
        moved = f"tl.fma({old}, {m.factor.text}, {m.product.text} * -1.0) - {c.env['error', shift]}"
        moved = moved if degree == UNIT else f"({moved}) * {c.literal(degree)}"
    else:
        moved = difference(c, old, value.unit, finite(c, value).text, value.unit, degree)
    return TileVariable(c.w.let("decay", f"tl.exp2({moved})"), value.dims)


def _product(c: Context, x: str, scale: Number) -> str:
    """``scale * x``, rounded: an fma adds the 0, so that a compiler can add nothing else to an unrounded product."""
    return f"tl.fma({x}, {c.literal(scale)}, 0.0)"


def _is_multiplied(c: Context, name: str) -> bool:
    """Does the kernel make a value by a multiplication, which its compiler may leave unrounded?"""
    op = c.ops.get(name)
    return op is not None and op.op in ("mul", "affine", "pow") and attr(op, "offset", 0) == 0


def _times_degree(shift: str, op: Op) -> str:
    degree = float(attr(op, "degree", 1))
    return shift if degree == 1 else f"{shift} * {literal(degree)}"


def finite(c: Context, shift: TileVariable) -> TileVariable:
    """A shift to subtract: 0 where it is still -inf, since -inf - -inf is NaN."""
    if shift.settled:
        return shift
    key = ("finite", shift.text)
    if key not in c.env:
        text = f'tl.where({shift.text} == float("-inf"), 0.0, {shift.text})'
        c.env[key] = TileVariable(c.w.let("finite", text), shift.dims, unit=shift.unit)
    return c.env[key]


def difference(c: Context, x: str, x_unit: Number, y: str, y_unit: Number, degree: Number = UNIT) -> str:
    """``degree * (x * x_unit - y * y_unit) * log2(e)``.

    Equal units are applied after the subtraction, which then cancels exactly.
    """
    a, b = x_unit * degree * PER_OCTAVE, y_unit * degree * PER_OCTAVE
    if a == b:
        return f"{x} - {y}" if a == UNIT else f"({x} - {y}) * {c.literal(a)}"
    return _fma(c, x, a, y, b)


def _fma(c: Context, x: str, a: Number, y: str, b: Number) -> str:
    """``x * a - y * b``, where `y` has fewer elements.

    The text asks for the fma: kernels that compute the same exponential must round it in the same way. It multiplies
    by -b, because Triton's `-y` is 0 - y, an instruction of its own; attention takes up to 13% longer with it.
    """
    if a == UNIT:
        return f"{x} - {y}" if b == UNIT else f"{x} - ({y} * {c.literal(b)})"
    return f"tl.fma({x}, {c.literal(a)}, {y} * {c.literal(-b)})"


def lows(c: Context) -> dict[str, str]:
    """By guarded shift: text that is 1 where an element is not between its bounds, or is NaN, else 0."""
    found: dict[str, str] = {}
    for guard in c.form.guards:
        shift = c.value(guard.shift)
        sides = ((">", guard.bound), ("<", guard.limit))
        holds = [f"({shift.text} {side} {_in_unit(c, b, shift)})" for side, b in sides if b is not None]
        text = f"1 - {holds[0] if len(holds) == 1 else f'({holds[0]} & {holds[1]})'}.to(tl.int32)"
        mask = c.mask(c.graph.axes_of[guard.shift], shift.dims)
        found[guard.shift] = f"tl.where({mask}, {text}, 0)" if mask else text
    return found


def _in_unit(c: Context, bound: Fraction, shift: TileVariable) -> str:
    """A bound of a shift as a literal, in the unit in which it is kept."""
    return c.literal(Number(bound / shift.unit.value, -shift.unit.logs))

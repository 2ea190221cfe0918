"""Exponentials relative to a shift, as softmax and log-sum-exp need them.

All exponentials are ``exp2``, with log2(e) folded into the scale. A shift m is kept as ``text * unit``
(`TileVariable.unit`), in the unit in which its exponentials need no further rounding.

The largest exponential of a row must be 1. An fma does not round its product, but a maximum of products is rounded:
from logits of 2^27 on, ``fma(x, scale, -max)`` can exceed what ``exp2`` holds. Compilers make such an fma from any
product that is subtracted from, so that each difference below is exact, or rounds its product by an fma with 0, or a
form of the kernel is right for smaller logits only (`mugraph.passes.sentinels.forms_of`).
"""

from __future__ import annotations

from collections.abc import Iterator

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
    rounded_product,
)
from mirage_jax.lower.triton.ops.pointwise import is_precise, precise_exp
from mirage_jax.lower.triton.ops.reductions import carried, maximum, own_axes
from mirage_jax.mugraph.graph import Op
from mirage_jax.mugraph.passes.sentinels import Guard, is_stored, names_of


@rule("shift")
def emit_shift(c: Context, op: Op) -> TileVariable:
    """The maximum of ``scale * x``, in the unit of x where that rounds nothing."""
    x, scale = c.value(op.args[0]), number(op, "scale", 1)
    is_product = _from_product(c, op.args[0]) and x.unit == UNIT and scale.value > 0
    unit = scale * x.unit
    if scale.value <= 0:
        text = rounded_product(c.natural(op.args[0]).text, c.literal(scale))
        x, unit = TileVariable(c.w.let("scaled", text), x.dims), UNIT
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

    A form that is right for small maxima only keeps them times log2(e): an exponential then costs one fma and one exp2.
    Another maximum that is stored is rounded as it is stored. Where another kernel divides exponentials by their sum,
    and makes them from that maximum, each must be, bit for bit, what was added up here, or large logits do not cancel.
    """
    if _has_limit(c, op.name):
        return f"{text} * {c.literal(scale * PER_OCTAVE)}", OCTAVE
    return (rounded_product(text, c.literal(scale)), UNIT) if is_stored(c.graph, op.name) else (text, scale)


def _from_product(c: Context, name: str) -> bool:
    """Is a value the result of a matrix product, possibly masked with minus infinity?"""
    op = c.ops.get(name)
    return op is not None and (op.op == "dot" or (op.op == "mask" and _from_product(c, op.args[1])))


def _has_limit(c: Context, shift: str) -> bool:
    """Is a form of the kernel written whose results are not taken if a maximum is large (`lows`)?"""
    limited = (guard.shift for guard in c.form.guards if guard.limit is not None)
    return not names_of(c.graph, shift).isdisjoint(limited)


def correction(c: Context, shift: str, degree: Number) -> TileVariable | None:
    """The factor that makes sums of exponentials relative to a maximum as it is stored, after the loop; None if they
    are. A maximum that is kept times log2(e) is rounded when it is stored.
    """
    m: TileVariable | None = c.env.get(("end", shift))
    if m is None or m.unit != OCTAVE or not is_stored(c.graph, shift):
        return None
    key = ("correction", shift, degree)
    if key not in c.env:
        m = finite(c, m)
        stored = c.in_natural_unit(m)
        error = f"tl.fma({stored.text}, {c.literal(PER_OCTAVE)}, {m.text} * -1.0)"
        c.env[key] = TileVariable(c.w.let("correction", f"tl.exp2(({error}) * {c.literal(-degree)})"), m.dims)
    return c.env[key]


@rule("exps")
def emit_exp_shifted(c: Context, op: Op) -> TileVariable:
    """``exp(scale * x - m)`` for a shift m."""
    dims = c.tiling.dims(op.axes)
    x, m = c.natural(op.args[0]), finite(c, c.value(op.args[1]))
    scale, text, shift = number(op, "scale", 1), c.at(x, dims), c.at(m, dims)
    if m.unit == UNIT and (scale != UNIT or _is_multiplied(c, op.args[0])):
        exponent = f"{rounded_product(text, c.literal(scale))} - {shift}"
        moved = f"({exponent}) * {c.literal(PER_OCTAVE)}"
    else:
        exponent = f"({text} - {shift}) * {c.literal(scale)}" if scale == m.unit else ""
        moved = difference(c, text, scale, shift, m.unit)
    if exponent and is_precise(c, op):
        return c.made(op, precise_exp(c, exponent), [x, m])
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
    moved = difference(c, old, value.unit, finite(c, value).text, value.unit, degree)
    return TileVariable(c.w.let("decay", f"tl.exp2({moved})"), value.dims)


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
    """By guarded shift: text that is 1 where an element is not as its guard asks, or is NaN, else 0."""
    found: dict[str, str] = {}
    for guard in c.form.guards:
        shift = c.value(guard.shift)
        asked = list(_as_asked(c, guard, shift))
        text = f"1 - ({' & '.join(f'({x})' for x in asked) if len(asked) > 1 else asked[0]}).to(tl.int32)"
        mask = c.mask(c.graph.axes_of[guard.shift], shift.dims)
        found[guard.shift] = f"tl.where({mask}, {text}, 0)" if mask else text
    return found


def _as_asked(c: Context, guard: Guard, shift: TileVariable) -> Iterator[str]:
    """What a guard asks of a shift, in the unit in which it is kept."""
    bound, limit = (
        None if b is None else c.literal(Number(b / shift.unit.value, -shift.unit.logs))
        for b in (guard.bound, guard.limit)
    )
    if bound is not None:
        yield f"{shift.text} > {bound}"
    if limit is not None:
        yield f'(tl.abs({shift.text}) < {limit}) | ({shift.text} == float("-inf"))'

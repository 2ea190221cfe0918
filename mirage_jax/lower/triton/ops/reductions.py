"""Sums and maxima over axes of a tile."""

from __future__ import annotations

import math
from fractions import Fraction
from math import prod

from mirage_jax.errors import UnsupportedError
from mirage_jax.lower.tiling import extent
from mirage_jax.lower.triton.context import Context, rule
from mirage_jax.lower.triton.expressions import UNIT, Number, TileVariable, reduced
from mirage_jax.mugraph.graph import Axis, Op
from mirage_jax.mugraph.operators import KEEPS_NAN


@rule("sum")
def emit_sum(c: Context, op: Op) -> TileVariable:
    """A sum over axes of the tile, times the extents of axes that the operand lacks."""
    x = c.natural(op.args[0])
    own = c.graph.axes_of[op.args[0]]
    axes = [a for a in reduced(op) if a in own]
    x = c.zeroed(x, axes)
    text = c.reduction("tl.sum", x, axes)
    if missing := [a for a in reduced(op) if a not in own]:
        if c.graph.loop in missing and c.graph.stages[op.name].body:
            raise UnsupportedError(f"{op}: of the axis of the loop each step would count all elements")
        text = f"{text} * {c.literal(Number(Fraction(prod(_elements(c, a) for a in missing))))}"
    return TileVariable(c.w.let(op.op, text), c.tiling.dims(op.axes), zero_lanes(c, op, x))


def _elements(c: Context, axis: Axis) -> int:
    """Elements of an axis in one block."""
    if axis not in c.axes:
        return extent(axis, c.tiling.graph, c.tiling.parts)
    if c.axes[axis].short_part:
        raise UnsupportedError(f"the number of elements of axis {axis} differs from part to part")
    return c.axes[axis].local


def zero_lanes(c: Context, op: Op, x: TileVariable) -> dict[Axis, float]:
    """Padded lanes of a sum: zeros along an axis stay 0 when other axes are summed."""
    return {a: 0.0 for a in op.axes if x.pads.get(a) == 0.0}


@rule("max")
def emit_max(c: Context, op: Op) -> TileVariable:
    """The maximum, or NaN if there is one. ``tl.max`` ignores NaN, which only a shift may do."""
    x = c.natural(op.args[0])
    text = maximum(c, op, x)
    if axes := [a for a in reduced(op) if a in x.dims]:
        lost = c.zeroed(TileVariable(c.w.let("lost", f"({x.text} != {x.text}).to(tl.float32)"), x.dims), axes)
        text = f"tl.where({c.reduction('tl.max', lost, axes)} > 0.0, float('nan'), {text})"
    return carried(c, op, text, UNIT)


def maximum(c: Context, op: Op, x: TileVariable) -> str:
    """``tl.max`` over the axes that `op` reduces, with -inf in padded lanes."""
    axes = [a for a in reduced(op) if a in c.graph.axes_of[op.args[0]]]
    return c.reduction("tl.max", c.zeroed(x, axes, -math.inf), axes)


def carried(c: Context, op: Op, text: str, unit: Number, settled: bool = False) -> TileVariable:
    """Assign a maximum; a running one, if `op` reduces the axis of the loop."""
    dims = c.tiling.dims(op.axes)
    if ("carried", op.name) in c.env:
        keeps_nan = f", {KEEPS_NAN}" if op.op == "max" else ""
        text = f"tl.maximum({c.env['carried', op.name]}, {text}{keeps_nan})"
    return TileVariable(c.w.let(op.op, text), dims, unit=unit, settled=settled)

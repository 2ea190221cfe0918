"""Sums and maxima over axes of a tile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from math import prod

from mirage_jax.errors import UnsupportedError
from mirage_jax.lower.tiling import ELEMENT, extent
from mirage_jax.lower.triton.context import Context, rule
from mirage_jax.lower.triton.expressions import UNIT, Number, TileVariable, reduced
from mirage_jax.mugraph.graph import Axis, Op
from mirage_jax.mugraph.operators import CARRIED_REGISTERS, KEEPS_NAN

DEFERRED_REGISTERS = 64  # per thread, in which a loop may carry a sum unreduced


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
    x, axes = c.natural(op.args[0]), own_axes(c, op)
    if ("carried", op.name) in c.env and is_carried_as_tile(c, op):
        x = c.zeroed(x, axes, -math.inf)
        text = f"tl.maximum({c.env['carried', op.name]}, {c.at(x, running_dims(c, op))}, {KEEPS_NAN})"
        return TileVariable(c.w.let(op.op, text), running_dims(c, op))
    return carried(c, op, maximum_or_nan(c, x, axes), UNIT)


def maximum_or_nan(c: Context, x: TileVariable, axes: Sequence[Axis]) -> str:
    """The maximum of a tile over some of its axes, or NaN if there is one."""
    greatest = maximum(c, x, axes)
    if not (axes := [a for a in axes if a in x.dims]):
        return greatest
    lost = c.zeroed(TileVariable(c.w.let("lost", f"({x.text} != {x.text}).to(tl.float32)"), x.dims), axes)
    return f"tl.where({c.reduction('tl.max', lost, axes)} > 0.0, float('nan'), {greatest})"


def is_carried_as_tile(c: Context, op: Op) -> bool:
    """Is a running maximum reduced after the loop only, from a tile of maxima? If there are registers for it, and
    nothing in the loop reads it.
    """
    own = c.graph.axes_of[op.args[0]]
    return (
        op.op == "max"
        and c.graph.loop in reduced(op)
        and set(reduced(op)) <= set(own)
        and all(c.ops[user].op == "last" for user in c.graph.users[op.name])
        and c.tiling.lanes(own) <= deferred_lanes(c, op)
    )


def running_dims(c: Context, op: Op) -> tuple[Axis, ...]:
    """The dimensions of the variable that a loop carries for a maximum."""
    return c.tiling.dims(c.graph.axes_of[op.args[0]] if is_carried_as_tile(c, op) else op.axes)


def deferred_lanes(c: Context, op: Op) -> int:
    """Elements of a tile that may be carried unreduced through a loop: all elements of a narrow axis share them, and
    without matrix products all sums do.
    """
    base, mark, _ = op.name.partition(ELEMENT)
    alike = sum(other.op == op.op and other.name.startswith(base + mark) for other in c.graph.ops) if mark else 1
    registers = DEFERRED_REGISTERS // alike
    if not any(c.tiling.product(other) for other in c.graph.ops):
        registers = min(registers, CARRIED_REGISTERS // max(1, sum(other.op == "acc" for other in c.graph.ops)))
    return registers * 32 * c.tiling.schedule.num_warps


def maximum(c: Context, x: TileVariable, axes: Sequence[Axis]) -> str:
    """``tl.max`` over axes, with -inf in padded lanes."""
    return c.reduction("tl.max", c.zeroed(x, axes, -math.inf), axes)


def own_axes(c: Context, op: Op) -> list[Axis]:
    """The axes that an operator reduces and its operand has, whether or not they are dimensions of a tile."""
    return [a for a in reduced(op) if a in c.graph.axes_of[op.args[0]]]


def carried(c: Context, op: Op, text: str, unit: Number, settled: bool = False) -> TileVariable:
    """Assign a maximum; a running one, if `op` reduces the axis of the loop."""
    dims = c.tiling.dims(op.axes)
    if ("carried", op.name) in c.env:
        keeps_nan = f", {KEEPS_NAN}" if op.op == "max" else ""
        text = f"tl.maximum({c.env['carried', op.name]}, {text}{keeps_nan})"
    return TileVariable(c.w.let(op.op, text), dims, unit=unit, settled=settled)

"""Tiles as Triton variables, and small pieces of text: literals, powers, reductions, differences of exponents."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from mirage_jax.mugraph.graph import Axis, Op

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)


@dataclass(frozen=True, slots=True)
class Value:
    """A tile in a variable.

    `pads`: what padded lanes hold, per padded axis, where it is a known constant. `unit`: the value in the graph's
    sense is ``text * unit``; it differs from 1 for shifts only, kept in the unit that their exponentials need.
    """

    text: str
    dims: tuple[Axis, ...] = ()
    pads: Mapping[Axis, float] = field(default_factory=dict)
    unit: float = 1.0
    constant: float | None = None  # the same known number in every lane
    settled: bool = False  # a maximum of at least one number that no mask has made -inf


def attr(op: Op, name: str, default: Any = None) -> Any:
    return op.attributes.get(name, default)


def reduced(op: Op) -> tuple[Axis, ...]:
    return tuple(op.attributes["axes"])  # type: ignore[arg-type]


def literal(value: float) -> str:
    return repr(value) if math.isfinite(value) else f'float("{value}")'


def reduction(function: str, value: Value, axes: Iterable[Axis]) -> str:
    """``tl.sum`` over several tile dimensions, last dimension first."""
    text = value.text
    for place in sorted((value.dims.index(a) for a in set(axes) if a in value.dims), reverse=True):
        text = f"{function}({text}, axis={place})"
    return text


def difference(x: str, x_unit: float, y: str, y_unit: float, degree: float = 1.0) -> str:
    """``degree * (x * x_unit - y * y_unit) * log2(e)``.

    Equal units are applied after the subtraction, which then cancels exactly.
    """
    a, b = x_unit * degree * LOG2E, y_unit * degree * LOG2E
    if math.isclose(a, b, rel_tol=1e-15):
        return f"{x} - {y}" if math.isclose(a, 1.0, rel_tol=1e-15) else f"({x} - {y}) * {literal(a)}"
    left, right = (t if math.isclose(f, 1.0, rel_tol=1e-15) else f"{t} * {literal(f)}" for t, f in ((x, a), (y, b)))
    return f"{left} - {right}"


def power(x: str, exponent: Fraction) -> str:
    """``x ** exponent`` for a name `x`: products for integers, roots for halves, exp2 of the logarithm for the rest."""
    whole, rest = divmod(abs(exponent), 1)
    if rest not in (0, Fraction(1, 2)) or whole > 8:
        if exponent.denominator == 1:
            magnitude = f"tl.exp2({float(exponent)!r} * tl.log2(tl.abs({x})))"
            return f"tl.where({x} < 0, -{magnitude}, {magnitude})" if exponent % 2 else magnitude
        return f"tl.exp2({float(exponent)!r} * tl.log2({x}))"
    factors = [x] * int(whole)
    if exponent == Fraction(-1, 2):
        return f"tl.rsqrt({x})"
    if rest:
        factors.append(f"tl.sqrt({x})")
    text = " * ".join(factors) or "1.0"
    return text if exponent > 0 else f"1.0 / ({text})"

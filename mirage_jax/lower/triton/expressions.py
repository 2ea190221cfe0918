"""Tiles as Triton variables, exact numbers behind literals, and small pieces of text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from mirage_jax.mugraph.graph import Axis, Op

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)


@dataclass(frozen=True, slots=True)
class Number:
    """``value * log2(e) ** logs``, exactly: what a literal of a kernel stands for."""

    value: Fraction
    logs: int = 0

    def __mul__(self, other: Number) -> Number:
        return Number(self.value * other.value, self.logs + other.logs)

    def __neg__(self) -> Number:
        return Number(-self.value, self.logs)

    def __float__(self) -> float:
        return float(self.value) * {1: LOG2E, 0: 1.0, -1: LN2}.get(self.logs, LOG2E**self.logs)


UNIT, PER_OCTAVE, OCTAVE = Number(Fraction(1)), Number(Fraction(1), 1), Number(Fraction(1), -1)


@dataclass(frozen=True, slots=True)
class TileVariable:
    """A tile in a variable.

    `pads`: what padded lanes hold, per padded axis, where it is a known constant. `unit`: the value in the graph's
    sense is ``text * unit``; it differs from 1 for shifts only, kept in the unit that their exponentials need.
    """

    text: str
    dims: tuple[Axis, ...] = ()
    pads: Mapping[Axis, float] = field(default_factory=dict)
    unit: Number = UNIT
    constant: float | None = None  # the same known number in every lane
    settled: bool = False  # a maximum of at least one number that no mask has made -inf


def attr(op: Op, name: str, default: Any = None) -> Any:
    """An attribute of an operator."""
    return op.attributes.get(name, default)


def reduced(op: Op) -> tuple[Axis, ...]:
    """The axes that an operator sums or takes the maximum over."""
    return tuple(op.attributes["axes"])  # type: ignore[arg-type]


def number(op: Op, name: str, default: Any = None) -> Number:
    """An attribute as a number."""
    return Number(Fraction(attr(op, name, default)))


def literal(value: float) -> str:
    """A number in Python's text."""
    return repr(value) if math.isfinite(value) else f'float("{value}")'


def rounded_product(x: str, y: str) -> str:
    """``x * y``, rounded: an fma adds the 0, so that a compiler can add nothing else to an unrounded product."""
    return f"tl.fma({x}, {y}, 0.0)"


def reduction(function: str, value: TileVariable, axes: Iterable[Axis]) -> str:
    """``tl.sum`` over several tile dimensions, last dimension first."""
    text = value.text
    for place in sorted((value.dims.index(a) for a in set(axes) if a in value.dims), reverse=True):
        text = f"{function}({text}, axis={place})"
    return text


def meanings(numbers: Sequence[Mapping[float, Number | None]]) -> dict[float, Number | None]:
    """What literals stand for; None where texts mean different numbers by one."""
    found: dict[float, Number | None] = {}
    for own in numbers:
        for literal, meant in own.items():
            found[literal] = meant if found.get(literal, meant) == meant else None
    return found

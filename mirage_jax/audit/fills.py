"""Unusual data: sentinels in biases, numbers of one sign, scales of one argument.

A fill belongs to an argument of a random program, as its shape does: shrinking simplifies it, scripts print it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType

import ml_dtypes
import numpy as np

from mirage_jax.mugraph.dtypes import is_float

type Array = np.ndarray

LOWEST = "lowest"  # the most negative number of the argument's type
LOW = (LOWEST, "-1e30", "-1e9", "-inf")
ROW_SHARE, ELEMENT_SHARE = 0.4, 0.3  # how many rows, or elements, are low


@dataclass(frozen=True)
class Fill:
    """The contents of one argument, in place of the numbers of its program's kind.

    low: the sentinel of a bias, or "mixed"; where: which of its elements hold it, a key of `PLACES`; all others are 0.
    With where = "switch" all elements are 0 or 1. positive: no number is negative. power: of two, a factor.
    """

    low: str = ""
    where: str = ""
    positive: bool = False
    power: int = 0

    @property
    def cost(self) -> tuple[int, int]:
        """How many fields say something, and how far the scale is from 1."""
        return sum(getattr(self, f.name) != f.default for f in fields(self)), abs(self.power)

    @property
    def simpler(self) -> list[Fill]:
        """Fills that say less."""
        return [replace(self, low="", where=""), replace(self, positive=False), Fill()]


NOTHING = Fill()


def filled(x: Array, fill: Fill, rng: np.random.Generator) -> Array:
    """Fill an argument; arrays that are no floats stay as they are."""
    if not is_float(x.dtype) or fill == NOTHING:
        return x
    if fill.where == "switch":
        return np.asarray(rng.random(x.shape) < 1 - ELEMENT_SHARE, x.dtype)
    if fill.where:
        return _bias(x, fill, rng)
    most = float(ml_dtypes.finfo(x.dtype).max)
    wide = np.abs(x.astype(np.float64)) if fill.positive else x.astype(np.float64)
    return np.asarray(np.clip(np.ldexp(wide, fill.power), -most, most), x.dtype)


def _bias(x: Array, fill: Fill, rng: np.random.Generator) -> Array:
    names = rng.choice(LOW, x.shape) if fill.low == "mixed" else np.full(x.shape, fill.low)
    numbers = {name: _number(name, x.dtype) for name in LOW}
    low = np.vectorize(numbers.__getitem__, otypes=[np.float64])(names)
    with np.errstate(over="ignore"):
        return np.asarray(np.where(PLACES[fill.where](x.shape, rng), low, 0.0), x.dtype)


def _number(low: str, dtype: np.dtype) -> float:
    return float(ml_dtypes.finfo(dtype).min) if low == LOWEST else float(low)


# ---------------------------------------------------------------------- which elements of a bias are low


def _left(shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """As many columns as one of a batch is shorter than the longest, at most all."""
    m = shape[-1] if shape else 1
    batch = (*shape[:-2], 1, 1)[-max(len(shape), 1) :]
    return np.broadcast_to(np.arange(m) < rng.integers(1, math.ceil(2 * m / 3) + 1, batch), shape)


def _rows(shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Some whole rows, the first among them."""
    rows = (*shape[:-1], 1)[: len(shape)]
    chosen = (rng.random(rows) < ROW_SHARE) | (np.arange(math.prod(rows)).reshape(rows) == 0)
    return np.broadcast_to(chosen, shape)


type Place = Callable[[tuple[int, ...], np.random.Generator], Array]
PLACES: Mapping[str, Place] = MappingProxyType(
    {
        "left": _left,
        "right": lambda shape, rng: _left(shape, rng)[..., ::-1] if shape else np.array(True),
        "rows": _rows,
        "parts of rows": lambda shape, rng: _rows(shape, rng) & _left(shape, rng),
        "some": lambda shape, rng: rng.random(shape) < ELEMENT_SHARE,
        "all": lambda shape, rng: np.ones(shape, bool),
    }
)

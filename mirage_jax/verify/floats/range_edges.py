"""Inputs at the ends of a type's range: scaled by powers of two, together, alone and against each other, until the
program itself is about to overflow or to lose its digits near zero.

A candidate has other values on the way, which may leave the range earlier: `(a b) c` is finite where a and b are large
and c is small, and so is `a (b c)`; but `a b` alone need not be. Inputs that meet in a product are scaled in opposite
directions, since what one makes larger the other makes smaller again. Data without negative numbers is used as well:
its sums grow with their length, not with its root.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

TAIL_OCTAVES = 3  # powers of two between one and the largest numbers of a normal distribution, and as many near zero
MAX_SCALED_PAIRS = 6  # pairs of inputs that are scaled against each other
NORMAL_MARGIN = 2.0**4  # times the smallest normal number: the size of results that have all of their digits


@dataclass(frozen=True)
class Direction:
    """Inputs, by position, that are multiplied by 2**n, and those that are divided by it."""

    up: frozenset[int]
    down: frozenset[int]
    positive: bool = False

    def __str__(self) -> str:
        names = [
            f"{'input' if len(which) == 1 else 'inputs'} {', '.join(map(str, sorted(which)))} times 2**{sign}n"
            for which, sign in ((self.up, ""), (self.down, "-"))
            if which
        ]
        return " and ".join(names) + (", none negative" if self.positive else "")

    def most(self, dtypes: Sequence[Any]) -> int:
        """The largest n for which normally distributed inputs are normal numbers of their types."""
        ups = [int(ml_dtypes.finfo(dtypes[i]).maxexp) for i in self.up]
        downs = [-int(ml_dtypes.finfo(dtypes[i]).minexp) for i in self.down]
        return min((*ups, *downs)) - TAIL_OCTAVES

    def power(self, i: int, n: int) -> float:
        """What input i is multiplied by at a distance; powers of two lose no digits."""
        return 2.0 ** (n if i in self.up else -n if i in self.down else 0)


def directions(floats: Sequence[int], pairs: Collection[tuple[int, int]]) -> Iterator[Direction]:
    """Where to: all inputs up or down, those that meet against each other, all but one against it, and each alone.

    None at all for a program that reads no floats: it makes its own of indices, masks and lengths.
    """
    if not floats:
        return
    nobody, everybody = frozenset[int](), frozenset(floats)
    yield Direction(everybody, nobody)
    yield Direction(everybody, nobody, positive=True)
    yield Direction(nobody, everybody)
    for one, other in list(pairs)[:MAX_SCALED_PAIRS]:
        yield Direction(frozenset({one}), frozenset({other}), positive=True)
        yield Direction(frozenset({other}), frozenset({one}), positive=True)
    if len(floats) > 2:
        for i in sorted({i for pair in pairs for i in pair}):
            yield Direction(everybody - {i}, frozenset({i}), positive=True)
    if len(floats) > 1:
        for i in floats:
            yield Direction(frozenset({i}), nobody)


def in_range(largest: Sequence[float], dtypes: Sequence[Any]) -> bool:
    """Are results finite, and of a size that leaves them all of their digits? `largest` are their largest magnitudes,
    not finite if a result is not.
    """
    small = (NORMAL_MARGIN * float(ml_dtypes.finfo(d).smallest_normal) for d in dtypes)
    return all(least <= size < np.inf for size, least in zip(largest, small, strict=True))


def brink(is_in_range: Callable[[int], bool], most: int) -> int:
    """The largest n from 0 to `most` that is in range, -1 if none is, for a property that larger numbers lose."""
    low, high = -1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if is_in_range(middle) else (low, middle - 1)
    return low

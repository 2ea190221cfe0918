"""Tensors that are parts of arrays, and where they lie there.

A slice is no operator of a muGraph: a graph may read a part of an array. XLA copies the part; a kernel
reads it where it lies, wherever its elements are as far apart along each axis as the next ones (`View.place`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import Any, Self

type Dims = list[tuple[int, int]]  # size and stride of each dimension, in elements


@dataclass(frozen=True, slots=True)
class ViewStep:
    """A step from an array to a part: reshape to `shape`, then slice. Row-major."""

    shape: tuple[int, ...]
    starts: tuple[int, ...]
    limits: tuple[int, ...]


@dataclass(frozen=True)
class View:
    """From an array of shape `whole` to a tensor: cuts one after the other, then a reshape to `shape`. Row-major."""

    whole: tuple[int, ...]
    cuts: tuple[ViewStep, ...]
    shape: tuple[int, ...]

    def __str__(self) -> str:
        cuts = (f"{list(c.starts)} to {list(c.limits)} of {list(c.shape)}" for c in self.cuts)
        return ", ".join((f"{list(self.shape)} in {list(self.whole)}", *cuts))

    def of(self, x: Any) -> Any:
        """The tensor, of an array of JAX or numpy."""
        for cut in self.cuts:
            x = x.reshape(cut.shape)[tuple(map(slice, cut.starts, cut.limits))]
        return x.reshape(self.shape)

    def to_json(self) -> list[Any]:
        """Encode the view as lists of numbers."""
        return [self.whole, [astuple(cut) for cut in self.cuts], self.shape]

    @classmethod
    def from_json(cls, value: list[Any]) -> Self:
        """Decode a view."""
        whole, cuts, shape = value
        return cls(tuple(whole), tuple(ViewStep(*map(tuple, cut)) for cut in cuts), tuple(shape))

    @cached_property
    def place(self) -> tuple[int, tuple[int, ...]] | None:
        """Where element i of the tensor lies: at ``offset + sum(stride * i)`` of the flat array. None if there are no
        such strides.
        """
        offset, dims = 0, _row_major(self.whole)
        for cut in self.cuts:
            if (found := _reshaped(dims, cut.shape)) is None:
                return None
            offset += sum(start * stride for start, (_, stride) in zip(cut.starts, found, strict=True))
            sizes = (limit - start for start, limit in zip(cut.starts, cut.limits, strict=True))
            dims = [(size, stride) for size, (_, stride) in zip(sizes, found, strict=True)]
        found = _reshaped(dims, self.shape)
        return None if found is None else (offset, tuple(stride for _, stride in found))


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of an array without gaps."""
    return tuple(stride for _, stride in _row_major(shape))


def _row_major(shape: Sequence[int]) -> Dims:
    return [(n, math.prod(shape[d + 1 :])) for d, n in enumerate(shape)]


def _reshaped(dims: Dims, shape: Sequence[int]) -> Dims | None:
    """The dimensions of a reshape that copies nothing."""
    runs: Dims = []  # neighbours without a gap, as one dimension
    for n, stride in dims:
        if runs and runs[-1][1] == n * stride:
            runs[-1] = runs[-1][0] * n, stride
        elif n > 1:
            runs.append((n, stride))
    out: Dims = []
    for n in reversed(shape):
        size, stride = runs.pop() if n > 1 else (1, 0)
        if size % n:
            return None
        out.append((n, stride))
        if size > n:
            runs.append((size // n, stride * n))
    return out[::-1]

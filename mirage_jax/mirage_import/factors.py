"""Dimensions as products of axes that are found by unification, for graphs that are written with numbered dimensions.

A dimension is a tuple of *keys*, major first, whose extents multiply to its size; a dimension of size 1 has none.
Making two dimensions the same (`unify`) divides both until their extents agree, and then makes the axes one by one the
same.

before -> after:  (k: 4096) ~ (g: 64)(r: 64)  ->  k is divided, and its parts are g and r

A key is a base and a copy. Copies of one base are different axes of the same extents: dividing one divides all. So two
readers of a tensor divide it in the same way, and yet each has other axes. Keys stay valid after a division: `resolve`
gives the keys that replace them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from mirage_jax.errors import UnsupportedError


class FactorKey(NamedTuple):
    """An axis that may still be divided."""

    base: int
    copy: tuple[int, ...]  # a unique number, and the path of parts that divisions have left


type Dim = tuple[FactorKey, ...]
type Dims = tuple[Dim, ...]


class Factors:
    def __init__(self) -> None:
        self._extents: list[int] = []  # by base
        self._parts: dict[int, tuple[int, int]] = {}  # base -> bases of its major and its minor part
        self._joined: dict[int, int] = {}  # base -> the base that it is now
        self._same: dict[FactorKey, FactorKey] = {}
        self._copies = itertools.count()

    def dim(self, size: int) -> Dim:
        """Make a new dimension."""
        return () if size == 1 else (FactorKey(self._base(size), (next(self._copies),)),)

    def copy(self, dim: Dim) -> Dim:
        """Make other axes of the same extents, now and after all divisions."""
        return tuple(FactorKey(k.base, (next(self._copies),)) for k in self.resolve(dim))

    def copies(self, dims: Dims) -> Dims:
        """Copy several dimensions."""
        return tuple(map(self.copy, dims))

    def resolve(self, dim: Dim) -> Dim:
        """Look up the axes of a dimension after all divisions."""
        out: list[FactorKey] = []
        for key in dim:
            key = self._representative(key)
            if parts := self._parts.get(key.base):
                out += self.resolve(tuple(FactorKey(part, (*key.copy, n)) for n, part in enumerate(parts)))
            else:
                out.append(key)
        return tuple(out)

    def extent(self, key: FactorKey) -> int:
        """The extent of an axis."""
        return self._extents[key.base]

    def size(self, dim: Dim) -> int:
        """The size of a dimension."""
        return math.prod(map(self.extent, self.resolve(dim)))

    def shape(self, dims: Dims) -> tuple[int, ...]:
        """The sizes of several dimensions."""
        return tuple(map(self.size, dims))

    def unify(self, left: Dim, right: Dim) -> None:
        """Make two dimensions of one size the same axes."""
        while (pair := self._misaligned(left, right)) is not None:
            small, large = sorted(pair, key=self.extent)
            self._divide(large, self.extent(small))
        for a, b in zip(self.resolve(left), self.resolve(right), strict=True):
            a, b = self._representative(a), self._representative(b)
            if a.base != b.base:
                self._joined[b.base] = a.base
                b = self._representative(b)
            if a != b:
                self._same[b] = a

    def _base(self, extent: int) -> int:
        self._extents.append(extent)
        return len(self._extents) - 1

    def _representative(self, key: FactorKey) -> FactorKey:
        while True:
            if key in self._same:
                key = self._same[key]
            elif key.base in self._joined:
                key = FactorKey(self._joined[key.base], key.copy)
            else:
                return key

    def _misaligned(self, left: Dim, right: Dim) -> tuple[FactorKey, FactorKey] | None:
        pairs: Sequence[tuple[FactorKey, FactorKey]] = list(zip(self.resolve(left), self.resolve(right), strict=False))
        return next((p for p in pairs if self.extent(p[0]) != self.extent(p[1])), None)

    def _divide(self, key: FactorKey, major: int) -> None:
        extent = self.extent(key)
        if extent % major:
            raise UnsupportedError(
                f"a dimension is divided both into {major} and into {extent} parts, of which neither divides the other"
            )
        self._parts[key.base] = self._base(major), self._base(extent // major)

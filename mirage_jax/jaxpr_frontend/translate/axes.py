"""Names for dimensions: which axes of different tensors are the same axis, found by unification.

A dimension of a JAX value is a tuple of axes whose extents multiply to its size, major first; a dimension of size 1 is
the empty tuple. Then transpose, broadcast, squeeze and reshape only move names about:

* reshape regroups axes, and where a dimension is divided it *splits* an axis, ``k -> (k0, k1)``, everywhere at once;
* operators *merge* axes: in ``dot(x[i,k], w[a,j])`` contracting k with a, the axes k and a become one.

An axis is a base and a copy number (printed as primes): copies have the extent of their base. Where merging would put
one axis twice into one tensor or one operator (``x @ x.T``), the merged axis becomes another copy, and the operator
*views* its operand under other names. So names never limit what can be expressed; they only show what is common.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mirage_jax.jaxpr_frontend.partition.reasons import Code, NotExpressible


class AxisKey(NamedTuple):
    """One axis; `AxisKey(b, 0)`, `AxisKey(b, 1)`, .. are copies of each other."""

    base: int
    copy: int = 0


type Dims = tuple[tuple[AxisKey, ...], ...]
type View = dict[AxisKey, AxisKey]  # names of an operand's axes -> the names under which an operator sees them


class AxisTable:
    """Extents, merges and splits of axes. Stored keys may be outdated: `resolve` says what they are by now."""

    def __init__(self) -> None:
        self._extents: list[int] = []
        self._copies: list[set[int]] = []
        self._merged: dict[AxisKey, AxisKey] = {}
        self._split: dict[int, tuple[int, int]] = {}
        self._apart: dict[tuple[AxisKey, ...], None] = {}  # axes that occur together and so must stay different

    def fresh(self, extent: int) -> AxisKey:
        """Make a new axis."""
        self._extents.append(extent)
        self._copies.append({0})
        return AxisKey(len(self._extents) - 1)

    def dimension(self, size: int) -> tuple[AxisKey, ...]:
        """A new dimension: one new axis, or none if its size is 1."""
        return () if size == 1 else (self.fresh(size),)

    def extent(self, key: AxisKey) -> int:
        """Give the number of elements along an axis."""
        return self._extents[key.base]

    def resolve(self, keys: Iterable[AxisKey]) -> tuple[AxisKey, ...]:
        """What axes are after all merges and splits so far."""
        out: list[AxisKey] = []
        for key in keys:
            while key in self._merged:
                key = self._merged[key]
            if parts := self._split.get(key.base):
                out += self.resolve(AxisKey(part, key.copy) for part in parts)
            else:
                out.append(key)
        return tuple(out)

    def resolve_dims(self, dims: Dims) -> Dims:
        """Resolve the axes of each dimension."""
        return tuple(map(self.resolve, dims))

    def resolve_view(self, view: View) -> View:
        """Resolve both sides of a view, and drop names that it keeps."""
        pairs = ((self.resolve((k,)), self.resolve((v,))) for k, v in view.items())
        return {k: v for old, new in pairs for k, v in zip(old, new, strict=True) if k != v}

    def keep_apart(self, keys: Iterable[AxisKey]) -> None:
        """Forbid merges among these axes: they occur in one tensor or operator."""
        self._apart[tuple(keys)] = None

    def copy_of(self, key: AxisKey, used: Iterable[AxisKey]) -> AxisKey:
        """The first copy of an axis that is not among `used`."""
        taken = set(used)
        copy = next(k for n in itertools.count() if (k := AxisKey(key.base, n)) not in taken)
        self._copies[copy.base].add(copy.copy)
        return copy

    def split(self, key: AxisKey, major: int) -> None:
        """Divide the base of `key` and all of its copies into (major, extent / major)."""
        extent = self.extent(key)
        if extent % major:
            raise NotExpressible(Code.LAYOUT, f"an axis of {extent} cannot be divided into parts of {major}")
        parts = self.fresh(major).base, self.fresh(extent // major).base
        for part in parts:
            self._copies[part] = set(self._copies[key.base])
        self._split[key.base] = parts

    def regroup(self, dims: Dims, shape: Sequence[int]) -> Dims:
        """The dimensions after a row-major reshape to `shape`, by merging and splitting axes."""
        axes = list(self.resolve(itertools.chain(*dims)))
        out: list[tuple[AxisKey, ...]] = []
        for size in shape:
            group: list[AxisKey] = []
            while size > 1:
                key = axes[0]
                extent = self.extent(key)
                if size % extent == 0:
                    group.append(axes.pop(0))
                    size //= extent
                else:
                    if extent % size:
                        raise NotExpressible(Code.LAYOUT, f"the reshape to {tuple(shape)} does not split or merge axes")
                    self.split(key, size)
                    axes = list(self.resolve(axes))
            out.append(tuple(group))
        return self.resolve_dims(tuple(out))

    def unify(self, left: Sequence[tuple[AxisKey, ...]], right: Sequence[tuple[AxisKey, ...]]) -> View:
        """Make dimensions of two operands the same axes; returns the view of the right one where that cannot be."""
        pairs = list(zip(left, right, strict=True))
        self._align(pairs)
        for a, b in pairs:
            for n in range(len(self.resolve(a))):
                x, y = self.resolve(a)[n], self.resolve(b)[n]
                if x.base != y.base:
                    self._merge(x, y)
        keys = [p for a, b in pairs for p in zip(self.resolve(b), self.resolve(a), strict=True)]
        return {y: x for y, x in keys if y != x}

    def _align(self, pairs: Sequence[tuple[tuple[AxisKey, ...], tuple[AxisKey, ...]]]) -> None:
        """Split axes until both dimensions of each pair have the same extents; a split may divide other pairs too."""
        while True:
            axes = (p for a, b in pairs for p in zip(self.resolve(a), self.resolve(b), strict=False))
            pair = next(((a, b) for a, b in axes if self.extent(a) != self.extent(b)), None)
            if pair is None:
                return
            small, large = sorted(pair, key=self.extent)
            self.split(large, self.extent(small))

    def _merge(self, into: AxisKey, key: AxisKey) -> None:
        """Make the base of `key` the base of `into`: the same axis where nothing forbids it, else copies."""
        apart = [self.resolve(keys) for keys in self._apart]
        target: dict[AxisKey, AxisKey] = {}

        def is_free(old: AxisKey, new: AxisKey) -> bool:
            return not any(new in keys or any(target.get(k) == new for k in keys) for keys in apart if old in keys)

        others = (AxisKey(key.base, n) for n in sorted(self._copies[key.base]) if n != key.copy)
        for old in (key, *others):
            wanted = into.copy if old == key else old.copy
            numbers = itertools.chain((wanted,), itertools.count())
            target[old] = next(new for n in numbers if is_free(old, new := AxisKey(into.base, n)))
        self._copies[into.base].update(new.copy for new in target.values())
        self._merged.update(target)

    def size(self, dims: Dims) -> tuple[int, ...]:
        """The shape of a value with these dimensions."""
        return tuple(math.prod(map(self.extent, self.resolve(dim))) for dim in dims)

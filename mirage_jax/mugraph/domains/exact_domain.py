"""Meaning of the operators on exact numbers (`exact`): the values of a graph, to compare with its kernels' text.

Input: arrays of numbers by name of axes, and of plain numpy integers and truth values for tensors of these types.
Every rule is the one of float64 (`floats.FloatDomain`), over other numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np

from mirage_jax.mugraph.domains import exact
from mirage_jax.mugraph.domains.floats import NamedArray, are_allowed, arrange, contracted, pasted
from mirage_jax.mugraph.dtypes import is_float, numpy_dtype
from mirage_jax.mugraph.graph import Axis, Tensor
from mirage_jax.mugraph.operators import FUNCTIONS, union

MAX_PRODUCT = 8  # powers up to this are products, as in kernels; others go through logarithms
ANY_SHIFT = exact.made(0, 0, -1e300)  # of a row in which everything is masked: no other maximum is as low


@dataclass(frozen=True)
class ExactDomain:
    """Exact numbers, for kernels block by block or for whole graphs. `of_equal` is for `exact.largest`."""

    ranges: Mapping[Axis, range] = field(default_factory=dict[Axis, range])
    of_equal: int = 1

    representative = False

    # --- tiles

    def within(self, ranges: Mapping[Axis, range]) -> ExactDomain:
        """See the domain from one tile."""
        return replace(self, ranges=ranges)

    def load(self, x: NamedArray, axes: tuple[Axis, ...]) -> NamedArray:
        """Cut the tile out of `x`; integers become numbers."""
        tile = x.array[tuple(slice(self.ranges[a].start, self.ranges[a].stop) for a in axes)]
        return NamedArray(axes, tile if tile.dtype == exact.EXACT else exact.integers(tile))

    def store(self, x: NamedArray, tensor: Tensor) -> NamedArray:
        """Arrange `x` as the tensor; integers come back from numbers."""
        array = arrange(x.array, x.axes, tensor.axes)
        return NamedArray(
            tensor.axes, array if is_float(numpy_dtype(tensor.dtype)) else as_integers(array, tensor.dtype)
        )

    def assemble(
        self, tensor: Tensor, shape: tuple[int, ...], stored: Sequence[tuple[tuple[range, ...], NamedArray]]
    ) -> NamedArray:
        """Paste the tiles into one array."""
        return NamedArray(tensor.axes, pasted(shape, stored))

    def all_allowed(self, x: NamedArray, bound: Fraction | None, limit: Fraction | None) -> bool:
        """Compare the floats of numbers. The shift of a row in which everything is masked is minus infinity here."""
        real = x.array["real"]
        real = np.where(real == ANY_SHIFT["real"], -math.inf, real)
        return are_allowed(real, bound, limit, lambda value: float(exact.constant(value)["real"]))

    # --- operators

    def constant(self, value: Fraction) -> NamedArray:
        """Make an exact fraction."""
        return NamedArray((), exact.constant(value))

    def add(self, x: NamedArray, y: NamedArray) -> NamedArray:
        """x + y in both residues."""
        axes, (a, b) = _aligned(x, y)
        return NamedArray(axes, exact.add(a, b))

    def mul(self, x: NamedArray, y: NamedArray) -> NamedArray:
        """x * y in both residues."""
        axes, (a, b) = _aligned(x, y)
        return NamedArray(axes, exact.multiply(a, b))

    def power(self, x: NamedArray, exponent: Fraction) -> NamedArray:
        """Multiply for small exponents, as kernels do, else go through logarithms."""
        return NamedArray(x.axes, _power(x.array, Fraction(exponent)))

    def exp(self, x: NamedArray) -> NamedArray:
        """See `exact.exp`."""
        return NamedArray(x.axes, exact.exp(x.array))

    def rounded(self, x: NamedArray) -> NamedArray:
        """x: nothing is rounded here."""
        return x

    def log_product(self, x: NamedArray, m: NamedArray) -> NamedArray:
        """log(x) + m, infinite where m is."""
        axes, (a, b) = _aligned(x, m)
        return NamedArray(axes, exact.choose(b["real"] == math.inf, b, exact.add(exact.log(a), b)))

    def less_log_product(self, y: NamedArray, x: NamedArray, m: NamedArray) -> NamedArray:
        log = NamedArray(x.axes, exact.log(x.array))
        return self.add(self.add(y, self._negative(m)), self._negative(log))

    def _negative(self, x: NamedArray) -> NamedArray:
        return self.mul(self.constant(Fraction(-1)), x)

    def function(self, name: str, args: Sequence[NamedArray]) -> NamedArray:
        """Apply the function's exact meaning from its record."""
        axes, arrays = _aligned(*args)
        return NamedArray(axes, FUNCTIONS[name].exact(*arrays))

    def sum(self, x: NamedArray, axes: tuple[Axis, ...]) -> NamedArray:
        """Sum; an axis that x lacks multiplies by its extent."""
        array = exact.total(x.array, tuple(i for i, a in enumerate(x.axes) if a in axes))
        count = math.prod(len(self.ranges[a]) for a in axes if a not in x.axes)
        if count != 1:
            array = exact.multiply(array, exact.constant(Fraction(count)))
        return NamedArray(tuple(a for a in x.axes if a not in axes), array)

    def dot(self, x: NamedArray, y: NamedArray, axes: tuple[Axis, ...]) -> NamedArray:
        """Multiply as matrices."""
        return contracted(x, y, axes, exact.matmul)

    def maximum(self, x: NamedArray, axes: tuple[Axis, ...]) -> NamedArray:
        """Compare floats, then residues."""
        array = x.array
        for dim in sorted((x.axes.index(a) for a in axes if a in x.axes), reverse=True):
            array = exact.largest(array, dim, self.of_equal)
        return NamedArray(tuple(a for a in x.axes if a not in axes), array)

    def shift(self, x: NamedArray, axes: tuple[Axis, ...]) -> NamedArray:
        """The maximum, but never minus infinity; any number would do."""
        m = self.maximum(x, axes)
        return NamedArray(m.axes, np.where(m.array["real"] == -math.inf, ANY_SHIFT, m.array))

    def iota(self, axis: Axis) -> NamedArray:
        """Count from the tile's first index."""
        here = self.ranges[axis]
        return NamedArray((axis,), exact.integers(range(here.start, here.stop)))


def as_integers(x: exact.Numbers, dtype: str) -> Any:
    """Convert numbers to integers or truth values, as a tensor of these stores them."""
    return ~exact.equal(x, exact.ZERO) if dtype == "bool" else x["p"].astype(numpy_dtype(dtype))


def _aligned(*xs: NamedArray) -> tuple[tuple[Axis, ...], list[Any]]:
    axes = union(tuple(x.axes for x in xs))
    return axes, [arrange(x.array, x.axes, axes) if x.axes else x.array for x in xs]


def _power(x: exact.Numbers, exponent: Fraction) -> exact.Numbers:
    whole, rest = divmod(abs(exponent), 1)
    if rest not in (0, Fraction(1, 2)) or whole > MAX_PRODUCT:
        return _power_by_logarithm(x, exponent)
    if rest and exponent < 0:  # as kernels have it: a root squared is not known to be the number
        return exact.power(exact.rsqrt(x), 2 * int(whole) + 1)
    out = exact.power(x, whole)
    if rest:
        out = exact.multiply(out, exact.sqrt(x))
    return exact.inverse(out) if exponent < 0 else out


def _power_by_logarithm(x: exact.Numbers, exponent: Fraction) -> exact.Numbers:
    """As kernels have it; for integers of |x|, with the sign put back."""
    integer = exponent.denominator == 1
    magnitude = exact.exp(exact.multiply(exact.constant(exponent), exact.log(exact.absolute(x) if integer else x)))
    if not integer or exponent % 2 == 0:
        return magnitude
    return exact.choose(exact.less(x, exact.ZERO), exact.negative(magnitude), magnitude)

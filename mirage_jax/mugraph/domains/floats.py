"""Arrays with named axes, and the floating-point domain over numpy (the oracle) and jax.numpy (the portable lowering).

`FloatDomain(numpy, "float64")` computes everything in float64 and rounds nothing: the reference of all float tests.
`FloatDomain(jax.numpy)` keeps the program's own precisions: 16-bit values are widened to float32 for pointwise work and
reductions, products of two 16-bit operands accumulate in float32, and stores round to the type of their tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Self

import numpy

from mirage_jax.errors import GraphError
from mirage_jax.mugraph.dtypes import DTYPES, is_float, is_sixteen_bit_float, is_small_integer, lowest, numpy_dtype
from mirage_jax.mugraph.graph import Axis, Tensor
from mirage_jax.mugraph.operators import FUNCTIONS, union


def random_integers(rng: numpy.random.Generator, shape: Sequence[int], dtype: Any) -> Any:
    """What integers of a type are like in programs: weights of 8 bits are anything, others are indices or counts."""
    low, high = (numpy.iinfo(dtype).min, numpy.iinfo(dtype).max + 1) if is_small_integer(dtype) else (0, 4)
    return rng.integers(low, high, tuple(shape)).astype(dtype)


@dataclass(frozen=True, slots=True)
class NamedArray:
    """An array whose dimensions are the axes `axes`; a Python number if it has none."""

    axes: tuple[Axis, ...]
    array: Any


def arrange(array: Any, have: tuple[Axis, ...], want: tuple[Axis, ...]) -> Any:
    """Dimensions in the order `want`; an axis that the array lacks becomes a dimension of length 1."""
    if have == want:
        return array
    order = tuple(have.index(a) for a in want if a in have)
    if len(order) != len(have):
        raise GraphError(f"value over ({','.join(have)}) does not fit into axes ({','.join(want)})")
    if order != tuple(range(len(have))):
        array = array.transpose(order)
    return array[tuple(slice(None) if a in have else None for a in want)]


@dataclass(frozen=True)
class FloatDomain:
    """Floating-point meaning of the operators on arrays of `xp`. `dtype` None: each value in its own precision."""

    xp: Any = numpy
    dtype: str | None = None
    ranges: Mapping[Axis, range] = field(default_factory=dict[Axis, range])  # indices that the axes run over here
    widen: bool = False  # multiply 16-bit operands as float32: XLA for CPUs lacks some 16-bit products
    in_range: bool = False  # what is stored is infinite where its own type has no such number
    once: Set[str] = frozenset()  # tensors that JAX's compiler, if it runs this, may not compute a second time

    representative = False

    # --- tiles

    def within(self, ranges: Mapping[Axis, range]) -> Self:
        """See the domain from one tile."""
        return replace(self, ranges=ranges)

    def load(self, x: NamedArray, axes: tuple[Axis, ...]) -> NamedArray:
        """Cut the tile out of `x`; a whole array is not copied."""
        cut = tuple(slice(self.ranges[a].start, self.ranges[a].stop) for a in axes)
        whole = all(c.start == 0 and c.stop == n for c, n in zip(cut, x.array.shape, strict=True))
        return NamedArray(axes, x.array if whole else x.array[cut])

    def store(self, x: NamedArray, tensor: Tensor) -> NamedArray:
        """Arrange `x` as the tensor and round it to its type."""
        dtype = own = numpy_dtype(tensor.dtype)
        if self.dtype is not None and is_float(dtype):
            dtype = numpy.dtype(self.dtype)
        array = self._array(x.array) if x.axes else self.xp.asarray(x.array)
        array = arrange(array, x.axes, tensor.axes)
        if self.in_range and is_float(own):
            array = self.xp.where(self.xp.abs(array) > -lowest(own), self.xp.copysign(numpy.inf, array), array)
        return NamedArray(tensor.axes, self.held(tensor.name, array if array.dtype == dtype else array.astype(dtype)))

    def held(self, name: str, x: Any) -> Any:
        """A tensor of this name, which is computed once if it has to be."""
        if name not in self.once:
            return x
        import jax  # jax.numpy was passed in

        return jax.lax.optimization_barrier(x)  # pyright: ignore[reportUnknownMemberType]

    def assemble(
        self, tensor: Tensor, shape: tuple[int, ...], stored: Sequence[tuple[tuple[range, ...], NamedArray]]
    ) -> NamedArray:
        """Paste the tiles, which cover the tensor, into one array."""
        return NamedArray(tensor.axes, self.xp.asarray(pasted(shape, stored)))

    def all_allowed(self, x: NamedArray, bound: Fraction | None, limit: Fraction | None) -> bool:
        """Compare every element."""
        return are_allowed(x.array, bound, limit, _float)

    # --- operators

    def constant(self, value: Fraction) -> NamedArray:
        """Make a Python number, which adapts to any type."""
        whole = value.denominator == 1 and abs(value) < 2**31 and self.dtype is None
        return NamedArray((), int(value) if whole else _float(value))

    def add(self, x: NamedArray, y: NamedArray) -> NamedArray:
        """x + y."""
        axes, (a, b) = self._align(self._real(x), self._real(y))
        return NamedArray(axes, a + b)

    def mul(self, x: NamedArray, y: NamedArray) -> NamedArray:
        """x * y."""
        axes, (a, b) = self._align(self._real(x), self._real(y))
        return NamedArray(axes, a * b)

    def power(self, x: NamedArray, exponent: Fraction) -> NamedArray:
        """Raise by division, roots and products where these do; `xp.power` else."""
        a = self._array(self._real(x).array)
        if exponent == -1:
            return NamedArray(x.axes, 1 / a)
        if exponent.denominator == 1 and exponent > 0:
            return NamedArray(x.axes, a ** int(exponent))
        if not hasattr(a, "dtype"):
            return NamedArray((), float(a) ** float(exponent))
        if exponent == Fraction(1, 2):
            return NamedArray(x.axes, self.xp.sqrt(a))
        if exponent == Fraction(-1, 2):
            return NamedArray(x.axes, 1 / self.xp.sqrt(a))
        return NamedArray(x.axes, self.xp.power(a, self.xp.asarray(float(exponent), a.dtype)))

    def exp(self, x: NamedArray) -> NamedArray:
        """e ** x."""
        return NamedArray(x.axes, self.xp.exp(self._array(x.array)))

    def rounded(self, x: NamedArray) -> NamedArray:
        """x; for a compiler behind a choice, which is none, but which it does not see through."""
        a = self._array(x.array)
        if self.xp is numpy:
            return x
        return NamedArray(x.axes, self.xp.where(self.xp.isfinite(a), a, a + a))

    def log_product(self, x: NamedArray, m: NamedArray) -> NamedArray:
        """log(x) + m; infinite where m is, since sums relative to an infinite maximum are NaN."""
        axes, (a, b) = self._align(x, m)
        return NamedArray(axes, self.xp.where(b == self.xp.inf, b, self.xp.log(a) + b))

    def less_log_product(self, y: NamedArray, x: NamedArray, m: NamedArray) -> NamedArray:
        """(y - m) - log(x): y - (log(x) + m) has no log(x) where m is so large that its digits do not hold it."""
        axes, (a, b, c) = self._align(self._real(y), x, m)
        return NamedArray(axes, (a - c) - self.xp.log(b))

    def function(self, name: str, args: Sequence[NamedArray]) -> NamedArray:
        """Apply the function's value from its record."""
        axes, arrays = self._align(*args)
        return NamedArray(axes, FUNCTIONS[name].value(self.xp, *arrays))

    def sum(self, x: NamedArray, axes: tuple[Axis, ...]) -> NamedArray:
        """Sum; an axis that x lacks multiplies by its extent."""
        total = self._reduce(self.xp.sum, self._real(x), axes)
        missing = math.prod(len(self.ranges[a]) for a in axes if a not in x.axes)
        return total if missing == 1 else NamedArray(total.axes, total.array * missing)

    def dot(self, x: NamedArray, y: NamedArray, axes: tuple[Axis, ...]) -> NamedArray:
        """Contract; two 16-bit operands accumulate in float32."""
        x, y = self._real(self._of_one_type(x, y)), self._real(self._of_one_type(y, x))
        narrow = self._multiplies_narrow(x, y)
        if not narrow or self.xp is numpy:
            a, b = self._common(x.array, y.array)
            x, y = NamedArray(x.axes, a), NamedArray(y.axes, b)
        if self.xp is numpy:
            return contracted(x, y, axes, numpy.matmul)
        names = union((x.axes, y.axes))
        out = tuple(a for a in names if a not in axes)
        dims = ([names.index(a) for a in x.axes], [names.index(a) for a in y.axes], [names.index(a) for a in out])
        wide = "float32" if narrow else None
        return NamedArray(out, self.xp.einsum(x.array, dims[0], y.array, dims[1], dims[2], preferred_element_type=wide))

    def maximum(self, x: NamedArray, axes: tuple[Axis, ...]) -> NamedArray:
        """Reduce by the maximum."""
        return self._reduce(self.xp.max, x, axes)

    def shift(self, x: NamedArray, axes: tuple[Axis, ...]) -> NamedArray:
        """The maximum, but never -inf: a fully masked tile must not turn ``exp(-inf - -inf)`` into NaN for its row."""
        m = self._real(self._reduce(self.xp.max, x, axes))
        return NamedArray(m.axes, self.xp.maximum(m.array, self.xp.asarray(lowest(m.array.dtype), m.array.dtype)))

    def iota(self, axis: Axis) -> NamedArray:
        """Count from the tile's first index."""
        here = self.ranges[axis]
        return NamedArray((axis,), self.xp.arange(here.start, here.stop, dtype=self.dtype or "int32"))

    # --- helpers

    def _reduce(self, reduction: Any, x: NamedArray, axes: tuple[Axis, ...]) -> NamedArray:
        gone = tuple(i for i, a in enumerate(x.axes) if a in axes)
        array = self._array(x.array)
        return NamedArray(tuple(a for a in x.axes if a not in axes), reduction(array, axis=gone) if gone else array)

    def _multiplies_narrow(self, x: NamedArray, y: NamedArray) -> bool:
        """Tell whether the operands are multiplied as 16-bit floats."""
        allowed = self.dtype is None and not self.widen
        return allowed and x.array.dtype == y.array.dtype and is_sixteen_bit_float(x.array.dtype)

    def _of_one_type(self, x: NamedArray, other: NamedArray) -> NamedArray:
        """A small integer times a 16-bit float is a product of such floats, as the cast before it is exact."""
        if self.dtype is None and is_small_integer(x.array.dtype) and is_sixteen_bit_float(other.array.dtype):
            return NamedArray(x.axes, x.array.astype(other.array.dtype))
        return x

    def _real(self, x: NamedArray) -> NamedArray:
        """Integers as float32, as in kernels: a program that computes with bytes or indices has cast them before."""
        if self.dtype is None and hasattr(x.array, "dtype") and not is_float(x.array.dtype):
            return NamedArray(x.axes, x.array.astype(DTYPES["f32"].numpy))
        return x

    def _array(self, x: Any) -> Any:
        return self._common(x)[0]

    def _align(self, *xs: NamedArray) -> tuple[tuple[Axis, ...], list[Any]]:
        axes = union(tuple(x.axes for x in xs))
        arrays = self._common(*(x.array for x in xs))
        return axes, [arrange(a, x.axes, axes) if x.axes else a for a, x in zip(arrays, xs, strict=True)]

    def _common(self, *xs: Any) -> list[Any]:
        """The arrays in one arithmetic type; Python numbers adapt to it by themselves."""
        dtypes: list[Any] = [numpy.dtype(x.dtype) for x in xs if hasattr(x, "dtype")]
        if not dtypes:
            return list(xs)
        to = numpy.dtype(self.dtype) if self.dtype is not None else _arithmetic_type(dtypes)
        return [x.astype(to) if hasattr(x, "dtype") and x.dtype != to else x for x in xs]


def _arithmetic_type(dtypes: Sequence[Any]) -> Any:
    if DTYPES["f64"].numpy in dtypes:
        return DTYPES["f64"].numpy
    if any(map(is_float, dtypes)):
        return DTYPES["f32"].numpy
    return DTYPES["i32" if all(t.itemsize <= 4 for t in dtypes) else "i64"].numpy


def are_allowed(x: Any, bound: Fraction | None, limit: Fraction | None, to_float: Callable[[Fraction], float]) -> bool:
    """Are all numbers above a bound, and smaller than a limit, or minus infinity?"""
    above = bound is None or bool((x > to_float(bound)).all())
    return above and (limit is None or bool(((abs(x) < to_float(limit)) | (x == -math.inf)).all()))


def _float(value: Fraction) -> float:
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def pasted(shape: tuple[int, ...], stored: Sequence[tuple[tuple[range, ...], NamedArray]]) -> Any:
    """Put the tiles of an array together; they cover it."""
    out = numpy.empty(shape, stored[0][1].array.dtype)
    for ranges, tile in stored:
        out[tuple(slice(r.start, r.stop) for r in ranges)] = tile.array
    return out


def contracted(x: NamedArray, y: NamedArray, axes: tuple[Axis, ...], matmul: Callable[[Any, Any], Any]) -> NamedArray:
    """Sum products over `axes` by one `matmul` of stacks of matrices (numpy's einsum does not use BLAS for batches)."""
    batch = tuple(a for a in x.axes if a in y.axes and a not in axes)
    rows = tuple(a for a in x.axes if a not in y.axes)
    columns = tuple(a for a in y.axes if a not in x.axes)
    a = arrange(x.array, x.axes, (*batch, *rows, *axes))
    b = arrange(y.array, y.axes, (*batch, *axes, *columns))
    outer, split, summed = len(batch), len(batch) + len(rows), len(axes)
    shape = (*a.shape[:split], *b.shape[outer + summed :])
    left = a.reshape(*a.shape[:outer], math.prod(a.shape[outer:split]), math.prod(a.shape[split:]))
    right = b.reshape(*b.shape[:outer], math.prod(a.shape[split:]), math.prod(b.shape[outer + summed :]))
    return NamedArray((*batch, *rows, *columns), matmul(left, right).reshape(shape))

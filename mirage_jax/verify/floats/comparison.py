"""Three results of one output, compared: the reference in float64, XLA's and the candidate's.

What the rules of `verify.floats.gate` are about is summed up in two looks at all elements: totals first, then rows, for
which the totals have to be known. On numpy arrays it is done in blocks that stay in the processor's cache; JAX arrays
are compared where they lie, each look one compiled function. Both are the same functions of a namespace, `xp`.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

type Array = np.ndarray

OVERFLOW_FRACTION = 15 / 16  # of the largest number of a type, beyond which rounding may decide what overflows
MAX_ULPS_ALONE = 16  # units in the last place that a candidate may be off where XLA's number is none
BOUNDLESS = 1e300  # stands for the relative error of what should be zero
COMPARED_ELEMENTS = 1 << 16  # elements compared at a time: intermediate results stay in the processor's cache


def on(array: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a namespace and arrays, as one of arrays like this one: of numpy's, or of JAX's, compiled for where
    they lie. What is passed by keyword alone is no array.
    """
    return functools.partial(function, np) if is_numpy(array) else _compiled(function)


def is_numpy(array: Any) -> bool:
    """Whether the array lies on the host."""
    return isinstance(array, np.ndarray | np.generic)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    import jax

    parameters = inspect.signature(function).parameters.values()
    static = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    run = jax.jit(functools.partial(function, jax.numpy), static_argnames=static)

    def in_float64(*args: Any, **kwargs: Any) -> Any:
        with jax.enable_x64(True):
            return jax.device_get(run(*args, **kwargs))

    return in_float64


def _nothing(like: Any) -> Any:
    """Zeros in float64, where a JAX array lies."""
    import jax

    with jax.enable_x64(True):
        return jax.numpy.zeros_like(like)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Some rows of the results in float64: the reference, XLA's error and the candidate's, zero where any of the three
    results is not finite or the reference is too large to be compared, and the noise.
    """

    good: Array
    r: Array
    ex: Array
    ec: Array
    noise: Array


def _rows(
    xp: Any, r: Array, x: Array, c: Array, noise: Array | None, written: Array | None, unit: float, below: float
) -> _Rows:
    good = xp.isfinite(x) & xp.isfinite(c) & (xp.abs(r) < below)
    if xp is not np or not good.all():
        r, x, c = (xp.where(good, a, 0.0) for a in (r, x, c))
    ex, ec = x - r, c - r
    if written is not None:
        most = unit * xp.abs(r).max(-1, keepdims=True)
        ew = xp.minimum(xp.where(good & xp.isfinite(written), xp.abs(written), 0.0), most)
        ex = xp.where(ew > xp.abs(ex), xp.copysign(ew, ex), ex)
    own = xp.zeros((1, 1)) if noise is None else xp.where(good & xp.isfinite(noise), xp.abs(noise), 0.0)
    return _Rows(good, r, ex, ec, own)


def _measures(xp: Any, x: Array) -> tuple[Array, Array, Array]:
    """Largest absolute value, sum, and sum of squares in units of the largest: the square of large values overflows."""
    top = xp.maximum(x.max(), -x.min())
    scaled = xp.ravel(x / xp.where(top > 0, top, 1.0))
    return top, x.sum(), scaled @ scaled


@dataclass
class _Total:
    """The measures of numbers that are seen in blocks."""

    largest: float = 0.0
    sum: float = 0.0
    squares: float = 0.0

    def add(self, top: Any, total: Any, squares: Any) -> None:
        """Add the measures of a block."""
        if top := float(top):
            largest = _larger(self.largest, top)
            self.squares *= (self.largest / largest) ** 2
            self.squares += float(squares) * (top / largest) ** 2
            self.largest = largest
            self.sum += float(total)

    def rms(self, n: int) -> float:
        """Root mean square of n numbers."""
        return self.largest * math.sqrt(self.squares / n)


@dataclass
class _Totals:
    n: int = 0  # elements that are finite in all three results
    floor: float = 0.0  # max |(r + 0.3 - 0.3) - r| in the type of the output
    r: _Total = field(default_factory=_Total)
    ex: _Total = field(default_factory=_Total)
    ec: _Total = field(default_factory=_Total)
    noise: _Total = field(default_factory=_Total)

    def add(self, n: Any, measures: Sequence[tuple[Any, Any, Any]]) -> None:
        """Add the measures of n elements."""
        self.n += int(n)
        for total, own in zip((self.r, self.ex, self.ec, self.noise), measures, strict=True):
            total.add(*own)


@dataclass
class Compared:
    """Three results of an output, compared in blocks: to get memory for large arrays takes longer than arithmetic."""

    reference64: Array
    xla: Array
    candidate: Array
    noise: Array | None
    written: Array | None
    unit: float
    below: float  # size of numbers from which on they are not compared; infinite: all that are finite are
    brink: float = math.inf  # XLA's numbers beyond may be infinite or NaN

    def _blocks(self, *arrays: Array) -> Iterator[tuple[int, list[Array]]]:
        """Some rows of each array in float64, and the place of the first element."""
        shape = self.xla.shape
        columns = shape[-1] if shape else 1
        flat = [np.broadcast_to(a, shape).reshape(-1, columns) for a in arrays]
        step = max(1, COMPARED_ELEMENTS // columns)
        for start in range(0, len(flat[0]), step):
            yield start * columns, [np.asarray(a[start : start + step], np.float64) for a in flat]

    def strange(self, kinds: bool, skips: bool) -> str:
        """What is wrong with the non-finite values, if anything."""
        found, first = 0, None
        noise = np.zeros(()) if self.noise is None else self.noise
        for start, (r, x, c, own) in self._blocks(self.reference64, self.xla, self.candidate, noise):
            if np.isfinite(x).all() and np.isfinite(c).all():
                continue
            count, n, *pair = _strange(np, (r, x, c, own), self.brink, kinds=kinds, skips=skips, dtype=self.xla.dtype)
            if count and first is None:
                first = start + n, *pair
            found += int(count)
        return self._told(found, first)

    def _told(self, found: int, first: tuple[Any, Any, Any] | None) -> str:
        """Say how many values are wrong, and where the first is: XLA's and the candidate's number there."""
        if not found or first is None:
            return ""
        n, x, c = first
        at = tuple(int(i) for i in np.unravel_index(n, self.xla.shape))
        return f"{found} non-finite values differ from XLA's, as {c} instead of {x} at {at}"

    def rows(self) -> Iterator[_Rows]:
        """Yield measures of rows, block by block."""
        nothing = np.zeros(())
        noise, written = (nothing if a is None else a for a in (self.noise, self.written))
        for _, (r, x, c, own, w) in self._blocks(self.reference64, self.xla, self.candidate, noise, written):
            own, w = (None if a is None else b for a, b in ((self.noise, own), (self.written, w)))
            yield _rows(np, r, x, c, own, w, self.unit, self.below)

    @functools.cached_property
    def totals(self) -> _Totals:
        """Measures over all elements."""
        found, dtype = _Totals(), self.xla.dtype
        seen = np.zeros(1 << 16, bool)  # of numbers of 16 bits there are only so many
        for rows in self.rows():
            found.add(rows.good.sum(), [_measures(np, x) for x in (rows.r, rows.ex, rows.ec, rows.noise)])
            with np.errstate(over="ignore"):  # a value may be too large for the type
                own = rows.r.astype(dtype)
            if dtype.itemsize == 2:
                seen[own.view(np.uint16)] = True
            else:
                found.floor = _larger(found.floor, _moved(own))
        if seen.any():
            found.floor = _moved(np.flatnonzero(seen).astype(np.uint16).view(dtype))
        return found

    def worst(self, most: float, own_rms: float, eps: float) -> tuple[float, float, float]:
        """The largest error of the candidate that rule 2 does not excuse, XLA's worst row and the candidate's."""
        found = [_worst(np, rows, most, own_rms, eps) for rows in self.rows()]
        largest, xla, ours = (functools.reduce(_larger, map(float, own)) for own in zip(*found, strict=True))
        return largest, xla, ours

    def over(self, ceiling: Array) -> float:
        """The largest of the candidate's errors over their bounds."""
        blocks = (own for _, (own,) in self._blocks(ceiling))
        over = (np.abs(rows.ec) / np.maximum(own, 1e-300) for rows, own in zip(self.rows(), blocks, strict=True))
        return functools.reduce(_larger, (float(x.max()) for x in over))


class OnDevice(Compared):
    """The same of JAX arrays, all at once where they lie."""

    @property
    def _arrays(self) -> tuple[Any, ...]:
        """The arrays. What is missing is zero if anything is there: code is compiled for two forms, not for four."""
        noise, written = self.noise, self.written
        given = written if noise is None else noise
        if given is not None:
            nothing = _nothing(given)
            noise, written = (nothing if a is None else a for a in (noise, written))
        return self.reference64, self.xla, self.candidate, noise, written

    def on_host(self) -> Compared:
        """Fetch the arrays."""
        arrays = self.reference64, self.xla, self.candidate, self.noise, self.written
        r, x, c, noise, written = (None if a is None else np.asarray(a) for a in arrays)
        assert r is not None and x is not None and c is not None
        return Compared(r, x, c, noise, written, self.unit, self.below, self.brink)

    def strange(self, kinds: bool, skips: bool) -> str:
        if self._seen["finite"]:
            return ""
        noise = np.zeros(()) if self.noise is None else self.noise
        arrays = self.reference64, self.xla, self.candidate, noise
        look = functools.partial(on(self.xla, _strange), kinds=kinds, skips=skips, dtype=self.xla.dtype)
        found, *first = look(arrays, self.brink)
        return self._told(int(found), (first[0], first[1], first[2]))

    @functools.cached_property
    def _seen(self) -> dict[str, Any]:
        return on(self.xla, _first_look)(self._arrays, self.unit, self.below)

    @functools.cached_property
    def totals(self) -> _Totals:
        found = _Totals(floor=float(self._seen["floor"]))
        found.add(self._seen["n"], self._seen["measures"])
        return found

    def worst(self, most: float, own_rms: float, eps: float) -> tuple[float, float, float]:
        largest, xla, ours = on(self.xla, _second_look)(self._arrays, self.unit, self.below, most, own_rms, eps)
        return float(largest), float(xla), float(ours)


def _in_rows(xp: Any, array: Any, shape: tuple[int, ...]) -> Array:
    """An array as rows of float64, of so many elements as one of this shape has."""
    columns = shape[-1] if shape else 1
    return xp.broadcast_to(array, shape).reshape(-1, columns).astype(xp.float64)


def _all_rows(xp: Any, arrays: Sequence[Any], unit: float, below: float) -> _Rows:
    wide = functools.partial(_in_rows, xp, shape=arrays[1].shape)
    r, x, c = map(wide, arrays[:3])
    noise, written = (None if a is None else wide(a) for a in arrays[3:])
    return _rows(xp, r, x, c, noise, written, unit, below)


def _first_look(xp: Any, arrays: Sequence[Any], unit: float, below: float) -> dict[str, Any]:
    rows = _all_rows(xp, arrays, unit, below)
    return {
        "finite": (xp.isfinite(arrays[1]) & xp.isfinite(arrays[2])).all(),
        "n": rows.good.sum(),
        "measures": [_measures(xp, x) for x in (rows.r, rows.ex, rows.ec, rows.noise)],
        "floor": _largest_moved(xp, rows.r.astype(arrays[1].dtype)),
    }


def _largest_moved(xp: Any, x: Array) -> Array:
    """`_moved` as XLA computes it, which would leave out roundings of 16 bits but for the barriers."""
    from jax.lax import optimization_barrier

    there = optimization_barrier(x + x.dtype.type(0.3))
    back = optimization_barrier(there - x.dtype.type(0.3))
    moved = xp.abs(back.astype(xp.float64) - x.astype(xp.float64))
    return xp.where(xp.isfinite(moved), moved, 0.0).max()


def _second_look(
    xp: Any, arrays: Sequence[Any], unit: float, below: float, most: float, own_rms: float, eps: float
) -> tuple[Array, Array, Array]:
    return _worst(xp, _all_rows(xp, arrays, unit, below), most, own_rms, eps)


def _worst(xp: Any, rows: _Rows, most: float, own_rms: float, eps: float) -> tuple[Array, Array, Array]:
    by_row = xp.maximum(rows.noise.max(-1, keepdims=True), own_rms)
    sizes = xp.maximum(xp.abs(rows.r), by_row)
    ours = xp.maximum(xp.abs(rows.ec) - 8 * by_row, 0.0)
    is_told = xp.abs(rows.ex).max(-1, keepdims=True) <= sizes.max(-1, keepdims=True)  # by some digit that XLA has right
    return (
        _largest_unfaithful(xp, rows.r, rows.ec, most, eps),
        _worst_row(xp, sizes, rows.ex),
        _worst_row(xp, sizes, xp.where(is_told, ours, 0.0)),
    )


def _larger(a: float, b: float) -> float:
    """The larger one, and NaN if one is: no rule allows it."""
    return float(np.maximum(a, b))


def _moved(x: Array) -> float:
    """max |(x + 0.3 - 0.3) - x|."""
    with np.errstate(over="ignore", invalid="ignore"):
        moved = np.abs(((x + x.dtype.type(0.3)) - x.dtype.type(0.3)).astype(np.float64) - x.astype(np.float64))
    return float(np.max(np.where(np.isfinite(moved), moved, 0.0)))


def _largest_unfaithful(xp: Any, r: Array, ec: Array, most: float, eps: float) -> Array:
    """The largest error; if that is more than `most`, the largest that is no faithful rounding."""
    size = xp.abs(ec)
    if xp is np and size.max() <= most:  # almost always: the rest takes its time
        return size.max()
    faithful = size < _unit(xp, xp.minimum(xp.abs(r), xp.abs(r + ec)), eps)
    return xp.where((size > most) & faithful, 0.0, size).max()


def _unit(xp: Any, size: Array, eps: float) -> Array:
    """The distance from a number to the next larger one of its type."""
    return xp.ldexp(eps, xp.frexp(size)[1] - 1) * (size != 0)


def _worst_row(xp: Any, r: Array, e: Array) -> Array:
    """The largest error of a row over its size; any error at all in a row of zeros is `BOUNDLESS`."""
    rows, errors = xp.abs(r).max(-1), xp.abs(e).max(-1)
    with np.errstate(over="ignore"):  # a row of denormal numbers
        in_zeros = xp.where(errors > 0, BOUNDLESS, 0.0)
        relative = xp.minimum(errors / xp.where(rows > 0, rows, 1.0), BOUNDLESS)
        return xp.max(xp.where(rows > 0, relative, in_zeros))


def _strange(
    xp: Any, arrays: Sequence[Array], brink: float, *, kinds: bool, skips: bool, dtype: np.dtype
) -> tuple[Any, Any, Any, Any]:
    """Count the wrong ones of the non-finite values; where the first is, XLA's and the candidate's number there. Where
    only XLA's are not finite, float64 judges. Beyond the range of the type an infinity may stand for XLA's NaN, which
    is one infinity less another: the candidate may hold either in a wider type.
    """
    r, x, c, noise = (_in_rows(xp, a, arrays[1].shape) for a in arrays)
    with np.errstate(invalid="ignore", over="ignore"):
        right = xp.isfinite(r) & (xp.abs(c - r) <= _allowed_alone(xp, r, noise, dtype))
        is_beyond = xp.abs(r) > float(ml_dtypes.finfo(dtype).max)  # XLA would leave out a conversion there and back
    repaired = ~xp.isfinite(x) & xp.isfinite(c) & (right | (skips & xp.isnan(x) & xp.isnan(r)))
    if kinds:
        differ = (xp.isnan(x) != xp.isnan(c)) | (xp.isinf(x) != xp.isinf(c)) | (xp.isinf(x) & (x != c))
    else:
        differ = xp.isfinite(x) != xp.isfinite(c)
    as_float64 = (xp.isnan(c) & xp.isnan(r)) | (xp.isinf(c) & is_beyond & (xp.sign(c) == xp.sign(r)))
    lost = is_beyond & xp.isnan(x) & xp.isinf(c)
    excused = repaired | lost | as_float64 | on_the_brink(x, c, dtype, xp) | (xp.isfinite(x) & (xp.abs(x) > brink))
    wrong = xp.ravel(differ & ~excused)
    first = xp.argmax(wrong)
    return wrong.sum(), first, xp.ravel(x)[first], xp.ravel(c)[first]


def _allowed_alone(xp: Any, r: Array, noise: Array, dtype: Any) -> Array:
    """How far a candidate may be from float64 where XLA gives no number to compare it with: in units in the last place
    of the largest number of its row that the type holds, and as far as the program's noise carries it.
    """
    info = ml_dtypes.finfo(dtype)
    size = xp.abs(r)
    held = xp.where(xp.isfinite(size) & (size <= float(info.max)), size, 0.0)
    most = xp.maximum(held.max(-1, keepdims=True), held)
    return MAX_ULPS_ALONE * float(info.eps) * most + 8 * xp.where(xp.isfinite(noise), noise, 0.0)


def on_the_brink(x: Array, c: Array, dtype: Any, xp: Any = np) -> Array:
    """Is c infinite where x is nearly, of the same sign?"""
    return (
        xp.isinf(c)
        & xp.isfinite(x)
        & (xp.sign(c) == xp.sign(x))
        & (xp.abs(x) > OVERFLOW_FRACTION * float(ml_dtypes.finfo(dtype).max))
    )

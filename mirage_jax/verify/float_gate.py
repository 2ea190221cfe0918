"""The floating-point gate: a candidate must be as accurate as XLA's code, against float64, on many classes of inputs.

Functions of arrays only: the caller runs the three programs. Results that are JAX arrays are compared where they lie:
to compare tens of millions of numbers takes a processor longer than all else that the gate does. Per output, ALL of
(e_x = XLA - r, e_c = candidate - r; r in float64):

1. equal shapes and dtypes; NaN where XLA has NaN, the same infinities (any of these for another where an input has
   some); but what float64 gives, rounded to the output's type, is always allowed (XLA in float16 may make NaN of an
   overflow that is none), and so is finite where only XLA is not, and should be; an infinity may stand for a number so
   close to the largest that rounding decides;
2. max |e_c| <= 2 spread max |e_x| + 2 max |(r + 0.3 - 0.3) - r|, the latter in the type of the output (FlashAttention's
   rule), or c is one of the two numbers of the output's type beside r (faithful rounding: where weights of a softmax
   are all but 0 and 1, XLA is exact, and a sum in another order may still round the other way);
3. rms(e_c) <= 1.5 spread rms(e_x) + 0.5 eps rms(r);
4. the worst row, max |e_c| / max |r| over its elements, is at most 2 spread times XLA's worst row + 4 eps: one wrong
   tile cannot hide;
5. bias: |mean e_c| / spread <= 2 |mean e_x| + 3 rms(e_c) / sqrt(N) + 0.5 eps rms(r) (the last term for inputs whose
   errors are all the same one);
6. |e_c| <= `ceiling`, if given: an a-priori bound, so that a bad XLA does not license a bad candidate;
7. if `exact` is set and XLA is exact, the candidate is exact: integers find wrong indices and masks that tolerances
   hide.

To what rules 2 to 5 allow comes the `noise` of the program itself (`verify.noise`), if given: four times its maximum in
rule 2; in rule 4, of each error, eight times its maximum in the row, or its rms (of many thousand rows some have little
noise by chance), and a row counts as no smaller than its noise; twice its rms in rule 3; its rms in 5.

`written` are errors of the program operation by operation, each of its intermediates rounded to its type. XLA leaves
such roundings out where it makes one kernel of several operations; but the program's text asks for them, so in rules 2
to 5 e_x is the larger of both. It is so only up to `unit`, which is one in the last place of the program's narrowest
type, times the largest number of a row: a bad program licenses no worse.

`spread` is 1 for a kernel that keeps the program's order of evaluation, 2 for another order (whose errors are others,
not more of the same), and doubled on `DEGENERATE` classes, where few errors are distinct and statistics over many say
less. For another order that includes `LOGITS`: without its exponential, such a class is one large column among small
ones. Integer and boolean outputs must equal XLA's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from mirage_jax.mugraph.arrays import is_float, random_integers

type Spec = tuple[tuple[int, ...], Any]  # shape, dtype
type Array = np.ndarray


@dataclass(frozen=True)
class GateResult:
    """`ratios`: measured over allowed, per rule; at most 1 where passed."""

    passed: bool
    reasons: tuple[str, ...] = ()
    ratios: tuple[tuple[str, float], ...] = ()

    def __bool__(self) -> bool:
        return self.passed


def float_gate(
    reference64: Array,
    xla: Array,
    candidate: Array,
    *,
    exact: bool = False,
    kinds: bool = True,
    ceiling: Array | None = None,
    spread: float = 1.0,
    skips: bool = False,
    noise: Array | None = None,
    written: Array | None = None,
    unit: float = 0.0,
) -> GateResult:
    """Is one output of the candidate as good as XLA's?

    `kinds` False: any non-finite value may stand for another (other orders of evaluation meet other infinities).
    `skips`: a finite value may stand for NaN (a loop that ends early leaves out zeros of a mask times infinities, which
    would be NaN).
    """
    if xla.shape != candidate.shape or xla.dtype != candidate.dtype or reference64.shape != xla.shape:
        return GateResult(False, (f"{candidate.dtype}{candidate.shape} instead of {xla.dtype}{xla.shape}",))
    if not is_float(xla.dtype):
        same = np.array_equal(xla, candidate)
        return GateResult(same, () if same else (f"{int((xla != candidate).sum())} elements differ from XLA's",))
    if xla.size == 0:
        return GateResult(True)
    compared = _OnDevice(reference64, xla, candidate, noise, written, unit)
    if _is_numpy(xla) or ceiling is not None or exact:
        compared = compared.on_host()
    if strange := compared.strange(kinds, skips):
        return GateResult(False, (strange,))
    limits = _limits(compared, spread)
    if limits is None:
        return GateResult(True)
    if ceiling is not None:
        limits["ceiling"] = (compared.over(ceiling), 1.0)
    if exact and not replace(compared, written=None).totals.ex.largest:
        limits["exact"] = (compared.totals.ec.largest, 0.0)
    reasons = tuple(
        f"{name}: {have:.3g}, allowed {most:.3g}" for name, (have, most) in limits.items() if not have <= most
    )
    ratios = tuple(
        (name, have / most if most else (0.0 if not have else np.inf)) for name, (have, most) in limits.items()
    )
    return GateResult(not reasons, reasons, ratios)


ROUNDING = {
    2: 0.1,
    4: 1e-2,
    8: 1e-6,
}  # rms error over rms value that XLA may have on ordinary inputs, by bytes of the narrowest type


def misread(reference64: Array, xla: Array, narrowest: int) -> str:
    """Does float64, which evaluates the program *as it was translated*, differ from XLA by more than rounding can
    explain?

    The certificate compares a candidate with the translated program, so the translation itself has to be compared
    with the user's own equations: a wrong rule gives errors of the order of the values. `narrowest`: bytes of the
    narrowest float. Returns what was found, or "". Meant for ordinary inputs, where rounding stays small.
    """
    if not is_float(xla.dtype):
        return ""
    seen = _on(xla, _misreading)(reference64, xla)
    beyond, some, size, error = (seen[name].item() for name in ("beyond", "some", "size", "error"))
    if beyond:  # nothing is in the range of XLA's types and not in that of float64
        r, x = (np.asarray(a, np.float64) for a in (reference64, xla))
        at = tuple(int(i) for i in np.argwhere(np.isfinite(x) & ~np.isfinite(r))[0])
        return f"the translated program gives {r[at]} instead of {x[at]} at {at}"
    if not some:
        return ""
    most = ROUNDING[narrowest]
    if error > most * size:
        return f"the translated program differs from the user's by {error:.2g}, the values being of size {size:.2g}"
    sizes, errors = (np.asarray(seen[name]) for name in ("sizes", "errors"))
    if (wrong := np.flatnonzero(errors > most * (sizes + size))).size:
        return (
            f"the translated program differs from the user's by {errors[wrong[0]]:.2g} in row {wrong[0]}, the values"
            f" there being of size {sizes[wrong[0]]:.2g}, all of size {size:.2g}"
        )
    return ""


def _misreading(xp: Any, r: Array, x: Array) -> dict[str, Array]:
    """Sizes and errors of what is finite, root mean squares over all and over each row: a rule may be wrong for a few
    elements, the last row of a mask, say.
    """
    r, x = r.astype(xp.float64), x.astype(xp.float64)
    good = xp.isfinite(r) & xp.isfinite(x)
    count, rows = xp.maximum(good.sum(), 1), (-1, r.shape[-1] if r.ndim > 1 else 1)
    squares = [xp.square(xp.where(good, a, 0.0)) for a in (r, xp.where(good, x, 0.0) - xp.where(good, r, 0.0))]
    size, error = (xp.sqrt(a.sum() / count) for a in squares)
    sizes, errors = (xp.sqrt(xp.mean(a.reshape(rows), axis=1)) for a in squares)
    found = {"beyond": (xp.isfinite(x) & ~good).any(), "some": good.any(), "size": size, "error": error}
    return {**found, "sizes": sizes, "errors": errors}


BRINK = 15 / 16  # of the largest number of a type, beyond which rounding may decide what overflows


def brink(in_range: Callable[[int], bool], most: int) -> int:
    """The largest n from 0 to `most` that is in range, -1 if none is, for a property that larger numbers lose."""
    low, high = -1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if in_range(middle) else (low, middle - 1)
    return low


def _strange(r: Array, x: Array, c: Array, kinds: bool, skips: bool, dtype: Any) -> Array:
    """Where the non-finite values are wrong."""
    repaired = ~np.isfinite(x) & (np.isfinite(r) | (skips & np.isnan(x) & np.isnan(r))) & np.isfinite(c)
    if kinds:
        differ = (np.isnan(x) != np.isnan(c)) | (np.isinf(x) != np.isinf(c)) | (np.isinf(x) & (x != c))
    else:
        differ = np.isfinite(x) != np.isfinite(c)
    with np.errstate(over="ignore"):
        ideal = r.astype(dtype).astype(np.float64)
    as_float64 = (np.isnan(c) & np.isnan(ideal)) | (np.isinf(c) & (c == ideal))
    return differ & ~repaired & ~as_float64 & ~_on_the_brink(x, c, dtype)


def _on_the_brink(x: Array, c: Array, dtype: Any) -> Array:
    """Is c infinite where x is nearly, of the same sign?"""
    return (
        np.isinf(c)
        & np.isfinite(x)
        & (np.sign(c) == np.sign(x))
        & (np.abs(x) > BRINK * float(ml_dtypes.finfo(dtype).max))
    )


def shorter_range(x: Array, c: Array) -> bool:
    """Is c not finite anywhere where x is, and not on the brink either?"""
    if not is_float(x.dtype):
        return False
    x64, c64 = x.astype(np.float64), c.astype(np.float64)
    return bool((np.isfinite(x64) & ~np.isfinite(c64) & ~_on_the_brink(x64, c64, x.dtype)).any())


BLOCK = 1 << 16  # elements that are compared at a time: what is computed of them stays in the processor's cache


def _on(array: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a namespace and arrays, as one of arrays like this one: of numpy's, or of JAX's, compiled for where
    they lie.
    """
    return functools.partial(function, np) if _is_numpy(array) else _compiled(function)


def _is_numpy(array: Any) -> bool:
    return isinstance(array, np.ndarray | np.generic)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    import jax

    run = jax.jit(functools.partial(function, jax.numpy))

    def in_float64(*args: Any) -> Any:
        with jax.enable_x64(True):
            return jax.device_get(run(*args))

    return in_float64


@dataclass(frozen=True, slots=True)
class _Rows:
    """Some rows of the results in float64: the reference, XLA's error and the candidate's, zero where any of the three
    results is not finite, and the noise.
    """

    good: Array
    r: Array
    ex: Array
    ec: Array
    noise: Array


def _rows(xp: Any, r: Array, x: Array, c: Array, noise: Array | None, written: Array | None, unit: float) -> _Rows:
    good = xp.isfinite(r) & xp.isfinite(x) & xp.isfinite(c)
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
        if top := float(top):
            largest = _larger(self.largest, top)
            self.squares *= (self.largest / largest) ** 2
            self.squares += float(squares) * (top / largest) ** 2
            self.largest = largest
            self.sum += float(total)

    def rms(self, n: int) -> float:
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
        self.n += int(n)
        for total, own in zip((self.r, self.ex, self.ec, self.noise), measures, strict=True):
            total.add(*own)


@dataclass
class _Compared:
    """Three results of an output, compared in blocks: to get memory for large arrays takes longer than arithmetic."""

    reference64: Array
    xla: Array
    candidate: Array
    noise: Array | None
    written: Array | None
    unit: float

    def _blocks(self, *arrays: Array) -> Iterator[tuple[int, list[Array]]]:
        """Some rows of each array in float64, and the place of the first element."""
        shape = self.xla.shape
        columns = shape[-1] if shape else 1
        flat = [np.broadcast_to(a, shape).reshape(-1, columns) for a in arrays]
        step = max(1, BLOCK // columns)
        for start in range(0, len(flat[0]), step):
            yield start * columns, [np.asarray(a[start : start + step], np.float64) for a in flat]

    def strange(self, kinds: bool, skips: bool) -> str:
        """What is wrong with the non-finite values, if anything."""
        found, text = 0, ""
        for start, (r, x, c) in self._blocks(self.reference64, self.xla, self.candidate):
            if np.isfinite(x).all() and np.isfinite(c).all():
                continue
            wrong = _strange(r, x, c, kinds, skips, self.xla.dtype)
            if wrong.any() and not found:
                n = int(np.flatnonzero(wrong)[0])
                at = tuple(int(i) for i in np.unravel_index(start + n, self.xla.shape))
                text = f"as {c.flat[n]} instead of {x.flat[n]} at {at}"
            found += int(wrong.sum())
        return f"{found} non-finite values differ from XLA's, {text}" if found else ""

    def rows(self) -> Iterator[_Rows]:
        nothing = np.zeros(())
        noise, written = (nothing if a is None else a for a in (self.noise, self.written))
        for _, (r, x, c, own, w) in self._blocks(self.reference64, self.xla, self.candidate, noise, written):
            own, w = (None if a is None else b for a, b in ((self.noise, own), (self.written, w)))
            yield _rows(np, r, x, c, own, w, self.unit)

    @functools.cached_property
    def totals(self) -> _Totals:
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


class _OnDevice(_Compared):
    """The same of JAX arrays, all at once where they lie."""

    @property
    def _arrays(self) -> tuple[Any, ...]:
        return self.reference64, self.xla, self.candidate, self.noise, self.written

    def on_host(self) -> _Compared:
        r, x, c, noise, written = (None if a is None else np.asarray(a) for a in self._arrays)
        assert r is not None and x is not None and c is not None
        return _Compared(r, x, c, noise, written, self.unit)

    def strange(self, kinds: bool, skips: bool) -> str:
        if _on(self.xla, _all_finite)(self.xla, self.candidate):
            return ""
        return self.on_host().strange(kinds, skips)

    @functools.cached_property
    def totals(self) -> _Totals:
        found = _Totals()
        n, measures, floor = _on(self.xla, _first_look)(self._arrays, self.unit)
        found.add(n, measures)
        found.floor = float(floor)
        return found

    def worst(self, most: float, own_rms: float, eps: float) -> tuple[float, float, float]:
        largest, xla, ours = _on(self.xla, _second_look)(self._arrays, self.unit, most, own_rms, eps)
        return float(largest), float(xla), float(ours)


def _all_finite(xp: Any, *arrays: Array) -> Array:
    return xp.stack([xp.isfinite(a).all() for a in arrays]).all()


def _all_rows(xp: Any, arrays: Sequence[Any], unit: float) -> _Rows:
    columns = arrays[1].shape[-1] if arrays[1].shape else 1
    wide = lambda a: a.reshape(-1, columns).astype(xp.float64)  # noqa: E731
    r, x, c = map(wide, arrays[:3])
    noise, written = (None if a is None else wide(a) for a in arrays[3:])
    return _rows(xp, r, x, c, noise, written, unit)


def _first_look(xp: Any, arrays: Sequence[Any], unit: float) -> tuple[Any, ...]:
    rows = _all_rows(xp, arrays, unit)
    measures = [_measures(xp, x) for x in (rows.r, rows.ex, rows.ec, rows.noise)]
    return rows.good.sum(), measures, _largest_moved(xp, rows.r.astype(arrays[1].dtype))


def _largest_moved(xp: Any, x: Array) -> Array:
    """`_moved` as XLA computes it, which would leave out roundings of 16 bits but for the barriers."""
    from jax.lax import optimization_barrier

    there = optimization_barrier(x + x.dtype.type(0.3))
    back = optimization_barrier(there - x.dtype.type(0.3))
    moved = xp.abs(back.astype(xp.float64) - x.astype(xp.float64))
    return xp.where(xp.isfinite(moved), moved, 0.0).max()


def _second_look(
    xp: Any, arrays: Sequence[Any], unit: float, most: float, own_rms: float, eps: float
) -> tuple[Array, Array, Array]:
    return _worst(xp, _all_rows(xp, arrays, unit), most, own_rms, eps)


def _worst(xp: Any, rows: _Rows, most: float, own_rms: float, eps: float) -> tuple[Array, Array, Array]:
    by_row = xp.maximum(rows.noise.max(-1, keepdims=True), own_rms)
    sizes = xp.maximum(xp.abs(rows.r), by_row)
    ours = xp.maximum(xp.abs(rows.ec) - 8 * by_row, 0.0)
    return (
        _largest_unfaithful(xp, rows.r, rows.ec, most, eps),
        _worst_row(xp, sizes, rows.ex),
        _worst_row(xp, sizes, ours),
    )


def _limits(compared: _Compared, spread: float) -> dict[str, tuple[float, float]] | None:
    """Rules 2 to 5: measured and allowed. None if nothing is finite."""
    totals = compared.totals
    if not (n := totals.n):
        return None
    eps = float(ml_dtypes.finfo(compared.xla.dtype).eps)
    own_rms, size = totals.noise.rms(n), totals.r.rms(n)
    most = 2 * spread * totals.ex.largest + 2 * totals.floor + 4 * totals.noise.largest
    unfaithful, worst_xla, worst = compared.worst(most, own_rms, eps)
    rms = totals.ec.rms(n)
    bias = 2 * abs(totals.ex.sum) / n + 3 * rms / n**0.5 + 0.5 * eps * size + own_rms
    return {
        "max error": (unfaithful, most),
        "rms error": (rms, 1.5 * spread * totals.ex.rms(n) + 0.5 * eps * size + 2 * own_rms),
        "worst row": (worst, 2 * spread * worst_xla + 4 * eps),
        "bias": (abs(totals.ec.sum) / n / spread, bias),
    }


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
    rows, errors = xp.abs(r).max(-1), xp.abs(e).max(-1)
    with np.errstate(over="ignore"):  # a row of denormal numbers
        return xp.max(xp.where(rows > 0, errors / xp.where(rows > 0, rows, 1.0), 0.0))


# --- inputs


class InputClasses(Mapping[str, list[Array]]):
    """Classes of inputs by name; made when asked for, since a set of weights is large."""

    def __init__(
        self, specs: Sequence[Spec], seed: int, near: Sequence[float], roots: Collection[int], counts: Mapping[int, int]
    ):
        self.specs, self.seed = [(tuple(s), np.dtype(d)) for s, d in specs], seed
        self.roots, self.counts = frozenset(roots), counts
        self.own = {f"near {value:.6g}": _near(value) for value in near}  # classes of this program alone
        self.own |= {BELOW_ZERO: _far_from_zero(self.roots)} if self.roots else {}
        self.makers = CLASSES | self.own

    def __getitem__(self, name: str) -> list[Array]:
        rng = np.random.default_rng([self.seed, *name.encode()])
        draw = _draw if name in LOGITS else _repeated
        out = [
            _indices(rng, shape, dtype, self.counts[i])
            if i in self.counts
            else draw(self.makers[name], rng, shape, dtype, i)
            for i, (shape, dtype) in enumerate(self.specs)
        ]
        if name != BELOW_ZERO:
            out = [np.abs(x) if i in self.roots and is_float(x.dtype) else x for i, x in enumerate(out)]
        if name in SPOILED:
            _spoil(out, rng, SPOILED[name])
        return out

    def __iter__(self) -> Iterator[str]:
        return iter(self.makers)

    def __len__(self) -> int:
        return len(self.makers)


def input_classes(
    specs: Sequence[Spec],
    seed: int,
    near: Sequence[float] = (),
    roots: Collection[int] = (),
    counts: Mapping[int, int] = MappingProxyType({}),
) -> InputClasses:
    """The input classes of the gate for arrays of the given shapes and dtypes, and one for each value in `near`: where
    a program subtracts a constant, inputs that are almost this constant.

    Inputs in `roots`, by position, have no negative numbers, since the program takes roots or logarithms of them (as
    AdamW does of second moments): half of the results would be NaN, and rounding decide which. But in one class more
    they have, far from zero. `counts` has inputs of integers that are compared with indices, by position, and how many
    indices: lengths and labels.
    """
    return InputClasses(specs, seed, near, roots, counts)


type Maker = Callable[[np.random.Generator, tuple[int, ...], int], Array]
LARGE, ROWS = 1 << 23, 251  # elements of an array that takes long to draw, and how many of its rows are drawn then


def _indices(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, count: int) -> Array:
    """Any of so many indices; every fourth is one of the first, since few or no elements are a case of their own."""
    few = rng.integers(0, min(4, count), shape)
    return np.asarray(np.where(rng.random(shape) < 0.25, few, rng.integers(0, count, shape)), dtype)


def _draw(make: Maker, rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, position: int) -> Array:
    if dtype.kind == "b":
        return np.asarray(rng.random(shape) < 0.9)
    if not is_float(dtype):
        return random_integers(rng, shape, dtype)
    most = float(ml_dtypes.finfo(dtype).max)
    return np.asarray(np.clip(make(rng, shape, position), -most, most), dtype)  # an array also where the shape is ()


def _repeated(make: Maker, rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, position: int) -> Array:
    """The same; of a large array some rows, again and again. Their number is a prime, so that no tile is another."""
    if len(shape) < 2 or shape[0] <= ROWS or math.prod(shape) <= LARGE:
        return _draw(make, rng, shape, dtype, position)
    rows = _draw(make, rng, (ROWS, *shape[1:]), dtype, position)
    return rows[np.arange(shape[0]) % ROWS]


def _normal(rng: np.random.Generator, shape: tuple[int, ...], position: int) -> Array:
    return rng.standard_normal(shape)


def _scaled(scale: float) -> Maker:
    return lambda rng, shape, position: scale * rng.standard_normal(shape)


def _near(value: float) -> Maker:
    return lambda rng, shape, position: value * (1 + 1e-2 * rng.standard_normal(shape))


def _far_from_zero(roots: Collection[int]) -> Maker:
    return lambda rng, shape, position: (
        rng.choice([-FAR, FAR], shape) if position in roots else rng.standard_normal(shape)
    )


def _zero_rows(rng: np.random.Generator, shape: tuple[int, ...], position: int) -> Array:
    return rng.standard_normal(shape) * (rng.random((*shape[:-1], 1)[: len(shape)]) < 0.5)


def _one_hot(rng: np.random.Generator, shape: tuple[int, ...], position: int) -> Array:
    if not shape or shape[-1] == 0:
        return np.ones(shape)
    return (np.arange(shape[-1]) == rng.integers(0, shape[-1], (*shape[:-1], 1))).astype(np.float64)


def _constant_rows(rng: np.random.Generator, shape: tuple[int, ...], position: int) -> Array:
    return np.broadcast_to(rng.standard_normal((*shape[:-1], 1)[: len(shape)]), shape)


def _cancelling(rng: np.random.Generator, shape: tuple[int, ...], position: int) -> Array:
    """Pairs a, -a and a little noise, along the last dimension."""
    x = rng.standard_normal(shape)
    if shape and shape[-1] > 1:
        half = shape[-1] // 2
        x[..., half : 2 * half] = -x[..., :half]
    return x + 1e-3 * rng.standard_normal(shape)


def _far(*dims: int) -> Maker:
    """Ordinary values, but one index of a dimension is +-45: products of two such are near +-2000, spread as usual."""

    def make(rng: np.random.Generator, shape: tuple[int, ...], position: int) -> Array:
        x = rng.standard_normal(shape)
        dim = dims[min(position, len(dims) - 1)]
        if len(shape) >= 2 and shape[dim] > 0:
            sign = rng.choice([-1.0, 1.0], shape) if position == 0 else 1.0
            np.copyto(
                x, 45.0 * sign, where=np.moveaxis(np.arange(shape[dim]) == np.zeros((1,) * len(shape), int), -1, dim)
            )
        return x

    return make


ORDINARY = ("normal", "uniform")
BELOW_ZERO, FAR = "below zero", 2.0**13  # under roots; sums of products of such numbers are exact
CLASSES: dict[str, Maker] = {
    "normal": _normal,
    "small": _scaled(1e-3),
    "large": _scaled(1e3),
    "uniform": lambda rng, shape, position: rng.random(shape),
    "heavy tail": lambda rng, shape, position: rng.standard_t(2, shape),
    "zeros": lambda rng, shape, position: np.zeros(shape),
    "zero rows": _zero_rows,
    "one hot": _one_hot,
    "constant rows": _constant_rows,
    "cancelling": _cancelling,
    "integers": lambda rng, shape, position: rng.integers(-3, 4, shape).astype(np.float64),
    "large logits": _far(-1, -2),
    "large logits, transposed": _far(-1),
    "denormal": _scaled(1e-39),
    "near overflow": lambda rng, shape, position: rng.choice([-1.0, 1.0], shape) * (6e4 if position == 0 else 1.0),
    "nan": _normal,
    "inf": _normal,
    "-inf": _normal,
}
DEGENERATE = frozenset(
    {"constant rows", "near overflow", "large logits, transposed", "one hot", "denormal", "nan", "inf", "-inf"}
)
LOGITS = frozenset({"large logits", "large logits, transposed"})
SPOILED = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}  # classes in which one element of one input has this value


def _spoil(arrays: list[Array], rng: np.random.Generator, value: float) -> None:
    eligible = [x for x in arrays if is_float(x.dtype) and x.size]
    if eligible:
        x = eligible[rng.integers(len(eligible))]
        x.reshape(-1)[rng.integers(x.size)] = value

"""The floating-point gate: a candidate must be as accurate as XLA's code, against float64, on many classes of inputs.

Functions of arrays only: the caller runs the three programs. Per output, ALL of (e_x = XLA - r, e_c = candidate - r;
r in float64):

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
    compared = _Compared(reference64, xla, candidate, noise, written, unit)
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
    r, x = (np.asarray(a, np.float64) for a in (reference64, xla))
    good = np.isfinite(r) & np.isfinite(x)
    if (np.isfinite(x) & ~good).any():  # nothing is in the range of XLA's types and not in that of float64
        at = tuple(int(i) for i in np.argwhere(np.isfinite(x) & ~good)[0])
        return f"the translated program gives {r[at]} instead of {x[at]} at {at}"
    if not good.any():
        return ""
    most = ROUNDING[narrowest]
    size, error = (float(np.sqrt(np.mean(np.square(a)))) for a in (r[good], x[good] - r[good]))
    if error > most * size:
        return f"the translated program differs from the user's by {error:.2g}, the values being of size {size:.2g}"
    rows = (-1, r.shape[-1] if r.ndim > 1 else 1)  # a rule may be wrong for a few elements: the last row of a mask, say
    r, x = (np.where(good, a, 0.0).reshape(rows) for a in (r, x))
    sizes, errors = (np.sqrt(np.mean(np.square(a), axis=1)) for a in (r, x - r))
    if (wrong := np.flatnonzero(errors > most * (sizes + size))).size:
        return (
            f"the translated program differs from the user's by {errors[wrong[0]]:.2g} in row {wrong[0]}, the values"
            f" there being of size {sizes[wrong[0]]:.2g}, all of size {size:.2g}"
        )
    return ""


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


@dataclass
class _Total:
    """The largest absolute value of numbers that are seen in blocks, their sum, and their root mean square."""

    largest: float = 0.0
    sum: float = 0.0
    squares: float = 0.0  # in units of the largest, or the square of large values overflows

    def add(self, x: Array) -> None:
        if top := float(max(x.max(), -x.min())):
            scaled = np.ravel(x) / top
            largest = _larger(self.largest, top)
            self.squares *= (self.largest / largest) ** 2
            self.squares += float(scaled @ scaled) * (top / largest) ** 2
            self.largest = largest
            self.sum += float(x.sum())

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
            good = np.isfinite(r) & np.isfinite(x) & np.isfinite(c)
            if not good.all():
                r, x, c = (np.where(good, a, 0.0) for a in (r, x, c))
            ex, ec = x - r, c - r
            if self.written is not None:
                most = self.unit * np.abs(r).max(-1, keepdims=True)
                ew = np.minimum(np.where(good & np.isfinite(w), np.abs(w), 0.0), most)
                ex = np.where(ew > np.abs(ex), np.copysign(ew, ex), ex)
            if self.noise is not None:
                own = np.where(good & np.isfinite(own), np.abs(own), 0.0)
            yield _Rows(good, r, ex, ec, own)

    @functools.cached_property
    def totals(self) -> _Totals:
        found, dtype = _Totals(), self.xla.dtype
        seen = np.zeros(1 << 16, bool)  # of numbers of 16 bits there are only so many
        for rows in self.rows():
            found.n += int(rows.good.sum())
            for total, x in ((found.r, rows.r), (found.ex, rows.ex), (found.ec, rows.ec)):
                total.add(x)
            if self.noise is not None:
                found.noise.add(rows.noise)
            with np.errstate(over="ignore"):  # a value may be too large for the type
                own = rows.r.astype(dtype)
            if dtype.itemsize == 2:
                seen[own.view(np.uint16)] = True
            else:
                found.floor = _larger(found.floor, _moved(own))
        if seen.any():
            found.floor = _moved(np.flatnonzero(seen).astype(np.uint16).view(dtype))
        return found

    def over(self, ceiling: Array) -> float:
        """The largest of the candidate's errors over their bounds."""
        blocks = (own for _, (own,) in self._blocks(ceiling))
        over = (np.abs(rows.ec) / np.maximum(own, 1e-300) for rows, own in zip(self.rows(), blocks, strict=True))
        return functools.reduce(_larger, (float(x.max()) for x in over))


def _limits(compared: _Compared, spread: float) -> dict[str, tuple[float, float]] | None:
    """Rules 2 to 5: measured and allowed. None if nothing is finite."""
    totals = compared.totals
    if not (n := totals.n):
        return None
    eps = float(ml_dtypes.finfo(compared.xla.dtype).eps)
    own_rms, size = totals.noise.rms(n), totals.r.rms(n)
    most = 2 * spread * totals.ex.largest + 2 * totals.floor + 4 * totals.noise.largest
    unfaithful, worst_xla, worst = 0.0, 0.0, 0.0
    for rows in compared.rows():
        by_row = np.maximum(rows.noise.max(-1, keepdims=True), own_rms)
        sizes = np.maximum(np.abs(rows.r), by_row)
        unfaithful = _larger(unfaithful, _largest_unfaithful(rows.r, rows.ec, most, eps))
        worst_xla = _larger(worst_xla, _worst_row(sizes, rows.ex))
        worst = _larger(worst, _worst_row(sizes, np.maximum(np.abs(rows.ec) - 8 * by_row, 0.0)))
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


def _largest_unfaithful(r: Array, ec: Array, most: float, eps: float) -> float:
    """The largest error; if that is more than `most`, the largest that is no faithful rounding."""
    size = np.abs(ec)
    if (largest := float(size.max())) <= most:
        return largest
    far = size > most
    r, ec, size = r[far], ec[far], size[far]
    return float(np.where(size < _unit(np.minimum(np.abs(r), np.abs(r + ec)), eps), 0.0, size).max())


def _unit(size: Array, eps: float) -> Array:
    """The distance from a number to the next larger one of its type."""
    return np.ldexp(eps, np.frexp(size)[1] - 1) * (size != 0)


def _worst_row(r: Array, e: Array) -> float:
    rows, errors = np.abs(r).max(-1), np.abs(e).max(-1)
    with np.errstate(over="ignore"):  # a row of denormal numbers
        return float(np.max(np.where(rows > 0, errors / np.where(rows > 0, rows, 1.0), 0.0)))


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

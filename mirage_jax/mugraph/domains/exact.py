"""Exact numbers in place of floats, on which a kernel's text and its graph can be run and compared bit for bit.

A number is a residue modulo P, a residue modulo Q with Q | P - 1, and a float. Sums, products and quotients are exact
in both residues, in any order; ``exp(x) = w ** x_q`` with w of order Q modulo P turns sums into products, so that a
running softmax is exact too (compare `field`). The float says what order and infinities need: which of two numbers is
larger, whether a value is masked with minus infinity or is no number at all. It never enters a residue. So:

* other functions (square roots, logarithms, ..) are hashes of the residue modulo P, except that sin(0) = 0 and so on,
  and so is what an exponential leaves modulo Q: a second exponential sees all of its argument, and a softmax relative
  to another shift, which is right modulo P, differs modulo Q;
* an exponential of minus infinity is 0, its reciprocal not a number that equals any other;
* constants are exact fractions; log2(e) is an arbitrary number `LOG2E`, since no identity of rationals knows it.

The primes are fixed: this finds errors of indices, masks, loops and constants, and no one chooses programs against it.
A wrong value agrees by chance with probability about 1/Q.

Numbers are numpy arrays of the structured type `EXACT`: whatever only moves elements around needs not know about them.
"""

# Arrays of a structured type have no elements that a type checker could know.
# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cache, reduce
from typing import Any

import numpy as np

from mirage_jax.errors import UnsupportedError

P, Q, W = 60554803, 131071, 32227351  # primes, P = 462 Q + 1 < 2**26; W has order Q modulo P
EXACT = np.dtype([("p", np.int64), ("q", np.int64), ("real", np.float64)])
MODERATE = 2.0**30  # of constants, above which floats grow as logarithms do: sentinels are as large as floats can be
MAX_RESIDUE_OFFSET = 2.0**-20  # of the float of a hash, which tells its residue
HALF = 1 << 13  # products with residues below it can be summed in float64 without rounding, up to 2**14 of them

type Numbers = Any  # an array of type EXACT


def made(p: Any, q: Any, real: Any) -> Numbers:
    """Build numbers from their three parts, which broadcast."""
    out = np.empty(np.broadcast_shapes(np.shape(p), np.shape(q), np.shape(real)), EXACT)
    out["p"], out["q"], out["real"] = p, q, real
    return out


def constant(value: Fraction) -> Numbers:
    """A number without dimensions."""
    n, d = value.numerator, value.denominator
    if d % P == 0 or d % Q == 0:
        raise UnsupportedError(f"the denominator of {value} is 0 modulo {P} or {Q}")
    try:
        real = _moderate(float(value))
    except OverflowError:
        real = math.copysign(math.inf, n)
    return made(n * pow(d, -1, P) % P, n * pow(d, -1, Q) % Q, real)


def _moderate(real: float) -> float:
    """The float of a constant: in the order of constants, but small enough that sums with it keep their digits.

    Of equal floats nobody could tell which is larger, and a kernel may ask in another order than its graph.
    """
    if abs(real) <= MODERATE:
        return real
    return math.copysign(MODERATE * (1 + (math.log2(abs(real)) - math.log2(MODERATE)) / 64), real)


def special(real: float) -> Numbers:
    """An infinity, or NaN."""
    return made(0, 0, real)


def integers(values: Any) -> Numbers:
    """Integers or truth values as numbers."""
    values = np.asarray(values, np.int64)
    return made(values % P, values % Q, values.astype(np.float64))


def random_numbers(rng: np.random.Generator, shape: tuple[int, ...]) -> Numbers:
    """Uniform residues; small floats, so that none overflows."""
    return made(rng.integers(P, size=shape), rng.integers(Q, size=shape), rng.uniform(-1, 1, shape))


ZERO, ONE, MINUS_INFINITY = constant(Fraction(0)), constant(Fraction(1)), special(-math.inf)
LOG2E = made(9017031, 74606, math.log2(math.e))

# --- arithmetic


def add(x: Numbers, y: Numbers) -> Numbers:
    """x + y."""
    return made((x["p"] + y["p"]) % P, (x["q"] + y["q"]) % Q, x["real"] + y["real"])


def negative(x: Numbers) -> Numbers:
    """-x."""
    return made(-x["p"] % P, -x["q"] % Q, -x["real"])


def subtract(x: Numbers, y: Numbers) -> Numbers:
    """x - y."""
    return add(x, negative(y))


def multiply(x: Numbers, y: Numbers) -> Numbers:
    """x * y."""
    return made(x["p"] * y["p"] % P, x["q"] * y["q"] % Q, x["real"] * y["real"])


LOST_IN_ROUNDING = 1e100  # the float of 1 / x where that of x is zero and x is not


def inverse(x: Numbers) -> Numbers:
    """1 / x; a zero divisor always has the same one. A zero float of another number was lost in rounding, as x is in
    (1 + x) - 1, and gives no infinity.
    """
    with np.errstate(divide="ignore"):
        real = np.where((x["real"] == 0) & (x["p"] != 0), LOST_IN_ROUNDING, 1 / x["real"])
        out = made(_raised(x["p"], P - 2, P), _raised(x["q"], Q - 2, Q), real)
    return choose(np.isinf(x["real"]), ZERO, out)


def divide(x: Numbers, y: Numbers) -> Numbers:
    """x / y, by way of `inverse`."""
    return multiply(x, inverse(y))


def power(x: Numbers, n: int) -> Numbers:
    """x ** n for n >= 0."""
    return made(_raised(x["p"], n, P), _raised(x["q"], n, Q), x["real"] ** n)


def _raised(x: Any, n: int, m: int) -> Any:
    out = np.ones_like(x)
    while n:
        if n & 1:
            out = out * x % m
        x, n = x * x % m, n >> 1
    return out


def total(x: Numbers, dims: tuple[int, ...]) -> Numbers:
    """Sum over dimensions."""
    p, q, real = (np.sum(x[part], axis=dims) for part in ("p", "q", "real"))
    return made(p % P, q % Q, real)


def matmul(x: Numbers, y: Numbers) -> Numbers:
    """Multiply stacks of matrices, as `numpy.matmul` does."""
    return made(_product(x["p"], y["p"], P), _product(x["q"], y["q"], Q), _in_order(x["real"], y["real"]))


def _in_order(x: Any, y: Any) -> Any:
    """Multiply matrices of floats, term by term: BLAS rounds the same row in other ways in larger matrices.

    Rows that are equal as floats have to stay equal, whatever tile they are in: `largest` chooses among all of these.
    """
    terms = (x[..., :, n, None] * y[..., n, None, :] for n in range(x.shape[-1]))
    return reduce(np.add, terms)


def _product(x: Any, y: Any, m: int) -> Any:
    """A matrix product modulo m in float64, in which numpy is fast; x in two parts if sums would round otherwise."""
    y = y.astype(np.float64)
    if m * m * x.shape[-1] < 1 << 53:
        return (x.astype(np.float64) @ y).astype(np.int64) % m
    low, high = ((part.astype(np.float64) @ y).astype(np.int64) % m for part in (x % HALF, x // HALF))
    return (high * HALF + low) % m


# --- exponentials and other functions


@cache
def _powers() -> Any:
    """W ** k for all k below Q."""
    out, step = np.ones(1, np.int64), W
    while len(out) < Q:
        out, step = np.concatenate([out, out * step % P]), step * step % P
    return out[:Q]


def exp(x: Numbers) -> Numbers:
    """Turn residues modulo Q into exponents of W; what remains modulo Q is a hash."""
    p = _powers()[x["q"]]
    with np.errstate(over="ignore"):
        out = made(p, np.where(p == 1, 1, _mixed(p, 0) % Q), np.exp(x["real"]))  # exp(0) is 1 in both
    return choose(x["real"] == -math.inf, ZERO, out)


def exp2(x: Numbers) -> Numbers:
    """2 ** x."""
    return exp(divide(x, LOG2E))


def log2(x: Numbers) -> Numbers:
    """Logarithm to base 2."""
    return multiply(log(x), LOG2E)


def _mixed(p: Any, seed: int) -> Any:
    """A hash with 63 bits (the finalizer of splitmix64)."""
    z = np.asarray(p).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15 * (seed + 1) % (1 << 64))
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(1)).astype(np.int64)


def _hashed(seed: int, real: Callable[[Any], Any], known: Mapping[int, int]) -> Callable[[Numbers], Numbers]:
    """A function that is known as a float and at some integers: kernels count on its values for the constants in
    padded lanes, as on sin(0) = 0.

    The float of a hash tells its residue: 0.2 and 0.7 have one floor as floats and two as residues, and of a tie
    `maximum` would take another one after a multiplication.
    """

    def _function(x: Numbers) -> Numbers:
        p, q, finite = _mixed(x["p"], 2 * seed) % P, _mixed(x["p"], 2 * seed + 1) % Q, np.isfinite(x["real"])
        for at, value in known.items():
            here = finite & (x["p"] == at)
            p, q = np.where(here, value, p), np.where(here, value, q)
        with np.errstate(all="ignore"):
            return made(p, q, real(x["real"]) + MAX_RESIDUE_OFFSET / P * p)

    return _function


def _real_erf(x: Any) -> Any:
    import scipy.special  # pyright: ignore[reportMissingTypeStubs]  # it takes a while to load

    return scipy.special.erf(x)


# of magnitudes, where a function has no value for negative numbers: residues have no sign
log = _hashed(1, lambda x: np.log(np.abs(x)), {1: 0})
sqrt = _hashed(2, lambda x: np.sqrt(np.abs(x)), {0: 0, 1: 1})
erf = _hashed(3, _real_erf, {0: 0})
sin = _hashed(4, np.sin, {0: 0})
cos = _hashed(5, np.cos, {0: 1})
floor = _hashed(6, np.floor, {0: 0, 1: 1})


def rsqrt(x: Numbers) -> Numbers:
    """1 / sqrt(x)."""
    return inverse(sqrt(x))


# --- order and choice


def choose(condition: Any, x: Any, y: Any) -> Any:
    """Take x where the condition holds, else y."""
    return np.where(condition, x, y)


def equal(x: Numbers, y: Numbers) -> Any:
    """Truth values. Two finite numbers are equal if they are so modulo P."""
    finite = is_finite(x) & is_finite(y)
    return choose(finite, x["p"] == y["p"], x["real"] == y["real"])


def less(x: Numbers, y: Numbers) -> Any:
    """x < y, as truth values; equal residues are not less."""
    return (x["real"] < y["real"]) & ~equal(x, y)


def less_equal(x: Numbers, y: Numbers) -> Any:
    """x <= y, as truth values."""
    return (x["real"] < y["real"]) | equal(x, y)


def maximum(x: Numbers, y: Numbers) -> Numbers:
    """The larger float, of equal ones as `largest` chooses; NaN wins."""
    both = np.stack(np.broadcast_arrays(x, y))
    return largest(both, 0)


def minimum(x: Numbers, y: Numbers) -> Numbers:
    """Mirror `maximum`."""
    return negative(maximum(negative(x), negative(y)))


def largest(x: Numbers, dim: int, of_equal: int = 1) -> Numbers:
    """`maximum` over a dimension.

    Of equal floats it is the number that is the largest residue of their sum, or the smallest if `of_equal` is -1.
    Neither their order nor a common factor changes that: a graph may scale before a maximum, and a kernel after it.
    """
    real = x["real"]
    top = np.isnan(real) | (real == np.max(real, axis=dim, keepdims=True))
    share = x["p"]
    if np.any(np.sum(top, axis=dim) > 1):
        of_all = np.sum(np.where(top, share, 0), axis=dim, keepdims=True) % P
        share = share * _raised(of_all, P - 2, P) % P
    place = np.expand_dims(np.argmax(np.where(top, of_equal * share, -P), axis=dim), dim)
    return np.take_along_axis(x, place, axis=dim).squeeze(dim)


def is_zero(x: Numbers) -> Any:
    """Test for zero modulo P: truth values."""
    return equal(x, ZERO)


def is_finite(x: Numbers) -> Any:
    """Tell numbers from infinities and NaN: truth values."""
    return np.isfinite(x["real"])


def sign(x: Numbers) -> Numbers:
    """Return -1, 0 or 1."""
    return subtract(integers(less(ZERO, x)), integers(less(x, ZERO)))


def absolute(x: Numbers) -> Numbers:
    """Drop the sign, which the float tells."""
    return choose(less(x, ZERO), negative(x), x)


def differences(x: Numbers, y: Numbers) -> Any:
    """Where two arrays of numbers are not the same: another residue, or another infinity or NaN."""
    finite = is_finite(x) & is_finite(y)
    strange = np.where(np.isnan(x["real"]), ~np.isnan(y["real"]), x["real"] != y["real"])
    return np.where(finite, (x["p"] != y["p"]) | (x["q"] != y["q"]), strange)


def logistic(x: Numbers) -> Numbers:
    """1 / (1 + exp(-x))."""
    return inverse(add(ONE, exp(negative(x))))


def tanh(x: Numbers) -> Numbers:
    """1 - 2 / (1 + exp(2 x)), and a series near 0, as kernels write it."""
    two, square, series = add(ONE, ONE), multiply(x, x), ONE
    for coefficient in (0.4047619104385376, 0.4000000059604645, 0.3333333432674408):
        series = subtract(ONE, multiply(multiply(square, constant(Fraction(coefficient))), series))
    by_exp = subtract(ONE, divide(two, add(ONE, exp(multiply(two, x)))))
    return choose(less(absolute(x), constant(Fraction(1, 8))), multiply(x, series), by_exp)


def log1p(x: Numbers) -> Numbers:
    """log(1 + x), 0 of 0, as kernels write it: x is divided by itself, which not every residue can be."""
    divisible = choose(is_zero(x), ONE, x)
    above = add(ONE, divisible)
    return choose(is_zero(x), x, multiply(log(above), divide(divisible, subtract(above, ONE))))


def expm1(x: Numbers) -> Numbers:
    """exp(x) - 1; a series near 0, as kernels write it."""
    series = ONE
    for n in range(6, 1, -1):
        series = add(ONE, multiply(divide(x, integers(n)), series))
    return choose(less(absolute(x), constant(Fraction(1, 4))), multiply(x, series), subtract(exp(x), ONE))


# highest powers first; float32 holds them exactly
ERFC_OVER = (0.5641807913780212, 2.1974823474884033, 4.2230753898620605, 3.6137263774871826)
ERFC_UNDER = (1.0, 3.8943779468536377, 7.99363899230957, 8.2811918258667, 3.6176767349243164)


def erfc(x: Numbers) -> Numbers:
    """1 - erf(x) where that keeps its digits; else exp(-x^2) times a rational function, as kernels write it."""
    size, is_negative = absolute(x), less(x, ZERO)
    over, under = (
        reduce(lambda tail, c: add(multiply(tail, size), constant(Fraction(c))), rest, constant(Fraction(first)))
        for first, *rest in (ERFC_OVER, ERFC_UNDER)
    )
    tail = multiply(exp(negative(multiply(x, x))), divide(over, under))
    tail = choose(less(integers(10), size), ZERO, tail)
    two = add(ONE, ONE)
    far = add(choose(is_negative, two, ZERO), multiply(choose(is_negative, negative(ONE), ONE), tail))
    return choose(less(size, ONE), subtract(ONE, erf(x)), far)


# as float32 has them
LN2, EIGHTH_TURN, QUARTER_TURN, HALF_TURN = (
    0.6931471824645996,
    0.7853981852531433,
    1.5707963705062866,
    3.1415927410125732,
)
SERIES_END, DIAGONAL_END = 0.4142135679721832, 2.4142136573791504  # tan(pi / 8), tan(3 pi / 8)
LARGE = 1e8  # from where x * x + 1 is x * x in float32
# (atan(t) / t - 1) / t^2 for |t| below tan(pi / 8), to 1e-9, highest powers of t^2 first; float32 holds them exactly
ATAN = (-0.0688045397400856, 0.10885743796825409, -0.1427779644727707, 0.1999991536140442, -0.3333333432674408)


def sinh(x: Numbers) -> Numbers:
    """Half the difference of two exponentials; a series where they cancel, as kernels write it."""
    square, series, ln2 = multiply(x, x), ONE, constant(Fraction(LN2))
    for n in (72, 42, 20, 6):
        series = add(ONE, multiply(divide(square, integers(n)), series))
    by_exp = subtract(exp(subtract(x, ln2)), exp(subtract(negative(x), ln2)))
    return choose(less(absolute(x), ONE), multiply(x, series), by_exp)


def _log_unless_near(size: Numbers, near: Numbers) -> Numbers:
    """log1p(near), or log(2 size) where the size is large."""
    return choose(less(constant(Fraction(LARGE)), size), add(log(size), constant(Fraction(LN2))), log1p(near))


def asinh(x: Numbers) -> Numbers:
    """log(|x| + sqrt(x * x + 1)) with the sign of x, as kernels write it."""
    size, square = absolute(x), multiply(x, x)
    out = _log_unless_near(size, add(size, divide(square, add(ONE, sqrt(add(ONE, square))))))
    return choose(less(x, ZERO), negative(out), choose(is_zero(x), x, out))


def acosh(x: Numbers) -> Numbers:
    """log(x + sqrt(x * x - 1)), as kernels write it."""
    above = subtract(x, ONE)
    return _log_unless_near(x, add(above, multiply(sqrt(above), sqrt(add(x, ONE)))))


def atan(x: Numbers) -> Numbers:
    """The arc tangent: a series of a small slope, and up to a quarter of a turn, as kernels write it."""
    sign, size = choose(less(x, ZERO), negative(ONE), ONE), absolute(x)
    is_steep = less(constant(Fraction(DIAGONAL_END)), size)
    is_diagonal = less(constant(Fraction(SERIES_END)), size)
    slope = choose(is_diagonal, divide(subtract(x, sign), add(size, ONE)), x)
    slope = choose(is_steep, divide(negative(ONE), x), slope)
    turn = choose(is_diagonal, constant(Fraction(EIGHTH_TURN)), ZERO)
    turn = choose(is_steep, constant(Fraction(QUARTER_TURN)), turn)
    square, series = multiply(slope, slope), constant(Fraction(ATAN[0]))
    for c in ATAN[1:]:
        series = add(multiply(series, square), constant(Fraction(c)))
    return add(multiply(sign, turn), add(slope, multiply(multiply(slope, square), series)))


def asin(x: Numbers) -> Numbers:
    """The arc tangent of x / sqrt(1 - x * x)."""
    return atan(divide(x, sqrt(multiply(subtract(ONE, x), add(ONE, x)))))


def acos(x: Numbers) -> Numbers:
    """Twice the arc tangent of sqrt((1 - x) / (1 + x))."""
    return multiply(add(ONE, ONE), atan(sqrt(divide(subtract(ONE, x), add(ONE, x)))))


def _has_minus(x: Numbers) -> Any:
    """Whether x is below zero, or the zero that is, as kernels ask for it."""
    return less(x, ZERO) | less(inverse(x), ZERO)


def atan2(y: Numbers, x: Numbers) -> Numbers:
    """The angle of a point: the smaller coordinate over the larger one is a slope, as kernels write it."""
    rise, run = absolute(y), absolute(x)
    is_upright = less(run, rise)
    slope = choose(is_upright, divide(run, rise), divide(rise, run))
    angle = atan(choose(equal(rise, run), choose(is_zero(rise), ZERO, ONE), slope))
    angle = choose(is_upright, subtract(constant(Fraction(QUARTER_TURN)), angle), angle)
    angle = choose(_has_minus(x), subtract(constant(Fraction(HALF_TURN)), angle), angle)
    return choose(_has_minus(y), negative(angle), angle)


def real_power(x: Numbers, y: Numbers) -> Numbers:
    """x ** y for any y: exp(y log |x|), with the sign that x has if y is odd, as kernels write it."""
    size, half = absolute(x), floor(multiply(y, constant(Fraction(1, 2))))
    is_one = equal(size, ONE) | is_zero(y)
    out = choose(is_one, ONE, exp(multiply(y, log(size))))
    is_whole = equal(floor(y), y)
    is_odd = is_whole & ~equal(add(half, half), y)
    out = choose(_has_minus(x) & is_odd, negative(out), out)
    is_unknown = less(x, ZERO) & ~is_whole & less(size, special(math.inf))
    return choose(is_unknown, special(math.nan), out)


def nearest(x: Numbers) -> Numbers:
    """The nearest whole number, of two the even one, as kernels write it."""
    half, down = constant(Fraction(1, 2)), floor(x)
    rest, is_odd = subtract(x, down), ~equal(down, multiply(add(ONE, ONE), floor(multiply(down, half))))
    is_up = less(half, rest) | (equal(rest, half) & is_odd)
    return choose(less_equal(absolute(x), half), multiply(x, ZERO), add(down, integers(is_up)))


def where(c: Numbers, x: Numbers, y: Numbers) -> Numbers:
    """Take x where c is not 0, else y."""
    return choose(is_zero(c), y, x)

"""Exact arithmetic in which muGraphs are tested: pairs over Z_p x Z_q with q | p - 1, random primes, random functions.

A value is a pair of residues (mod p, mod q). The Lax fragment acts on both parts; ``exp`` takes the q part into an
exponent, ``exp(x) = (w ** x_q mod p, undefined)`` with w of order q, because w ** x does not depend on multiples of
q. After an exponential the q part is *poisoned* (None) and stays so (Mirage, section 5). Beyond the paper:

* p, q, w, the inputs and the hash key are drawn afresh from secret randomness for every test: nothing can be fitted
  to them.
* **Roots.** p = q = 3 (mod 4), and residues live in Z_p[i] = F_{p^2}, Z_q[i]: there every element x of Z_p has a
  root, x^((p+1)/4) or i * (-x)^((p+1)/4), so sqrt(x)**2 == x and rsqrt(x) == 1/sqrt(x) hold always. Lost, that is,
  true but not seen: sqrt(x)*sqrt(y) == sqrt(x*y) for positive x, y, sqrt(1/x) == 1/sqrt(x); and sqrt(x)**2 == x for x
  that contain exponentials or roots of non-residues (such roots are uninterpreted). The sign of a root is arbitrary:
  sqrt(x*x) == x, which is false for negative x, holds for half of all x. So the verifier prefers draws in which all
  roots are uninterpreted, and takes these only for graphs that need sqrt(x)**2 == x (`Draw.algebraic`).
* **The logistic function** can be 1 / (1 + exp(-x)) modulo p. Modulo q it is uninterpreted, so exponentials and roots
  of it assume nothing. Only graphs that need the identity have it, since many exponentials need large primes.
* An exponent a + b*i becomes w ** (a + l*b) with a random l: an additive character, so exp(x+y) == exp(x)*exp(y)
  holds there too.
* **Uninterpreted functions** are keyed hashes of the p residues of their arguments (equal values have equal p
  residues, whatever became of their q parts), with a fresh pair as value. So are: a second exponential on one path,
  other fractional powers. Proofs assume only that equal arguments give equal values.
* **Maxima** are hashes of the *set* of values that they are the maximum of, and a maximum of maxima has the
  union of their sets: commutative, associative and idempotent, and nothing else is assumed (minima likewise). For
  graphs that need max(c x) == c max(x), positive constants are taken out of every maximum before it is hashed
  (`Pair.factor`). Lost there, and seen otherwise: max(x + x) == max(2 x).
* ``shift`` is a fresh random pair at each call: only graphs that do not depend on it agree.
* **Masks.** What indices alone tell (`predicates`) comes on top, if a `scale` is given, as it is where loops end early:
  an exponential of what a mask makes minus infinity is exactly 0, and so is ``where(c, x, 0)`` outside of c. All else
  stays as it was: a mask is a hash of its condition and its value, and conditions are hashed with the constants of the
  program, so that no two masks are taken for one because they happen to agree at reduced extents. Every assumption
  made is an identity of real numbers, and the zeros come on both sides.
* **Measures.** Tests run at reduced extents, but programs contain their real extents as constants (1/4096 in a mean).
  So the elements of an axis weigh real/reduced each: a sum over an axis has total mass equal to its *real* extent,
  also for values that do not have the axis. Every identity of sums (linearity, order of summation, a constant summed
  is N times it) holds for such measures.

Values are numpy arrays of Python integers: exact at any size of primes.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, lru_cache, reduce
from random import Random
from typing import Any

import numpy

from mirage_jax.errors import MirageError
from mirage_jax.mugraph.domains import index_facts
from mirage_jax.mugraph.domains.floats import arrange
from mirage_jax.mugraph.domains.index_facts import Affine, Fact, Scale, ZeroUnless
from mirage_jax.mugraph.graph import Axis, Tensor, origin
from mirage_jax.mugraph.operators import ONE, union

SYMMETRIC = frozenset({"eq", "and", "or"})  # functions of two arguments in any order
SEMILATTICES = frozenset({"maximum", "minimum"})
ROOT, LOGISTIC, MAXIMUM = "power 1/2", "logistic", "maximum"
ALGEBRAIC = (MAXIMUM, LOGISTIC, ROOT)  # functions that may be uninterpreted or have their algebra
USUALLY_ALGEBRAIC = frozenset((LOGISTIC, ROOT))  # with which nothing is lost that is seen without
type Place = tuple[slice, ...]


class ZeroDivisor(MirageError):
    """A random draw met a zero divisor: not an error of the graph (unless it happens always), draw again."""


# --- primes


def is_prime(n: int) -> bool:
    """Miller-Rabin with the first 13 primes as bases: exact below 3.3e24; wrong for at most 4**-13 of larger ones."""
    bases = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)
    if n < 2 or any(n % b == 0 for b in bases):
        return n in bases
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    return all(_passes(n, b, odd, twos) for b in bases)


def _passes(n: int, base: int, odd: int, twos: int) -> bool:
    x = pow(base, odd, n)
    if x in (1, n - 1):
        return True
    for _ in range(twos - 1):
        x = x * x % n
        if x == n - 1:
            return True
    return False


def random_primes(rng: Random, p_bits: int, q_bits: int) -> tuple[int, int]:
    """Random primes p in [2**(p_bits-1), 2**p_bits) and q of q_bits bits, both 3 mod 4, with q | p - 1."""
    q = 0
    while not is_prime(q):
        q = rng.getrandbits(q_bits - 1) | 1 << (q_bits - 1) | 3
    low, high = ((1 << p_bits - 1) // (2 * q) + 1, (1 << p_bits) // (2 * q))
    p = 0
    while not is_prime(p):
        p = 2 * q * (rng.randrange(low, high) | 1) + 1  # odd * 2q + 1 is 3 mod 4 since q is odd
    return p, q


# --- residues: arrays of Python integers, a + b*i with b None if zero


@dataclass(frozen=True, slots=True)
class Residues:
    """``re + im * i``, elementwise; `im` is None where it is zero throughout."""

    re: Any
    im: Any = None

    def map(self, f: Callable[[Any], Any]) -> Residues:
        """Apply `f` to both parts."""
        return Residues(f(self.re), None if self.im is None else f(self.im))


def _array(x: Any) -> Any:
    """numpy turns results without dimensions into plain numbers; make them arrays again."""
    return numpy.asarray(x, dtype=object)


@dataclass(frozen=True)
class PrimeRing:
    """Z_m[i] for a prime m = 3 (mod 4): the field with m**2 elements."""

    m: int

    def make(self, re: Any, im: Any = None) -> Residues:
        """Reduce integers modulo m."""
        return Residues(_array(re % self.m), None if im is None else _array(im % self.m))

    def fraction(self, value: Fraction) -> int:
        """Map a fraction to its residue.

        Raises:
            ZeroDivisor: its denominator is 0 modulo m.
        """
        if value.denominator % self.m == 0:
            raise ZeroDivisor(f"the denominator of {value} is 0 modulo {self.m}")
        return value.numerator * _pow(value.denominator, -1, self.m) % self.m

    def add(self, x: Residues, y: Residues) -> Residues:
        """x + y."""
        if x.im is None and y.im is None:
            return self.make(x.re + y.re)
        re = x.re + y.re  # broadcasts, so the imaginary part must as well
        zero = numpy.zeros(numpy.shape(re), dtype=object)
        return self.make(re, zero + (0 if x.im is None else x.im) + (0 if y.im is None else y.im))

    def mul(self, x: Residues, y: Residues) -> Residues:
        """x * y."""
        if x.im is None and y.im is None:
            return self.make(x.re * y.re)
        if x.im is None:
            return self.make(x.re * y.re, x.re * y.im)
        if y.im is None:
            return self.make(x.re * y.re, x.im * y.re)
        return self.make(x.re * y.re - x.im * y.im, x.re * y.im + x.im * y.re)

    def scale(self, x: Residues, value: Fraction) -> Residues:
        """Multiply by a fraction."""
        return x if value == 1 else self.mul(x, Residues(_array(self.fraction(value))))

    def sum(self, x: Residues, dims: tuple[int, ...]) -> Residues:
        """Sum over dimensions."""
        return (
            x
            if not dims
            else self.make(*(None if part is None else numpy.add.reduce(part, axis=dims) for part in (x.re, x.im)))
        )

    def inverse(self, x: Residues) -> Residues:
        """1 / x.

        Raises:
            ZeroDivisor: an element is 0.
        """
        norm = x.re if x.im is None else _array((x.re * x.re + x.im * x.im) % self.m)
        if numpy.any(norm == 0):
            raise ZeroDivisor("division by zero")
        inverse = _each(lambda a: _pow(a, -1, self.m), norm)
        return Residues(inverse) if x.im is None else self.make(x.re * inverse, -x.im * inverse)

    def power(self, x: Residues, n: int) -> Residues:
        """x ** n for n >= 0, by repeated squaring."""
        if n == 0:
            return x.map(lambda a: _array(a * 0 + 1)) if x.im is None else Residues(_array(x.re * 0 + 1))
        half = self.power(x, n // 2) if n > 1 else None
        square = self.mul(half, half) if half else x
        return self.mul(square, x) if half and n % 2 else square

    def root(self, x: Residues) -> Residues:
        """Roots of elements without imaginary part (the part is ignored)."""
        e, m = (self.m + 1) // 4, self.m
        r = _each(lambda a: _pow(a, e, m), x.re)
        square = (r * r - x.re) % m == 0
        if numpy.all(square):
            return Residues(r)
        # r**2 == -x for the others, and (-x)**e == ± r: e is even or odd, so take the power itself
        s = _each(lambda a: _pow(-a, e, m), x.re)
        return Residues(_array(numpy.where(square, r, 0)), _array(numpy.where(square, 0, s)))


@lru_cache(maxsize=1 << 14)
def _pow(base: int, exponent: int, m: int) -> int:
    """Remembered, because blocks, loop steps and candidates for one reference come upon the same elements again."""
    return pow(base, exponent, m)


def _each(f: Callable[[Any], Any], x: Any) -> Any:
    out = numpy.empty(numpy.shape(x), dtype=object)
    out.reshape(-1)[:] = [f(a) for a in numpy.ravel(x)]
    return out


# --- the draw and the domain


@dataclass(frozen=True)
class Draw:
    """All that one random test fixes: primes, root of unity, character, hash key; everything follows from `seed`."""

    seed: bytes
    p_bits: int = 61
    q_bits: int = 31
    algebraic: frozenset[str] = USUALLY_ALGEBRAIC  # others of `ALGEBRAIC` are uninterpreted

    @cached_property
    def rng(self) -> Random:
        """The source of inputs and shifts; the one part of a draw that changes when used."""
        return Random(b"values" + self.seed)

    @cached_property
    def hashed(self) -> Counter[str]:
        """How often each uninterpreted function was evaluated; the error bound needs it."""
        return Counter()

    @cached_property
    def rooted(self) -> set[tuple[int, int]]:
        """Values that had a fractional power taken, as real and imaginary part."""
        return set()

    @cached_property
    def _primes(self) -> tuple[int, int]:
        return random_primes(Random(b"primes" + self.seed), self.p_bits, self.q_bits)

    @property
    def p(self) -> int:
        """The prime of values."""
        return self._primes[0]

    @property
    def q(self) -> int:
        """The prime of exponents, a divisor of p - 1."""
        return self._primes[1]

    @cached_property
    def character(self) -> int:
        """The l in ``w ** (a + l * b)``, the exponential of a + b*i."""
        return Random(b"character" + self.seed).randrange(self.q)

    @cached_property
    def w(self) -> int:
        """A random element of order q modulo p."""
        rng, w = Random(b"root" + self.seed), 1
        while w == 1:
            w = pow(rng.randrange(2, self.p), (self.p - 1) // self.q, self.p)
        return w

    @cached_property
    def _windows(self) -> list[list[int]]:
        """windows[j][d] = w ** (d << 8*j)."""
        out: list[list[int]] = []
        base = self.w
        for _ in range(-(-self.q_bits // 8)):
            row = [1]
            for _ in range(255):
                row.append(row[-1] * base % self.p)
            out.append(row)
            base = row[-1] * base % self.p
        return out

    def w_to(self, exponent: int) -> int:
        """w ** exponent mod p, for 0 <= exponent < q."""
        out = 1
        for row in self._windows:
            out = out * row[exponent & 255] % self.p
            exponent >>= 8
        return out

    def random_residues(self, modulus: int, shape: tuple[int, ...]) -> Residues:
        """Draw uniform residues; changes `rng`."""
        n = int(numpy.prod(shape))
        return Residues(_fill([self.rng.randrange(modulus) for _ in range(n)], shape))

    @cached_property
    def _indices(self) -> dict[int, tuple[int, int]]:
        return {}

    def index(self, n: int) -> tuple[int, int]:
        """What stands for the number n as an index."""
        if n not in self._indices:
            rng = Random(b"index %d " % n + self.seed)
            self._indices[n] = rng.randrange(self.p), rng.randrange(self.q)
        return self._indices[n]

    def hash(self, name: str, arguments: Any) -> tuple[int, int]:
        """A pair of residues, random but the same for the same arguments."""
        self.hashed[name] += 1
        n = (self.p_bits + self.q_bits) // 8 + 32
        digest = hashlib.shake_256(self.seed + repr((name, arguments)).encode()).digest(n)
        value = int.from_bytes(digest)
        return value % self.p, (value >> (self.p_bits + 128)) % self.q


def _fill(values: Sequence[Any], shape: tuple[int, ...]) -> Any:
    out = numpy.empty(shape, dtype=object)
    out.reshape(-1)[:] = values
    return out


@dataclass(frozen=True, slots=True)
class Pair:
    """A tensor over Z_p x Z_q; `q` is None once poisoned by an exponential.

    `among`: for a maximum (or minimum), its name and per element the set of residues that it is the maximum of.
    `factor`: a positive constant by which the value, and all members of its set, have been multiplied.
    """

    axes: tuple[Axis, ...]
    p: Residues
    q: Residues | None
    fact: Fact = None
    among: tuple[str, Any] | None = None
    factor: Fraction = ONE

    def map(self, axes: tuple[Axis, ...], f: Callable[[Any], Any]) -> Pair:
        """The same elements in another arrangement."""
        among = None if self.among is None else (self.among[0], f(self.among[1]))
        return Pair(axes, self.p.map(f), None if self.q is None else self.q.map(f), self.fact, among, self.factor)


@dataclass(frozen=True)
class FieldDomain:
    """Meaning of the operators over Z_p x Z_q. `weights` gives the mass of one element of each axis (default 1).

    `scale` says where cuts of indices lie at these extents; None: masks are uninterpreted throughout.
    """

    draw: Draw
    weights: Mapping[Axis, Fraction] = field(default_factory=dict[Axis, Fraction])
    ranges: Mapping[Axis, range] = field(default_factory=dict[Axis, range])
    scale: Scale | None = None

    representative = False

    @cached_property
    def rings(self) -> tuple[PrimeRing, PrimeRing]:
        """Z_p[i] and Z_q[i]."""
        return PrimeRing(self.draw.p), PrimeRing(self.draw.q)

    def random(self, axes: tuple[Axis, ...], shape: tuple[int, ...]) -> Pair:
        """A fresh uniformly random tensor."""
        return Pair(axes, self.draw.random_residues(self.draw.p, shape), self.draw.random_residues(self.draw.q, shape))

    # --- tiles

    def within(self, ranges: Mapping[Axis, range]) -> FieldDomain:
        """See the domain from one tile."""
        return replace(self, ranges=ranges)

    def load(self, x: Pair, axes: tuple[Axis, ...]) -> Pair:
        """Cut the tile out of `x`; facts follow the names of axes."""
        cut = tuple(slice(self.ranges[a].start, self.ranges[a].stop) for a in axes)
        fact = index_facts.renamed(x.fact, dict(zip(x.axes, axes, strict=True)))
        return replace(x.map(axes, lambda a: _array(a[cut])), fact=fact)

    def store(self, x: Pair, tensor: Tensor) -> Pair:
        """Arrange `x` in the order of the tensor's axes."""
        return x.map(tensor.axes, lambda a: _array(arrange(a, x.axes, tensor.axes)))

    def assemble(
        self, tensor: Tensor, shape: tuple[int, ...], stored: Sequence[tuple[tuple[range, ...], Pair]]
    ) -> Pair:
        """Put tiles together; the q part survives if all tiles have one."""
        where = [tuple(slice(r.start, r.stop) for r in ranges) for ranges, _ in stored]
        factor, values = self._alike([x for _, x in stored])
        p = _joined(shape, where, [x.p for x in values])
        qs = _all_given([x.q for x in values])
        sets = _all_given([x.among for x in values])
        q = _joined(shape, where, qs) if qs else None
        among = (sets[0][0], _pasted(shape, where, [s for _, s in sets])) if sets else None
        return Pair(tensor.axes, p, q, values[0].fact, among, factor)

    # --- operators

    def all_allowed(self, x: Pair, bound: Fraction | None, limit: Fraction | None) -> bool:
        """Residues have no order, so this is assumed."""
        return True  # both forms of a kernel with guards are proven (`verify.equivalence.certificate`)

    def constant(self, value: Fraction) -> Pair:
        """Map a fraction to its residues."""
        p, q = (Residues(_array(ring.fraction(value))) for ring in self.rings)
        factor = abs(value) if value and MAXIMUM in self.draw.algebraic else ONE
        return Pair((), p, q, index_facts.constant(value), factor=factor)

    def add(self, x: Pair, y: Pair) -> Pair:
        """x + y in both rings."""
        total = self._both("add", x, y)
        return replace(total, fact=index_facts.add(x.fact, y.fact), factor=_common_factor(x.factor, y.factor))

    def mul(self, x: Pair, y: Pair) -> Pair:
        """x * y in both rings."""
        product = replace(self._both("mul", x, y), factor=x.factor * y.factor)
        if x.among or y.among:
            maximum, other = (x, y) if x.among else (y, x)
            product = replace(product, among=self._among_multiples(maximum, other, product.axes))
        return self._known(product, index_facts.mul(x.fact, y.fact))

    def power(self, x: Pair, exponent: Fraction) -> Pair:
        """Multiply and invert; roots are taken in the field or uninterpreted (module's docstring)."""
        if exponent < 0:  # 1 / root(x), not root(1 / x): their signs differ
            return self._unary(PrimeRing.inverse, self.power(x, -exponent))
        if exponent.denominator != 1:
            re, im = (_flat(part, x.p.re.shape) for part in (x.p.re, x.p.im))
            self.draw.rooted.update(zip(re, im, strict=True))
        if exponent.denominator == 2 and self._has_algebra(ROOT, x):
            x, exponent = self._root(x), exponent * 2
        if exponent.denominator != 1:
            root = Fraction(1, exponent.denominator)
            x, exponent = self.function(f"power {root}", (x,)), exponent / root
        return self._unary(lambda ring, a: ring.power(a, int(exponent)), x)

    def exp(self, x: Pair) -> Pair:
        """w ** x_q; uninterpreted if the q part is poisoned."""
        if x.q is None:
            return self.function("exp", (x,))
        exponent = x.q.re if x.q.im is None else (x.q.re + self.draw.character * x.q.im) % self.draw.q
        return self._known(Pair(x.axes, Residues(_each(self.draw.w_to, exponent)), None), index_facts.exp(x.fact))

    def rounded(self, x: Pair) -> Pair:
        """x: nothing is rounded here."""
        return x

    def log_product(self, x: Pair, m: Pair) -> Pair:
        """An uninterpreted logarithm of x exp(m)."""
        return self.function("log", (self.mul(x, self.exp(m)),))

    def less_log_product(self, y: Pair, x: Pair, m: Pair) -> Pair:
        return self.add(y, self.mul(self.constant(Fraction(-1)), self.log_product(x, m)))

    def function(self, name: str, args: Sequence[Pair]) -> Pair:
        """Hash the p residues of the arguments; maxima hash sets."""
        axes = union(tuple(x.axes for x in args))
        if name in SEMILATTICES:
            factor, args = self._alike(args)
            sets = numpy.broadcast_arrays(*(arrange(self._among(name, x), x.axes, axes) for x in args))
            value = self._extremum(name, axes, sets, factor)
        else:
            columns = [x.p.map(lambda a, x=x: arrange(a, x.axes, axes)) for x in args]
            value = self._hash(name, axes, columns, sort=name in SYMMETRIC)
        if name == LOGISTIC and self._has_algebra(name, args[0]):
            value = replace(value, p=self._logistic(args[0]).p)
        return self._known(value, index_facts.function(name, [x.fact for x in args]))

    def sum(self, x: Pair, axes: tuple[Axis, ...]) -> Pair:
        """Sum, each element weighing real over reduced extent."""
        dims = tuple(i for i, a in enumerate(x.axes) if a in axes)
        missing = math.prod(len(self.ranges[a]) for a in axes if a not in x.axes)
        mass = missing * math.prod((self.weights.get(origin(a), Fraction(1)) for a in axes), start=Fraction(1))
        rest = tuple(a for a in x.axes if a not in axes)
        total = self._unary(lambda ring, a: ring.scale(ring.sum(a, dims), mass), x)
        return Pair(rest, total.p, total.q, factor=x.factor)

    def dot(self, x: Pair, y: Pair, axes: tuple[Axis, ...]) -> Pair:
        """Sum of products."""
        return self.sum(self.mul(x, y), axes)

    def maximum(self, x: Pair, axes: tuple[Axis, ...]) -> Pair:
        """Hash the set of elements."""
        rest = tuple(a for a in x.axes if a not in axes)
        if rest == x.axes:
            return x
        sets = arrange(self._among("maximum", x), x.axes, (*rest, *(a for a in x.axes if a in axes)))
        columns = sets.reshape(*sets.shape[: len(rest)], -1)
        return self._extremum("maximum", rest, [columns[..., i] for i in range(columns.shape[-1])], x.factor)

    def shift(self, x: Pair, axes: tuple[Axis, ...]) -> Pair:
        """Draw a fresh random pair."""
        kept = [(a, n) for a, n in zip(x.axes, x.p.re.shape, strict=True) if a not in axes]
        return self.random(tuple(a for a, _ in kept), tuple(n for _, n in kept))

    def iota(self, axis: Axis) -> Pair:
        """An index is a variable, the same on all axes: as a number it would satisfy at reduced extents what it does
        not satisfy at real ones, ``i (i - 1) (i - 2) == 0``.
        """
        numbers = [self.draw.index(n) for n in self.ranges[axis]]
        p, q = (Residues(_fill(list(column), (len(numbers),))) for column in zip(*numbers, strict=True))
        return Pair((axis,), p, q, index_facts.iota(axis))

    # --- helpers

    def _known(self, x: Pair, fact: Fact) -> Pair:
        """State a fact about `x`, and make zeros where it says so."""
        if self.scale is None or not isinstance(fact, ZeroUnless):
            return _stating(x, fact)
        kept = index_facts.may_hold(index_facts.differences(fact.unless), x.axes, self.ranges, self.scale)
        return replace(x.map(x.axes, lambda a: _array(numpy.where(kept, a, 0))), fact=fact)

    def _unary(self, f: Callable[[PrimeRing, Residues], Residues], x: Pair) -> Pair:
        p, q = self.rings
        return Pair(x.axes, f(p, x.p), None if x.q is None else f(q, x.q))

    def _both(self, method: str, x: Pair, y: Pair) -> Pair:
        axes = union((x.axes, y.axes))
        x, y = (z.map(axes, lambda a, z=z: arrange(a, z.axes, axes)) for z in (x, y))
        p, q = self.rings
        high = None if x.q is None or y.q is None else getattr(q, method)(x.q, y.q)
        return Pair(axes, getattr(p, method)(x.p, y.p), high)

    def _has_algebra(self, name: str, x: Pair) -> bool:
        return x.q is not None and name in self.draw.algebraic

    def _logistic(self, x: Pair) -> Pair:
        """1 / (1 + exp(-x)); 1 + w^n is not 0, for -1 is no power of w, whose order is odd."""
        inverse = self.exp(self.mul(self.constant(Fraction(-1)), x))
        return self.power(self.add(inverse, self.constant(Fraction(1))), Fraction(-1))

    def _root(self, x: Pair) -> Pair:
        if x.p.im is not None or (x.q is not None and x.q.im is not None):
            return self._mixed_root(x)
        return self._unary(PrimeRing.root, x)

    def _mixed_root(self, x: Pair) -> Pair:
        """Roots where some elements have an imaginary part: uninterpreted for these, part by part."""
        hashed = self.function(ROOT, (x,))

        def _choose(ring: PrimeRing, a: Residues, h: Residues) -> Residues:
            if a.im is None:
                return ring.root(a)
            real, root = a.im == 0, ring.root(Residues(a.re))
            im = 0 if root.im is None else root.im
            return Residues(_array(numpy.where(real, root.re, h.re)), _array(numpy.where(real, im, 0)))

        p, q = self.rings
        high = None if x.q is None or hashed.q is None else _choose(q, x.q, hashed.q)
        return Pair(x.axes, _choose(p, x.p, hashed.p), high)

    def _hash(self, name: str, axes: tuple[Axis, ...], columns: Sequence[Residues], sort: bool) -> Pair:
        """Hash of corresponding elements of `columns`."""
        shape = numpy.broadcast_shapes(*(c.re.shape for c in columns))
        rows = zip(*(_elements(c, shape) for c in columns), strict=True)
        values = [self.draw.hash(name, sorted(set(row)) if sort else row) for row in rows]
        p, q = (Residues(_fill(list(v), shape)) for v in zip(*values, strict=True))
        return Pair(axes, p, q)

    # --- maxima

    def _among(self, name: str, x: Pair) -> Any:
        """Per element, the set whose maximum (minimum) it is, divided by its factor: for other values, their own."""
        if x.among is not None and x.among[0] == name:
            return x.among[1]
        shape = x.p.re.shape
        return _fill([frozenset((e,)) for e in _elements(self.rings[0].scale(x.p, 1 / x.factor), shape)], shape)

    def _among_multiples(self, x: Pair, c: Pair, axes: tuple[Axis, ...]) -> tuple[str, Any] | None:
        """The sets of a product of a maximum x and c, divided by its factor; None unless c is known to be positive."""
        if x.among is None or not isinstance(c.fact, Affine):
            return None
        name, sets = x.among
        is_factor = not c.fact.coefficients and c.fact.constant == c.factor
        return (name, arrange(sets, x.axes, axes)) if is_factor else None

    def _alike(self, values: Sequence[Pair]) -> tuple[Fraction, Sequence[Pair]]:
        """The common factor of all values, and these with it; the rest of a value's own factor goes into its set."""
        factor = reduce(_common_factor, (x.factor for x in values))
        return factor, [self._with_factor(x, factor) for x in values]

    def _with_factor(self, x: Pair, factor: Fraction) -> Pair:
        if x.among is None or x.factor == factor:
            return replace(x, factor=factor)
        c, p = self.rings[0].fraction(x.factor / factor), self.draw.p
        sets = _each(lambda s: frozenset((c * re % p, c * im % p) for re, im in s), x.among[1])
        return replace(x, among=(x.among[0], sets), factor=factor)

    def _extremum(self, name: str, axes: tuple[Axis, ...], columns: Sequence[Any], factor: Fraction) -> Pair:
        """Hash of the union of corresponding sets, elementwise, times the factor."""
        shape = columns[0].shape
        sets = [frozenset[Any]().union(*row) for row in zip(*(c.ravel().tolist() for c in columns), strict=True)]
        values = [self.draw.hash(name, sorted(s)) for s in sets]
        self.draw.hashed[name] += sum(len(s) - 1 for s in sets)  # any two numbers of two sets may collide
        hashed = (Residues(_fill(list(v), shape)) for v in zip(*values, strict=True))
        p, q = (ring.scale(x, factor) for ring, x in zip(self.rings, hashed, strict=True))
        return Pair(axes, p, q, among=(name, _fill(sets, shape)), factor=factor)


def _all_given[T](values: Sequence[T | None]) -> list[T] | None:
    """The values, unless one is missing."""
    given = [x for x in values if x is not None]
    return given if len(given) == len(values) else None


def _pasted(shape: tuple[int, ...], where: Sequence[Place], parts: Sequence[Any]) -> Any:
    """Put parts of an array side by side; None stands for zeros."""
    out = numpy.zeros(shape, dtype=object)
    for place, part in zip(where, parts, strict=True):
        if part is not None:
            out[place] = part
    return out


def _joined(shape: tuple[int, ...], where: Sequence[Place], parts: Sequence[Residues]) -> Residues:
    imaginary = [x.im for x in parts]
    is_real = all(im is None for im in imaginary)
    re = _pasted(shape, where, [x.re for x in parts])
    return Residues(re, None if is_real else _pasted(shape, where, imaginary))


def _elements(x: Residues, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(zip(_flat(x.re, shape), _flat(x.im, shape), strict=True))


def _common_factor(x: Fraction, y: Fraction) -> Fraction:
    """The largest number of which both are multiples: twice as large for numbers twice as large."""
    return Fraction(math.gcd(x.numerator, y.numerator), math.lcm(x.denominator, y.denominator))


def _stating(x: Pair, fact: Fact) -> Pair:
    """Replace the fact about `x`."""
    return x if x.fact is fact else replace(x, fact=fact)


def _flat(part: Any, shape: tuple[int, ...]) -> list[int]:
    return [0] * int(numpy.prod(shape)) if part is None else numpy.broadcast_to(part, shape).ravel().tolist()

"""How likely one random test accepts a wrong graph: an upper bound, computed from the graphs themselves.

The difference of the outputs of two graphs, cleared of denominators, is F = sum over i <= k of P_i(x) * exp(G_i(x))
with integer polynomials P_i of degree <= d and coefficients of total size <= H, and rational exponents. `BoundDomain`
carries upper bounds of k, d, H and of the degrees of the exponents through the very walk that evaluates the graphs
(`evaluate`), one block standing for all. If F is not zero, a test with q prime of `q_bits`, p = 1 mod q prime of
`p_bits`, X = 2**(p_bits-1), accepts with probability at most

    S * (k-1) * d_G / q  +  S * d / X  +  4 * q * ln H / X  +  (k-1) * 3 * h_G / q        (error_bound)

1. two exponents that differ agree modulo q (Schwartz-Zippel); 2. the remaining combination of q-th roots of unity, an
   integer of norm <= H**(q-1) in the cyclotomic field, vanishes modulo the random prime above p (4 = 2 for p = 3 mod
   4, times 2 for the density of primes); 3. the polynomial vanishes at the random inputs; 4. q divides a difference
   of exponents of height 2**h_G. Square roots are points of the variety s*s*D = N: its degree S, the product of the
   degrees of these equations, multiplies 1 and 3 (Bezout). Uninterpreted functions are fresh variables as long as
   different arguments have different residues: every pair of calls adds the bound for the difference of two
   arguments.

Assumptions, stated and not proven here: the density of primes p = 1 mod q in [X, 2X] is the expected one, and
hashes are random. All sizes that multiply are base-2 logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from mirage_jax.mugraph.domains.finite_field import LOGISTIC, MAXIMUM, ROOT, SEMILATTICES, USUALLY_ALGEBRAIC
from mirage_jax.mugraph.graph import Axis, Tensor, is_part, origin
from mirage_jax.mugraph.operators import union


@dataclass(frozen=True, slots=True)
class Poly:
    """Upper bounds of an exponential polynomial: a sum of c * monomial * exp(G)."""

    degree: float = 0.0  # of the monomials
    terms: float = 0.0  # log2 of the number of different exp(G)
    height: float = 0.0  # log2 of the sum of the absolute values of its integer coefficients ..
    scale: float = 0.0  # .. after multiplication by an integer of this log2
    up: float = 0.0  # degree of the numerators of the exponents G
    down: float = 0.0  # degree of their denominators
    tall: float = 0.0  # log2 of the height of both

    @property
    def plain(self) -> bool:
        """A polynomial: no exponentials."""
        return self.terms == self.tall == 0

    def times(self, y: Poly) -> Poly:
        """Bound a product."""
        up = max(self.up + y.down, y.up + self.down)
        return Poly(
            self.degree + y.degree, self.terms + y.terms, self.height + y.height, self.scale + y.scale,
            up, self.down + y.down, self.tall + y.tall + 1 if self.tall and y.tall else self.tall + y.tall,
        )  # fmt: skip

    def power(self, n: float) -> Poly:
        """Bound the n-th power."""
        if n == 0:
            return ONE
        tall = n * self.tall + math.log2(n)
        up = self.up + (n - 1) * self.down
        return Poly(n * self.degree, n * self.terms, n * self.height, n * self.scale, up, n * self.down, tall)

    def plus(self, y: Poly) -> Poly:
        """Bound a sum, over a common denominator."""
        height = max(self.height + y.scale, y.height + self.scale) + 1
        terms = 0.0 if self.plain and y.plain else _log_add(self.terms, y.terms)
        return Poly(
            max(self.degree, y.degree), terms, height, self.scale + y.scale,
            max(self.up, y.up), max(self.down, y.down), max(self.tall, y.tall),
        )  # fmt: skip

    def repeated(self, n: int) -> Poly:
        """A sum of n such polynomials, with the same integer scale."""
        return replace(self, terms=self.terms + (0 if self.plain else math.log2(n)), height=self.height + math.log2(n))

    def either(self, y: Poly) -> Poly:
        """A bound for both."""
        return Poly(*(max(getattr(self, f), getattr(y, f)) for f in Poly.__slots__))


ONE = Poly()
VARIABLE = Poly(degree=1.0)


def _log_add(x: float, y: float) -> float:
    high, low = max(x, y), min(x, y)
    return high + math.log2(1 + 2.0 ** (low - high))


@dataclass(frozen=True, slots=True)
class Factor:
    """A polynomial that occurs in denominators, one per index of `axes`. Equal keys: the same polynomials."""

    key: object
    axes: frozenset[Axis]
    poly: Poly


@dataclass(frozen=True, slots=True)
class Radical:
    """A square root, one per index of `axes`; `bits` is log2 of the degree of its equation."""

    key: object
    axes: frozenset[Axis]
    bits: float


@dataclass(frozen=True, slots=True)
class Bound:
    """Bounds for every element of a tensor: top / product of factors; `roots` counts the radicals it depends on."""

    axes: tuple[Axis, ...]
    top: Poly
    bottom: Mapping[Factor, int] = field(default_factory=dict)
    roots: Mapping[Radical, int] = field(default_factory=dict)
    poisoned: bool = False

    def denominator(self) -> Poly:
        """Bound the product of all factors below the fraction bar."""
        return _product(self.bottom)


def _product(factors: Mapping[Factor, int]) -> Poly:
    out = ONE
    for f, n in factors.items():
        out = out.times(f.poly.power(n))
    return out


def _most[K](x: Mapping[K, int], y: Mapping[K, int]) -> dict[K, int]:
    return {k: max(x.get(k, 0), y.get(k, 0)) for k in (*x, *y)}


@dataclass
class Notes:
    """What the walk leaves behind besides its values."""

    count: int = 0
    arguments: dict[str, Bound] = field(
        default_factory=dict
    )  # of each uninterpreted function: a bound for all its arguments

    def fresh(self) -> int:
        """Give a number that was not used before."""
        self.count += 1
        return self.count


@dataclass(frozen=True)
class BoundDomain:
    """Bounds instead of values; see the module's docstring."""

    extents: Mapping[Axis, int]
    weights: Mapping[Axis, Fraction] = field(default_factory=dict)
    ranges: Mapping[Axis, range] = field(default_factory=dict)
    notes: Notes = field(default_factory=Notes)
    algebraic: frozenset[str] = USUALLY_ALGEBRAIC

    representative = True

    def input(self, axes: tuple[Axis, ...]) -> Bound:
        """Bound an input: one variable per element."""
        return Bound(axes, VARIABLE)

    # --- tiles

    def within(self, ranges: Mapping[Axis, range]) -> BoundDomain:
        """Restrict axes to the indices of a block."""
        return replace(self, ranges=ranges)

    def load(self, x: Bound, axes: tuple[Axis, ...]) -> Bound:
        """Seen under other axes, the same element of a factor is a different one."""
        if axes == x.axes:
            return x
        new = dict(zip(x.axes, axes, strict=True))

        def renamed[F: (Factor, Radical)](f: F) -> F:
            return replace(f, key=(f.key, x.axes, axes), axes=frozenset(new.get(a, a) for a in f.axes))

        bottom = {renamed(f): n for f, n in x.bottom.items()}
        return replace(x, axes=axes, bottom=bottom, roots={renamed(r): n for r, n in x.roots.items()})

    def store(self, x: Bound, tensor: Tensor) -> Bound:
        """Blocks have factors of their own: they depend on every axis that is divided here."""
        divided = frozenset(a for a, r in self.ranges.items() if is_part(a) or len(r) < self.extents[origin(a)])
        bottom = {replace(f, axes=f.axes | divided): n for f, n in x.bottom.items()}
        roots = {replace(f, axes=f.axes | divided): n for f, n in x.roots.items()}
        return replace(x, axes=tensor.axes, bottom=bottom, roots=roots)

    def assemble(
        self, tensor: Tensor, shape: tuple[int, ...], stored: Sequence[tuple[tuple[range, ...], Bound]]
    ) -> Bound:
        """Join the bounds of all blocks of a tensor."""
        out = stored[0][1]
        for _, x in stored[1:]:
            out = _either(out, x)
        return out

    # --- operators

    def all_allowed(self, x: Bound, bound: Fraction | None, limit: Fraction | None) -> bool:
        """Hold in any case: bounds know no values."""
        return True

    def constant(self, value: Fraction) -> Bound:
        """Bound a fraction by its numerator and denominator."""
        return Bound((), Poly(height=math.log2(max(1, abs(value.numerator))), scale=math.log2(value.denominator)))

    def add(self, x: Bound, y: Bound) -> Bound:
        """Bound a sum of fractions."""
        bottom = _most(x.bottom, y.bottom)
        tops = [z.top.times(_product({f: n - z.bottom.get(f, 0) for f, n in bottom.items()})) for z in (x, y)]
        return self._joined(x, y, tops[0].plus(tops[1]), bottom)

    def mul(self, x: Bound, y: Bound) -> Bound:
        """Bound a product of fractions."""
        bottom = {f: x.bottom.get(f, 0) + y.bottom.get(f, 0) for f in (*x.bottom, *y.bottom)}
        return self._joined(x, y, x.top.times(y.top), bottom)

    def power(self, x: Bound, exponent: Fraction) -> Bound:
        """Bound a power; roots count as uninterpreted functions unless `algebraic`."""
        if exponent < 0:
            return self._inverse(self.power(x, -exponent))
        if exponent.denominator == 2 and self._has_algebra(ROOT, x):
            x, exponent = self._root(x), exponent * 2
        if exponent.denominator != 1:
            root = Fraction(1, exponent.denominator)
            x, exponent = self.function(f"power {root}", (x,)), exponent / root
        n = int(exponent)
        return replace(x, top=x.top.power(n), bottom={f: n * e for f, e in x.bottom.items()})

    def exp(self, x: Bound) -> Bound:
        """Bound an exponential: one term, whose exponent is hashed."""
        if x.poisoned:
            return self.function("exp", (x,))
        below = x.denominator()
        tall = max(x.top.height + below.scale, below.height + x.top.scale, 1.0)
        return Bound(x.axes, Poly(up=x.top.degree, down=below.degree, tall=tall), {}, x.roots, poisoned=True)

    def rounded(self, x: Bound) -> Bound:
        """x: nothing is rounded here."""
        return x

    def log_product(self, x: Bound, m: Bound) -> Bound:
        """Bound log(x exp(m))."""
        return self.function("log", (self.mul(x, self.exp(m)),))

    def less_log_product(self, y: Bound, x: Bound, m: Bound) -> Bound:
        return self.add(y, self.mul(self.constant(Fraction(-1)), self.log_product(x, m)))

    def function(self, name: str, args: Sequence[Bound]) -> Bound:
        """Bound an uninterpreted function: a new variable for each argument."""
        for x in args:
            known = self.notes.arguments.get(name)
            self.notes.arguments[name] = x if known is None else _either(known, x)
        if name == LOGISTIC and self._has_algebra(name, args[0]):
            return self._logistic(args[0])
        axes = union(tuple(x.axes for x in args))
        is_multiple = name in SEMILATTICES and MAXIMUM in self.algebraic
        return Bound(axes, _multiple(args) if is_multiple else VARIABLE)

    def sum(self, x: Bound, axes: tuple[Axis, ...]) -> Bound:
        """Bound a sum along axes."""
        top, bottom, roots = x.top, dict[Factor, int](), dict[Radical, int]()
        for f, e in x.bottom.items():
            one, n = self._merged(f, axes)
            top = top.times(f.poly.power(e * (n - 1)))
            all_of_them = replace(one, poly=f.poly.power(n))
            bottom[all_of_them] = bottom.get(all_of_them, 0) + e
        for r, e in x.roots.items():
            one, n = self._merged(r, axes)
            roots[one] = roots.get(one, 0) + n * e
        top = top.repeated(math.prod(len(self.ranges[a]) for a in axes if a in x.axes))
        for a in axes:
            mass = self.weights.get(origin(a), Fraction(1)) * (1 if a in x.axes else len(self.ranges[a]))
            top = top.times(self.constant(mass).top)
        return Bound(tuple(a for a in x.axes if a not in axes), top, bottom, roots, x.poisoned)

    def dot(self, x: Bound, y: Bound, axes: tuple[Axis, ...]) -> Bound:
        """Bound a sum of products along axes."""
        return self.sum(self.mul(x, y), axes)

    def maximum(self, x: Bound, axes: tuple[Axis, ...]) -> Bound:
        """Bound a maximum, which is an uninterpreted function of its elements."""
        return (
            replace(self.function("maximum", (x,)), axes=tuple(a for a in x.axes if a not in axes))
            if set(axes) & set(x.axes)
            else x
        )

    def shift(self, x: Bound, axes: tuple[Axis, ...]) -> Bound:
        """Bound the shift of a softmax, which cancels."""
        return Bound(tuple(a for a in x.axes if a not in axes), VARIABLE)

    def iota(self, axis: Axis) -> Bound:
        """Bound an index."""
        return Bound((axis,), VARIABLE)

    # --- helpers

    def _merged[F: (Factor, Radical)](self, f: F, axes: tuple[Axis, ...]) -> tuple[F, int]:
        """What stands for all indices of `axes` here, and how many there are."""
        gone = sorted(f.axes & set(axes))
        if not gone:
            return f, 1
        key = (f.key, tuple((a, self.ranges[a]) for a in gone))
        return replace(f, key=key, axes=f.axes - set(axes)), math.prod(len(self.ranges[a]) for a in gone)

    def _joined(self, x: Bound, y: Bound, top: Poly, bottom: Mapping[Factor, int]) -> Bound:
        return Bound(union((x.axes, y.axes)), top, bottom, _most(x.roots, y.roots), x.poisoned or y.poisoned)

    def _inverse(self, x: Bound) -> Bound:
        top = x.denominator()
        if not x.top.degree and not x.top.terms:  # c * exp(G)
            return replace(x, top=top.times(replace(x.top, height=x.top.scale, scale=x.top.height)), bottom={})
        return replace(x, top=top, bottom={Factor(self.notes.fresh(), frozenset(x.axes), x.top): 1})

    def _has_algebra(self, name: str, x: Bound) -> bool:
        return not x.poisoned and name in self.algebraic

    def _logistic(self, x: Bound) -> Bound:
        """1 / (1 + exp(-x)), and a variable within exponents: so its degree is at least 1."""
        inverse = self.exp(self.mul(self.constant(Fraction(-1)), x))
        out = self._inverse(self.add(inverse, self.constant(Fraction(1))))
        return replace(out, top=replace(out.top, degree=max(out.top.degree, VARIABLE.degree)), poisoned=False)

    def _root(self, x: Bound) -> Bound:
        if x.roots:  # the field takes roots of elements with imaginary part for uninterpreted
            self.function(ROOT, (x,))
        bits = math.log2(max(2 + x.denominator().degree, x.top.degree))
        radical = Radical(self.notes.fresh(), frozenset(x.axes), bits)
        return Bound(x.axes, VARIABLE, {}, {**x.roots, radical: 1}, x.poisoned)


def _multiple(args: Sequence[Bound]) -> Poly:
    """A variable times a constant factor of values."""
    heights, scales = zip(*((x.top.height, x.top.scale) for x in args), strict=True)
    return replace(VARIABLE, height=max(heights), scale=max(scales))


def _either(x: Bound, y: Bound) -> Bound:
    return Bound(
        x.axes, x.top.either(y.top), _most(x.bottom, y.bottom), _most(x.roots, y.roots), x.poisoned or y.poisoned
    )


@dataclass(frozen=True)
class Difference:
    """What `error_bound` needs to know about a difference of two values."""

    top: Poly
    root_bits: float  # log2 S

    @classmethod
    def between(cls, domain: Any, x: Bound, y: Bound) -> Difference:
        """Bound the cleared difference of two results."""
        d = domain.add(x, y)
        return cls(d.top, sum(r.bits * n for r, n in d.roots.items()))

    @classmethod
    def of_arguments(cls, x: Bound) -> Difference:
        """Between any two elements: nothing is shared."""
        one = x.top.times(x.denominator())
        return cls(one.plus(one), 2 * sum(r.bits * n for r, n in x.roots.items()))


def error_bound(d: Difference, p_bits: int, q_bits: int) -> float:
    """log2 of the probability that one test sees no difference though there is one."""
    f, q, x = d.top, q_bits - 1, p_bits - 1
    others = math.log2(2.0**f.terms - 1) if f.terms < 30 and f.terms > 0 else f.terms
    parts = [d.root_bits + math.log2(max(f.degree, 1)) - x, 2 + q_bits + math.log2(max(f.height, 1)) - x]
    if f.terms > 0:
        parts.append(d.root_bits + others + math.log2(max(f.up + f.down, 1)) - q)
        parts.append(others + math.log2(3 * (2 * f.tall + 1)) - q)
    total = parts[0]
    for part in parts[1:]:
        total = _log_add(total, part)
    return total

"""Facts that follow from indices alone: masks made of iotas are exact predicates, not uninterpreted functions.

A `Fact` about a value is one of

* `Affine`: it is this affine function of indices (iota, constants, sums and multiples of such);
* `Truth`: it is the truth value of this condition (comparisons of affine values; and, or, not);
* `MaskedUnless`: it is minus infinity wherever the condition does not hold (``mask``; sums and positive multiples of
such);
* `ZeroUnless`: it is zero wherever the condition does not hold (exponentials of masked values, and products with them);

or None, nothing. Conditions are in negation normal form over *cuts*, ``sum of c * index <= bound`` in integers; the
condition UNKNOWN may hold or not (a padding mask that is an input). Two readers: the field sets
exponentials of masked elements to zero, and the search lets loops end early.
"""

# The rules of functions are lambdas, whose parameters cannot be typed.
# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy

from mirage_jax.mugraph.domains.floats import arrange
from mirage_jax.mugraph.graph import Axis, LoopBounds, Op, Tensor
from mirage_jax.mugraph.operators import ONE, ZERO, operator


@dataclass(frozen=True, slots=True)
class Cut:
    """``sum of coefficient * index <= bound``; coefficients are integers without common divisor, sorted by axis."""

    form: tuple[tuple[Axis, int], ...]
    bound: int


@dataclass(frozen=True, slots=True)
class Every:
    """All of these hold. With no parts: true."""

    parts: tuple[Condition, ...]


@dataclass(frozen=True, slots=True)
class Some:
    """One of these holds. With no parts: false."""

    parts: tuple[Condition, ...]


type Condition = Cut | Every | Some | None
UNKNOWN = None


def negation(c: Condition) -> Condition:
    """Negate a condition, in negation normal form."""
    match c:
        case Cut(form, bound):
            return Cut(tuple((a, -n) for a, n in form), -bound - 1)
        case Every(parts):
            return Some(tuple(map(negation, parts)))
        case Some(parts):
            return Every(tuple(map(negation, parts)))
        case None:
            return UNKNOWN


def cuts(c: Condition) -> Iterator[Cut]:
    """Every cut in a condition."""
    match c:
        case Cut():
            yield c
        case Every(parts) | Some(parts):
            for part in parts:
                yield from cuts(part)
        case None:
            pass


def differences(c: Condition) -> Condition:
    """What a condition says about differences of two indices; all else is unknown."""
    match c:
        case Cut(form, _) if sorted(n for _, n in form) == [-1, 1]:
            return c
        case Every(parts) | Some(parts):
            return type(c)(tuple(map(differences, parts)))
        case _:
            return UNKNOWN


def may_hold(c: Condition, axes: tuple[Axis, ...], ranges: Mapping[Axis, range], scale: Scale) -> Any:
    """Where the condition holds or might: a boolean array over `axes`."""
    match c:
        case Cut(form, bound) if all(a in axes for a, _ in form):
            total: Any = numpy.zeros((1,) * len(axes), int)
            for a, n in form:
                total = total + arrange(n * numpy.arange(ranges[a].start, ranges[a].stop), (a,), axes)
            return total <= scale(bound)
        case Every(parts) | Some(parts):
            join = numpy.logical_and if isinstance(c, Every) else numpy.logical_or
            out: Any = numpy.full((1,) * len(axes), isinstance(c, Every))
            for part in parts:
                out = join(out, may_hold(part, axes, ranges, scale))
            return out
        case _:
            return numpy.ones((1,) * len(axes), bool)


@dataclass(frozen=True)
class Scale:
    """Bounds of cuts at reduced extents, in order: where the program says 128 and the axis has 5 elements, 2.

    Only the order of two cuts of one difference n - i decides whether one implies the other. So any map that keeps
    order, and treats ``f <= t`` and its mirror image ``-f <= -t - 1`` the same, tests the same implications. Neighbours
    end up at most 2 apart. This does not hold of other cuts: ``n <= 150`` and ``i >= 50`` imply ``n - i <= 100`` by a
    sum of bounds, which the map does not keep. So only differences are known where this is used.
    """

    to: Mapping[int, int] = field(default_factory=dict[int, int])  # bounds >= 0
    pairs: frozenset[frozenset[Axis]] = frozenset()  # axes that are compared

    @classmethod
    def of(cls, bounds: Sequence[int]) -> Scale:
        """Shrink the bounds of cuts, given at real extents."""
        to: dict[int, int] = {}
        real = small = 0
        for t in sorted({max(b, -b - 1) for b in bounds}):
            small += min(t - real, 2)
            to[t], real = small, t
        return cls(to)

    def __call__(self, bound: int) -> int:
        return self.to.get(bound, bound) if bound >= 0 else -self.to.get(-bound - 1, -bound - 1) - 1

    def loop_bounds(self, loop_bounds: LoopBounds) -> LoopBounds:
        """``low <= n - i`` is the cut ``i - n <= -low``."""
        low, high = (None if b is None else s * self(s * b) for s, b in ((-1, loop_bounds.low), (1, loop_bounds.high)))
        return replace(loop_bounds, low=low, high=high)

    @property
    def largest(self) -> int:
        """The farthest bound at reduced extents."""
        return max(self.to.values(), default=0)

    @property
    def far(self) -> int:
        """Elements of an axis whose ends imply nothing: a chain of cuts and one axis from end to end is no cut."""
        return (len(self.pairs) + 1) * (self.largest + 1) + 2 if len(self.pairs) > 1 else 0


# --- facts


@dataclass(frozen=True, slots=True)
class Affine:
    coefficients: Mapping[Axis, Fraction]
    constant: Fraction


@dataclass(frozen=True, slots=True)
class Truth:
    holds: Condition


@dataclass(frozen=True, slots=True)
class MaskedUnless:
    unless: Condition


@dataclass(frozen=True, slots=True)
class ZeroUnless:
    unless: Condition


type Fact = Affine | Truth | MaskedUnless | ZeroUnless | None


def constant(value: Fraction) -> Fact:
    """A constant is affine."""
    return Affine({}, value)


def iota(axis: Axis) -> Fact:
    """An index is affine."""
    return Affine({axis: ONE}, ZERO)


def add(x: Fact, y: Fact) -> Fact:
    """Tell what holds for x + y."""
    match x, y:
        case Affine(a, b), Affine(c, d):
            return Affine({k: n for k in (*a, *c) if (n := a.get(k, ZERO) + c.get(k, ZERO))}, b + d)
        case MaskedUnless(c), MaskedUnless(d):
            return MaskedUnless(Every((c, d)))
        case (MaskedUnless(c), _) | (_, MaskedUnless(c)):
            return MaskedUnless(c)
        case ZeroUnless(c), ZeroUnless(d):
            return ZeroUnless(Some((c, d)))
        case _:
            return None


def mul(x: Fact, y: Fact) -> Fact:
    """Products with what may be infinite are not known to be zero."""
    if isinstance(y, Affine) and not y.coefficients:
        x, y = y, x
    match x, y:
        case (Affine(c, n), other) if not c and isinstance(other, Affine | MaskedUnless):
            if isinstance(other, Affine):
                return Affine({k: v * n for k, v in other.coefficients.items() if n}, other.constant * n)
            return other if n > 0 else None
        case (MaskedUnless(), _) | (_, MaskedUnless()):
            return None
        case (ZeroUnless(c) | Truth(c), _) | (_, ZeroUnless(c) | Truth(c)):
            return ZeroUnless(c)
        case _:
            return None


def power(x: Fact, exponent: Fraction) -> Fact:
    """Powers keep zeros."""
    return x if isinstance(x, ZeroUnless) and exponent > 0 else None


def exp(x: Fact) -> Fact:
    """Exponentials of masked elements are zero."""
    return ZeroUnless(x.unless) if isinstance(x, MaskedUnless) else None


def function(name: str, args: Sequence[Fact]) -> Fact:
    """Tell what facts about the arguments say about a pointwise function."""
    return FUNCTION_RULES[name](*args) if name in FUNCTION_RULES else None


def _comparison(holds: Callable[[Affine, Affine], Condition]) -> Callable[[Fact, Fact], Fact]:
    return lambda x, y: Truth(holds(x, y) if isinstance(x, Affine) and isinstance(y, Affine) else UNKNOWN)


def _mask(condition: Fact, x: Fact) -> Fact:
    holds = _truth(condition)
    return MaskedUnless(Every((holds, x.unless)) if isinstance(x, MaskedUnless) else holds)


def _where(condition: Fact, x: Fact, y: Fact) -> Fact:
    holds = _truth(condition)
    if _is_zero(y) and not isinstance(x, MaskedUnless):
        return ZeroUnless(holds)
    if _is_zero(x) and not isinstance(y, MaskedUnless):
        return ZeroUnless(negation(holds))
    return None


def _is_zero(x: Fact) -> bool:
    return isinstance(x, Affine) and not x.coefficients and not x.constant


def _truth(x: Fact) -> Condition:
    return x.holds if isinstance(x, Truth) else UNKNOWN


def _at_most(x: Affine, y: Affine, strict: bool = False) -> Condition:
    """``x <= y``, or ``x < y``."""
    difference = add(x, mul(y, constant(Fraction(-1))))
    assert isinstance(difference, Affine)
    values = difference.coefficients.values()
    if not values:
        holds = difference.constant < 0 if strict else difference.constant <= 0
        return Every(()) if holds else Some(())
    unit = Fraction(math.gcd(*(v.numerator for v in values)), math.lcm(*(v.denominator for v in values)))
    form = tuple(sorted((k, int(v / unit)) for k, v in difference.coefficients.items()))
    bound = -difference.constant / unit
    return Cut(form, math.ceil(bound) - 1 if strict else math.floor(bound))


FUNCTION_RULES: Mapping[str, Callable[..., Fact]] = {
    "lt": _comparison(lambda x, y: _at_most(x, y, strict=True)),
    "le": _comparison(lambda x, y: _at_most(x, y)),
    "eq": _comparison(lambda x, y: Every((_at_most(x, y), _at_most(y, x)))),
    "and": lambda x, y: Truth(Every((_truth(x), _truth(y)))),
    "or": lambda x, y: Truth(Some((_truth(x), _truth(y)))),
    "not": lambda x: Truth(negation(_truth(x))),
    "mask": _mask,
    "where": _where,
}


def renamed(x: Fact, names: Mapping[Axis, Axis]) -> Fact:
    """The same about a value whose axes are seen under other names."""

    match x:
        case Affine(c, n):
            return Affine({names.get(k, k): v for k, v in c.items()}, n)
        case Truth(c) | MaskedUnless(c) | ZeroUnless(c):
            return type(x)(_renamed(c, names))
        case None:
            return None


def _renamed(c: Condition, names: Mapping[Axis, Axis]) -> Condition:
    match c:
        case Cut(form, bound):
            return Cut(tuple(sorted((names.get(a, a), n) for a, n in form)), bound)
        case Every(parts) | Some(parts):
            return type(c)(tuple(_renamed(part, names) for part in parts))
        case None:
            return UNKNOWN


# --- facts about a whole graph


@dataclass(frozen=True, slots=True)
class FactAt:
    """A fact; `axes` names a tensor's axes if the value lies in memory."""

    fact: Fact = None
    axes: tuple[Axis, ...] = ()


@dataclass(frozen=True)
class FactDomain:
    """Meaning of the operators as facts. `seen` collects the bounds of all cuts of differences, `pairs` their axes.

    Sums keep zeros: under a summed axis, read "for all its indices here".
    """

    seen: set[int] = field(default_factory=set[int])
    pairs: set[frozenset[Axis]] = field(default_factory=set[frozenset[Axis]])

    representative = True

    def within(self, ranges: Mapping[Axis, range]) -> FactDomain:
        """Facts are the same in every tile."""
        return self

    def load(self, x: FactAt, axes: tuple[Axis, ...]) -> FactAt:
        """Rename the fact's axes."""
        return FactAt(renamed(x.fact, dict(zip(x.axes, axes, strict=True))))

    def store(self, x: FactAt, tensor: Tensor) -> FactAt:
        """Keep the fact, unless it says where zeros are."""
        return FactAt(None if isinstance(x.fact, ZeroUnless) else x.fact, tensor.axes)

    def assemble(
        self, tensor: Tensor, shape: tuple[int, ...], stored: Sequence[tuple[tuple[range, ...], FactAt]]
    ) -> FactAt:
        """All tiles have one fact."""
        return FactAt(stored[0][1].fact, tensor.axes)

    def all_allowed(self, x: FactAt, bound: Fraction | None, limit: Fraction | None) -> bool:
        """Facts have no order, so this is assumed."""
        return True

    def constant(self, value: Fraction) -> FactAt:
        """See `constant`."""
        return FactAt(constant(value))

    def add(self, x: FactAt, y: FactAt) -> FactAt:
        """See `add`."""
        return FactAt(add(x.fact, y.fact))

    def mul(self, x: FactAt, y: FactAt) -> FactAt:
        """See `mul`."""
        return FactAt(mul(x.fact, y.fact))

    def power(self, x: FactAt, exponent: Fraction) -> FactAt:
        """See `power`."""
        return FactAt(power(x.fact, exponent))

    def exp(self, x: FactAt) -> FactAt:
        """See `exp`."""
        return FactAt(exp(x.fact))

    def rounded(self, x: FactAt) -> FactAt:
        """x: nothing is rounded here."""
        return x

    def log_product(self, x: FactAt, m: FactAt) -> FactAt:
        """Nothing is known of logarithms."""
        return FactAt()

    def less_log_product(self, y: FactAt, x: FactAt, m: FactAt) -> FactAt:
        return FactAt()

    def function(self, name: str, args: Sequence[FactAt]) -> FactAt:
        """See `function`; collects the cuts of conditions."""
        fact = function(name, [x.fact for x in args])
        if isinstance(fact, Truth):
            for cut in cuts(differences(fact.holds)):
                self.seen.add(cut.bound)
                self.pairs.add(frozenset(a for a, _ in cut.form))
        return FactAt(fact)

    def sum(self, x: FactAt, axes: tuple[Axis, ...]) -> FactAt:
        """Sums keep zeros."""
        return x if isinstance(x.fact, ZeroUnless) else FactAt()

    def dot(self, x: FactAt, y: FactAt, axes: tuple[Axis, ...]) -> FactAt:
        """The sum of a product."""
        return self.sum(self.mul(x, y), axes)

    def maximum(self, x: FactAt, axes: tuple[Axis, ...]) -> FactAt:
        """Nothing is known of maxima."""
        return FactAt()

    def shift(self, x: FactAt, axes: tuple[Axis, ...]) -> FactAt:
        """Nothing is known of shifts."""
        return FactAt()

    def iota(self, axis: Axis) -> FactAt:
        """See `iota`."""
        return FactAt(iota(axis))


def known(ops: Iterable[Op]) -> dict[str, FactAt]:
    """Facts about the values of one kernel that follow from indices alone."""
    facts: dict[str, FactAt] = {}
    for op in ops:
        args = [facts.get(a, FactAt()) for a in op.args]  # of what is loaded, nothing
        facts[op.name] = operator(op.op).meaning(FactDomain(), *args, **op.attributes)
    return facts


# --- bands

type Band = tuple[int | None, int | None]  # low <= n - i <= high
NOTHING: Band = (1, 0)


def band(c: Condition, n: Axis, i: Axis) -> Band:
    """The narrowest band that the condition implies."""
    match c:
        case Cut(form, bound) if dict(form) == {n: 1, i: -1}:
            return None, bound
        case Cut(form, bound) if dict(form) == {n: -1, i: 1}:
            return -bound, None
        case Every(parts):
            lows, highs = zip((None, None), *(band(part, n, i) for part in parts), strict=True)
            return max(_finite(lows), default=None), min(_finite(highs), default=None)
        case Some(parts):
            return hull(band(part, n, i) for part in parts)
        case _:
            return None, None


def hull(bands: Iterable[Band]) -> Band:
    """Join bands into the narrowest one around them."""
    some = [(low, high) for low, high in bands if low is None or high is None or low <= high]
    if not some:
        return NOTHING
    return _unless_unbounded(min, [low for low, _ in some]), _unless_unbounded(max, [high for _, high in some])


def _unless_unbounded(extreme: Callable[[list[int]], int], ends: Sequence[int | None]) -> int | None:
    finite = _finite(ends)
    return extreme(finite) if len(finite) == len(ends) else None


def _finite(ends: Iterable[int | None]) -> list[int]:
    return [end for end in ends if end is not None]


def is_band(c: Condition, n: Axis, i: Axis) -> bool:
    """Does the condition say that n is in its band, and nothing else?"""
    match c:
        case Cut(form):
            return dict(form) in ({n: 1, i: -1}, {n: -1, i: 1})
        case Every(parts):
            return all(is_band(part, n, i) for part in parts)
        case _:
            return False

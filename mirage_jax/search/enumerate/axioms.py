"""The axioms, run backwards: every way to make a value with ONE operator from strictly smaller values.

Table 2 of Mirage (OSDI'25, section 4.3) lists the axioms; `AXIOMS` holds them as records. An axiom's rule looks at a
normal form and yields `Decomposition`s. Operands are strictly smaller (`Expressions.size`), so the AND-OR graph that
the rules span from a target is finite and acyclic. It contains exactly the target's subexpressions modulo the axioms.
Mirage asks a solver about each prefix whether it is useful; here every prefix is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import combinations, islice, product
from typing import Any, NamedTuple

from mirage_jax.mugraph.graph import PART_SUFFIX, Axis, origin
from mirage_jax.mugraph.operators import ACCUMULATORS, TRUTHS, OpDef, operator
from mirage_jax.mugraph.passes.sentinels import MASKING
from mirage_jax.search.enumerate.normal_form import NO_AXES, ONE, Base, Expressions, Factors, Poly, Term, is_multiple

type Terms = frozenset[tuple[Term, Fraction]]  # of a sum, with their coefficients

MAX_NAMINGS = 64  # of the bound axes of a value's terms, in all: a value of more keeps its own names
SELECTED = {"where": slice(1, 3)} | dict.fromkeys(("maximum", "minimum", "floor", "round"), slice(2))  # of arguments
LOOP = ".l"  # k.l: the loop-step part of an axis during search; muGraphs call (k.l, k) by the one name k again


@functools.cache
def kind(axis: Axis) -> str:
    """Classify an axis: "l" counts loop steps, "g" parts of a grid split, "t" elements inside the tile."""
    o = origin(axis)
    return "l" if o.endswith(LOOP) else "g" if o.endswith(PART_SUFFIX) else "t"


def part_of(axis: Axis, suffix: str = PART_SUFFIX) -> Axis:
    """Name the part axis (the loop steps) that belongs to a tile axis: ``k'`` -> ``k.g'`` (``k.l'``)."""
    o = origin(axis)
    return o + suffix + axis[len(o) :]


@dataclass(frozen=True, slots=True, eq=False)
class Decomposition:
    """value = times * op(args). `attrs` are attributes of the muGraph operator; "acc" stands for an accumulator over
    the loop steps `attrs.axes`, "last" for the end of a maximum that is carried through them. `reduced` are the axes
    that this step removes, `accumulates` says whether it ends a loop.
    """

    op: str
    args: tuple[Poly, ...]
    attrs: tuple[tuple[str, Any], ...] = ()
    times: Fraction = ONE
    reduced: tuple[Axis, ...] = field(init=False)
    accumulates: bool = field(init=False)

    def __post_init__(self) -> None:  # every state of a search reads these
        object.__setattr__(self, "reduced", self.attr("axes", ()))
        object.__setattr__(self, "accumulates", self.op in ACCUMULATORS)

    def attr(self, name: str, default: Any = None) -> Any:
        """Look up an attribute of the operator."""
        return dict(self.attrs).get(name, default)

    @property
    def record(self) -> OpDef:
        """The operator of one loop step (or of the one evaluation)."""
        return operator({"acc": "sum", "last": "max"}.get(self.op, self.op))

    def normal_form(self, e: Expressions) -> Poly:
        """Apply the axiom forwards: the normal form that the constructors give ``times * op(args)``."""
        return e.scale(self.record.meaning(e, *self.args, **dict(self.attrs)), self.times)


def _step(op: str, args: tuple[Poly, ...], times: Fraction = ONE, **attrs: Any) -> Decomposition:
    """Make a step; attributes with their default value are left out."""
    defaults = {"scale": ONE, "offset": Fraction(0), "ca": ONE, "cb": ONE}
    return Decomposition(op, args, tuple(sorted((k, v) for k, v in attrs.items() if defaults.get(k) != v)), times)


type Rule = Callable[[Expressions, Poly], Iterator[Decomposition]]


@dataclass(frozen=True)
class Axiom:
    """One axiom. Its normal form is `Decomposition.normal_form`; `ShiftDegrees` reads degrees from normal forms, so an
    axiom that builds on operators of the table needs no rule for degrees.
    """

    name: str  # in reports
    identity: str  # in the paper's terms
    backwards: Rule
    excludes_others: bool = False  # a value that it decomposes is made in no other way


@dataclass
class Axioms:
    """Backwards rules over one table of expressions. `fired` counts the steps of each axiom; none is from a value that
    is `refused`.
    """

    e: Expressions
    fired: dict[str, int] = field(default_factory=dict[str, int])
    records: tuple[Axiom, ...] = field(default_factory=lambda: AXIOMS)
    refused: Callable[[Poly], bool] = lambda _: False
    _inputs: dict[Poly, bool] = field(default_factory=dict[Poly, bool])
    _steps: dict[Poly, tuple[Decomposition, ...]] = field(default_factory=dict[Poly, tuple[Decomposition, ...]])

    def steps(self, p: Poly) -> tuple[Decomposition, ...]:
        """All ways to finish `p` with one operator. Each value is expanded once."""
        found = self._steps.get(p)
        if found is None:
            unique: dict[object, Decomposition] = {}
            for axiom in self.records:
                made = [s for s in axiom.backwards(self.e, p) if not any(map(self.refused, s.args))]
                self.fired[axiom.name] = self.fired.get(axiom.name, 0) + len(made)
                unique.update({(s.op, s.args, s.attrs, s.times): s for s in made})
                if axiom.excludes_others and made:
                    break
            found = self._steps[p] = tuple(unique.values())
        return found

    def is_input(self, p: Poly) -> bool:
        """Is the value a tensor of the region, unchanged?"""
        known = self._inputs.get(p)
        if known is None:
            base = self.e.only_base(p)
            known = self._inputs[p] = base is not None and base[0] == "atom" and not base[1].startswith("#")
        return known

    def is_truth(self, p: Poly) -> bool:
        """Is a value 0 or 1 by how it is made?"""
        match self.e.only_base(p):
            case ("f", name, *_):
                return name in TRUTHS
            case _:
                return False

    def atom(self, p: Poly) -> tuple[str, tuple[Axis, ...]]:
        """(tensor, axes) of an input."""
        base = self.e.only_base(p)
        assert base is not None
        return base[1], base[2]


# ---------------------------------------------------------------------- backwards rules


class _Row(NamedTuple):
    """One term of a value, with its coefficient."""

    bound: frozenset[Axis]
    factors: Factors
    coefficient: Fraction
    term: Term


def _rows(e: Expressions, p: Poly) -> list[_Row]:
    return [_Row(*e.term(t), c, t) for t, c in e.poly(p)]


def _aligned(e: Expressions, rows: list[_Row]) -> Iterator[list[_Row]]:
    """The same terms under other names of their bound axes, first as they are. In S[k] x[k] y[k] - S[k,k'] x[k'] z[k] u
    both have the factor x[k] once k and k' are swapped in the second.
    """
    namings = [[row._replace(bound=bound, factors=f) for bound, f in e.namings(row.term)] for row in rows]
    if all(row.bound == rows[0].bound for row in rows):  # to rename all of them in the same way changes nothing
        namings[0] = rows[:1]
    if math.prod(map(len, namings)) > MAX_NAMINGS:
        namings = [own[:1] for own in namings]
    yield from map(list, product(*namings))


def _has_constant(e: Expressions, rows: Sequence[_Row]) -> bool:
    return any(row.term == e.one for row in rows)


def _single(e: Expressions, bound: Iterable[Axis], factors: Iterable[tuple[Base, Fraction]]) -> Poly:
    return e.make_poly([(e.make_term(bound, factors), ONE)])


def leaves(e: Expressions, p: Poly) -> Iterator[Decomposition]:
    """c -> const; index -> iota; c x + o -> affine of x (values are stored without scale and offset).

    c x - c + y, with a huge c that makes a mask of x -> add of the mask and y: x + y / c loses y where x is 1.
    """
    if e.is_constant(p):
        value = e.poly(p)[0][1] if e.poly(p) else Fraction(0)
        yield _step("const", (), value=value)
        return
    q, c, offset = e.affine_parts(p)
    if q != p:
        if abs(offset) > MASKING and (parts := _by_size(e, p)):
            yield _step("add", parts)
            return
        yield _step("affine", (q,), scale=c, offset=offset)
        return
    match e.only_base(p):
        case ("atom", "#iota", axes):
            yield _step("iota", (), axis=axes[-1])  # parts and steps come first; the index counts all axes
        case _:
            return


def _by_size(e: Expressions, p: Poly) -> tuple[Poly, ...]:
    """A sum in two: the constant and terms with a huge coefficient, and the others. Nothing if there are none."""
    huge, others = ([(t, c) for t, c in e.poly(p) if (abs(c) > MASKING) == is_huge] for is_huge in (True, False))
    return (e.make_poly(huge), e.make_poly(others)) if len(huge) > 1 and others else ()


def unary(e: Expressions, p: Poly) -> Iterator[Decomposition]:
    """f(c x + o) -> f of x, for exp, powers and uninterpreted functions; exp(a) exp(b) -> exp(a + b)."""
    rows = _rows(e, p)
    if len(rows) != 1 or rows[0].bound or rows[0].coefficient != 1:
        return
    factors = rows[0].factors
    if factors and all(e.base(b)[0] == "E" for b, _ in factors):
        exponent = e.make_poly([(e.base(b)[1], power) for b, power in factors])
        q, c, offset = e.affine_parts(exponent)
        if e.is_constant(q):
            yield _step("exp", (e.constant(offset),))
        else:
            yield _step("exp", (q,), scale=c, offset=offset)
    elif len(factors) == 1:
        (b, power) = factors[0]
        yield from _function(e, b) if power == 1 else _power(e, b, power)


def _power(e: Expressions, b: Base, power: Fraction) -> Iterator[Decomposition]:
    """base ^ power -> pow; x^2, x^3, ... are products instead."""
    if is_multiple(power):
        return
    match e.base(b):
        case ("P", inner):
            q, c, offset = e.affine_parts(inner)
            yield _step("pow", (q,), exponent=power, scale=c, offset=offset)
        case ("atom", _, _) | ("f", _, _, _):
            yield _step("pow", (_single(e, (), [(b, ONE)]),), exponent=power)
        case _:
            return


def _function(e: Expressions, b: Base) -> Iterator[Decomposition]:
    """An uninterpreted function -> the operator of that name, of an argument without scale and offset."""
    match e.base(b):
        case ("f", "max", (inner,), removed):
            yield from _maximum(e, inner, removed)
        case ("f", "log", (total, of_row), ()):
            yield _step("logs", (total, of_row))
        case ("f", name, (inner,), ()):
            q, c, offset = e.affine_parts(inner)
            yield _step(name, (inner,)) if e.is_constant(inner) else _step(name, (q,), scale=c, offset=offset)
        case ("f", name, polys, ()):
            yield _step(name, polys)
        case _:
            return


def _maximum(e: Expressions, inner: Poly, removed: tuple[Axis, ...]) -> Iterator[Decomposition]:
    """max[x y] t -> max / last over x last; a tile first, then loop steps and grid parts, as for sums."""
    outer = [a for a in removed if kind(a) != "t"]
    if not outer:
        yield _step("max", (inner,), axes=removed)
    for x in outer:
        rest = e.function("max", (inner,), tuple(a for a in removed if a != x))
        yield _step("last" if kind(x) == "l" else "max", (rest,), axes=(x,))


def split_sum(e: Expressions, p: Poly) -> Iterator[Decomposition]:
    """t1 + ... + tn -> (some terms) + (the other terms).

    x - where(c, x, 0) + y stays x - where(c, x, 0) and y, since the rounding of x + y is all that is left of 0.
    """
    rows = e.poly(p)
    if len(rows) < 2 or e.one in dict(rows):
        return
    first, *rest = _units(e, rows)
    for n in range(len(rest)):
        for chosen in combinations(rest, n):
            part = first.union(*chosen)
            a, ca = e.monic(e.make_poly([row for row in rows if row in part]))
            b, cb = e.monic(e.make_poly([row for row in rows if row not in part]))
            yield _step("add", (a, b), ca=ca, cb=cb)


def _units(e: Expressions, rows: Sequence[tuple[Term, Fraction]]) -> list[Terms]:
    """Group the terms of a sum: in x - where(c, x, y) one selects the other, and cancels it. At least two groups."""
    units: list[Terms] = [frozenset({row}) for row in rows]
    alone = units  # if the sum is one such difference, its two sides
    for selecting, selected in _differences(e, rows):
        both = selecting | selected
        joined = [u for u in units if u & both]
        units = [both.union(*joined), *(u for u in units if u not in joined)]
        if len(both) == len(rows):
            alone = [selected, selecting]
    return units if len(units) > 1 else alone


def _differences(e: Expressions, rows: Sequence[tuple[Term, Fraction]]) -> Iterator[tuple[Terms, Terms]]:
    """Each term that selects others with the opposite sign, and these."""
    coefficients = dict(rows)
    for term, c in rows:
        alone = e.make_poly([(term, ONE)])
        for q in _selected(e, e.only_base(alone)):
            selected = frozenset((t, -c * k) for t, k in e.poly(q))
            if selected and selected <= coefficients.items():
                yield frozenset({(term, c)}), selected


def _selected(e: Expressions, base: tuple[Any, ...] | None) -> Iterator[Poly]:
    """The values of which a function returns one, or is near to one."""
    if base is None or base[0] != "f" or base[1] not in SELECTED:
        return
    _, name, values, _ = base
    for value in values[SELECTED[name]]:
        yield value
        yield from _selected(e, e.only_base(value))


def reduce_last(e: Expressions, p: Poly) -> Iterator[Decomposition]:
    """S[x] t -> reduce over x: a tile sum, the accumulator of the loop, or the combination of grid parts.

    A tile is summed before the loop steps and before the grid parts: the order of commuting sums is fixed, nothing is
    lost.
    """
    rows = _rows(e, p)
    if not rows or _has_constant(e, rows):
        return
    for named in _aligned(e, rows):
        bound_anywhere = NO_AXES.union(*(row.bound for row in named))
        for x in sorted(frozenset[Axis].intersection(*(row.bound for row in named))):
            if kind(x) == "t" and not bound_anywhere.isdisjoint((part_of(x), part_of(x, LOOP))):
                continue
            rest = [(e.make_term(row.bound - {x}, row.factors), row.coefficient) for row in named]
            a, scale = e.monic(e.make_poly(rest))
            yield _step("acc" if kind(x) == "l" else "sum", (a,), scale, axes=(x,))


def cut_product(e: Expressions, p: Poly) -> Iterator[Decomposition]:
    """G * rest -> mul, div or dot: a group G of factors common to all terms against the rest.

    Undistributes too: X W + X A B = X (W + A B). A contraction takes all shared tile axes at once and never a loop
    axis.
    """
    rows = _rows(e, p)
    if not rows or _has_constant(e, rows) or (len(rows) == 1 and _is_atomic(e, rows[0].factors)):
        return
    seen: set[tuple[frozenset[Poly], tuple[Axis, ...]]] = set()
    for named in _aligned(e, rows):
        common = _common_factors(e, named)
        for group in (*_root(common), *_submultisets(e, common, halves=len(rows) == 1)):
            cut = _cut(e, named, group)
            if cut is None:
                continue
            g, rest, scale, axes = cut
            if (key := (frozenset((g, rest)), axes)) not in seen:
                seen.add(key)
                yield from _products(e, g, rest, scale, axes)


def _products(e: Expressions, g: Poly, rest: Poly, scale: Fraction, axes: tuple[Axis, ...]) -> Iterator[Decomposition]:
    """The operators that multiply two values and sum over `axes`."""
    if axes:
        yield _step("dot", (g, rest), scale, axes=axes)
        return
    yield _step("mul", (g, rest), scale)
    for x, y in ((g, rest), (rest, g)):
        divisor = _reciprocal(e, y)
        if divisor is not None:
            yield _step("div", (x, divisor), scale)


def _cut(e: Expressions, rows: Sequence[_Row], group: Factors) -> tuple[Poly, Poly, Fraction, tuple[Axis, ...]] | None:
    """(group, rest, scale, contracted axes) of a product that equals the value; None if there is none."""
    rests = [_without(row.factors, group) for row in rows]
    if not group or not all(rests):
        return None
    group_axes = e.factor_axes(group)
    bound_in_group = rows[0].bound & group_axes
    if any(row.bound & group_axes != bound_in_group for row in rows):
        return None
    rest_axes = [e.factor_axes(rest) for rest in rests]
    shared = bound_in_group & NO_AXES.union(*rest_axes)
    if not all(shared <= axes for axes in rest_axes) or not _may_contract(shared, rows):
        return None
    g = _single(e, bound_in_group - shared, group)
    terms = [
        (e.make_term(row.bound - bound_in_group, rest), row.coefficient) for row, rest in zip(rows, rests, strict=True)
    ]
    r, scale = e.monic(e.make_poly(terms))
    return g, r, scale, tuple(sorted(shared))


def _may_contract(axes: frozenset[Axis], rows: Sequence[_Row]) -> bool:
    """No loop axis, and a tile axis not before the parts of the same axis."""
    if any(kind(x) == "l" for x in axes):
        return False
    outer = {part_of(x) for x in axes if kind(x) == "t"} - axes
    return all(outer.isdisjoint(row.bound) for row in rows)


def _common_factors(e: Expressions, rows: Sequence[_Row]) -> Factors:
    """Factors, with their powers, that every term has."""
    common = dict(rows[0].factors)
    for row in rows[1:]:
        here = dict(row.factors)
        shared = ((b, _shared_power(q, here.get(b), _divisible(e, b))) for b, q in common.items())
        common = {b: q for b, q in shared if q}
    return tuple(sorted(common.items()))


def _is_atomic(e: Expressions, factors: Factors) -> bool:
    """Is a product one factor that cannot be divided, or empty?"""
    return len(factors) < 2 and not any(is_multiple(q) and _divisible(e, b) for b, q in factors)


def _divisible(e: Expressions, b: Base) -> bool:
    """May a power be split, x^3 = x x^2? Not of an exponential: exp(x)^3 is exp(3 x), one operator."""
    return e.base(b)[0] != "E"


def _shared_power(q: Fraction, other: Fraction | None, divisible: bool) -> Fraction | None:
    if other is None or q == other:
        return other
    both_positive_integers = q.denominator == other.denominator == 1 and q > 0 and other > 0
    return min(q, other) if both_positive_integers and divisible else None


def _submultisets(e: Expressions, factors: Factors, halves: bool) -> Iterator[Factors]:
    """All submultisets; with `halves`, only the first of each one and its complement."""
    choices: list[Sequence[int | Fraction]] = [
        range(int(q) + 1) if is_multiple(q) and _divisible(e, b) else (0, q) for b, q in factors
    ]
    count = math.prod(map(len, choices))
    for pick in islice(product(*choices), (count + 1) // 2 if halves else count):  # complements come in reverse order
        yield tuple((b, Fraction(n)) for (b, _), n in zip(factors, pick, strict=True) if n)


def _root(factors: Factors) -> Iterator[Factors]:
    """Halve the powers of a square. (d exp(-s))^2 overflows where the program's own does, d^2 exp(-2 s) before."""
    if len(factors) > 1 and all((q / 2).denominator == 1 for _, q in factors):
        yield tuple((b, q / 2) for b, q in factors)


def _without(factors: Factors, group: Factors) -> Factors:
    left = dict(factors)
    for b, q in group:
        left[b] -= q
    return tuple((b, q) for b, q in left.items() if q)


def _reciprocal(e: Expressions, p: Poly) -> Poly | None:
    """x if p is x^-1 for a stored value x, else None."""
    match _rows(e, p):
        case [(bound, ((b, power),), coefficient, _)] if not bound and coefficient == 1 and power == -1:
            match e.base(b):
                case ("P", inner) if e.one not in dict(e.poly(inner)):
                    return inner
                case ("atom", _, _):
                    return _single(e, (), [(b, ONE)])
                case _:
                    return None
        case _:
            return None


AXIOMS = (
    Axiom("leaves", "constants, indices, and scales that ride for free", leaves, excludes_others=True),
    Axiom(
        "unary", "congruence of functions; mul(exp x, exp y) = exp(add(x, y)); max(i, max(j, x)) = max(i j, x)", unary
    ),
    Axiom("split_sum", "add is associative and commutative", split_sum),
    Axiom("reduce_last", "sum(i, sum(j, x)) = sum(i j, x); sum(i, add(x, y)) = add(sum(i, x), sum(i, y))", reduce_last),
    Axiom(
        "cut_product",
        "mul is associative, commutative and distributive; sum(i, mul(x, y)) = mul(x, sum(i, y))",
        cut_product,
    ),
)

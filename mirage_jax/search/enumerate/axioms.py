"""The axioms, run backwards: every way to make a value with ONE operator from strictly smaller values.

A `Rule` looks at a normal form and yields `Decomposition`s. Because operands are strictly smaller (`Expressions.size`),
the AND-OR graph that the rules span from a target is finite and acyclic, and it contains exactly the subexpressions of
the target modulo the axioms: "is this prefix useful?", which Mirage asks a solver about each prefix, is answered by
construction.

| rule | value            | operator             | axiom of the paper (Table 2) it inverts |
|------|------------------|----------------------|-----------------------------------------|
| unary| f(c x + o)       | exp, pow, function   | (uninterpreted functions: congruence) |
| merge| exp(a) exp(b)    | exp of a sum         | mul(exp x, exp y) = exp(add(x, y)) |
| split| t1 + ... + tn    | add of a bipartition | add associative, commutative |
| sum  | S[x] t           | sum / acc over x last| sum(i, sum(j, x)) = sum(i j, x), sum over add |
| max  | max[x y] t       | max / last over x last| max(i, max(j, x)) = max(i j, x) |
| cut  | G * rest         | mul, div, dot        | mul assoc., comm., distributive; sum(i, x y) = x sum(i, y) |
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import combinations, islice, product
from typing import Any

from mirage_jax.mugraph.graph import PART_SUFFIX, Axis, origin
from mirage_jax.mugraph.operators import ACCUMULATORS, OpDef, operator
from mirage_jax.search.enumerate.normal_form import NO_AXES, ONE, Base, Expressions, Factors, Poly, Term

LOOP = ".l"  # k.l: the loop-step part of an axis during search; muGraphs call (k.l, k) by the one name k again


@functools.cache
def kind(axis: Axis) -> str:
    """What an axis counts: "l" loop steps, "g" parts of a grid split, "t" elements inside the tile."""
    o = origin(axis)
    return "l" if o.endswith(LOOP) else "g" if o.endswith(PART_SUFFIX) else "t"


def part_of(axis: Axis, suffix: str = PART_SUFFIX) -> Axis:
    """``k'`` -> ``k.g'`` (``k.l'``): the part axis (the loop steps) that belongs to a tile axis."""
    o = origin(axis)
    return o + suffix + axis[len(o) :]


@dataclass(frozen=True, slots=True, eq=False)
class Decomposition:
    """value = times * op(args). `attrs` are attributes of the muGraph operator; "acc" stands for an accumulator over
    the loop steps `attrs.axes`, "last" for the end of a maximum that is carried through them. `reduced` are the axes
    that this step removes, `accumulates` is whether it ends a loop.
    """

    op: str
    args: tuple[Poly, ...]
    attrs: tuple[tuple[str, Any], ...] = ()
    times: Fraction = ONE
    reduced: tuple[Axis, ...] = field(init=False)
    accumulates: bool = field(init=False)

    def __post_init__(self) -> None:  # asked for in every state of a search
        object.__setattr__(self, "reduced", self.attr("axes", ()))
        object.__setattr__(self, "accumulates", self.op in ACCUMULATORS)

    def attr(self, name: str, default: Any = None) -> Any:
        return dict(self.attrs).get(name, default)

    @property
    def record(self) -> OpDef:
        """What one loop step (or the one evaluation) of it costs."""
        return operator({"acc": "sum", "last": "max"}.get(self.op, self.op))


def _step(op: str, args: tuple[Poly, ...], times: Fraction = ONE, **attrs: Any) -> Decomposition:
    """A step with the operator's attributes, those that have their default value left out."""
    defaults = {"scale": ONE, "offset": Fraction(0), "ca": ONE, "cb": ONE}
    return Decomposition(op, args, tuple(sorted((k, v) for k, v in attrs.items() if defaults.get(k) != v)), times)


@dataclass
class Axioms:
    """Backwards rules over one table of expressions. `fired` counts the steps of each rule."""

    e: Expressions
    fired: dict[str, int] = field(default_factory=dict[str, int])
    _inputs: dict[Poly, bool] = field(default_factory=dict[Poly, bool])
    _steps: dict[Poly, tuple[Decomposition, ...]] = field(default_factory=dict[Poly, tuple[Decomposition, ...]])

    def steps(self, p: Poly) -> tuple[Decomposition, ...]:
        """All ways to finish `p` with one operator. Each value is expanded once."""
        found = self._steps.get(p)
        if found is None:
            unique: dict[object, Decomposition] = {}
            for rule in RULES:
                made = list(rule(self.e, p))
                self.fired[rule.__name__] = self.fired.get(rule.__name__, 0) + len(made)
                unique.update({(s.op, s.args, s.attrs, s.times): s for s in made})
                if rule is leaves and made:  # c x + o is always made from x: no other rule sees scales and offsets
                    break
            found = self._steps[p] = tuple(unique.values())
        return found

    def is_input(self, p: Poly) -> bool:
        """A tensor of the region, just as it is."""
        known = self._inputs.get(p)
        if known is None:
            known = self._inputs[p] = self._is_input(p)
        return known

    def _is_input(self, p: Poly) -> bool:
        base = self.e.only_base(p)
        return base is not None and base[0] == "atom" and not base[1].startswith("#")

    def atom(self, p: Poly) -> tuple[str, tuple[Axis, ...]]:
        """(tensor, axes) of an input."""
        base = self.e.only_base(p)
        assert base is not None
        return base[1], base[2]


def _single(e: Expressions, bound: Iterable[Axis], factors: Iterable[tuple[Base, Fraction]]) -> Poly:
    return e.make_poly([(e.make_term(bound, factors), ONE)])


def _rows(e: Expressions, p: Poly) -> list[tuple[frozenset[Axis], Factors, Fraction, Term]]:
    return [(*e.term(t), c, t) for t, c in e.poly(p)]


def leaves(e: Expressions, p: Poly) -> Iterator[Decomposition]:
    """c -> const; index -> iota; c x + o -> affine of x (values are stored without scale and offset)."""
    if e.is_constant(p):
        value = e.poly(p)[0][1] if e.poly(p) else Fraction(0)
        yield _step("const", (), value=value)
        return
    q, c, offset = e.affine_parts(p)
    if q != p:
        yield _step("affine", (q,), **_affine(c, offset))
        return
    match e.only_base(p):
        case ("atom", "#iota", axes):
            yield _step("iota", (), axis=axes[-1])  # parts and steps come first; the index counts all of them
        case _:
            return


def unary(e: Expressions, p: Poly) -> Iterator[Decomposition]:
    """f(c x + o) -> f of x, for exp, powers and uninterpreted functions; exp(a) exp(b) -> exp(a + b)."""
    rows = _rows(e, p)
    if len(rows) != 1 or rows[0][0] or rows[0][2] != 1:
        return
    factors = rows[0][1]
    if all(e.base(b)[0] == "E" for b, _ in factors) and factors:
        q, c, offset = e.affine_parts(e.make_poly([(e.base(b)[1], power) for b, power in factors]))
        if e.is_constant(q):
            yield _step("exp", (e.constant(offset),))
        else:
            yield _step("exp", (q,), **_affine(c, offset))
        return
    if len(factors) != 1:
        return
    b, power = factors[0]
    match e.base(b):
        case ("P", inner) if power != 1 and not (power.denominator == 1 and power > 1):
            q, c, offset = e.affine_parts(inner)
            yield _step("pow", (q,), exponent=power, **_affine(c, offset))
        case ("atom", _, _) | ("f", _, _, _) if power != 1 and not (power.denominator == 1 and power > 1):
            yield _step("pow", (_single(e, (), [(b, ONE)]),), exponent=power)
        case ("f", "max", (inner,), removed) if power == 1:
            outer = [a for a in removed if kind(a) != "t"]  # a tile first, then loop steps and grid parts, as for sums
            if not outer:
                yield _step("max", (inner,), axes=removed)
            for x in outer:
                rest = e.function("max", (inner,), tuple(a for a in removed if a != x))
                yield _step("last" if kind(x) == "l" else "max", (rest,), axes=(x,))
        case ("f", name, (inner,), ()) if power == 1:
            q, c, offset = e.affine_parts(inner)
            if e.is_constant(inner):
                yield _step(name, (inner,))
            else:
                yield _step(name, (q,), **_affine(c, offset))
        case ("f", name, polys, ()) if power == 1:
            yield _step(name, polys)
        case _:
            return


def _affine(scale: Fraction, offset: Fraction) -> dict[str, Fraction]:
    return {"scale": scale, "offset": offset}


def split_sum(e: Expressions, p: Poly) -> Iterator[Decomposition]:
    """t1 + ... + tn -> (some terms) + (the other terms)."""
    rows = e.poly(p)
    if len(rows) < 2 or e.one in dict(rows):
        return
    first, rest = rows[0], rows[1:]
    for n in range(len(rest)):
        for chosen in combinations(rest, n):
            a, ca = e.monic(e.make_poly([first, *chosen]))
            b, cb = e.monic(e.make_poly([x for x in rest if x not in chosen]))
            yield _step("add", (a, b), ca=ca, cb=cb)


def reduce_last(e: Expressions, p: Poly) -> Iterator[Decomposition]:
    """S[x] t -> reduce over x: a tile sum, the accumulator of the loop, or the combination of grid parts.

    A tile is summed before the loop steps and before the grid parts: the order of commuting sums is fixed, nothing is
    lost.
    """
    rows = _rows(e, p)
    if not rows or any(t == e.one for *_, t in rows):
        return
    for x in sorted(frozenset[Axis].intersection(*(bound for bound, *_ in rows))):
        if kind(x) == "t" and any(part_of(x) in bound or part_of(x, LOOP) in bound for bound, *_ in rows):
            continue
        a, scale = e.monic(e.make_poly([(e.make_term(bound - {x}, factors), c) for bound, factors, c, _ in rows]))
        yield _step("acc" if kind(x) == "l" else "sum", (a,), scale, axes=(x,))


def cut_product(e: Expressions, p: Poly) -> Iterator[Decomposition]:
    """G * rest -> mul, div or dot: a group G of factors common to all terms against the rest.

    Undistributes too: X W + X A B = X (W + A B). A contraction takes all shared tile axes at once and never a loop
    axis.
    """
    rows = _rows(e, p)
    if (
        not rows
        or any(t == e.one for *_, t in rows)
        or (len(rows) == 1 and len(rows[0][1]) < 2 and _atomic(e, rows[0][1]))
    ):
        return
    common = dict(rows[0][1])
    for _, factors, *_ in rows[1:]:
        here = dict(factors)
        shared_powers = ((b, _shared_power(q, here.get(b), _divisible(e, b))) for b, q in common.items())
        common = {b: q for b, q in shared_powers if q}
    seen: set[tuple[frozenset[Poly], tuple[Axis, ...]]] = set()
    for group in _submultisets(e, tuple(sorted(common.items())), halves=len(rows) == 1):
        rests = [_without(factors, group) for _, factors, *_ in rows]
        if not group or not all(rests):
            continue
        group_axes = NO_AXES.union(*(e.base_axes(b) for b, _ in group))
        bounds = {bound & group_axes for bound, *_ in rows}
        if len(bounds) != 1:
            continue
        bound_in_group = bounds.pop()
        rest_axes = [NO_AXES.union(*(e.base_axes(b) for b, _ in r)) for r in rests]
        shared = frozenset(x for x in bound_in_group if any(x in r for r in rest_axes))
        if any(kind(x) == "l" for x in shared) or any(x not in r for x in shared for r in rest_axes):
            continue
        if any(
            kind(x) == "t" and part_of(x) in bound and part_of(x) not in shared for x in shared for bound, *_ in rows
        ):
            continue
        g = _single(e, bound_in_group - shared, group)
        r, scale = e.monic(
            e.make_poly(
                [
                    (e.make_term(bound - bound_in_group, rest), c)
                    for (bound, _, c, _), rest in zip(rows, rests, strict=True)
                ]
            )
        )
        axes = tuple(sorted(shared))
        if (key := (frozenset((g, r)), axes)) in seen:
            continue
        seen.add(key)
        if shared:
            yield _step("dot", (g, r), scale, axes=axes)
            continue
        yield _step("mul", (g, r), scale)
        for x, y in ((g, r), (r, g)):
            divisor = _reciprocal(e, y)
            if divisor is not None:
                yield _step("div", (x, divisor), scale)


def _atomic(e: Expressions, factors: Factors) -> bool:
    return all(q.denominator != 1 or q <= 1 or not _divisible(e, b) for b, q in factors)


def _divisible(e: Expressions, b: Base) -> bool:
    """May a power be split, x^3 = x x^2? Not of an exponential: exp(x)^3 is exp(3 x), one operator."""
    return e.base(b)[0] != "E"


def _shared_power(q: Fraction, other: Fraction | None, divisible: bool) -> Fraction | None:
    if other is None:
        return None
    if q == other:
        return q
    both_positive_integers = q.denominator == other.denominator == 1 and q > 0 and other > 0
    return min(q, other) if both_positive_integers and divisible else None


def _submultisets(e: Expressions, factors: Factors, halves: bool) -> Iterator[Factors]:
    """All of them, or (`halves`) of each one and its complement the one that comes first."""

    def powers(b: Base, q: Fraction) -> Sequence[int | Fraction]:
        return range(int(q) + 1) if q.denominator == 1 and q > 1 and _divisible(e, b) else (0, q)

    choices = [powers(b, q) for b, q in factors]
    count = math.prod(map(len, choices))
    for pick in islice(product(*choices), (count + 1) // 2 if halves else count):  # complements come in reverse order
        yield tuple((b, Fraction(n)) for (b, _), n in zip(factors, pick, strict=True) if n)


def _without(factors: Factors, group: Factors) -> Factors:
    left = dict(factors)
    for b, q in group:
        left[b] -= q
    return tuple((b, q) for b, q in left.items() if q)


def _reciprocal(e: Expressions, p: Poly) -> Poly | None:
    """x if p is x^-1 for a stored value x, else None."""
    rows = _rows(e, p)
    if len(rows) == 1 and not rows[0][0] and rows[0][2] == 1 and len(rows[0][1]) == 1:
        b, q = rows[0][1][0]
        if q == -1:
            match e.base(b):
                case ("P", inner):
                    return inner if e.one not in dict(e.poly(inner)) else None
                case ("atom", _, _):
                    return _single(e, (), [(b, ONE)])
                case _:
                    return None
    return None


RULES: tuple[Callable[[Expressions, Poly], Iterator[Decomposition]], ...] = (
    leaves,
    unary,
    split_sum,
    reduce_last,
    cut_product,
)

"""Safe softmax as shift degrees: which values may be stored relative to a running maximum.

A value of degree d is stored as ``a`` with true value ``a * exp(d * m)``. All values of one *exp group* share the shift
m. An exponential has degree 1, and so have its row sum l and the weighted sum O; 1/l has degree -1, and O/l has degree
0. So has log l, computed as log(a) + m. exp(-max(x)) has degree -1, computed as exp(m - max(x)): programs that keep row
sums for a gradient keep them relative to their maximum. A group may be shifted if every output of the region has degree
0: then m cancels for any value, and may be the maximum. A value that is not homogeneous (exp(x) + 1) has no shifted
form and cannot occur in such a program. This generalizes online softmax (Milakov and Gimelshein, 2018).

A program that takes no maximum, `exp(-d) / sum(exp(-d))`, is 0/0 where all its exponentials are 0. A shifted form has a
number there, which the float gate refuses.

Exponentials that the program multiplies together form one group, computed as one exp of the sum: exp(a) exp(b) would
be fine in algebra and 0 * inf in floats. exp(a - b) + exp(a - c) has a group of three, where only pairs occur. It is
computed plainly.

exp(a - L) with L = log(sum(exp(a))) is at most 1, and so is exp(a - M) with M = where(isfinite(max(a)), max(a), 0).
Were exp(-L) a member of a group, the sum could have no shift. So where that is the case, such a product is
*normalized*: it has degree 0, is computed as one exp, and no factor of it is made alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction

from mirage_jax.mugraph.graph import Axis, origin
from mirage_jax.search.enumerate.axioms import kind
from mirage_jax.search.enumerate.normal_form import Base, Expressions, Poly, Term

type Degree = tuple[tuple[int, Fraction], ...]  # ((group, degree), ...) without zeros, sorted
NONE: Degree = ()


@dataclass
class ShiftDegrees:
    """Exp groups of the targets, and the degree of every value in the groups that may be shifted."""

    e: Expressions
    targets: tuple[Poly, ...]
    may_shift: bool = (
        True  # False: the program has plain exponentials, and where it has no number, candidates have none
    )
    groups: list[frozenset[str]] = field(default_factory=list[frozenset[str]])
    shifted: frozenset[int] = frozenset()
    _group_of: dict[str, tuple[int, Fraction]] = field(
        default_factory=dict[str, tuple[int, Fraction]]
    )  # signature -> (group, degree of power 1)
    _degree: dict[Poly, Degree | None] = field(default_factory=dict[Poly, Degree | None])
    _signatures: dict[Base, str] = field(default_factory=dict[Base, str])
    _splits: dict[Poly, bool] = field(default_factory=dict[Poly, bool])
    _together: set[frozenset[str]] = field(default_factory=set[frozenset[str]])  # names of exponentials in one term
    _occurring: dict[frozenset[str], set[frozenset[str]]] = field(
        default_factory=dict[frozenset[str], set[frozenset[str]]]
    )  # group -> those of its members that are multiplied together in a term of the program
    _normalizing: dict[Base, bool] = field(default_factory=dict[Base, bool])
    _normalizes: bool = False  # whether any product is normalized
    _normalized: set[frozenset[str]] = field(default_factory=set[frozenset[str]])  # names of exponentials in such ones

    def __post_init__(self) -> None:
        self._settle()
        exponentials = (b for t in self._terms(self.targets) for b, _ in self._exponentials(t))
        plain = frozenset[str]().union(*self.plain)
        if self.may_shift and any(self.signature(b) in plain and self._is_normalizing(b) for b in exponentials):
            self._normalizes = True
            self._settle()

    @property
    def plain(self) -> list[frozenset[str]]:
        """The groups that may not be shifted."""
        return [g for i, g in enumerate(self.groups) if i not in self.shifted]

    def _settle(self) -> None:
        """Find the groups, and those that may be shifted."""
        powers: dict[str, Fraction] = {}  # of each exponential where it occurs first
        self._group_of, self._degree, self._together = {}, {}, set()
        self.groups = self._grouped(powers)
        for i, group in enumerate(self.groups):
            self._group_of |= {name: (i, 1 / (powers[name] * len(group))) for name in group}
        self._occurring = {g: {own & g for own in self._together if own & g} for g in self.groups}
        self.shifted = frozenset(i for i, g in enumerate(self.groups) if self._occurring[g] == {g} and self.may_shift)
        # A group in which some target is not of degree 0 is computed plainly, which may free or bind others.
        while bad := self._unshiftable():
            if len(bad) == len(self.shifted) > 1:  # of a value that has no degree, nobody knows yet whose fault that is
                bad = self._unshiftable_alone() or {min(bad)}
            self._shift(self.shifted - bad)

    def _shift(self, groups: frozenset[int]) -> None:
        self.shifted, self._degree = groups, {}

    def _unshiftable_alone(self) -> set[int]:
        """Groups that may not be shifted although all others are computed plainly."""
        groups, bad = self.shifted, set[int]()
        for group in groups:
            self._shift(frozenset({group}))
            bad |= self._unshiftable()
        self._shift(groups)
        return bad

    def _grouped(self, powers: dict[str, Fraction]) -> list[frozenset[str]]:
        """Names of exponentials, those multiplied together as one group; fills `powers`."""
        found: list[set[str]] = []
        for t in self._terms(self.targets):
            exps = list(self._exponentials(t))
            if self._is_normalized(t):
                self._normalized.add(frozenset(self.signature(b) for b, _ in exps))
                continue
            for b, q in exps:
                powers.setdefault(self.signature(b), q)
            names = {self.signature(b) for b, _ in exps}
            self._together.add(frozenset(names))
            if names:
                touching = [g for g in found if g & names]
                found = [g for g in found if not g & names] + [names.union(*touching)]
        return sorted((frozenset(g) for g in found), key=sorted)

    def _unshiftable(self) -> set[int]:
        """Shifted groups in which some target is not of degree 0."""
        bad = set[int]()
        for target in self.targets:
            d = self.degree(target)
            bad |= self.shifted if d is None else {i for i, _ in d}
        return bad

    def _exponentials(self, t: Term) -> Iterator[tuple[Base, Fraction]]:
        """Those of a term, but for exponentials of maxima: these are no members of a group."""
        return ((b, q) for b, q in self.e.term(t)[1] if self.e.base(b)[0] == "E" and self.e.maximum_of(b) is None)

    def _is_normalized(self, t: Term) -> bool:
        """Whether a product holds exp(-L) or exp(-M), and such products have degree 0."""
        return self._normalizes and any(self._is_normalizing(b) for b, _ in self._exponentials(t))

    def _is_normalizing(self, b: Base) -> bool:
        """Whether an exponential is one of a value that is made with L or M."""
        if b not in self._normalizing:
            self._normalizing[b] = any(map(self._is_bound, self._bases_in(self.e.exponent(b))))
        return self._normalizing[b]

    def _is_bound(self, b: Base) -> bool:
        """Whether a value is the logarithm of a sum of exponentials, or asks whether a maximum is finite."""
        match self.e.base(b):
            case ("f", "log", (argument, *_), _):
                return self.e.sums_exponentials(argument)
            case ("f", "isfinite", (argument,), _):
                return any(self.e.base(x)[:2] == ("f", "max") for x in self._bases_in(argument))
            case _:
                return False

    def _bases_in(self, p: Poly) -> list[Base]:
        """All bases that a value is made of."""
        terms = map(self.e.term, self._terms([p]))
        return [b for _, factors in terms for b, _ in factors]

    def signature(self, b: Base) -> str:
        """An exponential's name without axes: the same before and after every axis split."""
        name = self._signatures.get(b)
        if name is None:
            text = self.e.text(self.e.exponent(b))
            name = self._signatures[b] = _without_axes(text)
        return name

    def _terms(self, polys: Iterable[Poly]) -> Iterable[Term]:
        e, seen, todo = self.e, set[Poly](), list(polys)
        while todo:
            p = todo.pop()
            if p in seen:
                continue
            seen.add(p)
            for t, _ in e.poly(p):
                yield t
                for b, _ in e.term(t)[1]:
                    match e.base(b):
                        case ("P", inner):
                            todo.append(inner)
                        case ("E", _):
                            todo.append(e.exponent(b))
                        case ("f", _, polys_of, _):
                            todo.extend(polys_of)
                        case _:
                            pass

    def degree(self, p: Poly) -> Degree | None:
        """Degrees of a value in the shifted groups; None if it is not homogeneous."""
        if p not in self._degree:
            self._degree[p] = self._degree_of(p)
        return self._degree[p]

    def _degree_of(self, p: Poly) -> Degree | None:
        found: set[Degree] = set()
        for t, _ in self.e.poly(p):
            d = self._term_degree(t)
            if d is None:
                return None
            found.add(d)
        if len(found) > 1:
            return None
        return found.pop() if found else NONE

    def _term_degree(self, t: Term) -> Degree | None:
        total: dict[int, Fraction] = {}
        for b, q in self._factors(t):
            d = self._base_degree(b)
            if d is None:
                return None
            for g, v in d:
                total[g] = total.get(g, Fraction(0)) + v * q
        return tuple(sorted((g, v) for g, v in total.items() if v))

    def _factors(self, t: Term) -> list[tuple[Base, Fraction]]:
        """The factors of a term, but for the exponentials of a normalized product, which has no degree."""
        without = list(self._exponentials(t)) if self._is_normalized(t) else []
        return [factor for factor in self.e.term(t)[1] if factor not in without]

    def _base_degree(self, b: Base) -> Degree | None:
        match self.e.base(b):
            case ("E", _) if (x := self.e.maximum_of(b)) is not None:
                return self.degree(self.e.exp(x))
            case ("E", _):
                is_plain = self.degree(self.e.exponent(b)) == NONE
                group, unit = self._group(b)
                return (((group, unit),) if group in self.shifted else NONE) if is_plain else None
            case ("P", inner_poly):
                return self.degree(inner_poly)
            case ("f", "log", (argument, *of_row), _):  # log(a exp(d m)) = log(a) + d m
                d = self.degree(argument)
                return None if d is None or len(d) > 1 or any(self.degree(x) != NONE for x in of_row) else NONE
            case ("f", _, polys, _):
                return NONE if all(self.degree(x) == NONE for x in polys) else None
            case _:
                return NONE

    def _group(self, exponential: Base) -> tuple[int, Fraction]:
        """(group, degree of power 1) of an exponential."""
        return self._group_of.get(self.signature(exponential), (-1, Fraction(0)))

    def splits_a_group(self, p: Poly) -> bool:
        """Does a term hold some exponentials of a group, but not with those that the program multiplies them with?"""
        if p not in self._splits:
            self._splits[p] = any(self._splits_in(t) for t, _ in self.e.poly(p))
        return self._splits[p]

    def _splits_in(self, t: Term) -> bool:
        names = frozenset(self.signature(b) for b, _ in self._exponentials(t))
        if self._is_normalized(t):
            return names not in self._normalized
        return any(self._is_split(g, names) for g in self.groups)

    def _is_split(self, group: frozenset[str], names: frozenset[str]) -> bool:
        """Are some exponentials of a group among these, without others that the program multiplies them with?"""
        some = names & group
        return bool(some) and some != group and some not in self._occurring[group]

    def is_of_maximum(self, p: Poly) -> bool:
        """Whether a value is a power of exp(max(x))."""
        rows = self.e.poly(p)
        factors = self.e.term(rows[0][0])[1] if len(rows) == 1 else ()
        return len(factors) == 1 and self.e.maximum_of(factors[0][0]) is not None

    def group_axes(self, p: Poly) -> dict[int, frozenset[Axis]]:
        """Axes of the exponentials of each shifted group inside a value."""
        out: dict[int, frozenset[Axis]] = {}
        for t in self._terms([p]):
            if self._is_normalized(t):
                continue
            for b, _ in self.e.term(t)[1]:
                for g, _ in (self._base_degree(b) or NONE) if self.e.base(b)[0] == "E" else NONE:
                    out[g] = out.get(g, frozenset()) | self.e.base_axes(b)
        return out


def _without_axes(text: str) -> str:
    """Leave out a text's axes; a reduction by name keeps those that it removes, as they were before every split."""

    def removed(match: re.Match[str]) -> str:
        tile_axes = {origin(axis) for axis in match[1].split(",") if kind(axis) == "t"}
        return f"{{{','.join(sorted(tile_axes))}}}"

    return re.sub(r"\{(.*?)\}", removed, re.sub(r"\[.*?\]", "", text))

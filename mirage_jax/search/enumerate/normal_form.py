"""Abstract expressions as hash-consed normal forms over named axes (Mirage, OSDI'25, section 4.3).

Every value that a muGraph can compute is given a sum-of-products normal form,

    poly = sum of coefficient * term,    term = SUM over bound axes of a PRODUCT of base ^ power,
    base = atom (a tensor under axis names) | (poly) | exp(term) | function(polys).

All rows are interned, so equality modulo the axioms is equality of ids, and one id serves tiles, loop steps, split-K
partials and whole tensors: splitting an axis ``k -> (k.g, k)`` or ``(k.l, k)`` is a substitution. The axioms are
built into the constructors:

* products and powers merge (x * x^-1 = 1), sums flatten, coefficients are pulled to the front (scalars ride for free);
* a single term distributes over a sum; two real sums stay factors, because undoing their expansion would need
  factorization;
* terms that differ by powers of one function's value are one term: x - x tanh(y)^2 is x (1 - tanh(y)^2), a derivative
  that would else be multiplied out through all sums;
* sums over axes move as far out as possible, bound axes get canonical names (alpha equivalence);
* exp(a + b) = exp(a) exp(b), so exp(-max) leaves a softmax's sums and cancels: safe and unsafe softmax have one id;
* a product of equal sums is a power of the sum, (S[k] x)^2, so that polynomials of a contraction stay small;
* integer powers distribute over products and pull out of sums any factor that the sum does not touch; other powers
  pull out only exp.

Ids depend on creation order: never use them as keys outside of one `Expressions`; `text` is structural.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import wraps
from itertools import chain, permutations, product, starmap
from typing import Any

from mirage_jax.errors import UnsupportedError
from mirage_jax.mugraph.graph import Axis, origin
from mirage_jax.mugraph.operators import TRUTHS

type Base = int
type Term = int
type Poly = int
type Factors = tuple[tuple[Base, Fraction], ...]
type Axes = frozenset[Axis]
type Atoms = frozenset[tuple[str, tuple[Axis, ...]]]  # tensors, under axis names

ONE, HALF = Fraction(1), Fraction(1, 2)
WHOLE = TRUTHS | {"floor", "round", "sign"}  # functions whose values are whole numbers
KEEPS_WHOLE = frozenset({"abs", "max", "maximum", "minimum", "where"})  # of whole numbers
NO_VARIABLES = WHOLE | KEEPS_WHOLE | {"log"}  # functions whose values are no variables of polynomials
NO_AXES: Axes = frozenset()
NO_ATOMS: Atoms = frozenset()


def is_multiple(power: Fraction) -> bool:
    """Is a power a product of copies: x^2, x^3, ...?"""
    return power.denominator == 1 and power > 1


def memo[**P, R](method: Callable[P, R]) -> Callable[P, R]:
    """Cache a method in its instance: tables live and die with one search (no global caches)."""
    name = method.__name__

    @wraps(method)
    def cached(self: Any, *args: Any) -> R:
        """Look the arguments up first."""
        table: dict[Any, R] = self._memo[name]
        try:
            return table[args]
        except KeyError:
            pass
        table[args] = method(self, *args)  # type: ignore[call-arg]
        return table[args]

    return cached  # type: ignore[return-value]


class _Table[Row]:
    """Interned rows: equal rows have equal ids."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.ids: dict[Row, int] = {}

    def id(self, row: Row) -> int:
        """The id of a row, which is added if it is new."""
        i = self.ids.get(row)
        if i is None:
            i = self.ids[row] = len(self.rows)
            self.rows.append(row)
        return i


def _common_divisor(numbers: Sequence[Fraction]) -> Fraction:
    """The largest number of which all are whole multiples."""
    whole = math.lcm(*(c.denominator for c in numbers))
    return Fraction(math.gcd(*(int(c * whole) for c in numbers)), whole)


class Expressions:
    """The tables of one search, and the constructors that keep every row in normal form.

    The constructors are the operations of a domain (`mugraph.domains.protocol`), so that a muGraph can be evaluated
    over normal forms. A polynomial can have more terms than there is time or memory for: `check` is called with their
    number before they are looked at, and may raise. If `row_factors_leave_logs`, log(q exp(b)) is a function of q and b
    where q is a sum of exponentials and b the same all along it.
    """

    def __init__(
        self,
        extent: Callable[[Axis], int],
        check: Callable[[int], None] = lambda n: None,
        row_factors_leave_logs: bool = False,
    ) -> None:
        self.check, self.row_factors_leave_logs = check, row_factors_leave_logs
        self._memo: defaultdict[str, dict[Any, Any]] = defaultdict(dict)
        self._expanding: set[Term] = set()
        self.extent = extent
        self.bases: _Table[tuple[Any, ...]] = _Table()
        self.terms: _Table[tuple[Axes, Factors]] = _Table()
        self.polys: _Table[tuple[tuple[Term, Fraction], ...]] = _Table()
        self.one: Term = self.terms.id((NO_AXES, ()))

    # ------------------------------------------------------------------ rows

    def base(self, b: Base) -> tuple[Any, ...]:
        """("atom", name, axes) | ("P", poly) | ("E", term) | ("f", name, polys, removed axes)"""
        return self.bases.rows[b]

    def term(self, t: Term) -> tuple[Axes, Factors]:
        """(bound axes, ((base, power), ...))"""
        return self.terms.rows[t]

    def poly(self, p: Poly) -> tuple[tuple[Term, Fraction], ...]:
        """((term, coefficient), ...)"""
        return self.polys.rows[p]

    @memo
    def base_axes(self, b: Base) -> Axes:
        """Free axes of a base."""
        match self.base(b):
            case ("atom", _, axes):
                return frozenset(axes)
            case ("P", p):
                return self.axes(p)
            case ("E", t):
                return self.term_axes(t)
            case function:
                _, _, polys, removed = function
                return NO_AXES.union(*(self.axes(p) for p in polys)) - frozenset(removed)
        raise AssertionError(self.base(b))

    @memo
    def term_axes(self, t: Term) -> Axes:
        """Free axes of a term."""
        bound, factors = self.term(t)
        return self.factor_axes(factors) - bound

    def factor_axes(self, factors: Iterable[tuple[Base, Fraction]]) -> Axes:
        """Free axes of a product."""
        return NO_AXES.union(*(self.base_axes(b) for b, _ in factors))

    @memo
    def axes(self, p: Poly) -> Axes:
        """Free axes of a value."""
        return NO_AXES.union(*(self.term_axes(t) for t, _ in self.poly(p)))

    # ------------------------------------------------------------------ what a value depends on

    @memo
    def _base_atoms(self, b: Base) -> Atoms:
        match self.base(b):
            case ("atom", name, axes):
                return frozenset({(name, axes)})
            case ("P", p):
                return self.atoms(p)
            case ("E", t):
                return self._term_atoms(t)
            case function:
                return NO_ATOMS.union(*map(self.atoms, function[2]))
        raise AssertionError(self.base(b))

    @memo
    def _term_atoms(self, t: Term) -> Atoms:
        _, factors = self.term(t)
        return NO_ATOMS.union(*(self._base_atoms(b) for b, _ in factors))

    @memo
    def atoms(self, p: Poly) -> Atoms:
        """The tensors that a value is made of, each under its axis names."""
        return NO_ATOMS.union(*(self._term_atoms(t) for t, _ in self.poly(p)))

    # ------------------------------------------------------------------ a well-founded measure

    @memo
    def _base_size(self, b: Base) -> int:
        match self.base(b):
            case ("atom", _, _):
                return 1
            case ("P", p):
                return 1 + self.size(p)
            case ("E", t):
                return 1 + self._term_size(t)
            case function:
                _, _, polys, removed = function
                return 1 + len(removed) + sum(self.size(p) for p in polys)
        raise AssertionError

    @memo
    def _term_size(self, t: Term) -> int:
        bound, factors = self.term(t)
        return 1 + len(bound) + sum(self._factor_size(b, q) for b, q in factors)

    def _factor_size(self, b: Base, q: Fraction) -> int:
        if is_multiple(q) and self.base(b)[0] != "E":
            return self._base_size(b) * int(q) + 1
        return self._base_size(b) + (q != 1) + _halvings(q)

    @memo
    def size(self, p: Poly) -> int:
        """Strictly smaller for the operands of every backwards rule, which is why decomposition ends."""
        return sum(self._term_size(t) for t, _ in self.poly(p))

    # ------------------------------------------------------------------ substitution of axes

    @staticmethod
    def _rename(axes: Iterable[Axis], m: Mapping[Axis, tuple[Axis, ...]]) -> tuple[Axis, ...]:
        return tuple(x for a in axes for x in m.get(a, (a,)))

    def _sub_base(self, b: Base, m: Mapping[Axis, tuple[Axis, ...]], everywhere: bool) -> Base:
        if not everywhere and not (self.base_axes(b) & m.keys()):
            return b
        match self.base(b):
            case ("atom", name, axes):
                return self.bases.id(("atom", name, self._rename(axes, m)))
            case ("P", p):
                return self.bases.id(("P", self._sub_poly(p, m, everywhere)))
            case ("E", t):
                return self.bases.id(("E", self._sub_term(t, tuple(sorted(m.items())), everywhere)))
            case function:
                _, name, polys, removed = function
                inner, gone = m, self._rename(removed, m) if everywhere else removed
                if not everywhere:
                    inner, gone = self._avoiding_capture(frozenset(removed), self.base_axes(b), m)
                return self.bases.id(
                    ("f", name, tuple(self._sub_poly(p, inner, everywhere) for p in polys), tuple(sorted(gone)))
                )
        raise AssertionError

    @memo
    def _sub_term(self, t: Term, items: tuple[tuple[Axis, tuple[Axis, ...]], ...], everywhere: bool) -> Term:
        bound, factors = self.term(t)
        m = dict(items)
        names: Iterable[Axis] = self._rename(bound, m)
        if not everywhere:
            m, names = self._avoiding_capture(bound, self.term_axes(t), m)
        return self.make_term(names, [(self._sub_base(b, m, everywhere), q) for b, q in factors])

    @staticmethod
    def _avoiding_capture(
        bound: Axes, free: Axes, m: Mapping[Axis, tuple[Axis, ...]]
    ) -> tuple[dict[Axis, tuple[Axis, ...]], tuple[Axis, ...]]:
        """A substitution of free axes under a binder: bound axes step aside for the names that come in."""
        inner = {a: v for a, v in m.items() if a in free}
        taken = {x for v in inner.values() for x in v}
        inner |= _stepped_aside(bound & taken, {*taken, *bound, *free})
        return inner, tuple(inner.get(x, (x,))[0] for x in sorted(bound))

    def _sub_poly(self, p: Poly, m: Mapping[Axis, tuple[Axis, ...]], everywhere: bool) -> Poly:
        items = tuple(sorted(m.items()))
        return self.make_poly([(self._sub_term(t, items, everywhere), c) for t, c in self.poly(p)])

    def rename(self, p: Poly, m: Mapping[Axis, Axis]) -> Poly:
        """The same value under other names of its free axes."""
        return self._sub_poly(p, {a: (b,) for a, b in m.items() if a != b}, False)

    def split(self, p: Poly, axis: Axis, parts: tuple[Axis, Axis]) -> Poly:
        """``k -> (k.g, k)`` or ``(k.l, k)`` everywhere, bound copies ``k'``, ``k''`` included."""
        m = {axis + q: tuple(x + q for x in parts) for q in ("", "'", "''", "'''")}
        return self._sub_poly(p, m, True)

    # ------------------------------------------------------------------ constructors of rows

    def make_term(self, bound: Iterable[Axis], factors: Iterable[tuple[Base, Fraction]]) -> Term:
        """Sum a product over bound axes. Raises `UnsupportedError` for an axis on which no factor depends."""
        return self._make_term(frozenset(bound), tuple(factors))

    @memo
    def _make_term(self, bound: Axes, factors: Factors) -> Term:
        bound, rows = self._opened(bound, _merged(factors))
        rows = _merged((self._without_sign(b, q), q) for b, q in rows)
        axes = self.factor_axes(rows)
        if lost := bound - axes:
            raise UnsupportedError(f"sum over axis {min(lost)}, on which no factor depends any more")
        groups, names = self._copies(bound, axes - bound)
        if all(len(ns) == 1 for ns in names) and groups == names:
            return self.terms.id((bound, tuple(sorted(rows))))
        return self.terms.id(min(self._renamed(groups, names, rows), key=lambda row: row[1]))  # canonical alpha names

    def _copies(self, bound: Axes, free: Axes) -> tuple[list[list[Axis]], list[list[Axis]]]:
        """Bound axes by what they are copies of, and the first names for as many copies that are not free."""
        groups: dict[Axis, list[Axis]] = {}
        for x in sorted(bound):
            groups.setdefault(origin(x), []).append(x)
        return list(groups.values()), [self._bound_names(o, len(xs), free) for o, xs in groups.items()]

    def _renamed(
        self, groups: Iterable[Sequence[Axis]], names: Iterable[Sequence[Axis]], rows: Sequence[tuple[Base, Fraction]]
    ) -> Iterator[tuple[Axes, Factors]]:
        """A term's row under all of the few permutations of names."""
        old = list(chain(*groups))
        for new in product(*map(permutations, names)):
            yield self._renamed_row(dict(zip(old, chain(*new), strict=True)), rows)

    @memo
    def namings(self, t: Term) -> tuple[tuple[Axes, Factors], ...]:
        """The rows that a term has under other names of its bound axes, and its own as the first: S[k,k'] x[k] y[k'] is
        S[k,k'] x[k'] y[k].
        """
        bound, factors = self.term(t)
        groups, names = self._copies(bound, self.term_axes(t))
        others = () if all(len(xs) == 1 for xs in groups) else self._renamed(groups, names, factors)
        return tuple(dict.fromkeys(((bound, factors), *others)))

    def _renamed_row(self, names: Mapping[Axis, Axis], rows: Sequence[tuple[Base, Fraction]]) -> tuple[Axes, Factors]:
        """A term's row with its bound axes renamed."""
        self.check(1)
        aside = {x: (x + "#",) for x in names}  # two steps, so that renaming captures nothing
        back = {x + "#": (n,) for x, n in names.items()}
        moved = ((self._sub_base(self._sub_base(b, aside, False), back, False), q) for b, q in rows)
        return frozenset(names.values()), tuple(sorted((self._without_sign(b, q), q) for b, q in moved))

    def _without_sign(self, b: Base, q: Fraction) -> Base:
        """The base of a power. Even powers have one base for (x - y)^2 and (y - x)^2."""
        return self._positive(b) if q.denominator == 1 and q.numerator % 2 == 0 else b

    @memo
    def _positive(self, b: Base) -> Base:
        match self.base(b):
            case ("P", p) if self.monic(p)[1] < 0:
                return self.bases.id(("P", self.scale(p, -ONE)))
            case _:
                return b

    def _opened(self, bound: Axes, rows: list[tuple[Base, Fraction]]) -> tuple[Axes, list[tuple[Base, Fraction]]]:
        """Move the sum of a factor (S[k] t)^1 that is not alone to the sums of the whole product."""
        for b, q in rows:
            term = self._only_term(b) if q == 1 and len(rows) > 1 else None
            if term is not None:
                inner, factors = self.term(term)
                others = [x for x in rows if x[0] != b]
                used = set(bound | inner | self.factor_axes((*rows, *factors)))
                m = _stepped_aside(inner & (bound | self.factor_axes(others)), used)
                moved = [(self._sub_base(x, m, False), power) for x, power in factors]
                renamed = frozenset(m.get(x, (x,))[0] for x in inner)
                return self._opened(bound | renamed, _merged((*others, *moved)))
        return bound, rows

    def _only_term(self, b: Base) -> Term | None:
        """The term that a base is, if it is a polynomial of one with coefficient 1."""
        match self.base(b):
            case ("P", p) if len(self.poly(p)) == 1 and self.poly(p)[0][1] == 1:
                return self.poly(p)[0][0]
            case _:
                return None

    @staticmethod
    def _bound_names(o: Axis, n: int, free: Axes) -> list[Axis]:
        out: list[Axis] = []
        x = o
        while len(out) < n:
            if x not in free:
                out.append(x)
            x += "'"
        return out

    def make_poly(self, items: Iterable[tuple[Term, Fraction]]) -> Poly:
        """Add terms with coefficients."""
        items = tuple(items)
        self.check(len(items))
        return self._make_poly(items)

    @memo
    def _make_poly(self, items: tuple[tuple[Term, Fraction], ...]) -> Poly:
        rows = _added(chain.from_iterable(starmap(self._expanded, items)))
        if any(map(self._has_variables, rows)):
            rows = self._of_variables(rows)
        return self.polys.id(tuple(sorted(rows.items())))

    def _expanded(self, t: Term, c: Fraction) -> Iterable[tuple[Term, Fraction]]:
        """c t as terms: (poly)^1 is the poly, and integer powers go further in."""
        bound, factors = self.term(t)
        if not bound and len(factors) == 1 and factors[0][1] == 1 and self.base(factors[0][0])[0] == "P":
            return ((u, c * e) for u, e in self.poly(self.base(factors[0][0])[1]))
        whole_powers = (x for x in factors if x[1].denominator == 1 and x[1] != 1)
        loose = next((x for x in whole_powers if self._is_loose(x[0])), None)
        if loose is None or t in self._expanding:
            return ((t, c),)
        b, q = loose
        # The sign of an odd power may return as a swap of bound axes: S[i,i'] (x[i] - x[i'])^3 y[i] y[i'].
        self._expanding.add(t)
        try:
            rest = self.make_poly([(self.make_term((), [x for x in factors if x != loose]), c)])
            return self.poly(self.sum(self.mul(self.power(self.base(b)[1], q), rest), tuple(sorted(bound))))
        finally:
            self._expanding.remove(t)

    # ------------------------------------------------------------------ polynomials of one function's value

    def _is_variable(self, b: Base) -> bool:
        """Whether sums may be polynomials of a base: it is a function's value."""
        match self.base(b):
            case ("f", name, (_,), ()):
                return name not in NO_VARIABLES
            case _:
                return False

    @memo
    def _has_variables(self, t: Term) -> bool:
        """Whether a term has a variable, or a polynomial of one, as a factor."""
        return any(self._is_variable(b) or self._variable(b) is not None for b, _ in self.term(t)[1])

    def _of_variables(self, rows: Mapping[Term, Fraction]) -> dict[Term, Fraction]:
        """The same sum with one term for all that differ by powers of a variable."""
        found = _added(chain.from_iterable(starmap(self._multiplied_out, rows.items())))
        variables = frozenset[Base]().union(*map(self._variables, found))
        for v in sorted(variables, key=self._base_text):
            found = self._collected(found, v)
        return found

    @memo
    def _variables(self, t: Term) -> frozenset[Base]:
        """Functions' values that a term has, or whole powers of them."""
        whole = (b for b, q in self.term(t)[1] if q == 1 or is_multiple(q))
        return frozenset(filter(self._is_variable, whole))

    @memo
    def _variable(self, b: Base) -> Base | None:
        """The one variable that a polynomial has; None if the base is none."""
        if self.base(b)[0] != "P":
            return None
        terms = [t for t, _ in self.poly(self.base(b)[1]) if t != self.one]
        found = frozenset[Base]().union(*map(self._variables, terms))
        if len(found) != 1 or not all(map(self._is_power, terms)):
            return None
        return next(iter(found))

    def _is_power(self, t: Term) -> bool:
        """Whether a term is a power of a variable, and nothing else."""
        bound, factors = self.term(t)
        return not bound and len(factors) == 1 and bool(self._variables(t))

    def _multiplied_out(self, t: Term, c: Fraction) -> Iterable[tuple[Term, Fraction]]:
        """c t as terms without a factor that is a polynomial of one variable."""
        bound, factors = self.term(t)
        for b, q in factors:
            if q == 1 and self._variable(b) is not None:
                rest = [x for x in factors if x[0] != b]
                found: list[tuple[Term, Fraction]] = []
                for u, e in self.poly(self.base(b)[1]):
                    inner = self._summed(bound, [*rest, *self.term(u)[1]], c * e)
                    found += self._multiplied_out(*inner)
                return found
        return [(t, c)]

    def _summed(self, bound: Axes, factors: list[tuple[Base, Fraction]], c: Fraction) -> tuple[Term, Fraction]:
        """A term of a sum over axes that not all terms have: over another it is the factor |axis|."""
        here = bound & self.factor_axes(factors)
        return self.make_term(here, factors), c * math.prod(map(self.extent, bound - here))

    def _collected(self, rows: Mapping[Term, Fraction], v: Base) -> dict[Term, Fraction]:
        """Terms that differ by powers of a variable as one term with a polynomial as a factor."""
        groups: dict[tuple[Axes, Factors], list[tuple[Factors, Fraction]]] = {}
        for t, c in rows.items():
            bound, factors = self.term(t)
            own = tuple(x for x in factors if x[0] == v and v in self._variables(t))
            rest = tuple(x for x in factors if x not in own)
            groups.setdefault((bound, rest), []).append((own, c))
        found: dict[Term, Fraction] = {}
        for (bound, rest), powers in groups.items():
            if not rest or len(powers) == 1:
                found |= {self.make_term(bound, [*rest, *own]): c for own, c in powers}
                continue
            rows_of_sum = sorted((self.make_term((), own), c) for own, c in powers)
            m, c = self.monic(self.polys.id(tuple(rows_of_sum)))
            found[self.make_term(bound, [*rest, (self.bases.id(("P", m)), ONE)])] = c
        return found

    @memo
    def _is_loose(self, b: Base) -> bool:
        """Could an integer power of this base go further in? Roots keep (x)^(1/2) and (2 x + 1)^(1/2) whole, but not a
        product of two such roots.
        """
        match self.base(b):
            case ("P", p):
                alone = len(self.poly(p)) == 1 and not self.term(self.poly(p)[0][0])[0]
                return alone or self.monic(p)[1] != 1 or bool(self._common(p, ONE))
            case _:
                return False

    def _common(self, p: Poly, r: Fraction) -> dict[Base, Fraction]:
        """Factors of all terms that may be pulled out of p ** r."""
        rows = [self.term(t) for t, _ in self.poly(p)]
        common = self._pullable(*rows[0], r)
        for bound, factors in rows[1:]:
            here = self._pullable(bound, factors, r)
            common = {b: q for b, q in common.items() if here.get(b) == q}
        return common

    def _pullable(self, bound: Axes, factors: Factors, r: Fraction) -> dict[Base, Fraction]:
        """Factors of one term that no sum touches; for a root only exp, which is positive."""
        free = ((b, q) for b, q in factors if not self.base_axes(b) & bound)
        return {b: q for b, q in free if r.denominator == 1 or self.base(b)[0] == "E"}

    def _factor(self, base: tuple[Any, ...], power: Fraction = ONE) -> Poly:
        return self.make_poly([(self.make_term((), [(self.bases.id(base), power)]), ONE)])

    # ------------------------------------------------------------------ values

    def constant(self, c: Fraction | int) -> Poly:
        """Make a constant."""
        return self.make_poly([(self.one, Fraction(c))])

    def atom(self, name: str, axes: tuple[Axis, ...]) -> Poly:
        """Make a tensor under these axis names."""
        return self._factor(("atom", name, axes))

    def add(self, *ps: Poly) -> Poly:
        """Add values."""
        return self.make_poly([x for p in ps for x in self.poly(p)])

    def scale(self, p: Poly, c: Fraction) -> Poly:
        """Multiply a value by a constant."""
        return self.make_poly([(t, k * c) for t, k in self.poly(p)])

    def monic(self, p: Poly) -> tuple[Poly, Fraction]:
        """Factor p = c * q so that q's largest non-constant coefficient is 1; returns (q, c).

        Where all coefficients are whole numbers, or all values, q has whole coefficients without a common divisor.
        Floats compute such a sum of whole numbers exactly, also if nobody knows that a float tensor holds them, so that
        comparisons find what they find in the program.
        """
        rows = self.poly(p)
        c = max((c for t, c in rows if t != self.one), key=abs, default=None)  # sums do not grow
        if c is None:
            return p, ONE
        if all(c.denominator == 1 for _, c in rows) or all(self._is_whole_term(t) for t, _ in rows):
            divisor = _common_divisor([c for _, c in rows])
            c = divisor if c > 0 else -divisor
        return (p, ONE) if c == 1 else (self.scale(p, 1 / c), c)

    def is_whole(self, p: Poly) -> bool:
        """Are all values whole numbers, as of indices and conditions?"""
        return all(c.denominator == 1 and self._is_whole_term(t) for t, c in self.poly(p))

    @memo
    def _is_whole_term(self, t: Term) -> bool:
        return all(q.denominator == 1 and q > 0 and self._is_whole_base(b) for b, q in self.term(t)[1])

    def _is_whole_base(self, b: Base) -> bool:
        match self.base(b):
            case ("atom", "#iota", _):
                return True
            case ("P", p):
                return self.is_whole(p)
            case ("f", name, polys, _):
                return name in WHOLE or (name in KEEPS_WHOLE and all(map(self.is_whole, polys)))
            case _:
                return False

    def affine_parts(self, p: Poly) -> tuple[Poly, Fraction, Fraction]:
        """Factor p = scale * q + offset with q monic and without constant term; q is the zero poly if p is constant."""
        offset = dict(self.poly(p)).get(self.one, Fraction(0))
        q, c = self.monic(self.make_poly([(t, c) for t, c in self.poly(p) if t != self.one]))
        return q, c, offset

    def only_base(self, p: Poly) -> tuple[Any, ...] | None:
        """The base that a value consists of, if it has no other factor or term."""
        match self.poly(p):
            case ((t, c),) if c == 1 and not self.term(t)[0]:
                match self.term(t)[1]:
                    case ((b, q),) if q == 1:
                        return self.base(b)
                    case _:
                        return None
            case _:
                return None

    def is_constant(self, p: Poly) -> bool:
        """Does a value depend on no tensor?"""
        return all(t == self.one for t, _ in self.poly(p))

    def mul(self, p: Poly, q: Poly) -> Poly:
        """Multiply values; two sums stay factors."""
        if len(self.poly(p)) > 1 and len(self.poly(q)) > 1:
            (p, c), (q, d) = self.monic(p), self.monic(q)
            factors = [(self.bases.id(("P", p)), ONE), (self.bases.id(("P", q)), ONE)]
            return self.make_poly([(self.make_term((), factors), c * d)])
        return self.make_poly([(self._mul_terms(s, t), c * d) for s, c in self.poly(p) for t, d in self.poly(q)])

    def _mul_terms(self, s: Term, t: Term) -> Term:
        (sum_s, beside_s), (sum_t, beside_t) = self._sum_base(s), self._sum_base(t)
        if sum_s is not None and sum_s == sum_t:  # a product of equal sums is a power of the sum, whatever is beside it
            return self.make_term((), [(sum_s, Fraction(2)), *beside_s, *beside_t])
        for whole, base, beside, other in ((t, sum_t, beside_t, s), (s, sum_s, beside_s, t)):
            bound, factors = self.term(other)
            if base in dict(factors) and not bound & self.term_axes(whole):
                return self.make_term(bound, [*factors, (base, ONE), *beside])
        (bound_s, fs), (bound_t, ft) = self.term(s), self.term(t)
        used = set(bound_s | bound_t | self.term_axes(s) | self.term_axes(t))
        bs, fs2 = self._freshly_bound(bound_s, fs, self.term_axes(t), used)
        bt, ft2 = self._freshly_bound(bound_t, ft, self.term_axes(s) | set(bs), used)
        return self.make_term([*bs, *bt], [*fs2, *ft2])

    def _freshly_bound(
        self, bound: Axes, factors: Factors, taken: Axes, used: set[Axis]
    ) -> tuple[list[Axis], list[tuple[Base, Fraction]]]:
        """Bound axes and factors with `taken` axes renamed; new names join `used`."""
        m = _stepped_aside(bound & taken, used)
        return [m.get(x, (x,))[0] for x in bound], [(self._sub_base(b, m, False), q) for b, q in factors]

    @memo
    def _sum_base(self, t: Term) -> tuple[Base | None, Factors]:
        """The sum in a term as one factor, None if it has none, and the factors that it does not sum."""
        bound, factors = self.term(t)
        if not bound:
            return None, factors
        beside = self._pullable(bound, factors, ONE)
        inside = [x for x in factors if x[0] not in beside]
        return self.bases.id(("P", self.make_poly([(self.make_term(bound, inside), ONE)]))), tuple(beside.items())

    def power(self, p: Poly, r: Fraction) -> Poly:
        """Raise p to the power r; common factors that no sum touches are pulled out (for a root only exp).

        Raises `UnsupportedError` for a power of zero.
        """
        rows = [self.term(t) for t, _ in self.poly(p)]
        if not rows:
            raise UnsupportedError("power of zero")
        common = self._common(p, r)
        out = self.make_poly([(self.make_term((), [(b, q * r) for b, q in common.items()]), ONE)])
        terms = [(*self.term(t), c) for t, c in self.poly(p)]
        rest = self.make_poly(
            [(self.make_term(bound, [x for x in factors if x[0] not in common]), c) for bound, factors, c in terms]
        )
        if self.poly(rest) == ((self.one, ONE),):
            return out
        if len(self.poly(rest)) == 1 and r.denominator == 1:
            (t, c) = self.poly(rest)[0]
            bound, factors = self.term(t)
            if t == self.one:
                return self.scale(out, c ** int(r))
            if not bound:  # a product without a sum: the power distributes
                return self.mul(
                    out, self.make_poly([(self.make_term((), [(b, q * r) for b, q in factors]), c ** int(r))])
                )
        return self.mul(out, self._raw_power(rest, r))

    def _raw_power(self, p: Poly, r: Fraction) -> Poly:
        m, c = self.monic(p) if r.denominator == 1 else (p, ONE)
        return self.make_poly([(self.make_term((), [(self.bases.id(("P", m)), r)]), c ** int(r) if c != 1 else ONE)])

    def exp(self, p: Poly) -> Poly:
        """exp(sum c_i t_i) = product of exp(t_i)^c_i; the constant term stays inside as exp of the term 1."""
        rows = chain.from_iterable(starmap(self._multiplied_out, self.poly(p)))
        return self.make_poly([(self.make_term((), [(self.bases.id(("E", t)), c) for t, c in rows]), ONE)])

    def function(self, name: str, polys: Iterable[Poly], removed: tuple[Axis, ...] = ()) -> Poly:
        """Apply an uninterpreted function, which reduces the axes `removed`."""
        polys = tuple(polys)
        if name == "log" and len(polys) == 1 and self.row_factors_leave_logs:
            polys = self._without_row_factor(*polys)
        return self._factor(("f", name, polys, tuple(sorted(removed))))

    def _without_row_factor(self, p: Poly) -> tuple[Poly, ...]:
        """p = q exp(b) as q and b, where q is a sum of exponentials and b the same all along it; else p alone."""
        if not self.poly(p):
            return (p,)
        common = self._common(p, HALF).items()
        row = [(b, q) for b, q in common if self.maximum_of(b) is None]
        if not row:
            return (p,)
        inverse = self.make_term((), [(b, -q) for b, q in row])
        rest = self.mul(p, self.make_poly([(inverse, ONE)]))
        if not self.sums_exponentials(rest):
            return (p,)
        return rest, self.make_poly((self.base(b)[1], q) for b, q in row)

    def exponent(self, b: Base) -> Poly:
        """x, of exp(x)."""
        return self.make_poly([(self.base(b)[1], ONE)])

    @memo
    def maximum_of(self, b: Base) -> Poly | None:
        """x, of exp(max(x)); None for all other bases."""
        inner = self.only_base(self.exponent(b)) if self.base(b)[0] == "E" else None
        return inner[2][0] if inner is not None and inner[:2] == ("f", "max") else None

    def sums_exponentials(self, p: Poly) -> bool:
        """Whether a value adds up exponentials."""
        terms = [self.term(t) for t, _ in self.poly(p)]
        if len(terms) == 1 and not terms[0][0]:
            return False
        factors = [b for _, factors in terms for b, _ in factors]
        return any(self.base(b)[0] == "E" for b in factors)

    def sum(self, p: Poly, axes: tuple[Axis, ...]) -> Poly:
        """Sum over axes; over an axis that a term does not have it is the factor |axis|."""
        for x in axes:
            items: list[tuple[Term, Fraction]] = []
            for t, c in self.poly(p):
                bound, factors = self.term(t)
                if x not in self.term_axes(t):
                    items.append((t, c * self.extent(x)))
                else:
                    # x is free in the term, so a bound axis never has this name
                    items.append((self.make_term(bound | {x}, factors), c))
            p = self.make_poly(items)
        return p

    def dot(self, p: Poly, q: Poly, axes: tuple[Axis, ...]) -> Poly:
        """Multiply and sum over axes."""
        return self.sum(self.mul(p, q), axes)

    def log_product(self, p: Poly, m: Poly) -> Poly:
        """log(p exp(m)), an uninterpreted function of the product."""
        return self.function("log", (self.mul(p, self.exp(m)),))

    def less_log_product(self, y: Poly, p: Poly, m: Poly) -> Poly:
        """y - log(p exp(m)): the order in which floats subtract has no normal form."""
        return self.add(y, self.scale(self.log_product(p, m), Fraction(-1)))

    def maximum(self, p: Poly, axes: tuple[Axis, ...]) -> Poly:
        """Maximum over axes; max(c x + o) = c max(x) + o for positive c."""
        axes = tuple(a for a in axes if a in self.axes(p))
        q, c, offset = self.affine_parts(p)
        if not axes:
            return p
        if c > 0:
            return self.add(self.scale(self._maximum(q, axes), c), self.constant(offset))
        return self._maximum(p, axes)

    def _maximum(self, p: Poly, axes: tuple[Axis, ...]) -> Poly:
        match self.only_base(p):
            case ("f", "max", (inner,), removed):  # max over i of max over j is max over i and j
                return self.function("max", (inner,), (*removed, *axes))
            case _:
                return self.function("max", (p,), axes)

    def shift(self, p: Poly, axes: tuple[Axis, ...]) -> Poly:
        """Raises `UnsupportedError`: the search adds shifts when it writes a kernel."""
        raise UnsupportedError("a shift has no normal form: it is added after the search")

    def iota(self, axis: Axis) -> Poly:
        """Make the index along an axis."""
        return self.atom("#iota", (axis,))

    # ------------------------------------------------------------------ text (structural, for people and digests)

    @memo
    def _base_text(self, b: Base) -> str:
        match self.base(b):
            case ("atom", name, axes):
                return f"{name}[{','.join(axes)}]"
            case ("P", p):
                return f"({self.text(p)})"
            case ("E", t):
                return f"exp({self._term_text(t)})"
            case function:
                _, name, polys, removed = function
                gone = f"{{{','.join(removed)}}}" if removed else ""
                return f"{name}{gone}({', '.join(self.text(p) for p in polys)})"
        raise AssertionError

    def _factor_text(self, b: Base, q: Fraction) -> str:
        """Of an even power: the same for a sum and its negative, since ids choose between both."""
        match self.base(b):
            case ("P", p) if q % 2 == 0:
                return f"({min(self.text(p), self.text(self.scale(p, Fraction(-1))))})^{q}"
            case _:
                return self._base_text(b) + ("" if q == 1 else f"^{q}")

    @memo
    def _term_text(self, t: Term) -> str:
        bound, factors = self.term(t)
        body = "*".join(sorted(self._factor_text(b, q) for b, q in factors)) or "1"
        return (f"S[{','.join(sorted(bound))}] " if bound else "") + body

    @memo
    def text(self, p: Poly) -> str:
        """Readable and independent of ids: the same for equal expressions of different searches."""
        return " + ".join(sorted(("" if c == 1 else f"{c}*") + self._term_text(t) for t, c in self.poly(p))) or "0"


def _added(rows: Iterable[tuple[Term, Fraction]]) -> dict[Term, Fraction]:
    """The coefficients of terms, added up, without those that cancel."""
    sums: dict[Term, Fraction] = {}
    for t, c in rows:
        sums[t] = sums[t] + c if t in sums else c
    return {t: c for t, c in sums.items() if c != 0}


def _halvings(q: Fraction) -> int:
    """How often a whole power may be halved."""
    return (q.numerator & -q.numerator).bit_length() - 1 if q.denominator == 1 else 0


def _merged(factors: Iterable[tuple[Base, Fraction]]) -> list[tuple[Base, Fraction]]:
    """Factors with powers of equal bases added."""
    powers: dict[Base, Fraction] = {}
    for b, q in factors:
        powers[b] = powers[b] + q if b in powers else q
    return [(b, q) for b, q in powers.items() if q != 0]


def _stepped_aside(bound: Axes | set[Axis], used: set[Axis]) -> dict[Axis, tuple[Axis, ...]]:
    """New names for bound axes: the first copies that are not used. They join `used`."""
    names: dict[Axis, tuple[Axis, ...]] = {}
    for x in sorted(bound):
        y = x
        while y in used:
            y += "'"
        used.add(y)
        names[x] = (y,)
    return names

"""Random expressions over named axes, and what an expression and a normal form mean, element by element.

Trees are nested tuples: ("atom", name), (op, tree, tree), ("sum", tree, axis), ("pow", tree, exponent), ... Both
readers are a few lines of scalar code that share nothing with the package.
"""

import math
from fractions import Fraction as Q
from itertools import product
from typing import Any

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

from mirage_jax.errors import UnsupportedError
from mirage_jax.mugraph.graph import origin
from mirage_jax.search.enumerate.normal_form import Expressions, Poly, Term

type Tree = tuple[Any, ...]
type Index = dict[str, int]  # axis -> index

SIZES = {"i": 2, "i'": 2, "j": 4, "k": 3}
SPLIT = {**SIZES, "j.l": 2, "j": 2}  # sizes after j -> (j.l, j)
ATOMS = {"a": ("i",), "b": ("j",), "x": ("i", "j"), "w": ("j", "k"), "v": ("k",), "s": ()}
DATA = {
    name: np.random.default_rng(n).uniform(0.5, 1.5, [SIZES[a] for a in axes])
    for n, (name, axes) in enumerate(ATOMS.items())
}
ATOMS |= {"a'": ("i'",), "x'": ("i'", "j")}  # the same tensors along a copy of an axis
FUNCTIONS = {"tanh": math.tanh, "maximum": max}


def extent(axis: str) -> int:
    return SIZES[origin(axis)]


# --- expressions


ROOTS = (Q(-1), Q(1, 2), Q(-1, 2), Q(3, 2), Q(-2))
ARGUMENTS: dict[str, st.SearchStrategy[Any]] = {
    "sum": st.sampled_from(sorted(SIZES)),
    "max": st.sampled_from(sorted(SIZES)),
    "scale": st.sampled_from([Q(1, 4), Q(-1), Q(2), Q(-1, 2)]),
    "offset": st.sampled_from([Q(1), Q(1, 3)]),
    "exp": st.sampled_from([Q(1, 16), Q(-1, 8)]),
}
OPERATORS = ("mul", "add", "sum", "mul", "add", "sum", "pow", "exp", "scale", "offset", "tanh", "maximum", "max")


@st.composite
def trees(draw: st.DrawFn, steps: int = 8, largest: int = 40) -> Tree:
    """An expression grown operator by operator, each on the last value and any value before: some are shared."""
    values: list[Tree] = [("atom", name) for name in ATOMS]
    last = draw(st.sampled_from(values))
    for _ in range(draw(st.integers(1, steps))):
        op = draw(st.sampled_from(OPERATORS))
        if op in ("mul", "add", "maximum"):
            made = (op, last, draw(st.sampled_from(values[::-1])))
        elif op == "pow":
            made = (op, last, draw(st.sampled_from(ROOTS)) if is_positive(last) else Q(draw(st.integers(2, 3))))
        else:
            made = (op, last, *([draw(ARGUMENTS[op])] if op in ARGUMENTS else []))
        if nodes(made) > largest:
            break
        values.append(last := made)
    return last


def nodes(tree: Tree) -> int:
    return 1 + sum(nodes(t) for t in tree if isinstance(t, tuple))


def is_positive(tree: Tree) -> bool:
    match tree:
        case ("atom", _) | ("exp", _, _):
            return True
        case ("scale", t, c):
            return c > 0 and is_positive(t)
        case ("maximum", t, u):
            return is_positive(t) or is_positive(u)
        case ("add" | "mul", t, u):
            return is_positive(t) and is_positive(u)
        case (_, t, *_):
            return is_positive(t)
    raise AssertionError(tree)


# --- readers


def form(d: Expressions, tree: Tree) -> Poly:
    """The normal form."""
    match tree:
        case ("atom", name):
            return d.atom(origin(name), ATOMS[name])
        case ("add", t, u):
            return d.add(form(d, t), form(d, u))
        case ("mul", t, u):
            return d.mul(form(d, t), form(d, u))
        case ("sum", t, axis):
            return d.sum(form(d, t), (axis,))
        case ("max", t, axis):
            p = form(d, t)
            return d.maximum(p, (axis,)) if axis in d.axes(p) else p
        case ("pow", t, exponent):
            return d.power(form(d, t), exponent)
        case ("scale", t, c):
            return d.mul(d.constant(c), form(d, t))
        case ("offset", t, c):
            return d.add(form(d, t), d.constant(c))
        case ("exp", t, c):
            return d.exp(d.mul(d.constant(c), form(d, t)))
        case (name, *args):
            return d.function(name, [form(d, t) for t in args])
    raise AssertionError(tree)


def formed(d: Expressions, tree: Tree) -> Poly:
    """The normal form of an expression that has one: not one that divides by what is always zero."""
    try:
        return form(d, tree)
    except UnsupportedError as why:
        assert "power of zero" in str(why), why
        assume(False)
        raise


def meaning(tree: Tree, at: Index, magnitude: bool = False) -> float:
    """The expression's value; `magnitude`: as if every factor were positive, to tell cancellation from error."""

    def go(t: Tree, at: Index = at) -> float:
        return meaning(t, at, magnitude)

    def size(c: Q) -> float:
        return float(abs(c) if magnitude else c)

    match tree:
        case ("atom", name):
            return float(DATA[origin(name)][tuple(at[a] for a in ATOMS[name])])
        case ("add", t, u):
            return go(t) + go(u)
        case ("mul", t, u):
            return go(t) * go(u)
        case ("sum", t, axis):
            return sum(go(t, at | {axis: n}) for n in range(SIZES[axis]))
        case ("max", t, axis):
            return max(go(t, at | {axis: n}) for n in range(SIZES[axis]))
        case ("pow", t, exponent):
            return meaning(t, at) ** float(exponent) if exponent < 0 else go(t) ** float(exponent)
        case ("scale", t, c):
            return size(c) * go(t)
        case ("offset", t, c):
            return go(t) + float(c)
        case ("exp", t, c):
            return math.exp(min(size(c) * go(t), 50.0))
        case (name, *args):
            return FUNCTIONS[name](*map(go, args))
    raise AssertionError(tree)


def value(e: Expressions, p: Poly, at: Index, sizes: dict[str, int] = SIZES) -> float:
    """What a normal form says, read off its rows."""

    def base(b: int, at: Index) -> float:
        match e.base(b):
            case ("atom", "#iota", (axis,)):
                return at[axis]
            case ("atom", name, axes):
                data = DATA[name].reshape([sizes[origin(a)] for a in axes])
                return float(data[tuple(at[a] for a in axes)])
            case ("P", inner):
                return value(e, inner, at, sizes)
            case ("E", inner):
                return math.exp(term(inner, at))
            case ("f", "max", (inner,), removed):
                return max(value(e, inner, at | more, sizes) for more in over(removed))
            case ("f", name, polys, ()):
                return FUNCTIONS[name](*(value(e, q, at, sizes) for q in polys))
        raise AssertionError(e.base(b))

    def over(axes: Any) -> list[Index]:
        names = sorted(axes)
        return [dict(zip(names, ns, strict=True)) for ns in product(*(range(sizes[origin(a)]) for a in names))]

    def term(t: Term, at: Index) -> float:
        bound, factors = e.term(t)
        return sum(math.prod(base(b, at | more) ** float(q) for b, q in factors) for more in over(bound))

    return sum(float(c) * term(t, at) for t, c in e.poly(p))


def corners() -> list[Index]:
    """Two elements: enough, since no two elements of the data are equal."""
    return [dict.fromkeys(SIZES, 0), {a: n - 1 for a, n in SIZES.items()}]


def tame(tree: Tree) -> float:
    """Scale of the errors of an expression; those with too large numbers are not worth testing."""
    try:
        size = max(meaning(tree, at, True) for at in corners())
    except (OverflowError, ZeroDivisionError):
        size = math.inf
    assume(size < 1e8)
    return size

"""Normal forms mean what the expression means, and expressions that the axioms make equal have equal ids."""

import math
from fractions import Fraction as Q

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from search.expressions import (
    DATA,
    SIZES,
    SPLIT,
    Tree,
    corners,
    extent,
    form,
    formed,
    meaning,
    tame,
    trees,
    value,
)  # fmt: skip

from mirage_jax.errors import UnsupportedError
from mirage_jax.search.enumerate.normal_form import Expressions, Poly

relaxed = settings(deadline=None, max_examples=200, suppress_health_check=list(HealthCheck), derandomize=True)


def domain() -> Expressions:
    return Expressions(extent)


def close(have: float, want: float, scale: float) -> bool:
    return math.isclose(have, want, rel_tol=1e-9, abs_tol=1e-9 * (1 + scale))


# --- meaning


@relaxed
@given(trees())
def test_means_the_expression(tree: Tree) -> None:
    d, scale = domain(), tame(tree)
    p = formed(d, tree)
    for at in corners():
        assert close(value(d, p, at), meaning(tree, at), scale)


@relaxed
@given(trees())
def test_splitting_an_axis_keeps_the_meaning(tree: Tree) -> None:
    d, scale = domain(), tame(tree)
    p = d.split(formed(d, tree), "j", ("j.l", "j"))
    for at in corners():
        inside = at | {"j.l": at["j"] // 2, "j": at["j"] % 2}
        assert close(value(d, p, inside, SPLIT), meaning(tree, at), scale)


@relaxed
@given(trees())
def test_renaming_free_axes_keeps_the_meaning_and_can_be_undone(tree: Tree) -> None:
    d, scale = domain(), tame(tree)
    p = formed(d, tree)
    q = d.rename(p, {"j": "j'", "k": "k''"})
    assert not d.axes(q) & {"j", "k"}
    for at in corners():
        moved = {"i": at["i"], "i'": at["i'"], "j'": at["j"], "k''": at["k"]}
        assert close(value(d, q, moved), meaning(tree, at), scale)
    assert d.rename(q, {"j'": "j", "k''": "k"}) == p


@relaxed
@given(trees())
def test_parts_recombine(tree: Tree) -> None:
    d = domain()
    p = formed(d, tree)
    q, c, offset = d.affine_parts(p)
    assert d.add(d.scale(q, c), d.constant(offset)) == p
    assert d.affine_parts(q) == (q, 1, 0) or d.is_constant(p)
    monic, c = d.monic(p)
    assert d.scale(monic, c) == p


@relaxed
@given(trees(), trees())
def test_text_does_not_depend_on_the_order_of_creation(first: Tree, second: Tree) -> None:
    one, other = domain(), domain()
    p = formed(one, first), formed(one, second)
    q = reversed([formed(other, second), formed(other, first)])
    assert [one.text(x) for x in p] == [other.text(x) for x in q]


# --- laws, as equality of ids


def same(law: str, left: Tree, right: Tree, d: Expressions | None = None) -> None:
    d = d or domain()
    have, want = form(d, left), form(d, right)
    assert have == want, f"{law}: {d.text(have)} is not {d.text(want)}"


@relaxed
@given(trees(), trees(), trees())
def test_sums_and_products_commute_and_sums_associate(x: Tree, y: Tree, z: Tree) -> None:
    d = domain()
    for t in (x, y, z):
        formed(d, t)
    same("x + y", ("add", x, y), ("add", y, x), d)
    same("x y", ("mul", x, y), ("mul", y, x), d)
    same("x + (y + z)", ("add", x, ("add", y, z)), ("add", ("add", x, y), z), d)
    same("c (x + y)", ("scale", ("add", x, y), Q(-3, 2)), ("add", ("scale", x, Q(-3, 2)), ("scale", y, Q(-3, 2))), d)


@relaxed
@given(trees(), trees(), st.sampled_from(sorted(SIZES)), st.sampled_from(sorted(SIZES)))
def test_reductions_are_linear_and_commute(x: Tree, y: Tree, a: str, b: str) -> None:
    d = domain()
    for t in (x, y):
        formed(d, t)
    same("S(x + y)", ("sum", ("add", x, y), a), ("add", ("sum", x, a), ("sum", y, a)), d)
    same("S S x", ("sum", ("sum", x, a), b), ("sum", ("sum", x, b), a), d)
    if a not in d.axes(form(d, x)):
        same("S c", ("sum", x, a), ("scale", x, Q(SIZES[a])), d)


@relaxed
@given(trees(), trees())
def test_exponentials_of_sums_are_products(x: Tree, y: Tree) -> None:
    d, c = domain(), Q(1, 16)
    for t in (x, y):
        formed(d, t)
    same("exp(x + y)", ("exp", ("add", x, y), c), ("mul", ("exp", x, c), ("exp", y, c)), d)
    same("exp(x)^2", ("pow", ("exp", x, c), Q(2)), ("exp", x, 2 * c), d)
    same("1 / exp(x)", ("pow", ("exp", x, c), Q(-1)), ("exp", x, -c), d)
    same("sqrt(exp(x))", ("pow", ("exp", x, c), Q(1, 2)), ("exp", x, c / 2), d)


def atom(name: str) -> Tree:
    return ("atom", name)


def add(*xs: Tree) -> Tree:
    return xs[0] if len(xs) == 1 else ("add", xs[0], add(*xs[1:]))


def mul(*xs: Tree) -> Tree:
    return xs[0] if len(xs) == 1 else ("mul", xs[0], mul(*xs[1:]))


def power(x: Tree, q: Q | int) -> Tree:
    return ("pow", x, Q(q))


def total(x: Tree, *axes: str) -> Tree:
    return total(("sum", x, axes[0]), *axes[1:]) if axes else x


A, B, X, W, V, S = map(atom, "abxwvs")
MEAN = ("offset", ("scale", total(mul(X, X), "j"), Q(1, 4)), Q(1, 3))
XW, XB = total(mul(X, W), "j"), total(mul(X, B), "j")
ONE = ("offset", ("scale", A, Q(0)), Q(1))
F = ("tanh", X)


def less(x: Tree) -> Tree:
    """1 - x."""
    return ("offset", ("scale", x, Q(-1)), Q(1))


LAWS: dict[str, tuple[Tree, Tree]] = {
    "distribute": (mul(A, add(X, B)), add(mul(A, X), mul(A, B))),
    "cancel": (mul(X, power(X, -1), B), B),
    "cancel a reduction": (mul(XB, power(XB, -1)), ONE),
    "collect": (mul(X, X, X), power(X, 3)),
    "reciprocal of a product": (power(mul(A, X), -1), mul(power(A, -1), power(X, -1))),
    "power of a power": (power(power(X, 2), -1), power(X, -2)),
    "out of the sum": (total(mul(A, X), "j"), mul(A, total(X, "j"))),
    "scale after the product": (total(mul(power(A, -1), X, W), "j"), mul(power(A, -1), XW)),
    "normalize after the product": (total(mul(power(MEAN, Q(-1, 2)), X, W), "j"), mul(power(MEAN, Q(-1, 2)), XW)),
    "associate products": (total(mul(XW, V), "k"), total(mul(X, total(mul(W, V), "k")), "j")),
    "square of a sum": (power(XB, 2), mul(XB, XB)),
    "square of a sum beside a factor": (mul(mul(XB, A), XB), mul(power(XB, 2), A)),
    "square of a scaled sum": (mul(mul(XB, A), mul(XB, S)), mul(A, S, power(XB, 2))),
    "cube of a sum beside a factor": (mul(mul(XB, A), mul(XB, mul(XB, S))), mul(A, S, power(XB, 3))),
    "reciprocal out of a sum": (power(total(mul(A, X), "j"), -1), mul(power(A, -1), power(total(X, "j"), -1))),
    "factor out": (power(add(mul(A, X), mul(A, B)), -1), mul(power(A, -1), power(add(X, B), -1))),
    "two roots": (mul(power(MEAN, Q(-1, 2)), power(MEAN, Q(-1, 2))), power(MEAN, -1)),
    "two roots of an input": (mul(power(X, Q(-1, 2)), power(X, Q(-1, 2))), power(X, -1)),
    "root and factor": (mul(power(X, Q(1, 2)), mul(power(X, Q(1, 2)), B)), mul(X, B)),
    "rsqrt of the square": (power(mul(power(MEAN, Q(1, 2)), power(MEAN, Q(1, 2))), -1), power(MEAN, -1)),
    "slope of a function": (add(mul(B, less(F)), mul(B, less(F), F)), mul(B, less(mul(F, F)))),
    "slope in a sum": (
        total(mul(A, X, less(mul(F, F))), "j"),
        mul(A, add(total(X, "j"), ("scale", total(mul(X, F, F), "j"), Q(-1)))),
    ),
    "one beside a function": (add(mul(B, less(F)), mul(B, F)), B),
    "exponential of a slope": (
        ("exp", mul(B, less(F)), Q(1, 16)),
        mul(("exp", B, Q(1, 16)), ("exp", mul(B, F), Q(-1, 16))),
    ),
    "two roots in a sum": (
        total(mul(power(X, Q(-1, 2)), B, power(X, Q(-1, 2))), "j"),
        total(mul(power(X, -1), B), "j"),
    ),
}


@pytest.mark.parametrize("law", LAWS)
def test_laws(law: str) -> None:
    left, right = LAWS[law]
    for at in corners():  # the law itself is right
        assert close(meaning(left, at), meaning(right, at), 1.0)
    same(law, left, right)


def test_a_slope_is_one_factor() -> None:
    """A gradient is not multiplied out: for x (1 - f^2) of one product, and not of x and x f^2 apart."""
    d = domain()
    slope = formed(d, less(mul(F, F)))
    ((_, factors),) = [d.term(t) for t, _ in d.poly(d.mul(formed(d, mul(B, W)), slope))]
    assert len(factors) == 3
    assert len(d.poly(slope)) == 2 and d.text(slope) == "-1*tanh(x[i,j])^2 + 1"


def test_safe_and_unsafe_softmax_are_one() -> None:
    """exp(x - max x) / sum exp(x - max x), whatever x is."""
    d = domain()
    e = d
    for tree in (X, XW, add(X, mul(A, B)), ("scale", X, Q(-1, 8))):
        x = form(d, tree)
        axes = tuple(sorted(e.axes(x) - {"i"}))
        shifted = d.add(x, d.mul(d.constant(Q(-1)), d.maximum(x, axes)))

        def softmax(y: Poly, over: tuple[str, ...] = axes) -> Poly:
            return d.mul(d.exp(y), d.power(d.sum(d.exp(y), over), Q(-1)))

        assert softmax(x) == softmax(shifted)
        weighted = [d.sum(d.mul(softmax(y), form(d, B)), axes) for y in (x, shifted)]
        assert weighted[0] == weighted[1]


def test_bound_axes_have_no_name_of_their_own() -> None:
    d = domain()
    e = d

    def product(j: str) -> Poly:
        return e.sum(e.mul(e.atom("x", ("i", j)), e.atom("w", (j, "k"))), (j,))

    assert product("j") == product("j'") == product("j'''")
    square = e.mul(product("j"), product("j'"))
    assert square == e.mul(product("j'"), product("j")) == e.power(product("j"), Q(2))
    gram = e.mul(e.atom("x", ("i", "j")), e.sum(e.mul(e.atom("x", ("i", "j")), e.atom("b", ("j",))), ("j",)))
    other = e.mul(e.atom("x", ("i", "j")), e.sum(e.mul(e.atom("x", ("i", "j'")), e.atom("b", ("j'",))), ("j'",)))
    assert gram == other and e.axes(gram) == {"i", "j"}


@pytest.mark.parametrize("q", [2, 3, 4, 5, -1, -2])
@pytest.mark.parametrize("seen", [("i", "i'"), ("i'", "i"), ("i'", "i''"), ("i''", "i'")], ids="-".join)
def test_powers_of_the_difference_of_one_tensor_along_two_axes(q: int, seen: tuple[str, str]) -> None:
    """To swap two bound axes turns the difference around, and makes its odd powers negative."""
    d = domain()

    def difference(first: str, second: str) -> Poly:
        return d.add(d.atom("a", (first,)), d.scale(d.atom("a", (second,)), Q(-1)))

    def pairs(first: str, second: str) -> Poly:
        weights = d.mul(d.atom("x", ("i", "j")), d.atom("x", ("i'", "j")))
        return d.sum(d.mul(d.power(difference(first, second), Q(q)), weights), ("i", "i'"))

    difference(*seen)  # the order in which values are met decides their ids
    one, other = pairs("i", "i'"), pairs("i'", "i")
    assert q % 2 or one == other
    product = d.mul(one, d.rename(other, {"j": "j'"}))  # both pairs of bound axes may now be swapped
    if q > 0:
        a, x = DATA["a"], DATA["x"]
        want = [sum((a[m] - a[n]) ** q * x[m, j] * x[n, j] for m in range(2) for n in range(2)) for j in (0, 1)]
        assert close(value(d, product, {"j": 0, "j'": 1}), want[0] * want[1], 1)


def test_splits_commute() -> None:
    d = domain()
    p = form(d, power(total(mul(XW, V), "k"), 2))
    parts = lambda q, a, b: d.split(d.split(q, a, (a + ".l", a)), b, (b + ".l", b))  # noqa: E731
    assert parts(p, "j", "k") == parts(p, "k", "j")


def test_power_of_zero() -> None:
    with pytest.raises(UnsupportedError, match="power of zero"):
        form(domain(), power(add(X, ("scale", X, Q(-1))), -1))


def test_sums_of_whole_numbers_stay_whole() -> None:
    """Floats compute them exactly, be they of indices or in a float tensor that nobody knows to hold whole numbers. Of
    all other sums the largest coefficient becomes one.
    """
    d = domain()
    i = d.iota("i")
    third = d.function("floor", (d.scale(i, Q(1, 3)),))
    for whole in (d.add(i, d.scale(third, Q(-3))), d.add(d.scale(i, Q(2, 5)), d.scale(third, Q(3, 5)))):
        q, c, _ = d.affine_parts(whole)
        assert d.is_whole(q) and d.scale(q, c) == whole and abs(c) in (1, Q(1, 5))
    sums = [d.add(d.scale(i, c), d.scale(third, c / 3)) for c in (Q(1), Q(3), Q(-6))]
    assert len({d.monic(p)[0] for p in sums[:2]}) == 1 and d.monic(sums[2]) == (d.monic(sums[0])[0], Q(-2))
    x = form(d, X)
    assert not d.is_whole(x) and not d.is_whole(d.scale(i, Q(1, 2)))
    assert d.monic(d.add(d.scale(x, Q(6)), d.scale(i, Q(-4)))) == (d.add(d.scale(x, Q(3)), d.scale(i, Q(-2))), Q(2))
    q, c, _ = d.affine_parts(d.add(d.scale(x, Q(3, 2)), i))
    assert c == Q(3, 2) and max(abs(k) for _, k in d.poly(q)) == 1

"""The computed error bound is one: with tiny primes wrong graphs get through, but not more often than it says."""

import math
from fractions import Fraction

import pytest

from mirage_jax.mugraph.domains.finite_field import ALGEBRAIC, Draw, FieldDomain, ZeroDivisor
from mirage_jax.verify.equivalence.error_bound import Bound, BoundDomain, Difference, error_bound

RANGES = {"i": range(1), "k": range(5), "n": range(7)}


# Expressions over single elements, different as functions.
PAIRS = {
    "exponentials": (lambda d, x, y: d.exp(x), lambda d, x, y: d.exp(y)),
    "products in exponents": (lambda d, x, y: d.exp(d.mul(x, x)), lambda d, x, y: d.exp(d.mul(y, y))),
    "polynomials": (lambda d, x, y: d.mul(x, d.mul(x, y)), lambda d, x, y: d.mul(y, d.mul(x, x if x is y else y))),
    "quotients": (
        lambda d, x, y: d.mul(x, d.power(d.add(d.exp(x), d.exp(y)), Fraction(-1))),
        lambda d, x, y: d.mul(y, d.power(d.add(d.exp(x), d.exp(y)), Fraction(-1))),
    ),
    "roots": (
        lambda d, x, y: d.exp(d.power(d.add(d.mul(x, x), d.mul(y, y)), Fraction(1, 2))),
        lambda d, x, y: d.exp(d.add(x, y)),
    ),
    "logistics": (lambda d, x, y: d.function("logistic", (x,)), lambda d, x, y: d.function("logistic", (y,))),
    "logistics in exponents": (
        lambda d, x, y: d.exp(d.mul(x, d.function("logistic", (y,)))),
        lambda d, x, y: d.exp(d.mul(y, d.function("logistic", (y,)))),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_bound_holds(name: str) -> None:
    left, right = PAIRS[name]
    p_bits, q_bits, trials = 26, 7, 3000
    accepted = done = 0
    for i in range(trials):
        draw = Draw(i.to_bytes(4), p_bits, q_bits)
        d = FieldDomain(draw).within(RANGES)
        x, y = d.random((), ()), d.random((), ())
        try:
            accepted += int(left(d, x, y).p == right(d, x, y).p)
            done += 1
        except ZeroDivisor:
            continue
    b = BoundDomain({"i": 1}).within(RANGES)
    difference = Difference.between(b, left(b, b.input(()), b.input(())), right(b, b.input(()), b.input(())))
    bound = 2.0 ** error_bound(difference, p_bits, q_bits)
    assert done > 0.9 * trials
    assert accepted / done <= bound + 3 * math.sqrt(bound / done), (accepted / done, bound)
    if name in ("exponentials", "products in exponents", "logistics", "logistics in exponents"):
        assert accepted > 0  # the test can see wrong acceptances


def test_growth() -> None:
    """A softmax over n has k <= n * n after clearing denominators; sums share what is the same along their axis."""
    b = BoundDomain({"i": 1, "n": 7}).within(RANGES)

    def softmax_dot(x: Bound, v: Bound) -> Bound:
        e = b.exp(x)
        total = b.power(b.sum(e, ("n",)), Fraction(-1))
        return b.sum(b.mul(b.mul(e, total), v), ("n",))

    x, v = b.input(("i", "n")), b.input(("n",))
    one = softmax_dot(x, v)
    assert one.top.terms == pytest.approx(math.log2(7))
    assert one.denominator().terms == pytest.approx(math.log2(7))
    difference = Difference.between(b, one, softmax_dot(x, v))
    assert difference.top.terms == pytest.approx(math.log2(2 * 49))
    assert difference.root_bits == 0
    # denominators that differ from element to element multiply
    each = b.sum(b.power(b.add(b.exp(x), b.exp(v)), Fraction(-1)), ("n",))
    assert each.denominator().terms == pytest.approx(7)


def test_maxima_are_multiplied_by_constants() -> None:
    """A maximum of 1024 x is 1024 times a variable, where maxima have their algebra."""
    for algebraic, height, scale in ((ALGEBRAIC, 10, 3), ((), 0, 0)):
        b = BoundDomain({"i": 1, "n": 7}, algebraic=frozenset(algebraic)).within(RANGES)
        multiple = b.mul(b.input(("i", "n")), b.constant(Fraction(1024, 7)))
        top = b.maximum(multiple, ("n",)).top
        assert top.height == height and math.ceil(top.scale) == scale


def test_roots_are_counted_per_element() -> None:
    b = BoundDomain({"i": 1, "k": 5, "n": 7}).within(RANGES)
    norm = b.power(b.sum(b.mul(b.input(("n", "k")), b.input(("n", "k"))), ("k",)), Fraction(-1, 2))
    assert sum(norm.roots.values()) == 1
    assert sum(b.sum(norm, ("n",)).roots.values()) == 7
    assert sum(b.mul(norm, norm).roots.values()) == 1


def test_larger_primes_help() -> None:
    b = BoundDomain({"n": 7}).within(RANGES)
    d = Difference.between(b, b.sum(b.exp(b.input(("n",))), ("n",)), b.input(()))
    assert error_bound(d, 127, 61) < error_bound(d, 61, 31) < 0

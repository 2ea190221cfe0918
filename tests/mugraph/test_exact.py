"""Exact numbers: the laws that kernels rely on, and none that would hide an error."""

from collections.abc import Callable
from fractions import Fraction as Q

import numpy as np
import pytest

from mirage_jax.errors import UnsupportedError
from mirage_jax.mugraph.domains import exact
from mirage_jax.mugraph.operators import FUNCTIONS

RNG = np.random.default_rng(0)


def draw(*shape: int) -> exact.Numbers:
    return exact.random_numbers(RNG, shape)


def same(x: exact.Numbers, y: exact.Numbers) -> bool:
    return not exact.differences(x, y).any()


def test_primes() -> None:
    assert (exact.P - 1) % exact.Q == 0 and exact.P * exact.HALF << 14 <= 1 << 53
    assert exact.W != 1 and pow(exact.W, exact.Q, exact.P) == 1
    assert all(n % d for n in (exact.P, exact.Q) for d in range(2, int(n**0.5) + 1))


def test_field() -> None:
    x, y, z = draw(50), draw(50), draw(50)
    assert same(exact.multiply(x, exact.add(y, z)), exact.add(exact.multiply(x, y), exact.multiply(x, z)))
    assert same(exact.multiply(exact.divide(x, y), y), x)
    assert same(exact.power(x, 3), exact.multiply(x, exact.multiply(x, x)))
    assert same(exact.multiply(exact.constant(Q(3, 7)), exact.constant(Q(7))), exact.constant(Q(3)))
    with pytest.raises(UnsupportedError, match="denominator"):
        exact.constant(Q(1, exact.Q))


def test_products_of_matrices_do_not_round() -> None:
    x, y = draw(3, 5000), draw(5000, 2)
    z = exact.matmul(x, y)
    for part, m in (("p", exact.P), ("q", exact.Q)):
        np.testing.assert_array_equal(z[part], (x[part].astype(object) @ y[part].astype(object)) % m)


def test_exponentials_turn_sums_into_products() -> None:
    x, y = draw(50), draw(50)
    both, product = exact.exp(exact.add(x, y)), exact.multiply(exact.exp(x), exact.exp(y))
    np.testing.assert_array_equal(both["p"], product["p"])
    assert (both["q"] != product["q"]).mean() > 0.9  # relative to another shift is not the same
    assert same(exact.exp(exact.ZERO), exact.ONE)
    assert same(exact.exp(exact.MINUS_INFINITY), exact.ZERO)
    assert same(exact.exp2(exact.multiply(x, exact.LOG2E)), exact.exp(x))


KNOWN = [("sin", 0, 0), ("cos", 0, 1), ("erf", 0, 0), ("log", 1, 0), ("log1p", 0, 0), ("tanh", 0, 0), ("abs", 0, 0)]


@pytest.mark.parametrize("name,at,value", [*KNOWN, ("sqrt", 0, 0), ("sqrt", 1, 1), ("logistic", 0, Q(1, 2))])
def test_functions_of_what_padded_lanes_hold(name: str, at: int, value: Q | int) -> None:
    """These are loaded as 0, of which exp makes 1. Of other numbers a function is a hash."""
    function = exact.sqrt if name == "sqrt" else FUNCTIONS[name].exact
    assert same(function(exact.integers([at])), exact.constant(Q(value)))
    assert len(np.unique(function(draw(50))["p"])) == 50


def test_what_is_no_number_stays() -> None:
    nan = exact.special(np.nan)
    for x in (exact.add(nan, draw(4)), exact.multiply(nan, exact.ZERO), exact.maximum(draw(4), nan)):
        assert np.isnan(x["real"]).all()
    assert not np.isfinite(exact.inverse(exact.ZERO)["real"])
    assert same(exact.inverse(exact.special(np.inf)), exact.ZERO)
    assert not same(exact.MINUS_INFINITY, exact.ZERO) and same(nan, nan)


def test_order() -> None:
    x = draw(6, 40)
    top = exact.largest(x, 1)
    np.testing.assert_array_equal(top["real"], x["real"].max(1))
    tied = exact.made(RNG.integers(exact.P, size=(6, 40)), 0, 0.5)
    assert same(exact.largest(tied, 1), exact.largest(tied[:, ::-1], 1))
    assert same(exact.maximum(tied, tied[::-1]), exact.maximum(tied[::-1], tied))


def lost_beside(huge: float) -> Callable[[exact.Numbers], exact.Numbers]:
    return lambda x: exact.add(x, exact.constant(Q(huge)))


@pytest.mark.parametrize("function", [exact.floor, exact.nearest, exact.erf, lost_beside(-1e60)])
@pytest.mark.parametrize("factor", [Q(1, 4), Q(3), Q(-1)])
def test_the_largest_of_equal_floats_stays_the_largest_when_scaled(
    function: Callable[[exact.Numbers], exact.Numbers], factor: Q
) -> None:
    """A graph may scale before a maximum, and a kernel after it. A bias as low as a sentinel makes logits equal."""
    x, scale = function(draw(50, 40)), exact.constant(factor)
    largest = exact.largest(x, 1) if factor > 0 else exact.negative(exact.largest(exact.negative(x), 1))
    assert same(exact.largest(exact.multiply(scale, x), 1), exact.multiply(scale, largest))


def test_equal_rows_stay_equal_in_any_tile() -> None:
    """BLAS rounds a row in other ways in a matrix of another size."""
    x, y = exact.made(7, 7, RNG.uniform(-1e60, 1e60, (33, 20))), draw(20, 2)
    whole = exact.matmul(x, y)["real"]
    for n in (1, 2, 16):
        np.testing.assert_array_equal(exact.matmul(x[:n], y)["real"], whole[:n])
        np.testing.assert_array_equal(exact.matmul(x[:n], y[:, 1:])["real"], whole[:n, 1:])


def test_what_rounding_loses_makes_no_infinity() -> None:
    """``log(1 + x) * (x / ((1 + x) - 1))``, as kernels write log1p, for an x whose float is lost beside 1."""
    x = exact.made([7], [11], [1e-30])
    y = exact.subtract(exact.add(exact.ONE, x), exact.ONE)
    quotient = exact.multiply(exact.log(exact.add(exact.ONE, x)), exact.divide(x, y))
    assert y["real"] == [0] and np.isfinite(quotient["real"])
    assert exact.divide(x, y)["p"] == [1] and np.isinf(exact.inverse(exact.ZERO)["real"])

"""The finite fields: exact arithmetic, the identities that must hold, and every operator of the table."""

# ruff: noqa: E501 (tables with one case per line)

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng

from mirage_jax.mugraph.builder import KernelBuilder, tensor
from mirage_jax.mugraph.check import check_graph
from mirage_jax.mugraph.domains.finite_field import ALGEBRAIC, Draw, FieldDomain, Pair, PrimeRing, ZeroDivisor, is_prime
from mirage_jax.mugraph.domains.floats import FloatDomain, NamedArray
from mirage_jax.mugraph.graph import KernelGraph
from mirage_jax.mugraph.operators import FUNCTIONS, OPERATORS
from mirage_jax.mugraph.parser import parse

RANGES = {"i": range(3), "k": range(4)}
HALF, ONE = Fraction(1, 2), Fraction(1)


def domain(seed: int = 0, p_bits: int = 61, q_bits: int = 31) -> FieldDomain:
    return FieldDomain(Draw(bytes([seed]) * 32, p_bits, q_bits)).within(RANGES)


def equal(x: Pair, y: Pair) -> bool:
    def same(a: Any, b: Any) -> bool:
        parts = ((a.re, b.re), (0 if a.im is None else a.im, 0 if b.im is None else b.im))
        return all(bool(np.all(u == v)) for u, v in parts)

    return x.axes == y.axes and same(x.p, y.p) and (x.q is None or y.q is None or same(x.q, y.q))


def test_primes() -> None:
    assert [n for n in range(60) if is_prime(n)] == [2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59]
    assert is_prime(2**61 - 1)
    assert not is_prime((2**31 - 1) * (2**61 - 1))
    assert not any(map(is_prime, (561, 1105, 25326001, 3215031751, 3825123056546413051)))  # pseudoprimes


@pytest.mark.parametrize("bits", [(61, 31), (127, 61), (40, 20)])
def test_draws(bits: tuple[int, int]) -> None:
    primes = set()
    for seed in range(10):
        d = Draw(bytes([seed]) * 32, *bits)
        assert is_prime(d.p)
        assert is_prime(d.q)
        assert (d.p.bit_length(), d.q.bit_length()) == bits
        assert (d.p - 1) % d.q == 0
        assert d.p % 4 == d.q % 4 == 3
        assert d.w != 1
        assert pow(d.w, d.q, d.p) == 1
        e = int(default_rng(seed).integers(d.q))
        assert d.w_to(e) == pow(d.w, e, d.p)
        primes.add(d.p)
    assert len(primes) == 10


@given(st.lists(st.integers(0, 10**12), min_size=4, max_size=4), st.booleans())
@settings(max_examples=50, deadline=None)
def test_ring_is_a_field(values: list[int], imaginary: bool) -> None:
    ring = PrimeRing(1_000_003)  # 3 mod 4
    x, y = (
        ring.make(np.array([a], object), np.array([b], object) if imaginary else None)
        for a, b in (values[:2], values[2:])
    )
    try:
        quotient = ring.mul(x, ring.inverse(y))
    except ZeroDivisor:
        return
    back = ring.mul(quotient, y)
    assert back.re[0] == x.re[0]
    assert (0 if back.im is None else back.im[0]) == (0 if x.im is None else x.im[0])
    assert ring.power(x, 5) == ring.mul(ring.power(x, 2), ring.power(x, 3))
    assert ring.power(x, 0).re[0] == 1


IDENTITIES: dict[str, Callable[[FieldDomain, Pair, Pair], tuple[Pair, Pair]]] = {
    "commutes": lambda d, x, y: (d.mul(x, y), d.mul(y, x)),
    "distributes": lambda d, x, y: (d.mul(x, d.add(x, y)), d.add(d.mul(x, x), d.mul(x, y))),
    "inverse": lambda d, x, y: (d.mul(d.mul(x, y), d.power(y, -ONE)), x),
    "cube": lambda d, x, y: (d.power(x, ONE * 3), d.mul(x, d.mul(x, x))),
    "exp of a sum": lambda d, x, y: (d.exp(d.add(x, y)), d.mul(d.exp(x), d.exp(y))),
    "exp of a negative": lambda d, x, y: (d.exp(d.mul(d.constant(-ONE), x)), d.power(d.exp(x), -ONE)),
    "square of a root": lambda d, x, y: (d.power(d.power(x, HALF), ONE * 2), x),
    "product of roots": lambda d, x, y: (d.mul(d.mul(y, d.power(x, -HALF)), d.power(x, -HALF)), d.mul(y, d.power(x, -ONE))),
    "inverse root": lambda d, x, y: (d.power(x, -HALF), d.power(d.power(x, HALF), -ONE)),
    "power 3/2": lambda d, x, y: (d.power(x, Fraction(3, 2)), d.mul(x, d.power(x, HALF))),
    "exp of roots": lambda d, x, y: (
        d.exp(d.mul(y, d.add(d.power(x, HALF), y))),
        d.mul(d.exp(d.mul(y, d.power(x, HALF))), d.exp(d.mul(y, y))),
    ),
    "root of a norm": lambda d, x, y: (
        d.power(d.mul(d.mul(x, x), d.power(y, -ONE)), ONE),
        d.power(d.mul(x, d.power(y, -HALF)), ONE * 2),
    ),
    "maximum is symmetric": lambda d, x, y: (d.function("maximum", (x, y)), d.function("maximum", (y, x))),
    "functions of equals": lambda d, x, y: (d.function("tanh", (d.add(x, y),)), d.function("tanh", (d.add(y, x),))),
    "max in any order": lambda d, x, y: (d.maximum(x, ("i", "k")), d.maximum(Pair(("k", "i"), *(r.map(lambda a: a.T) for r in (x.p, x.q))), ("k", "i"))),
    "sum of a constant": lambda d, x, y: (d.sum(d.constant(ONE), ("i", "k")), d.constant(ONE * 12)),
    "dot": lambda d, x, y: (d.dot(x, y, ("k",)), d.sum(d.mul(x, y), ("k",))),
    "second exponential": lambda d, x, y: (d.exp(d.mul(d.exp(x), d.exp(y))), d.exp(d.exp(d.add(x, y)))),
}  # fmt: skip
HOMOGENEOUS: dict[str, Callable[[FieldDomain, Pair, Pair], tuple[Pair, Pair]]] = {
    "max of a multiple": lambda d, x, y: (d.maximum(times(d, 2, x), ("k",)), times(d, 2, d.maximum(x, ("k",)))),
    "of a negative one": lambda d, x, y: (
        d.maximum(times(d, -2, x), ("k",)),
        times(d, 2, d.maximum(times(d, -1, x), ("k",))),
    ),
    "of a sum": lambda d, x, y: (
        d.maximum(d.add(times(d, 2, x), times(d, 6, y)), ("k",)),
        times(d, 2, d.maximum(d.add(x, times(d, 3, y)), ("k",))),
    ),
    "of a product": lambda d, x, y: (
        d.maximum(d.dot(times(d, HALF, x), y, ("i",)), ("k",)),
        times(d, HALF, d.maximum(d.dot(x, y, ("i",)), ("k",))),
    ),
    "of maxima": lambda d, x, y: (
        d.maximum(times(d, 2, d.maximum(x, ("k",))), ("i",)),
        times(d, 2, d.maximum(x, ("i", "k"))),
    ),
    "of two": lambda d, x, y: (
        d.function("minimum", (times(d, 2, x), times(d, 4, y))),
        times(d, 2, d.function("minimum", (x, times(d, 2, y)))),
    ),
    "of an affine value": lambda d, x, y: (
        d.maximum(d.add(times(d, 2, x), d.constant(-ONE)), ("k",)),
        times(d, 2, d.maximum(d.add(x, d.constant(-HALF)), ("k",))),
    ),
    "of several": lambda d, x, y: (
        d.function("maximum", (times(d, 2, d.maximum(x, ("k",))), times(d, 3, d.maximum(y, ("k",))))),
        d.maximum(d.function("maximum", (times(d, 2, x), times(d, 3, y))), ("k",)),
    ),
    "of tiles": lambda d, x, y: (in_tiles(d, times(d, 2, x)), times(d, 2, in_tiles(d, x))),
}
NOT_HOMOGENEOUS: dict[str, Callable[[FieldDomain, Pair, Pair], tuple[Pair, Pair]]] = {
    "max of a negative": lambda d, x, y: (d.maximum(times(d, -2, x), ("k",)), times(d, -2, d.maximum(x, ("k",)))),
    "max is no minimum": lambda d, x, y: (d.maximum(times(d, 2, x), ("k",)), times(d, 2, least(d, x))),
    "of any multiple": lambda d, x, y: (d.maximum(d.mul(x, y), ("i",)), d.mul(y, d.maximum(x, ("i",)))),
    "of a negative multiple of maxima": lambda d, x, y: (
        d.maximum(times(d, -2, d.maximum(x, ("k",))), ("i",)),
        times(d, -2, d.maximum(x, ("i", "k"))),
    ),
    "of a shifted value": lambda d, x, y: (
        d.maximum(d.add(times(d, 2, x), d.constant(ONE)), ("k",)),
        times(d, 2, d.maximum(d.add(x, d.constant(ONE)), ("k",))),
    ),
    "other factors": lambda d, x, y: (d.maximum(times(d, 2, x), ("k",)), times(d, 3, d.maximum(x, ("k",)))),
}


def times(d: FieldDomain, c: Fraction | int, x: Pair) -> Pair:
    return d.mul(x, d.constant(Fraction(c)))


def least(d: FieldDomain, x: Pair) -> Pair:
    return times(d, -1, d.maximum(times(d, -1, x), ("k",)))


def in_tiles(d: FieldDomain, x: Pair) -> Pair:
    tiles = [d.within(RANGES | {"k": range(*cut)}).load(x, ("i", "k")) for cut in ((0, 2), (2, 4))]
    return d.function("maximum", [d.maximum(tile, ("k",)) for tile in tiles])


NOT_IDENTITIES: dict[str, Callable[[FieldDomain, Pair, Pair], tuple[Pair, Pair]]] = {
    "exp distributes": lambda d, x, y: (d.exp(d.add(x, y)), d.add(d.exp(x), d.exp(y))),
    "root of a square": lambda d, x, y: (d.power(d.mul(x, x), HALF), x),
    "root distributes": lambda d, x, y: (d.power(d.add(x, y), HALF), d.add(d.power(x, HALF), d.power(y, HALF))),
    "functions are different": lambda d, x, y: (d.function("tanh", (x,)), d.function("erf", (x,))),
    "arguments have an order": lambda d, x, y: (d.function("lt", (x, y)), d.function("lt", (y, x))),
    "max is not a sum": lambda d, x, y: (d.maximum(x, ("k",)), d.sum(x, ("k",))),
    "shifts are fresh": lambda d, x, y: (d.shift(x, ("k",)), d.shift(x, ("k",))),
    "nested exponentials": lambda d, x, y: (d.exp(d.exp(x)), d.exp(x)),
    "constants wrap around": lambda d, x, y: (x, d.add(x, d.constant(Fraction(167 * 83)))),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", IDENTITIES)
def test_identities(name: str, seed: int) -> None:
    d = domain(seed)
    x, y = d.random(("i", "k"), (3, 4)), d.random(("i", "k"), (3, 4))
    left, right = IDENTITIES[name](d, x, y)
    assert equal(left, right)


@pytest.mark.parametrize("name", NOT_IDENTITIES)
def test_not_identities(name: str) -> None:
    d = domain()
    x, y = d.random(("i", "k"), (3, 4)), d.random(("i", "k"), (3, 4))
    left, right = NOT_IDENTITIES[name](d, x, y)
    assert not equal(left, right)


@pytest.mark.parametrize("name", HOMOGENEOUS)
def test_maxima_of_positive_multiples(name: str) -> None:
    """They are seen by draws in which maxima have their algebra, and only by these."""
    for algebraic in (True, False):
        d = FieldDomain(Draw(b"m" * 32, algebraic=frozenset(ALGEBRAIC if algebraic else ()))).within(RANGES)
        x, y = d.random(("i", "k"), (3, 4)), d.random(("i", "k"), (3, 4))
        assert equal(*HOMOGENEOUS[name](d, x, y)) == algebraic


@pytest.mark.parametrize("name", NOT_HOMOGENEOUS)
def test_maxima_of_other_multiples(name: str) -> None:
    d = FieldDomain(Draw(b"m" * 32, algebraic=frozenset(ALGEBRAIC))).within(RANGES)
    x, y = d.random(("i", "k"), (3, 4)), d.random(("i", "k"), (3, 4))
    assert not equal(*NOT_HOMOGENEOUS[name](d, x, y))


def test_same_residues_as_exact_fractions() -> None:
    """The field is a homomorphic image of the rationals."""
    d, rng = domain(), default_rng(0)
    values = [[Fraction(int(a), int(b)) for a, b in zip(*rng.integers(1, 99, (2, 4)), strict=True)] for _ in range(3)]
    x = Pair(
        ("i", "k"),
        *(
            type(d.random((), ()).p)(np.array([[r.fraction(v) for v in row] for row in values], object))
            for r in d.rings
        ),
    )
    result = d.power(d.add(d.sum(d.mul(x, x), ("k",)), d.constant(Fraction(1, 1000))), -ONE)
    want = [1 / (sum((v * v for v in row), Fraction(0)) + Fraction(1, 1000)) for row in values]
    assert list(result.p.re) == [d.rings[0].fraction(v) for v in want]
    assert result.q is not None
    assert list(result.q.re) == [d.rings[1].fraction(v) for v in want]


def test_weights() -> None:
    """The elements of a reduced axis weigh as much as the real axis."""
    d = FieldDomain(Draw(b"w" * 32), {"k": Fraction(4096, 4)}).within(RANGES)
    assert equal(d.sum(d.constant(ONE), ("k",)), d.constant(Fraction(4096)))
    ones = d.add(d.mul(d.iota("k"), d.constant(Fraction(0))), d.constant(ONE))
    assert equal(d.sum(ones, ("k",)), d.constant(Fraction(4096)))


def test_division_by_zero_is_a_redraw() -> None:
    d = domain()
    with pytest.raises(ZeroDivisor):
        d.power(d.constant(Fraction(0)), -ONE)
    with pytest.raises(ZeroDivisor):
        d.constant(Fraction(1, d.draw.q))


# --- every operator of the table


ATTRS: dict[str, dict[str, Any]] = {
    "const": {"value": Fraction(3, 2)}, "iota": {"axis": "k"}, "affine": {"scale": Fraction(2), "offset": Fraction(-1)},
    "pow": {"exponent": -HALF, "offset": ONE}, "sum": {"axes": ("k",)}, "dot": {"axes": ("k",)}, "max": {"axes": ("k",)},
    "shift": {"axes": ("k",)}, "add": {"ca": Fraction(2), "cb": -HALF}, "rescale": {"degree": -ONE}, "exp": {"scale": HALF},
}  # fmt: skip
ACCUMULATE = {"acc", "accs", "last"}
# lowest and highest numbers for functions that are not defined everywhere
DOMAINS = {"asin": (0.1, 0.9), "acos": (0.1, 0.9), "acosh": (1.1, 3.0)}


def _positive(name: str, seed: int, shape: tuple[int, int]) -> np.ndarray:
    low, high = DOMAINS.get(name, (0.1, 3.0))
    return np.clip(np.abs(default_rng(seed).standard_normal(shape)) + low, low, high)


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_operator(name: str) -> None:
    """Inference, float value, field congruence and text form of every registered operator."""
    record = OPERATORS[name]
    attrs = ATTRS.get(name, {})
    args = [("i", "k")] * record.arity
    want = set(record.infer(tuple(args), attrs))

    values = [NamedArray(a, _positive(name, j, (3, 4))) for j, a in enumerate(args)]
    floats = record.meaning(FloatDomain(np, "float64").within(RANGES), *values, **attrs)
    assert set(floats.axes) == want
    assert np.all(np.isfinite(floats.array))

    d = domain()
    xs = [d.random(a, (3, 4)) for a in args]
    once = record.meaning(d, *xs, **attrs)
    assert set(once.axes) == want
    if name != "shift":
        assert equal(once, record.meaning(d, *xs, **attrs))
    for j in range(0 if name in ("shift", "last", "acc", "accs") else len(xs)):  # each argument matters
        other = [d.random(a, (3, 4)) if i == j else x for i, (a, x) in enumerate(zip(args, xs, strict=True))]
        assert not equal(once, record.meaning(d, *other, **attrs))

    k = KernelBuilder("a", "i", "k" if name in ACCUMULATE else None)
    inputs = [tensor(f"X{j}", "i,k") for j in range(record.arity)]
    operands = [k.load(t) for t in inputs]
    if name in ACCUMULATE:
        operands = [k.op("sum", x, axes="k") for x in operands]
    result = k.op(name, *operands, **attrs)
    if "i" not in want:
        result = k.op("add", result, k.load(tensor("Y", "i")))
        inputs.append(tensor("Y", "i"))
    axes = k.build().axes_of[result]
    k.store(tensor("O", axes), result)
    graph = KernelGraph(tuple(inputs), (k.build(),), ("O",), (("i", 3), ("k", 4)))
    check_graph(graph)
    assert parse(str(graph)) == graph


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_functions_agree_in_jax(name: str) -> None:
    import jax.numpy as jnp

    f, xs = FUNCTIONS[name], _positive(name, 0, (3, 5))
    args = [NamedArray(("k",), x) for x in xs[: f.arity]]
    one = FloatDomain(np, "float64").function(name, args)
    two = FloatDomain(jnp).function(name, [NamedArray(x.axes, jnp.asarray(x.array, "float32")) for x in args])
    np.testing.assert_allclose(np.asarray(two.array, np.float64), np.asarray(one.array, np.float64), rtol=1e-5)

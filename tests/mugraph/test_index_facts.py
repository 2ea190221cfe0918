"""Facts that follow from indices alone, and where cuts lie at reduced extents."""

from fractions import Fraction as Q

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mirage_jax.mugraph.domains.index_facts import (
    UNKNOWN,
    Affine,
    Cut,
    Every,
    MaskedUnless,
    Scale,
    Some,
    Truth,
    ZeroUnless,
    add,
    constant,
    exp,
    function,
    iota,
    may_hold,
    mul,
    negation,
    power,
    renamed,
)
from mirage_jax.mugraph.graph import LoopBounds

ROW, N = iota("i"), iota("n")
RANGES = {"i": range(3, 8), "n": range(0, 7)}
CAUSAL = function("le", [N, ROW])


def table(fact, axes=("i", "n")):
    """Where a condition holds, as booleans."""
    assert isinstance(fact, Truth)
    return np.broadcast_to(may_hold(fact.holds, axes, RANGES, Scale()), [len(RANGES[a]) for a in axes])


def indices():
    return np.meshgrid(np.arange(3, 8), np.arange(0, 7), indexing="ij")


def test_constants_on_either_side() -> None:
    three, masked = constant(Q(3)), function("mask", [CAUSAL, None])
    assert mul(N, three) == mul(three, N) == Affine({"n": Q(3)}, Q(0))
    assert mul(masked, three) == mul(three, masked) == masked
    assert mul(three, constant(Q(2))) == constant(Q(6))


def test_comparisons_are_exact() -> None:
    i, n = indices()
    shifted = add(mul(constant(Q(1, 2)), N), constant(Q(1)))
    for name, value in (("lt", np.less), ("le", np.less_equal), ("eq", np.equal)):
        for x, a in ((N, n), (shifted, n / 2 + 1), (constant(Q(5)), 5)):
            np.testing.assert_array_equal(table(function(name, [x, ROW])), value(a, i))
            np.testing.assert_array_equal(table(function(name, [ROW, x])), value(i, a))
            np.testing.assert_array_equal(table(function("not", [function(name, [x, ROW])])), ~value(a, i))
    either = function("or", [CAUSAL, function("eq", [N, constant(Q(6))])])
    np.testing.assert_array_equal(table(either), (n <= i) | (n == 6))
    assert table(function("lt", [constant(Q(1)), constant(Q(2))])).all()
    assert not table(function("lt", [constant(Q(2)), constant(Q(2))])).any()


def test_what_is_not_known_may_hold() -> None:
    i, n = indices()
    np.testing.assert_array_equal(table(function("and", [CAUSAL, None])), n <= i)
    assert table(function("or", [CAUSAL, None])).all()
    assert table(function("not", [function("and", [CAUSAL, None])])).all()
    assert function("lt", [N, None]) == Truth(UNKNOWN)
    assert function("tanh", [N]) is None


def test_masks_become_zeros() -> None:
    cut = Cut((("i", -1), ("n", 1)), 0)
    masked = function("mask", [CAUSAL, None])
    assert masked == MaskedUnless(cut)
    assert add(masked, None) == add(None, masked) == mul(constant(Q(2)), masked) == masked
    assert mul(constant(Q(-1)), masked) is None  # plus infinity
    assert mul(masked, None) is None
    assert exp(masked) == mul(exp(masked), None) == power(exp(masked), Q(2)) == ZeroUnless(cut)
    assert power(exp(masked), Q(-1)) is None and exp(None) is None
    assert add(exp(masked), None) is None and add(exp(masked), exp(masked)) == ZeroUnless(Some((cut, cut)))
    assert mul(exp(masked), masked) is None  # 0 * -inf
    assert function("mask", [None, masked]) == MaskedUnless(Every((UNKNOWN, cut)))
    assert function("where", [CAUSAL, None, constant(Q(0))]) == ZeroUnless(cut) == mul(CAUSAL, None)
    assert function("where", [CAUSAL, constant(Q(0)), None]) == ZeroUnless(negation(cut))
    assert function("where", [CAUSAL, None, constant(Q(1))]) is None
    assert renamed(masked, {"n": "a"}) == MaskedUnless(Cut((("a", 1), ("i", -1)), 0))
    assert renamed(ROW, {"i": "k"}) == Affine({"k": Q(1)}, Q(0))


@given(st.lists(st.integers(-300, 300), min_size=1, max_size=6))
def test_scale_keeps_the_order_of_cuts(bounds: list[int]) -> None:
    scale = Scale.of(bounds)
    every = sorted({c for b in bounds for c in (b, -b - 1)})
    small = [scale(b) for b in every]
    assert small == sorted(set(small))
    assert all(scale(-b - 1) == -scale(b) - 1 for b in every)
    assert scale.largest <= 2 * len(bounds)


def test_scale_of_a_window() -> None:
    loop_bounds = LoopBounds("i", -127, 0)
    assert Scale.of(loop_bounds.bounds).loop_bounds(loop_bounds) == LoopBounds("i", -2, 0)
    near = LoopBounds("i", -126, 0)
    scale = Scale.of((*loop_bounds.bounds, *near.bounds))
    assert (scale.loop_bounds(near).low, scale.loop_bounds(loop_bounds).low) == (-2, -3)
    assert Scale.of([0]).to == {0: 0}


@pytest.mark.parametrize("low,high", [(None, 0), (-3, None), (-2, 1), (3, 5)])
def test_loop_bounds_meet(low: int | None, high: int | None) -> None:
    loop_bounds = LoopBounds("i", low, high)
    for loop in (range(0, 2), range(2, 3), range(4, 7)):
        for grid in (range(0, 3), range(3, 4), range(5, 8)):
            pairs = [n - i for n in loop for i in grid]
            want = any((low is None or low <= d) and (high is None or d <= high) for d in pairs)
            assert loop_bounds.meets(loop, grid) == want

"""What the times of some variants say of others."""

import math

from hypothesis import given
from hypothesis import strategies as st

from mirage_jax.cost.residuals import FIRST, MARGIN, Residuals

SECONDS = st.floats(1e-6, 1e-2)


@given(st.lists(st.tuples(st.integers(0, 3), SECONDS, SECONDS), min_size=1, max_size=20))
def test_nothing_that_is_as_good_as_its_kind_allows_is_left_out(timed: list[tuple[int, float, float]]) -> None:
    residuals = Residuals()
    for variant, (kind, estimate, seconds) in enumerate(timed):
        residuals.learn(kind, variant, estimate, seconds)
    assert residuals.best == min(seconds for _, _, seconds in timed)
    kind, estimate, _ = min(timed, key=lambda row: row[2])
    assert not residuals.is_slow(kind, estimate), "the fastest itself"
    for kind in range(4):
        factors = [seconds / estimate for k, estimate, seconds in timed if k == kind]
        if len(factors) < FIRST:
            assert not residuals.is_slow(kind, 1e9)
        else:
            limit = MARGIN * residuals.best / min(factors)
            assert residuals.is_slow(kind, 1.01 * limit) and not residuals.is_slow(kind, 0.99 * limit)


def test_times_that_say_nothing_are_not_learned() -> None:
    residuals = Residuals()
    for variant, seconds in enumerate((0.0, math.inf, 0.0, math.inf)):
        residuals.learn("kind", variant, 1.0, seconds)
    assert residuals.best == math.inf and not residuals.is_slow("kind", 1e9)
    for _ in range(FIRST + 1):
        residuals.learn("kind", "the same", 1.0, 1.0)
    assert not residuals.is_slow("kind", 1e9), "one variant is not several"

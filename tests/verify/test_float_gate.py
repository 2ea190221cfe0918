"""The float gate: what rounding may do passes, what a wrong kernel does fails."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mirage_jax.verify.floats import comparison, range_edges
from mirage_jax.verify.floats.gate import LATE, float_gate, misread
from mirage_jax.verify.floats.input_classes import CLASSES, input_classes

RNG = np.random.default_rng(0)
R = RNG.standard_normal((64, 96))
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32]


def rounded(r: np.ndarray, dtype: type, noise: float = 0.0, seed: int = 0) -> np.ndarray:
    """r as an implementation with some rounding noise, in units of eps, returns it."""
    eps = float(ml_dtypes.finfo(dtype).eps)
    return (r + noise * eps * np.random.default_rng(seed).standard_normal(r.shape)).astype(dtype)


def test_too_large_for_the_type_is_no_warning() -> None:
    """Values of float64 that overflow float16, and infinities on both sides: warnings are errors here."""
    r = np.array([[1e6, 1.0, np.inf], [2.0, -1e6, 3.0]])
    with np.errstate(over="ignore"):
        own = r.astype(np.float16)
    assert float_gate(r, own, own, kinds=False)
    assert not misread(r, own, 2)


def test_an_error_beside_a_row_of_denormal_numbers_is_no_warning() -> None:
    r = np.array([[1e-310, 0.0], [1.0, 2.0]])
    assert not float_gate(r, r.astype(np.float32), (r + 1e3).astype(np.float32))


@pytest.mark.parametrize("strange", [np.nan, np.inf, -np.inf])
def test_float64_alone_is_not_finite(strange: float) -> None:
    """No rounding explains it: the candidate, which is right about the translated program, must not be believed."""
    r = np.array([[strange, 1.0], [2.0, 3.0]])
    own = np.array([[0.5, 1.0], [2.0, 3.0]], np.float32)
    assert "instead of 0.5 at (0, 0)" in misread(r, own, 4)
    assert not misread(r, r.astype(np.float32), 4) and not misread(own.astype(np.float64), r.astype(np.float32), 4)


@pytest.mark.parametrize("shape", [(200_000,), (20_000, 10), (2_000, 10, 10)])
def test_a_row_that_was_read_wrongly(shape: tuple[int, ...]) -> None:
    """One element of many that is masked, and should not be."""
    own = np.random.default_rng(0).standard_normal(shape)
    reference = own.copy()
    reference.flat[7] = 2.0
    own.flat[7] = 0.0
    assert "in row" in misread(reference, own.astype(np.float32), 4)
    assert not misread(own, own.astype(np.float16), 2)


def test_terms_that_cancel_to_nothing_leave_their_rounding() -> None:
    """As in the gradient for what is added to all logits of a softmax; a wrong rule is off by the terms, of size 1."""
    reference, noise = np.full((4, 2), 1e-16), np.full((4, 2), 5e-4)
    xla = np.full((4, 2), 2e-3, np.float16)
    assert misread(reference, xla, 2) and not misread(reference, xla, 2, noise)
    xla[3] = 1.0
    assert misread(reference, xla, 2, noise)


def test_xla_may_flush_what_is_below_the_normal_range() -> None:
    reference = np.random.default_rng(0).normal(size=(8, 16)) * 1e-39
    assert not misread(reference, np.zeros((8, 16), np.float32), 4)
    assert misread(1e3 * reference, np.zeros((8, 16), np.float32), 4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_passes(dtype: type) -> None:
    xla = rounded(R, dtype, 0.3, 1)
    for seed in range(2, 8):
        result = float_gate(R, xla, rounded(R, dtype, 0.3, seed))
        assert result, result.reasons
    assert float_gate(R, xla, rounded(R, dtype))
    assert all(ratio <= 1 for _, ratio in result.ratios)


def test_roundings_that_the_program_asks_for() -> None:
    """XLA may have left them out; a candidate may not make more of them than a unit in the last place."""
    eps = 2.0**-8
    xla, once = R.astype(np.float32), (R * (1 + eps / 2)).astype(np.float32)
    assert not float_gate(R, xla, once)
    assert float_gate(R, xla, once, written=np.abs(R) * eps / 2, unit=eps)
    assert not float_gate(R, xla, once, written=np.abs(R) * eps / 2, unit=2.0**-23)
    assert not float_gate(R, xla, (R * (1 + 10 * eps)).astype(np.float32), written=np.abs(R) * 10 * eps, unit=eps)
    assert not float_gate(R, xla, np.full_like(xla, np.nan), written=np.full_like(R, np.nan), unit=eps)


def broken(what: str, dtype: type) -> np.ndarray:
    c, eps = rounded(R, dtype, 0.3, 2).astype(np.float64), float(ml_dtypes.finfo(dtype).eps)
    match what:
        case "one element":
            c[3, 4] += 0.1
        case "one tile":
            c[16:32, 32:48] = c[:16, 32:48]
        case "noise":
            c += 6 * eps * RNG.standard_normal(c.shape)
        case "bias":
            c += 3 * eps
        case "scale":
            c *= 1 + 8 * eps
        case "nan":
            c[0, 0] = np.nan
        case "inf":
            c[0, 0] = np.inf
        case "zero":
            c[:] = 0
    return c.astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("what", ["one element", "one tile", "noise", "bias", "scale", "nan", "inf", "zero"])
def test_fails(what: str, dtype: type) -> None:
    result = float_gate(R, rounded(R, dtype, 0.3, 1), broken(what, dtype))
    assert not result
    assert result.reasons


def test_wrong_tile_in_a_small_row() -> None:
    """A row of small values is wrong by half: far below the largest error, but not in its own row."""
    r = R.copy()
    r[5] *= 1e-3
    candidate = r.copy()
    candidate[5] *= 1.05
    result = float_gate(r, r.astype(np.float16), candidate.astype(np.float16))
    assert [x.partition(":")[0] for x in result.reasons] == ["worst row"]


def test_types_and_shapes() -> None:
    xla = R.astype(np.float32)
    assert "instead of" in float_gate(R, xla, R.astype(np.float16)).reasons[0]
    assert "instead of" in float_gate(R, xla, xla[:1]).reasons[0]
    assert float_gate(R > 0, R > 0, R > 0)
    assert "differ from XLA's" in float_gate(R > 0, R > 0, R > 1).reasons[0]
    empty = np.zeros((0, 3), np.float32)
    assert float_gate(empty.astype(np.float64), empty, empty)
    scalar = np.float32(2.0)
    assert float_gate(np.float64(2), scalar, scalar)


def test_a_neighbour_is_right() -> None:
    """XLA is exact: what rounds to the other side is not worse than half a unit, in rare places."""
    r = np.full((64, 64), 4352.0)
    r[3, 4] += 15.9
    xla = r.astype(ml_dtypes.bfloat16)
    ours = xla.copy()
    assert xla[3, 4] == 4352
    ours[3, 4] = 4384
    assert float_gate(r, xla, ours)
    ours[3, 4] = 4416
    assert "max error" in float_gate(r, xla, ours).reasons[0]
    below = np.full((64, 64), 4097.0)
    assert not float_gate(below, below.astype(ml_dtypes.bfloat16), np.full((64, 64), 4080).astype(ml_dtypes.bfloat16))


def test_non_finite() -> None:
    r = R.copy()
    r[0, 0], r[1, 1], r[2, 2] = np.nan, np.inf, -np.inf
    xla = r.astype(np.float32)
    assert float_gate(r, xla, xla)
    other = xla.copy()
    other[1, 1] = -np.inf
    assert not float_gate(r, xla, other)
    assert float_gate(r, xla, other, kinds=False)
    other[1, 1] = 1
    assert not float_gate(r, xla, other, kinds=False)
    overflown = R.astype(np.float32)
    overflown[4, 4] = (
        np.inf
    )  # XLA overflows where the result is finite: the candidate may do better, but not worse elsewhere
    assert float_gate(R, overflown, R.astype(np.float32))
    assert not float_gate(R, R.astype(np.float32), overflown)
    nothing = np.full((2, 2), np.nan)
    assert float_gate(nothing, nothing.astype(np.float32), nothing.astype(np.float32))


def test_an_infinity_may_stand_for_infinity_less_infinity() -> None:
    """Of infinity less infinity a kernel may hold one side in float32; the sum is beyond the range of float16."""
    xla, ours, far = R.astype(np.float16), R.astype(np.float16), R.copy()
    xla[3, 4], ours[3, 4], far[3, 4] = np.nan, np.inf, -1e10
    assert float_gate(far, xla, ours) and not float_gate(far, ours, xla) and not float_gate(R, xla, ours)
    there = map(jnp.asarray, (xla, ours))
    with jax.enable_x64(True):
        assert float_gate(jnp.asarray(far), *there)
    far[3, 4] = np.nan
    assert not float_gate(far, xla, ours)


def test_overflow_beyond_the_brink() -> None:
    """Another order of evaluation may overflow before XLA does, near the end of the range and nowhere else."""
    r = R.copy()
    r[0, 0] = -8.6e32
    xla = r.astype(np.float32)
    for late in (-np.inf, np.nan):
        ours = xla.copy()
        ours[0, 0] = late
        assert not float_gate(r, xla, ours)
        assert float_gate(r, xla, ours, brink=LATE)
        ours[0, 1] = late
        assert not float_gate(r, xla, ours, brink=LATE)


def test_ceiling_and_exactness() -> None:
    bad = (R + 0.5).astype(np.float32)
    assert float_gate(R, bad, bad)
    assert float_gate(R, bad, bad, ceiling=np.full(R.shape, 0.1)).reasons[0].startswith("ceiling")
    integers = RNG.integers(-9, 9, (8, 8)).astype(np.float64)
    xla = integers.astype(np.float32)
    off = xla.copy()
    off[0, 0] = np.nextafter(off[0, 0], np.float32(99))
    assert not float_gate(integers, xla, off, exact=True)
    assert float_gate(integers, off, off, exact=True)  # XLA is not exact either


def test_a_bound_that_is_no_number_allows_nothing() -> None:
    ones = np.ones((4, 8))
    ceiling = np.where(np.arange(32).reshape(4, 8) == 3, np.nan, 1.0)
    assert not float_gate(ones, ones, ones, ceiling=ceiling)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(), (7,), (30, 5), (3, 40, 2)])
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), noisy=st.booleans(), strange=st.booleans())
def test_large_arrays_are_compared_in_blocks(shape, dtype, seed: int, noisy: bool, strange: bool) -> None:
    """Which are the same comparisons, whatever their size."""
    rng = np.random.default_rng(seed)
    r = np.asarray(rng.standard_normal(shape))
    x, c = (np.array(r * (1 + e * rng.standard_normal(shape)), dtype) for e in (0.01, 0.02))
    if strange:
        c.flat[rng.integers(c.size)] = np.nan
    noise, written = (np.abs(0.01 * rng.standard_normal(shape)) if noisy else None for _ in range(2))
    found = []
    for size in (1, 16, 1 << 16):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(comparison, "COMPARED_ELEMENTS", size)
            found.append(float_gate(r, x, c, noise=noise, written=written, unit=0.1, ceiling=np.full(shape, 0.5)))
    for other in found[1:]:
        assert other.reasons == found[0].reasons
        assert dict(other.ratios) == pytest.approx(dict(found[0].ratios), rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(), (7,), (3, 40, 2)])
@pytest.mark.parametrize("noisy", [False, True])
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32), strange=st.booleans(), error=st.sampled_from([1e-6, 0.02, 0.5]))
def test_arrays_on_a_device_are_compared_there(
    shape, dtype, noisy: bool, seed: int, strange: bool, error: float
) -> None:
    """With the same result."""
    rng = np.random.default_rng(seed)
    r = np.asarray(rng.standard_normal(shape))
    x, c = (np.array(r * (1 + e * rng.standard_normal(shape)), dtype) for e in (0.01, error))
    if strange:
        c.flat[rng.integers(c.size)] = np.nan
    noise, written = (np.abs(0.01 * rng.standard_normal(shape)) if noisy else None for _ in range(2))
    with jax.enable_x64(True):
        there = [None if a is None else jnp.asarray(a) for a in (r, x, c, noise, written)]
    (r2, x2, c2, noise2, written2) = there
    here = float_gate(r, x, c, noise=noise, written=written, unit=0.1)
    found = float_gate(r2, x2, c2, noise=noise2, written=written2, unit=0.1)
    assert found.reasons == here.reasons
    assert dict(found.ratios) == pytest.approx(dict(here.ratios), rel=1e-9, abs=1e-15)
    for candidate in (x, c, np.array(r + 1.0, dtype)):
        with jax.enable_x64(True):
            other = jnp.asarray(candidate)
        narrowest = np.dtype(dtype).itemsize
        assert misread(r2, other, narrowest) == misread(r, candidate, narrowest)


def test_large_values_do_not_overflow() -> None:
    r = R * 1e200
    assert float_gate(r, r * (1 + 1e-16), r)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("dtype", [*DTYPES, np.int32, np.bool_, np.float64])
def test_input_classes(name: str, dtype: type) -> None:
    specs = [((4, 6), dtype), ((2, 6, 8), dtype), ((), dtype), ((5,), dtype), ((0, 3), dtype), ((1, 1), dtype)]
    one, two = input_classes(specs, 0)[name], input_classes(specs, 0)[name]
    for (shape, _), x, y in zip(specs, one, two, strict=True):
        assert x.shape == shape
        assert x.dtype == dtype
        np.testing.assert_array_equal(x.astype(np.float64), y.astype(np.float64))
    if dtype is np.float32:
        assert (
            any(not np.array_equal(x, y) for x, y in zip(one, input_classes(specs, 1)[name], strict=True))
            or name == "zeros"
        )
        assert (name in ("nan", "inf", "-inf")) == any(not np.isfinite(x).all() for x in one)


@pytest.mark.parametrize("shape", [(), (5,), (3, 7), (7, 3), (2, 4, 4)])
def test_an_infinite_logit_is_where_no_causal_mask_hides_it(shape: tuple[int, ...]) -> None:
    for seed in range(5):
        classes = input_classes([((2,), np.float32), (shape, np.float32)], seed, biases=[1])
        (place,) = np.argwhere(np.isinf(classes["infinite input 1"][1]))
        assert len({*place[-2:].tolist()}) <= 1
        assert sum(np.isnan(x).sum() for x in classes["nan"]) == 1


def test_a_root_of_one_number_is_spoiled_like_others() -> None:
    """The absolute value of an array without dimensions is no array."""
    for name, value in (("nan", math.nan), ("inf", math.inf)):
        (x,) = input_classes([((), np.float32)], 0, roots=[0])[name]
        assert x.shape == () and np.array_equal(x, np.float32(value), equal_nan=True)


def test_input_classes_are_a_mapping() -> None:
    classes = input_classes([((2, 2), np.float32)], 0)
    assert set(classes) == set(CLASSES)
    assert len(classes) == len(list(classes.items())) >= 15


def test_same_rows() -> None:
    """Points and some of them; arrays of other types, or with rows of another length, keep their own."""
    specs = [((2, 6, 8), np.float32), ((2, 9, 8), np.float32), ((2, 6, 8), np.float16), ((6, 8), np.float32)]
    few, many, other, flat = input_classes(specs, 0)["same rows"]
    assert np.array_equal(few, many[:, :6]) and not np.array_equal(few, few[:1])
    assert not np.array_equal(few, other.astype(np.float32)) and not np.array_equal(flat, few[0])
    x, y, n = input_classes([((5,), np.float32), ((5,), np.float32), ((5,), np.int32)], 0)["same rows"]
    assert np.array_equal(x, y) and not np.array_equal(x, n)
    assert "same rows" not in input_classes([*specs[1:], ((), np.float32), ((), np.float32)], 0)


def test_large_logits() -> None:
    q, k = input_classes([((8, 16), np.float32), ((16, 32), np.float32)], 0)["large logits"]
    logits = q.astype(np.float64) @ k
    assert np.all(np.abs(np.abs(logits) - 2025) < 50)
    assert 1 < logits.std(axis=1).mean() < 20


@pytest.mark.parametrize("dtype", DTYPES)
def test_where_xla_overflows_float64_judges(dtype: type) -> None:
    """Any finite number was right once."""
    xla = R.astype(dtype)
    xla[4, 4] = np.inf
    right, wrong = R.astype(dtype), R.astype(dtype)
    wrong[4, 4] = R[4, 4] + np.abs(R[4]).max()
    assert float_gate(R, xla, right) and float_gate(R, xla, right, kinds=False)
    for kinds in (True, False):
        assert "instead of inf at (4, 4)" in float_gate(R, xla, wrong, kinds=kinds).reasons[0]
    assert float_gate(R, xla, wrong, noise=np.full(R.shape, np.abs(R).max()))  # as far as the program's own noise goes


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_zeros_is_a_row(dtype: type) -> None:
    r = R.copy()
    r[5] = 0.0
    xla, candidate = r.astype(dtype), r.astype(dtype)
    assert float_gate(r, xla, candidate)
    candidate[5, 3] = 1e-3 * float(ml_dtypes.finfo(dtype).eps)
    assert [x.partition(":")[0] for x in float_gate(r, xla, candidate).reasons] == ["worst row"]
    assert float_gate(r, candidate, candidate)  # XLA's is no better
    assert float_gate(r, xla, candidate, noise=np.abs(candidate.astype(np.float64)))


def test_a_row_of_which_xla_has_no_digit_tells_nothing() -> None:
    """Its results cancel: which of two errors is larger there is chance. In other rows it counts, here and everywhere
    the largest error does.
    """
    r = R.copy()
    r[5:7] *= 1e-6
    xla = r.astype(np.float32)
    xla[5, 3] = 2e-6 * np.abs(R).max()
    candidate = xla.copy()
    candidate[5, 4] = 2e-4 * np.abs(R).max()
    found = float_gate(r, xla, candidate)
    assert "worst row" not in " ".join(found.reasons) and "max error" in " ".join(found.reasons)
    candidate = xla.copy()
    candidate[5, 4] = 3e-6 * np.abs(R).max()
    assert float_gate(r, xla, candidate)
    candidate[6, 4] = 2e-5 * np.abs(R).max()
    assert "worst row" in " ".join(float_gate(r, xla, candidate).reasons)


def test_ends_of_ranges() -> None:
    """Up and down, against each other, with and without negative numbers; never past what the types hold."""
    found = list(range_edges.directions([0, 1, 3], [(0, 1), (1, 3)]))
    assert len(found) == len(set(found)) < 20
    assert {(d.up, d.down) for d in found} >= {
        (frozenset({0, 1, 3}), frozenset()),
        (frozenset(), frozenset({0, 1, 3})),
        (frozenset({3}), frozenset({1})),
        (frozenset({1}), frozenset({3})),
        (frozenset({0, 3}), frozenset({1})),
        (frozenset({1}), frozenset()),
    }
    assert {d.positive for d in found} == {False, True}
    types = [np.dtype(t) for t in (np.float16, np.float16, np.int32, ml_dtypes.bfloat16)]
    for d in found:
        n = d.most(types)
        for i in (0, 1, 3):
            x = np.array([0.25, 7.9]) * d.power(i, n)
            info = ml_dtypes.finfo(types[i])
            assert x.max() <= float(info.max) and x.min() >= float(info.smallest_normal)
    assert range_edges.brink(lambda n: n <= 7, 13) == 7 and range_edges.brink(lambda n: False, 13) == -1
    assert str(found[3]) == "input 0 times 2**n and input 1 times 2**-n, none negative"


def test_large_inputs_are_drawn_in_part() -> None:
    """Drawing is what the gate takes longest for; the rows that are drawn are all different."""
    (x,) = input_classes([((2, 5000, 1000), np.float32)], 0)["normal"]
    rows = np.unique(x.reshape(-1, 1000)[:, 0])
    assert x.shape == (2, 5000, 1000) and len(rows) == 2089  # the largest prime with which not too much is drawn
    (x,) = input_classes([((2, 5000, 1000), np.float32)], 0)["large logits"]
    assert (np.abs(x[..., 0]) == 45).all() and (np.abs(x[..., 1:]) < 10).all()

"""Where a kernel's float32, which holds casts and integers as they come, would not give what the program says."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from mirage_jax.jaxpr_frontend.translate.translate import Region
from mirage_jax.mugraph import evaluate
from tests.jaxpr_frontend.replacing import Replacing, analysis, assert_close, optimized, random

N = 16
A = random(N, N, scale=1.0)
V = random(N, scale=1.0, seed=1)


def _full(value: int) -> jax.Array:
    return jnp.full((N,), value, "int32")


def _kept(x: Any) -> Any:
    return jnp.where(jnp.isfinite(x), x, 0).astype("float32")


CASES: dict[str, tuple[Callable[..., Any], jax.Array]] = {
    "an integer beyond 2**24 against a constant": (lambda q: jnp.where(q == 2**24, 1.0, 0.0), _full(2**24 + 1)),
    "the largest integer": (lambda q: jnp.where(q != 2**31 - 1, 1.0, 0.0), _full(2**31 - 48)),
    "a difference": (lambda q: (q - (2**24 + 1)).astype("float32"), _full(2**24 + 2)),
    "a sum that wraps around": (lambda q: (q + q).astype("float32"), _full(2**30)),
    "a successor that wraps around": (lambda q: (q + 1).astype("float32"), _full(2**31 - 1)),
    "a negative that wraps around": (lambda q: (-q).astype("float32"), _full(-(2**31))),
    "a mask that wraps around": (lambda q: jnp.where(jnp.arange(N) + q > 0, 1.0, 0.0), _full(2**31 - 5)),
    "two casts": (lambda q: jnp.where(q.astype("float32") == (q + 1).astype("float32"), 1.0, 0.0), _full(2**24)),
    "finite as float16": (lambda v: _kept(v.astype("float16")), V.at[0].set(1e6)),
    "finite as bfloat16": (lambda v: _kept(v.astype("bfloat16")), V.at[0].set(3.4e38)),
    "the last that is finite as float16": (lambda v: _kept(v.astype("float16")), V.at[0].set(65519.0)),
    "the first that is not": (lambda v: _kept(v.astype("float16")), V.at[0].set(65520.0)),
    "infinite as float16": (lambda v: jnp.where(v.astype("float16") == jnp.inf, 0.0, 1.0), V.at[0].set(1e6)),
    "an integer, finite as float16": (lambda q: jnp.where(jnp.isfinite(q.astype("float16")), 1.0, 0.0), _full(100_000)),
    "positive as float16": (lambda v: (v.astype("float16") > 0).astype("float32"), jnp.abs(V) * 1e-9),
    "positions as bfloat16": (lambda v: jnp.where(jnp.arange(300.0)[284:].astype("bfloat16") < 290, v, 0.0), V),
    "floor of bfloat16": (lambda v: jnp.floor(v.astype("bfloat16")).astype("float32"), V.at[0].set(1.999)),
    "ceil of float16": (lambda v: jnp.ceil(v.astype("float16")).astype("float32"), jnp.abs(V) * 1e-9),
    "sign of float16": (lambda v: jnp.sign(v.astype("float16")).astype("float32"), jnp.abs(V) * 1e-9),
    "fewer bits": (lambda v: lax.reduce_precision(v, 8, 4), V),
    "a smaller range": (lambda v: jnp.minimum(lax.reduce_precision(v, 5, 23), 7.0), V.at[0].set(1e6)),
    "a root of -inf": (lambda v: 1 / (1 + v**0.5), jnp.abs(V).at[1].set(-jnp.inf)),
    "bits of a constant": (lambda v: jnp.where(jnp.arange(N) < N - (_full(6) & 3), v, 0.0), V),
    "the complement of a constant": (lambda v: jnp.where(jnp.arange(N) < ~_full(-9), v, 0.0), V),
}


COMPARE = {"eq": jnp.equal, "ne": jnp.not_equal, "lt": jnp.less, "le": jnp.less_equal, "gt": jnp.greater}
NUMBERS = st.sampled_from([0.0, 1.0, -1.0, 0.5, 0.1, 300.0])


def chosen_by(mask: jax.Array, yes: float, no: float, dtype: str, op: str, constant: float, first: bool) -> jax.Array:
    """A comparison of a choice of two constants with a third; "cast": of its truth."""
    choice = jnp.where(mask, jnp.asarray(yes, dtype), jnp.asarray(no, dtype))
    if op == "cast":
        return choice.astype(bool)
    other = jnp.asarray(constant, dtype)
    return COMPARE[op](choice, other) if first else COMPARE[op](other, choice)


@settings(deadline=None, max_examples=60)
@given(
    NUMBERS,
    NUMBERS,
    st.sampled_from(["float32", "bfloat16", "int32"]),
    st.sampled_from([*COMPARE, "cast"]),
    NUMBERS,
    st.booleans(),
)
def test_a_comparison_of_two_constants(
    yes: float, no: float, dtype: str, op: str, constant: float, first: bool
) -> None:
    def fn(s: jax.Array) -> jax.Array:
        mask = chosen_by(jnp.tri(N, dtype=bool), yes, no, dtype, op, constant, first)
        return jnp.where(mask, s @ s.T, -7.0)

    assert_close(optimized(fn)(A), fn(A))


@pytest.mark.parametrize(
    "mask",
    [
        lambda: jnp.tril(jnp.ones((N, N))) == 1,
        lambda: ~(jnp.tril(jnp.ones((N, N))) == 0),
        lambda: jnp.tril(jnp.ones((N, N), "bfloat16")).astype(bool),
        lambda: jnp.tri(N, dtype="int32") > 0,
        lambda: jnp.logical_not(jnp.logical_not(jnp.tri(N, dtype=bool))),
    ],
)
def test_a_mask_is_the_same_however_it_is_written(mask: Callable[[], jax.Array]) -> None:
    """Loops end early only where they see which indices a mask compares."""

    def graph(mask: Callable[[], jax.Array]) -> list[str]:
        (region,) = analysis(lambda a: jax.nn.softmax(jnp.where(mask(), a @ a.T, -1e9)) @ a, A).regions
        return [op.op for k in region.graph for op in k.ops]

    assert graph(mask) == graph(lambda: jnp.tri(N, dtype=bool))


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_the_program(name: str) -> None:
    of, x = CASES[name]

    def fn(a: jax.Array, x: jax.Array) -> jax.Array:
        return (a @ a) @ of(x)

    compiler = Replacing()
    have, want = optimized(fn, compiler)(A, x), jax.jit(fn)(A, x)
    assert compiler.regions, "nothing is left to optimize"
    assert_close(have, want, 2e-3)


def test_overflow_of_float16_is_seen_where_it_is_computed() -> None:
    """What counts gradients that are not finite, to scale the loss."""

    def fn(a: jax.Array, v: jax.Array) -> jax.Array:
        return (1 - jnp.isfinite((a @ a) @ v).astype("float32")).sum()

    a, v = (A * 100).astype("float16"), (V * 100).astype("float16")
    assert optimized(fn)(a, v) == jax.jit(fn)(a, v) > 0


def test_a_sum_that_float16_does_not_hold_stays_in_float32() -> None:
    """Its mean is float16, as XLA has it: rows would be 0 where the sum is infinite."""

    def normalized(a: jax.Array) -> jax.Array:
        return (a * lax.rsqrt(jnp.mean(jnp.square(a), -1, keepdims=True) + 1e-6)) @ a

    a = (200 + 10 * A).astype("float16")
    (region,) = analysis(normalized, a).regions
    (have,), want = evaluate.run(region.graph, [a], xp=jnp, dtype=None), jax.jit(normalized)(a)
    assert_close(have.astype("float32"), want.astype("float32"), 2e-3)


SCALED: dict[str, Callable[[jax.Array, jax.Array, float], jax.Array]] = {
    "a product": lambda x, w, s: ((x * s) * (x * s)) @ w,
    "a square": lambda x, w, s: jnp.square(x * s) @ w,
    "a cube": lambda x, w, s: (x * s) ** 3 @ w,
    "two matrix products": lambda x, w, s: ((x * s) @ (x * s)) @ w,
    "a difference": lambda x, w, s: (x * s - x.T * s) @ w,
    "a quotient": lambda x, w, s: ((x * s) / (1 + jnp.abs(w))) @ w,
    "a sum": lambda x, w, s: (w * (x * s).sum(-1, keepdims=True)) @ w,
    "a maximum": lambda x, w, s: (w - (x * s * w).max(-1, keepdims=True)) @ w,
}


@pytest.mark.parametrize("power", [-10, 10])
@pytest.mark.parametrize("name", SCALED)
def test_constants_that_leave_a_product_cost_float16_no_digits(name: str, power: int) -> None:
    """Scaled by a constant, numbers are of ordinary size; without it, many are subnormal or infinite."""

    def program(x: jax.Array, w: jax.Array) -> jax.Array:
        return SCALED[name](x, w, 2.0**power)

    x, w = (A / 2.0**power).astype("float16"), A.astype("float16")
    (region,) = analysis(program, x, w).regions
    (have,), want = evaluate.run(region.graph, [x, w], xp=jnp, dtype=None), jax.jit(program)(x, w)
    assert_close(have.astype("float32"), want.astype("float32"), 4e-3)


@pytest.mark.parametrize(
    ("exponent", "of"),
    [(0.5, lambda v: v * v + 1e-6), (-0.5, lambda v: jnp.exp(v)), (1.5, lambda v: jnp.abs(v) / 3)],
)
def test_roots_of_what_is_not_negative_are_taken(exponent: float, of: Callable[[jax.Array], jax.Array]) -> None:
    found = analysis(lambda a, v: ((a @ v) * of(v) ** exponent).sum(), A, V)
    assert not [x for x in found.left_out if x.primitive == "pow"]


def _region(of: Callable[[jax.Array], jax.Array]) -> Region:
    (region,) = analysis(lambda a, v: (a @ a) @ of(v), A, V).regions
    return region


def test_programs_of_one_graph_are_told_apart() -> None:
    """A looser gate accepts what another program's would refuse."""
    programs = [
        _region(lambda v: v - 2),
        _region(lambda v: v.astype("bfloat16").astype("float32") - 2),
        _region(lambda v: lax.reduce_precision(v, 8, 23) - 2),
    ]
    assert len({str(r.graph) for r in programs}) == 1
    assert len({r.text for r in programs}) == 3


def test_the_order_of_equations_names_no_other_program() -> None:
    def one(a: jax.Array) -> jax.Array:
        x, y = jnp.exp(a), jnp.sin(a)
        return x @ y

    def other(a: jax.Array) -> jax.Array:
        y, x = jnp.sin(a), jnp.exp(a)
        return x @ y

    first, second = (analysis(fn, A).regions[0] for fn in (one, other))
    assert [e.primitive for e in first.equations] != [e.primitive for e in second.equations]
    assert first.written == second.written


def test_a_large_integer_is_no_result() -> None:
    """As float32 it would not come out as it went in."""

    def fn(a: jax.Array, v: jax.Array, q: jax.Array) -> tuple[jax.Array, jax.Array]:
        clipped = jnp.maximum(q, 0)
        return jnp.where(clipped > 3, (a @ a) @ v, 0.0), clipped

    compiler = Replacing()
    have, want = optimized(fn, compiler)(A, V, _full(2**24 + 1)), jax.jit(fn)(A, V, _full(2**24 + 1))
    assert compiler.regions
    assert_close(have[0], want[0])
    assert have[1].tolist() == want[1].tolist()


def test_indices_that_a_type_rounds() -> None:
    def fn(a: jax.Array) -> jax.Array:
        i = lax.iota("bfloat16", 300)
        return jnp.where(i[:, None] < i[None, :], a, 0.0).sum(1)

    (left,) = analysis(fn, random(300, 300)).left_out[:1]
    assert (left.primitive, left.why) == ("iota", "indices beyond what bf16 holds")


def test_small_integers_are_computed_with() -> None:
    """Indices, counts and what is made of them; an input of any size is compared with them."""

    def fn(a: jax.Array, v: jax.Array, length: jax.Array) -> jax.Array:
        i, j = jnp.arange(N)[:, None], jnp.arange(N)[None, :]
        seen = (i - j < 5) & (2 * j + 1 < length[:, None])
        return jnp.where(seen, a @ a, 0.0) @ v

    for n in (7, 2**24 + 1, 2**31 - 1, -(2**31)):
        compiler = Replacing()
        assert_close(optimized(fn, compiler)(A, V, _full(n)), jax.jit(fn)(A, V, _full(n)))
        assert sum("lt" in r.primitives for r in compiler.regions) == 1
    assert not analysis(fn, A, V, _full(3)).left_out


def test_two_inputs_of_integers_are_compared_as_they_are() -> None:
    """Segments of texts, say."""

    def fn(a: jax.Array, v: jax.Array, p: jax.Array, q: jax.Array) -> jax.Array:
        return jnp.where(p[:, None] == q[None, :], a @ a, 0.0) @ v

    found = analysis(fn, A, V, _full(0), _full(0))
    assert not found.left_out
    assert "eq" in str(found.regions[0].graph)
    assert np.isfinite(fn(A, V, _full(0), _full(1))).all()


def test_what_is_known_of_values_is_asked_once() -> None:
    """Of 40 sums of a value and itself there are 2**40 ways down."""

    def fn(a: jax.Array, v: jax.Array) -> jax.Array:
        y = v * v
        for _ in range(40):
            y = y + y
        return (a @ a) @ y**0.5

    assert not [x for x in analysis(fn, A, V, max_ops=200).left_out if x.primitive == "pow"]


def _half(*shape: int, dtype: str = "bfloat16") -> jax.Array:
    return jnp.asarray(random(*shape, scale=1.0), dtype)


ROUNDED: dict[str, Callable[..., Any]] = {
    "floor": lambda x, w: jnp.floor(x @ w),
    "ceil": lambda x, w: jnp.ceil(x @ w),
    "round": lambda x, w: jnp.round(x @ w),
    "sign": lambda x, w: jnp.sign(x @ w),
    "a threshold": lambda x, w: jnp.where(x @ w > 1.5, x, 0),
    "two products": lambda x, w: jnp.where(x @ w < w @ x, x, 0),
    "a type that a product is asked for": lambda x, w: jnp.floor(jnp.dot(x, w, preferred_element_type=x.dtype)),
    "a narrower one": lambda x, w: jnp.floor(
        jnp.dot(x.astype("float32"), w.astype("float32"), preferred_element_type="float32").astype(x.dtype)
    ),
    "a sum": lambda x, w: jnp.floor(x + w),
    "a multiple": lambda x, w: jnp.floor(x / 3),
    "the larger product": lambda x, w: jnp.floor(jnp.maximum(x @ w, 0)),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ROUNDED)
def test_what_sixteen_bits_round_is_rounded_before_a_step(name: str, dtype: str) -> None:
    """A kernel's products and sums are float32, where the program's are not."""
    found = analysis(lambda x, w: ROUNDED[name](x, w) @ w, _half(N, N, dtype=dtype), _half(N, N, dtype=dtype))
    short = {"bfloat16": "bf16", "float16": "f16"}[dtype]
    assert any(f"of what was rounded to {short}" in str(x) for x in found.left_out), found.left_out


def test_the_floor_of_a_product_is_that_of_the_program() -> None:
    x, w = _half(N, N), _half(N, N)
    fn = lambda x, w: (jnp.floor(8 * (x @ w)) @ w) @ w[0]  # noqa: E731
    compiler = Replacing()
    have, want = optimized(fn, compiler)(x, w), jax.jit(fn)(x, w)
    assert compiler.regions
    np.testing.assert_allclose(*(np.asarray(y, "float32") for y in (have, want)), rtol=0.03, atol=0.5)


def test_halves_that_are_rounded_away_from_zero_stay_with_xla() -> None:
    found = analysis(lambda x, w: jax.lax.round(x) @ w @ w, random(N, N), random(N, N))
    assert any("away from zero" in str(x) for x in found.left_out), found.left_out


CHOSEN: dict[str, Callable[..., Any]] = {
    "floor of an input": lambda x, w: jnp.floor(x) @ w,
    "of the larger one": lambda x, w: jnp.floor(jnp.maximum(x, w)) @ w,
    "a product and zero": lambda x, w: jnp.where(x @ w > 0, x, 0) @ w,
    "an input and a number": lambda x, w: jnp.where(x > 1.5, x, 0) @ w,
}


@pytest.mark.parametrize("name", CHOSEN)
def test_what_nothing_rounds_is_no_border(name: str) -> None:
    found = analysis(CHOSEN[name], _half(N, N), _half(N, N))
    assert found.regions and not any("rounded" in str(x) for x in found.left_out)

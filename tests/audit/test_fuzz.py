"""The fuzzer: what it generates, that it finds what is wrong, and programs in which nothing is."""

import json
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mirage_jax import cli
from mirage_jax.audit import brink, differential, float64, fuzz, generator
from mirage_jax.audit.differential import Setting
from mirage_jax.audit.fills import LOWEST, PLACES, Fill, filled
from mirage_jax.audit.generator import generate
from mirage_jax.audit.padding import BORDERS
from mirage_jax.audit.program import Border, ProgramStep, ProgramValue, RandomProgram, Wrapper, shape_of
from mirage_jax.audit.shrink import shrink, smaller, tidy
from mirage_jax.compiler import tuning_session as attempts
from mirage_jax.compiler.winner import Winner
from mirage_jax.hardware.device_model import DEVICES
from mirage_jax.jaxpr_frontend.capture import lowering
from mirage_jax.jaxpr_frontend.translate import rules
from mirage_jax.lower.runtime import launch
from mirage_jax.mugraph.graph import BlockGraph, KernelSchedule, Library, Schedule
from mirage_jax.mugraph.parser import parse
from mirage_jax.search.candidates import Candidate
from mirage_jax.search.enumerate import window_search
from mirage_jax.verify import types
from mirage_jax.verify.equivalence import certificate as certificates
from mirage_jax.verify.exact.interpreters.triton import interpret
from mirage_jax.verify.floats import gate as gate

SEEDS = st.integers(0, 10**6)
FEW = settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck), derandomize=True)


def drawn(seed: int) -> RandomProgram:
    return generate(random.Random(seed), seed)


def chain(*sizes: int, **more) -> RandomProgram:
    """(x0 @ x1) @ x2, and something beside it that is not needed."""
    names = dict(zip("abcd", sizes, strict=True))
    inputs = tuple(ProgramValue(f"x{i}", tuple("abcd"[i : i + 2]), "float32") for i in range(3))
    steps = (
        ProgramStep(ProgramValue("t0", ("a", "c"), "float32"), "{0} @ {1}", ("x0", "x1")),
        ProgramStep(ProgramValue("t1", ("a", "c"), "float32"), "jnp.exp({0})", ("t0",)),
        ProgramStep(ProgramValue("t2", ("a", "d"), "float32"), "{0} @ {1}", ("t0", "x2")),
    )
    return RandomProgram(tuple(names.items()), inputs, steps, ("t2",), **more)


# What is generated.


@FEW
@given(SEEDS)
def test_same_seed_same_program(seed: int) -> None:
    program = drawn(seed)
    assert program == drawn(seed)
    assert all(
        np.array_equal(a, b, equal_nan=True) for a, b in zip(program.arguments(), drawn(seed).arguments(), strict=True)
    )
    compile(program.script(Setting()), "script", "exec")


@FEW
@given(SEEDS)
def test_types_are_what_jax_says(seed: int) -> None:
    """Of every step: the shrinker relies on it."""
    program = replace(drawn(seed), inner=(), outer=())
    everything = replace(program, outputs=tuple(s.value.name for s in program.steps) or program.outputs)
    found = jax.eval_shape(everything.function()(jax.jit), *everything.arguments())
    values, sizes = everything.values, dict(everything.sizes)
    for name, aval in zip(everything.outputs, found, strict=True):
        assert (aval.shape, str(aval.dtype)) == (shape_of(values[name].shape, sizes), values[name].dtype), (
            program.source()
        )


def test_policies_reach_every_kind_of_program() -> None:
    programs = [drawn(seed) for seed in range(400)]
    seen = Counter(w.name for p in programs for w in p.inner + p.outer)
    assert {"jit", "grad", "vmap", "scan", "checkpoint"} <= seen.keys()
    text = "".join(p.source() for p in programs)
    for part in (
        "softmax",
        "rsqrt",
        "silu",
        "tril",
        "einsum",
        "astype",
        "concatenate",
        "swapaxes",
        "jnp.max",
        "einsum",
    ):
        assert part in text, part
    assert {v.dtype for p in programs for v in p.inputs} == {
        "float32",
        "bfloat16",
        "float16",
        "bool",
        "int8",
        "uint8",
        "int32",
    }
    assert any(p.same for p in programs) and any(len(p.outputs) > 1 for p in programs)


def test_sentinels_scales_and_borders_are_drawn() -> None:
    """Each in enough programs that a few hundred of them show a hole."""
    programs = [drawn(seed) for seed in range(400)]
    seen = Counter(what for p in programs for what in p.features)
    assert min(seen["a sentinel in its data"], seen["scales"]) >= 30 and seen["a border"] >= 60
    assert {b.kind for p in programs for b in p.borders} == set(BORDERS)
    fills = [v.fill for p in programs for v in p.inputs]
    assert {f.where for f in fills} >= {*PLACES, "switch"} and {f.low for f in fills} >= {
        LOWEST,
        "-1e30",
        "-inf",
        "mixed",
    }
    assert any(f.power and f.positive for f in fills)
    text = "".join(p.source() for p in programs)
    for part in ("logsumexp", "dot_product_attention", "lax.rev", "is_causal=True"):
        assert part in text, part


def test_scales_go_in_opposite_directions() -> None:
    scaled = [p for p in map(drawn, range(400)) if "scales" in p.features]
    for program in scaled:
        powers = [v.fill.power for v in program.inputs]
        assert min(powers) < 0 < max(powers)
    assert Counter(p.inputs[0].dtype for p in scaled)["float16"] > len(scaled) // 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_fills(dtype: str) -> None:
    rng = np.random.default_rng(0)
    x = np.asarray(rng.standard_normal((8, 16)), jnp.dtype(dtype))
    least = jnp.finfo(dtype).min
    for where in PLACES:
        y = filled(x, Fill(LOWEST, where), rng)
        assert y.dtype == x.dtype and set(np.unique(y.astype(np.float64))) <= {float(least), 0.0}
        assert (y == least).any() and (where == "all" or (y == 0).any())
    assert (filled(x, Fill(LOWEST, "rows"), rng) == least)[0].all()
    assert set(np.unique(filled(x, Fill(where="switch"), rng).astype(np.float64))) == {0.0, 1.0}
    assert np.array_equal(filled(x, Fill(positive=True, power=-3), rng), np.abs(x) / np.asarray(8, x.dtype))
    assert np.isfinite(filled(x, Fill(power=200), rng).astype(np.float64)).all()


@pytest.mark.parametrize("kind", sorted(set(BORDERS)))
def test_a_border_changes_no_value(kind: str) -> None:
    """In plain JAX and in the float64 reference."""
    steps = (
        *chain(4, 4, 4, 4).steps[:1],
        ProgramStep(ProgramValue("t1", ("a", "d"), "float32"), "{0} @ {1} / 8", ("t0", "x2")),
    )
    plain = replace(chain(4, 4, 4, 4), steps=steps, outputs=("t1",))
    inside = replace(plain, borders=(Border(kind, ("t0", "t1")),))
    (want,), (have,) = (p.function()(jax.jit)(*p.arguments()) for p in (plain, inside))
    assert np.allclose(want, have, rtol=1e-5) and "def part0(x0, x1, x2):" in inside.source()
    (exact,) = float64.evaluate(
        jax.jit(inside.function()(jax.jit)).trace(*inside.arguments()).jaxpr, inside.arguments()
    )
    assert np.allclose(want, exact, rtol=1e-4)
    if kind == "layers":
        twice = replace(plain, borders=(Border(kind, ("t0", "t1"), ("x0", "t1")),))
        x0, x1, x2 = twice.arguments()
        (have,) = twice.function()(jax.jit)(x0, x1, x2)
        assert np.allclose(have, np.asarray(want) @ x1 @ x2 / 8, rtol=1e-4)


def test_the_reference_rounds_constants_to_their_types() -> None:
    """A number of Python has more digits than float32: a bias of it would not be equal to what masks."""
    masks = 0.7 * float(jnp.finfo(jnp.float32).min)

    def f(x: jax.Array) -> jax.Array:
        biased = x + jnp.where(jnp.arange(3) < 2, masks, 0.0)
        return jnp.where(biased == np.float32(masks), 1.0, 2.0)

    x = jnp.zeros(3)
    jaxpr = jax.jit(f).trace(x).jaxpr
    (exact,) = float64.evaluate(jaxpr, [x])
    assert exact.tolist() == f(x).tolist() == [1.0, 1.0, 2.0]


def test_scales_go_to_the_brink() -> None:
    """(q k) v in float16 with k and v up and q down: its own values stay in range, k v does not."""
    program = chain(8, 8, 8, 8)
    inputs = tuple(replace(v, dtype="float16", fill=Fill(positive=True)) for v in program.inputs)
    program = replace(program, inputs=inputs, steps=program.steps[::2])
    directions = {"x0": -2, "x1": 1, "x2": 1}
    most = brink.to_the_brink(program, directions, 10)
    assert most == 10
    q, k, v = brink.scaled(program, {n: most * d for n, d in directions.items()}).arguments()
    assert np.isfinite(jnp.asarray(q) @ k @ v).all() and not np.isfinite(q @ (jnp.asarray(k) @ v)).all()
    up = brink.to_the_brink(program, {"x0": 1, "x1": 1}, 13)
    assert 0 < up < 13
    for power, stays in ((up, True), (up + 2, False)):
        a, b, c = brink.scaled(program, {"x0": power, "x1": power}).arguments()
        assert np.isfinite(jnp.asarray(a) @ b @ c).all() == stays


@FEW
@given(SEEDS)
def test_the_reference_agrees_with_xla(seed: int) -> None:
    """Plain JAX differs from the float64 reference by no more than the noise that is expected of its dtypes."""
    program = replace(drawn(seed), kind="normal")
    args = program.arguments()
    traced = jax.jit(program.function()(jax.jit)).trace(*args)
    exact = float64.evaluate(traced.jaxpr, args)
    noise = float64.spread(traced.jaxpr, args, exact, differential.SAMPLES, seed)
    xla = [np.asarray(y) for y in jax.tree.leaves(traced.lower().compile()(*args))]
    assert not differential._differences(exact, noise, None, xla), program.source()


# What is made smaller.


@FEW
@given(SEEDS)
def test_smaller_programs_are_programs(seed: int) -> None:
    program = drawn(seed)
    for p in [q for q in smaller(program) if q.sizes == program.sizes][:8]:
        jax.eval_shape(p.function()(jax.jit), *p.arguments())


@FEW
@given(SEEDS)
def test_shrinking_keeps_what_fails(seed: int) -> None:
    def fails(p: RandomProgram) -> bool:
        return any(" @ " in s.text for s in tidy(p).steps)

    program = drawn(seed)
    small = shrink(program, fails, trials=1000) if fails(program) else None
    if small is not None:
        assert fails(small) and small.cost <= program.cost
        assert len(small.steps) <= 2 and not small.inner + small.outer and all(n == 1 for _, n in small.sizes)


def test_shrinking_keeps_the_data_that_fail() -> None:
    """Scales all together, of other fills only those that matter; no border that does not."""
    program = chain(4, 4, 4, 4, borders=(Border("jit", ("t0", "t1")), Border("checkpoint", ("t2",))))
    fills = (Fill(power=8, positive=True), Fill(LOWEST, "left"), Fill(power=-8))
    program = replace(program, inputs=tuple(replace(v, fill=f) for v, f in zip(program.inputs, fills, strict=True)))

    def fails(p: RandomProgram) -> bool:
        return any(v.fill.power >= 2 for v in p.inputs) and any(v.fill.low for v in p.inputs)

    small = shrink(program, fails, trials=1000)
    assert fails(small) and not small.borders and not any(v.fill.positive for v in small.inputs)
    assert {v.fill.power for v in small.inputs} <= {2, 0, -2}


# What is found.


def judged(plain, other, *args) -> list[list[str]]:
    """What the judge says of XLA's result and of another one, on these arguments."""
    jaxpr = jax.jit(plain).trace(*args).jaxpr
    exact = float64.evaluate(jaxpr, args)
    noise = float64.spread(jaxpr, args, exact, differential.SAMPLES, 0)
    xla = [np.asarray(jax.jit(plain)(*args))]
    return [differential._differences(exact, noise, xla, [np.asarray(y)]) for y in (*xla, jax.jit(other)(*args))]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("low", ["lowest", "-1e30"])
def test_rows_of_sentinels_are_determined(dtype: str, low: str) -> None:
    """Where a row's own keys are all padding XLA weighs all keys alike; weights of its own keys alone are wrong."""
    rng, n = np.random.default_rng(0), 16
    q, k, v = (np.asarray(rng.standard_normal((n, 8)), jnp.dtype(dtype)) for _ in range(3))
    bias = filled(np.zeros(n, jnp.dtype(dtype)), Fill(low, "left"), np.random.default_rng(1))
    causal = np.tri(n, dtype=bool)

    def attention(masked):
        return lambda q, k, v, bias: jax.nn.softmax(jnp.where(causal, q @ k.T * 0.25 + bias, masked), -1) @ v

    right, wrong = judged(attention(bias.min()), attention(-jnp.inf), q, k, v, bias)
    assert not right and wrong


def test_what_underflows_in_float64_is_left_to_the_gate(tmp_path) -> None:
    """exp(2 max t) / sum(exp(t))^2 of a row of sentinels is 0/0 in float64, and right over the reals."""
    x, y, s, mask = (ProgramValue(f"x{i}", ("a", "a"), "bool" if i == 3 else "float16") for i in range(4))
    texts = (
        ("jnp.where({1}, {0}, jnp.finfo('float16').min)", (s.name, mask.name)),
        ("{0} @ {1}", (x.name, y.name)),
        ("jnp.exp({0} - jnp.max({0}, -1, keepdims=True))", ("t0",)),
        ("{0} / jnp.sum({0}, -1, keepdims=True)", ("t2",)),
        ("{0} @ {1}", ("t3", "t1")),
    )
    steps = tuple(
        ProgramStep(ProgramValue(f"t{i}", ("a", "a"), "float16"), text, reads) for i, (text, reads) in enumerate(texts)
    )
    program = RandomProgram((("a", 2),), (x, y, s, mask), steps, ("t4",), outer=(Wrapper("grad"),))
    outcome = fuzz.run_one(program, Setting("H200", gate=False, cache_dir=str(tmp_path), seed=168))
    assert outcome.counts["candidates"] and not [p for p in outcome.problems if p.startswith("a candidate")]


def test_the_branch_for_a_platform() -> None:
    """JAX's diagonal has one for each kind of platform; in a loop, its number is made before the loop."""
    x = np.arange(18, dtype=np.float32).reshape(2, 3, 3)
    diagonals = lambda x: jax.lax.scan(lambda c, s: (c, jnp.diagonal(s)), None, x)[1]  # noqa: E731
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(diagonals(x) ** 2)))
    (found,) = float64.evaluate(gradient.trace(x).jaxpr, [x])
    np.testing.assert_array_equal(found, gradient(x))


def test_undetermined_rows_excuse_no_others() -> None:
    """A row that cancels has errors as large as any; a wrong row beside it is found, and alone it is not wrong."""
    exact, noise = np.ones((2, 8)), np.array([[1e3], [1e-7]]) * np.ones((2, 8))
    x = np.ones((2, 8), np.float32)
    wrong = x + np.array([[0], [0.5]], np.float32)
    assert differential._differences([exact], [noise], [x], [wrong])
    assert not differential._differences([exact], [noise], [x], [x + np.array([[100], [0]], np.float32)])
    lost = np.where([[True], [False]], np.float32(np.nan), x)  # XLA's own
    assert differential._differences([exact], [0 * noise], [lost], [wrong])
    assert not differential._differences([exact], [0 * noise], [lost], [x])


def test_an_error_near_the_end_of_the_range_is_no_infinity() -> None:
    """58,748 with an error of 6,922 is beyond float16; XLA gives a finite number, and so may we."""
    exact, noise = np.full((2, 2), 58_748.0), np.full((2, 2), 6_922.0)
    x = np.full((2, 2), 54_656, np.float16)
    assert not differential._differences([exact], [noise], [x], [x])
    assert differential._differences([exact], [noise], [x], [np.full((2, 2), 9_000, np.float16)])
    exact, noise, x = np.full(2, 64_979.0), np.full(2, 27_622.0), np.full(2, 55_010, np.float16)
    assert not differential._differences([exact], [noise], [x], [x])


def test_a_number_near_one_beyond_the_range_is_no_error() -> None:
    """-65,550 is beyond float16. Where XLA has NaN, -65,472 is right if the noise is as large; -9,000 is not."""
    exact, lost = np.array([[-65_550.0, 1]]), np.array([[np.nan, 1]], np.float16)
    for noise, value, right in ((50.0, -65_472, True), (50.0, -9_000, False), (np.inf, -9_000, True)):
        have = np.array([[value, 1]], np.float16)
        assert bool(differential._differences([exact], [np.array([[noise, 0]])], [lost], [have])) != right


def test_a_sum_of_sentinels_is_determined_only_within_a_strict_range() -> None:
    """The mean of two lowest numbers, halved first, is finite; halved last, it is not."""
    x = np.full((2, 2), jnp.finfo(jnp.bfloat16).min, jnp.bfloat16)
    jaxpr = jax.make_jaxpr(lambda x: x * 0.5 - jnp.mean(x * 0.5, -2, keepdims=True))(x)
    exact = float64.evaluate(jaxpr, [x])
    assert np.all(exact[0] == 0)
    for strict in (True, False):
        (noise,) = float64.spread(jaxpr, [x], exact, 4, 0, strict_range=strict)
        assert np.all(np.isfinite(noise)) == strict


@pytest.mark.parametrize(
    ("dtype", "powers"), [("float16", (-20, 10, 10)), ("float16", (13, -13, -13)), ("float32", (-90, 70, 70))]
)
def test_an_intermediate_out_of_range_is_found(dtype: str, powers: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    args = [
        filled(np.asarray(rng.standard_normal((8, 8)), jnp.dtype(dtype)), Fill(positive=True, power=p), rng)
        for p in powers
    ]
    right, wrong = judged(lambda q, k, v: (q @ k) @ v, lambda q, k, v: q @ (k @ v), *args)
    assert not right and wrong


def test_an_infinity_is_as_good_as_a_number_that_noise_takes_out_of_range() -> None:
    exact, noise = np.array([-47903.0, 12.0, 30.0]), np.array([7330.0, 0.01, 0.01])
    xla = exact.astype(np.float16)
    for value, fails in ((-np.inf, False), (np.inf, True), (np.nan, True), (-47000.0, False)):
        assert bool(differential.judged(exact, noise, xla, np.array([value, 12, 30], np.float16))) == fails
    assert differential.judged(exact, noise / 100, xla, np.array([-np.inf, 12, 30], np.float16))


@pytest.mark.parametrize(("largest", "fails"), [(1e-8, False), (1e-18, True)])
def test_what_leaves_float32_without_strict_range_is_no_failure_where_numbers_grow(largest: float, fails: bool) -> None:
    """b c is infinite, and (a b) c is about 1e33. Numbers that stay ordinary have no such excuse."""
    rng = np.random.default_rng(0)
    sizes = ((32, 4), (4, 32), (32, 4))
    a, b, c = (
        np.asarray(scale * rng.uniform(1, 2, size), np.float32)
        for scale, size in zip((largest, 1e20, 1e20), sizes, strict=True)
    )
    assert float64.grows(jax.make_jaxpr(lambda a, b, c: (a @ b) @ c)(a, b, c), [a, b, c]) != fails

    def program(optimize: Any) -> Any:
        return optimize(lambda a, b, c: (a @ b) @ c)

    found = differential.examine(program, [a, b, c], Setting(gate=False))
    assert bool(found.problems) == fails and bool(found.counts["out of range, but not with strict_range"]) != fails


def test_sentinels_are_given_and_do_not_grow() -> None:
    x = np.ones((8, 8), np.float32)
    for f in (lambda x: jnp.where(x > 1, x, -1e30) * x, lambda x: x + 1e30 * (x - 1)):
        assert not float64.grows(jax.make_jaxpr(f)(x), [x])
    assert not float64.grows(jax.make_jaxpr(lambda x, y: (x * 1e20) * (y * 1e10))(x, -1e30 * x), [x, -1e30 * x])
    assert float64.grows(jax.make_jaxpr(lambda x: (x * 1e20) * (x * 1e10))(x), [x])


def test_a_mean_shift_of_xla_excuses_one_of_that_size() -> None:
    """Numbers that cancel may all share one rounded factor: their errors have a sign of their own."""
    exact = np.where(np.arange(1024) % 2, 1.0, -1.0).reshape(32, 32)
    x, same, larger = ((exact + n * 2e-6).astype(np.float32) for n in (1, 1.5, 9))
    noise = np.full_like(exact, 1e-8)
    assert not differential._differences([exact], [noise], [x], [same])
    assert differential._differences([exact], [noise], [x], [larger])


def test_products_of_sentinels_are_determined_only_within_a_strict_range() -> None:
    """bias @ w may meet a large factor in another order; float32's range is promised of what the program has."""
    bias = np.full((2, 4), jnp.finfo("float32").min)
    w = np.zeros((4, 2), np.float32)
    jaxpr = jax.make_jaxpr(lambda b, w: b @ w)(bias, w)
    exact = float64.evaluate(jaxpr, [bias, w])
    for strict, known in ((False, False), (True, True)):
        (noise,) = float64.spread(jaxpr, [bias, w], exact, 2, 0, strict_range=strict)
        assert np.isfinite(noise).all() == known


def test_quotients_of_sentinels_are_determined_only_within_a_strict_range() -> None:
    """x / s * y may be x * y / s."""
    x = np.array([1.0, jnp.finfo("float32").max], "float32")
    jaxpr = jax.make_jaxpr(lambda x, y: x / (1 + jnp.abs(x)) * y)(x, x)
    exact = float64.evaluate(jaxpr, [x, x])
    for strict, known in ((False, [True, False]), (True, [True, True])):
        (noise,) = float64.spread(jaxpr, [x, x], exact, 2, 0, strict_range=strict)
        assert np.isfinite(noise).tolist() == known


def test_a_right_program(tmp_path) -> None:
    outcome = fuzz.run_one(chain(7, 33, 17, 2), Setting(cache_dir=str(tmp_path)))
    assert not outcome.problems
    assert outcome.accepted == outcome.changed == 1 and outcome.counts["candidates"] >= 1


def test_the_users_own_decisions_stay_as_they_are(tmp_path, monkeypatch) -> None:
    """What counts as fast here must never be taken for fast elsewhere."""
    monkeypatch.setenv("MIRAGE_JAX_CACHE_DIR", str(tmp_path))
    assert fuzz.run_one(chain(7, 33, 17, 1), Setting()).accepted
    assert not list(tmp_path.rglob("*"))


def test_kernels_are_checked_in_tiles_and_as_text(tmp_path) -> None:
    pytest.importorskip("triton")
    outcome = fuzz.run_one(chain(17, 33, 31, 16), Setting("H200", interpret=True, cache_dir=str(tmp_path)))
    assert not outcome.problems
    assert outcome.counts["tiled"] and outcome.counts["interpreted"]


@pytest.fixture
def gpu_that_interprets(monkeypatch) -> list[str]:
    """Programs are decided for a GPU, and their kernels run in Triton's interpreter; lists the kernels that ran."""
    pytest.importorskip("triton")
    ran: list[str] = []

    def run_cuda(graph, schedule, arrays, run_library, **_) -> list[jax.Array]:
        def run(*inputs):
            ran.extend(k.name for k in graph.kernels if isinstance(k, BlockGraph))
            out = interpret(graph, schedule, [np.asarray(x) for x in inputs], library)
            return [np.asarray(y) for y in out]

        def library(kernel, tensors):
            return np.asarray(run_library(kernel, {name: jnp.asarray(x) for name, x in tensors.items()}))

        tensors = [graph.tensors[name] for name in graph.outputs]
        types = [
            jax.ShapeDtypeStruct(tuple(map(graph.extent, t.axes)), launch.NUMPY_TYPES.get(t.dtype, t.dtype))
            for t in tensors
        ]
        return jax.pure_callback(run, types, *arrays)

    plain = Winner.portable
    monkeypatch.setattr(Winner, "portable", lambda w, *xs: plain(w, *xs) if w.cuda is None else w._kernels(*xs))
    monkeypatch.setattr(launch, "run_cuda", run_cuda)
    monkeypatch.setattr(attempts, "device_for", lambda kind: DEVICES["H200"])
    right = differential.Unmeasured.session
    monkeypatch.setattr(differential.Unmeasured, "session", lambda self, r, _, *rest: right(self, r, "cuda", *rest))
    return ran


def test_on_a_gpu_kernels_run(tmp_path, gpu_that_interprets) -> None:
    outcome = fuzz.run_one(chain(17, 16, 16, 16), Setting(platform="cuda", gate=False, cache_dir=str(tmp_path)))
    assert not outcome.problems
    counts = outcome.counts
    assert counts["programs run through Triton"] == counts["regions run through Triton"] == outcome.accepted == 1
    assert 1 <= counts["kernels run through Triton"] <= len(gpu_that_interprets)


def test_on_a_gpu_what_cannot_be_launched_is_left_out(tmp_path, gpu_that_interprets, monkeypatch) -> None:
    def broken(*args, **kwargs):
        raise RuntimeError("out of shared memory")

    monkeypatch.setattr(launch, "run_cuda", broken)
    outcome = fuzz.run_one(chain(17, 16, 16, 16), Setting(platform="cuda", gate=False, cache_dir=str(tmp_path)))
    assert not outcome.problems
    assert outcome.counts["not compiled: RuntimeError"] and not outcome.counts["regions run through Triton"]


def test_on_a_gpu_a_wrong_kernel_is_found(tmp_path, gpu_that_interprets, monkeypatch) -> None:
    right = launch.run_cuda
    monkeypatch.setattr(launch, "run_cuda", lambda *args, **kwargs: [1.02 * y for y in right(*args, **kwargs)])
    outcome = fuzz.run_one(chain(17, 16, 16, 16), Setting(platform="cuda", gate=False, cache_dir=str(tmp_path)))
    assert outcome.counts["asked the float gate"] and outcome.refused["by the float gate"]
    monkeypatch.setattr(differential.Trial, "gate", lambda *args: (True, ""))
    outcome = fuzz.run_one(chain(17, 16, 16, 16), Setting(platform="cuda", cache_dir=str(tmp_path / "again")))
    assert outcome.problems and outcome.problems[0].startswith("result 0: ")


def test_tf32_is_noise_of_float32_products_only() -> None:
    """Operands rounded to 10 bits explain an error of 1e-3 in a product on a GPU, in nothing else and nowhere else."""
    x = np.random.default_rng(0).standard_normal((32, 32)).astype(np.float32)

    def noise(f, *args, tf32: bool) -> float:
        jaxpr = jax.make_jaxpr(f)(*args)
        exact = float64.evaluate(jaxpr, args)
        return float(float64.spread(jaxpr, args, exact, 4, 0, tf32=tf32)[0].max() / np.abs(exact[0]).max())

    assert 1e-4 < noise(jnp.matmul, x, x, tf32=True) < 2e-3
    assert noise(jnp.matmul, x, x, tf32=False) < 2e-6
    assert noise(lambda a, b: jnp.matmul(a, b, precision="highest"), x, x, tf32=True) < 2e-6
    assert noise(lambda a: jnp.sum(a * a, -1), x, tf32=True) < 2e-6
    half = x.astype(np.float16)
    f16 = (noise(jnp.matmul, half, half, tf32=t) for t in (True, False))
    assert len(set(f16)) == 1


def test_errors_that_all_elements_share_move_the_mean() -> None:
    """All weights of a row are one number, which TF32 rounds to one side: no random errors cancel in the mean."""
    x = np.random.default_rng(0).uniform(1, 2, (32, 32)).astype(np.float32)
    jaxpr = jax.make_jaxpr(lambda x: jnp.full((32, 32), 1 / 3, jnp.float32) @ x)(x)
    exact = float64.evaluate(jaxpr, [x])
    (noise,) = float64.spread(jaxpr, [x], exact, differential.SAMPLES, 0, tf32=True)
    runs = float64.disturbed_runs(jaxpr, [x], differential.SAMPLES, 0, tf32=True)
    (shift,) = float64.shifts(runs, exact)
    assert shift > 0.2 * noise.mean()
    xla = exact[0] + 0.1 * noise * np.random.default_rng(1).choice([-1, 1], noise.shape)
    judged = partial(differential.judged, exact[0], noise, xla.astype(np.float32))
    assert judged((exact[0] + 0.9 * shift).astype(np.float32)).startswith("bias")
    assert not judged((exact[0] + 0.9 * shift).astype(np.float32), shift)
    assert judged((exact[0] + 1.1 * shift).astype(np.float32), shift).startswith("bias")


def test_what_cancels_in_a_product_of_16_bits_is_noise() -> None:
    """(q k) w with q k near 0: q (k w) rounds k w, XLA does not. Where k w is near 0 it is the other way round."""
    rng = np.random.default_rng(0)
    q, k, w = (rng.standard_normal(shape) for shape in ((1, 8), (8, 1), (1, 8)))
    q[0, -1] -= q[0] @ k[:, 0] / k[-1, 0]

    def errors(dtype: str) -> tuple[float, float]:
        args = [jnp.asarray(x, dtype) for x in (q, k, w)]
        jaxpr = jax.make_jaxpr(lambda q, k, w: (q @ k) @ w)(*args)
        exact = float64.evaluate(jaxpr, args)
        other = args[0] @ (args[1] @ args[2])
        noise = float64.spread(jaxpr, args, exact, differential.SAMPLES, 0)
        return float(np.abs(np.asarray(other, np.float64) - exact[0]).max()), float(noise[0].max())

    for dtype in ("bfloat16", "float16"):
        error, noise = errors(dtype)
        eps = float(jnp.finfo(dtype).eps)
        assert 0.01 * eps < error < differential.SPREAD * noise < 100 * eps
    assert errors("float32")[1] < 1e-4


def test_a_quotient_is_linear_in_what_it_divides() -> None:
    """A product that cancels, over its own size: as one sum over both products it has errors of far larger terms."""
    x, w, v = np.array([[1e6, -1e6]]), np.array([[1.0], [1.001]]), np.ones((1, 1))

    def f(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        t = x @ w
        return (t / (1 + jnp.abs(t))) @ v

    args = [a.astype("f4") for a in (x, w, v)]
    jaxpr = jax.make_jaxpr(f)(*args)
    (noise,) = float64.spread(jaxpr, args, float64.evaluate(jaxpr, args), differential.SAMPLES, 0)
    assert 1e-5 < noise.max() < 1e-2


def test_sums_that_cancel_within_sums_are_noise() -> None:
    """All of a row is the same inner sum, which cancels. As one sum over both, elements have errors of their own."""
    a, b = jnp.full((1, 3), 1 / 3, jnp.float32), jnp.asarray([[7], [-4], [-3]], jnp.float32)
    jaxpr = jax.make_jaxpr(lambda a, b: (a @ b) @ jnp.ones((1, 2)) @ jnp.asarray([[1.0], [-1.0]]))(a, b)
    exact = float64.evaluate(jaxpr, [a, b])
    (noise,) = float64.spread(jaxpr, [a, b], exact, differential.SAMPLES, 0)
    assert 1e-7 < noise[0, 0] < 1e-5


def test_logits_that_are_computed_twice_have_the_noise_of_both() -> None:
    """The largest logit less the maximum is 0 only where both are the same sum; a diagonal may be a sum of its own."""

    def f(x: jax.Array) -> jax.Array:
        return jnp.diagonal(jax.nn.log_softmax(x @ x.T, -1))

    x = 8 * np.eye(4, 4, dtype="f4")
    jaxpr = jax.jit(f).trace(x).jaxpr
    (exact,) = float64.evaluate(jaxpr, [x])
    (noise,) = float64.spread(jaxpr, [x], [exact], 8, 0)
    assert (np.abs(exact) < 1e-20).all()
    eps = 2.0**-23 * 64
    assert (noise > 0.1 * eps).all() and (noise < 8 * eps).all()


def test_many_equal_terms_round_the_same_way() -> None:
    """Added one by one in float32, they are off by more than the largest of independent errors."""
    x = jnp.full(1024, 0.1, jnp.float32)
    jaxpr = jax.make_jaxpr(jnp.sum)(x)
    exact = float64.evaluate(jaxpr, [x])
    (noise,) = float64.spread(jaxpr, [x], exact, differential.SAMPLES, 0)
    error = abs(float(np.cumsum(np.asarray(x), dtype=np.float32)[-1]) - exact[0])
    assert 1e-7 * exact[0] < error < differential.SPREAD * noise < 2e-5 * exact[0]


def test_cotangents_that_cancel_have_the_noise_of_both() -> None:
    """The maximum of a softmax takes back what its exponentials gave: exactly 0 in JAX, rounding without a maximum."""

    def loss(x):
        e = jnp.exp(x - jnp.max(x, -1, keepdims=True))
        return jnp.sum(jnp.square(e @ w / jnp.sum(e, -1, keepdims=True)))

    rng = np.random.default_rng(0)
    x, w = jnp.asarray([[0, -jnp.inf]], jnp.float16), jnp.asarray(rng.standard_normal((2, 33)), jnp.float16)
    jaxpr = jax.make_jaxpr(jax.grad(loss))(x)
    exact = float64.evaluate(jaxpr, [x])
    (noise,) = float64.spread(jaxpr, [x], exact, differential.SAMPLES, 0)
    assert np.all(exact[0] == 0)
    one_unit = float(jnp.finfo(jnp.float16).eps) * float(jnp.sum(w[0].astype(jnp.float32) ** 2))
    assert noise[0, 0] > 0.25 * one_unit


@pytest.mark.parametrize(("dtype", "flushed"), [("float32", True), ("bfloat16", True), ("float16", False)])
def test_numbers_below_the_smallest_may_be_flushed_to_zero(dtype: str, flushed: bool) -> None:
    """That is noise as large as such a number, of a sum of many too; others have none that is larger than rounding."""
    least = float(jnp.finfo(dtype).tiny)
    for factor, lost in ((0.25, flushed), (1e4, False)):
        x = jnp.full((4, 8), (factor * least) ** 0.5, dtype)
        jaxpr = jax.make_jaxpr(lambda x: jnp.sum(x * x, -1))(x)
        exact = float64.evaluate(jaxpr, [x])
        (noise,) = float64.spread(jaxpr, [x], exact, differential.SAMPLES, 0)
        assert (noise.max() > 0.1 * exact[0].max()) == lost


def test_terms_below_the_smallest_may_be_flushed_to_zero() -> None:
    """A sum of products that is larger itself loses some of them; a large one loses nothing."""
    least = float(jnp.finfo("float32").tiny)
    for factor, lost in ((0.9, True), (1e6, False)):
        x = jnp.full((4, 1024), (factor * least) ** 0.5, "float32")
        jaxpr = jax.make_jaxpr(lambda x: x @ x.T)(x)
        exact = float64.evaluate(jaxpr, [x])
        (noise,) = float64.spread(jaxpr, [x], exact, differential.SAMPLES, 0)
        assert (noise.max() > 3e-4 * exact[0].max()) == lost


@pytest.mark.parametrize("name", ["floor_divide", "remainder", "fmod", "divmod"])
def test_whole_numbers_are_divided_as_xla_does(name: str) -> None:
    """Masks by blocks and strides divide indices, and the judge has to have the same masks."""
    x = np.arange(-7, 8, dtype=np.int32)

    def divided(x: jax.Array) -> Any:
        return getattr(jnp, name)(x[:, None], x)

    have = float64.evaluate(jax.make_jaxpr(divided)(x), [x])
    for found, wanted in zip(have, jax.tree.leaves(jax.jit(divided)(x)), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_a_wrong_lowering_is_found_and_shrunk(tmp_path, monkeypatch) -> None:
    """The result of a region is off by a thousandth, behind all checks; the script says so, until the bug is gone."""
    right = lowering.Placed.lower

    def wrong(self, function, context, operands):
        return right(
            self, lambda *tensors: [(x * 1.001).astype(x.dtype) for x in function(*tensors)], context, operands
        )

    program = chain(7, 33, 17, 2, outer=(Wrapper("jit"),))
    monkeypatch.setattr(lowering.Placed, "lower", wrong)
    outcome = fuzz.run_one(program, Setting(cache_dir=str(tmp_path / "cache")))
    assert outcome.problems and outcome.problems[0].startswith("result 0: ")
    failure = fuzz.report(0, 7, program, Setting(), outcome.problems, tmp_path)
    assert failure.steps <= 2
    text = Path(failure.script).read_text()
    assert "shrunk from 3 steps" in text and text.count(" @ ") <= 2
    monkeypatch.undo()
    done = subprocess.run([sys.executable, failure.script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "agrees" in done.stdout, done.stderr


def doubled(search):
    """A search of which every candidate is wrong: its last operator adds up to twice as much."""

    def wrong(*args, **kwargs):
        found, report = search(*args, **kwargs)
        return [replace(c, graph=twice(c.graph)) for c in found], report

    def twice(graph):
        *others, last = graph.kernels
        assert isinstance(last, Library)
        loads = tuple(replace(x, name=f"{x.name}_") for x in last.loads)
        op = replace(last.op, args=tuple(x.name for x in loads), name="half")
        half = Library(loads, op, replace(last.result, name="half"))
        load = replace(loads[0], name="h", tensor="half", axes=last.result.axes)
        whole = replace(last.op, op="add", args=("h", "h"), attrs=())
        return replace(graph, kernels=(*others, half, Library((load,), whole, last.result)))

    return wrong


def test_a_wrong_candidate_is_refused_and_without_proofs_found(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(attempts, "search", doubled(attempts.search))
    outcome = fuzz.run_one(chain(7, 8, 17, 2), Setting(cache_dir=str(tmp_path / "1")))
    assert not outcome.problems and not outcome.accepted and outcome.counts["refused by the fingerprint"]
    monkeypatch.setattr(certificates.Fingerprint, "__call__", lambda *args: True)
    monkeypatch.setattr(types, "check_types", lambda *args: None)  # which sees errors on a few numbers
    outcome = fuzz.run_one(chain(7, 8, 17, 2), Setting(cache_dir=str(tmp_path / "2")))
    assert outcome.problems[0].startswith("a candidate is off by")
    assert not outcome.accepted and outcome.counts["refused by the certificate"]


@pytest.mark.parametrize("device", ["CPU", "H200"])
@pytest.mark.parametrize("low", [LOWEST, "-1e30"])
def test_a_log_softmax_of_wholly_masked_logits(device: str, low: str, tmp_path) -> None:
    """Its logarithm is lost beside the lowest number, unless the maximum is subtracted first."""
    logits = (ProgramValue("x0", ("a", "b"), "float32"), ProgramValue("x1", ("a", "b"), "float32", Fill(low, "rows")))
    steps = (
        ProgramStep(ProgramValue("t0", ("a", "b"), "float32"), "{0} + {1}", ("x0", "x1")),
        ProgramStep(ProgramValue("t1", ("a", "b"), "float32"), "jnp.exp(jax.nn.log_softmax({0}, -1))", ("t0",)),
        ProgramStep(ProgramValue("t2", ("a", "c"), "float32"), "{0} @ {1}", ("t1", "x2")),
    )
    inputs = (*logits, ProgramValue("x2", ("b", "c"), "float32"))
    program = RandomProgram((("a", 3), ("b", 4), ("c", 2)), inputs, steps, ("t2",), inner=(Wrapper("grad"),))
    outcome = fuzz.run_one(program, Setting(device, cache_dir=str(tmp_path)))
    assert not outcome.problems and outcome.accepted


@pytest.mark.parametrize(("factor", "seed"), [(1.0, 4), (0.3, 1)])
def test_logits_of_huge_products_have_one_rounding(factor: float, seed: int, tmp_path) -> None:
    """Exponentials that are divided by a sum of others: each subtracts a rounded logit, and no fma an unrounded one."""

    def f(x: jax.Array, w: jax.Array, label: jax.Array) -> jax.Array:
        return jax.nn.log_softmax(factor * (x @ w), -1)[jnp.arange(1), label % 8]

    def program(optimize: Any) -> Any:
        return jax.grad(lambda x, w, label: jnp.sum(jnp.square(optimize(f)(x, w, label))), (0, 1))

    rng = np.random.default_rng(4)
    args = [np.full((1, 1), 18077100, "f4"), rng.standard_normal((1, 8)).astype("f4"), np.zeros(1, "i4")]
    setting = Setting("H200", gate=False, seed=seed, cache_dir=str(tmp_path))
    assert not differential.examine(program, args, setting).problems


def test_totals_over_pairs_are_drawn() -> None:
    """Each is two sums to the optimizer."""
    with mock.patch.object(generator, "TOTAL_SHARE", 1):
        programs = [fuzz.program_of(1810000, n)[0] for n in range(8)]
    totals = [p for p in programs if p.steps and p.steps[-1].text == generator.TOTAL]
    assert totals and all(p.steps[-1].value.name in p.outputs for p in totals)


def reported(seed: int, number: int) -> tuple[RandomProgram, Setting]:
    """Draw a program as it was when it was reported, before there were rare functions and totals."""
    with mock.patch.multiple(generator, RARE_SHARE=0, TOTAL_SHARE=0):
        return fuzz.program_of(seed, number)


@pytest.mark.parametrize(("seed", "number"), [(6004, 63), (6014, 84), (6015, 126), (6025, 91)])
def test_gradients_that_cancel_are_translated_rightly(seed: int, number: int, tmp_path) -> None:
    """What is added to all logits of a row has no gradient but rounding: XLA's is some units of its terms."""
    program, setting = reported(seed, number)
    outcome = fuzz.run_one(program, replace(setting, cache_dir=str(tmp_path)))
    assert not outcome.problems and not outcome.inaccurate


def test_what_xla_fuses_wrongly_is_told_apart(tmp_path) -> None:
    """It may write a result over an array that the same loop reads through two reshaped views."""
    program, setting = reported(1530022, 30)
    problems = fuzz.run_one(program, replace(setting, cache_dir=str(tmp_path))).problems
    assert all(why.endswith(differential.RIGHT_UNFUSED) for why in problems)


@pytest.mark.parametrize("shifts", [True, False])
def test_exponentials_out_of_range_are_no_errors_of_candidates(shifts: bool, monkeypatch, tmp_path) -> None:
    """Without a shift, of rows of sentinels, they are infinite in float64, and their quotients numbers: the gate is
    asked."""
    monkeypatch.setattr(window_search, "SHIFTING", window_search.SHIFTING if shifts else frozenset())
    program, setting = reported(1452022, 930)
    outcome = fuzz.run_one(program, replace(setting, cache_dir=str(tmp_path)))
    refused = outcome.counts["out of float64's range, and refused by the float gate"]
    assert not outcome.problems and bool(refused) != shifts


@pytest.mark.parametrize(("seed", "number"), [(1452014, 644), (1452028, 260), (1452031, 163)])
def test_maxima_keep_their_digits_and_means_their_range(seed: int, number: int, tmp_path) -> None:
    """A maximum was scaled and scaled back, so that it was no element less itself; one was computed apart from the
    elements; and float16 held a sum of squares whose mean the program takes."""
    program, setting = reported(seed, number)
    assert not fuzz.run_one(program, replace(setting, cache_dir=str(tmp_path))).problems


@pytest.mark.parametrize(("seed", "number"), [(1463015, 13), (1520007, 34), (1540000, 74)])
def test_rows_far_from_zero_overflows_and_many_samples(seed: int, number: int, tmp_path) -> None:
    """Where one of two inputs in logits is far from zero, a logarithm needs the row's maximum; a float16 cotangent is
    infinite in few of many samples of noise; and one infinite logit, where no mask hides it, leaves the rest of its row
    zero."""
    program, setting = reported(seed, number)
    assert not fuzz.run_one(program, replace(setting, cache_dir=str(tmp_path))).problems


@pytest.mark.parametrize(
    ("seed", "number"),
    [(943700, 12), (947206, 4), (1061056, 24), (1082215, 8), (1071129, 16), (1201403, 64)],
)
def test_rows_that_are_no_numbers_signs_of_zero_and_ties(seed: int, number: int, tmp_path) -> None:
    """A kernel keeps the NaN of a wholly masked row; a sum in another order has another sign where the terms cancel; a
    softmax of whole numbers has several maxima; the number that replaces a maximum of a wholly masked row has one name
    inside a loop and outside; the square of a sum that cancels is no double sum; and the gradient of a softmax, which
    sums to 0, is only rounding in bfloat16."""
    program, setting = reported(seed, number)
    assert not fuzz.run_one(program, replace(setting, cache_dir=str(tmp_path))).problems


def test_a_wrong_translation_is_found_by_its_name(tmp_path, monkeypatch) -> None:
    """The float gate refuses what comes of it: without a look at the user's equations in float64 nothing would fail."""
    monkeypatch.setitem(rules.RULES, "tanh", rules.RULES["sin"])
    step = ProgramStep(ProgramValue("t1", ("a", "c"), "float32"), "jnp.tanh({0})", ("t0",))
    program = chain(7, 8, 17, 2)
    wrong = replace(program, steps=(program.steps[0], step, replace(program.steps[2], reads=("t1", "x2"))))
    outcome = fuzz.run_one(wrong, Setting(cache_dir=str(tmp_path)))
    assert outcome.problems[0].startswith("a wrong translation: result 0 is off by")
    assert not outcome.inaccurate


def test_programs_on_which_xla_is_inaccurate_are_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(gate, "ROUNDING", dict.fromkeys(gate.ROUNDING, 1e-12))
    monkeypatch.setattr(gate, "NOISES", 0.0)
    monkeypatch.setattr(fuzz, "program_of", lambda *args: (chain(7, 33, 17, 2), Setting()))
    found = fuzz.run_programs(0, [5], tmp_path, str(tmp_path))
    assert not found.failures and [number for number, _ in found.inaccurate] == [5]
    assert ("XLA inaccurate, the translation right: programs", "5") in [*found.rows()]
    assert json.loads(found.to_json())["inaccurate"][0][1].startswith("normal: the translated program differs")


@pytest.mark.parametrize("how", ["raised", "logged"])
def test_what_the_optimizer_raises_or_logs_is_found(how: str, tmp_path, monkeypatch) -> None:
    def broken(*args):
        if how == "raised":
            raise RuntimeError("out of luck")
        lowering.log.warning("out of luck")
        return None

    monkeypatch.setattr(differential.Unmeasured, "compile_region", broken)
    (problem,) = fuzz.run_one(chain(7, 8, 17, 2), Setting(cache_dir=str(tmp_path))).problems
    assert problem.startswith(how) and "out of luck" in problem


def test_a_program_that_means_nothing_is_a_problem_of_its_own() -> None:
    nonsense = replace(
        chain(7, 8, 17, 2), steps=(ProgramStep(ProgramValue("t2", ("a",), "float32"), "{0} @ {0}", ("x0",)),)
    )
    (problem,) = fuzz.run_one(nonsense, Setting()).problems
    assert problem.startswith("not examined: TypeError")


ONES = """mugraph {
  extents i=8
  input x: f32[i]
  library t: f32[i] = pow{exponent=-1} x[i]
  library y: f32[i] = mul x[i] t[i]
  output y
}"""
PRODUCT = """mugraph {
  extents i=8
  input x: f32[i]
  kernel k0 grid(i) {
    %x = load x[i]
    %a[i] = exp{scale=100} %x
    %b[i] = exp{scale=-100} %x
    %c[i] = mul %a %b
    store y: f32[i] = %c
  }
  output y
}"""


@pytest.mark.parametrize("factor", [1, 2])
def test_a_kernel_is_not_blamed_for_the_range_of_its_graph(factor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a graph loses in float32 is for the float gate to judge; what it does not lose has to be right."""
    monkeypatch.setattr(differential, "interpret", lambda *a: [factor * x for x in interpret(*a)])
    candidate = Candidate(parse(PRODUCT), Schedule((KernelSchedule((("i", 8),)),)), 1.0, "kernels")
    counts = Counter[str]()
    problems = list(differential.check_candidate(parse(ONES), candidate, Setting(interpret=True), counts))
    assert counts["interpreted"] == 1 and len(problems) == factor - 1


SIGN_BY_XLA = """mugraph {
  extents i=64 j=64
  input x: f32[i,j]
  library t: f32[i,j] = tanh{scale=2} x[i,j]
  library p: f32[i,j] = mul x[i,j] t[i,j]
  library s: f32[i,j] = add x[i,j] p[i,j]
  library z: f32[] = const{value=0}
  library y: bool[i,j] = le z[] s[i,j]
  output y
}"""
SIGN_BY_KERNEL = """mugraph {
  extents i=64 j=64
  input x: f32[i,j]
  kernel k0 grid(i,j) {
    %x = load x[i,j]
    %z[] = const{value=0}
    %t[i,j] = tanh{scale=2} %x
    %p[i,j] = mul %x %t
    %s[i,j] = add %x %p
    %y[i,j] = le %z %s
    store y: bool[i,j] = %y
  }
  output y
}"""


def _planted(wrong: str, *a: Any) -> list[np.ndarray]:
    x, have = np.asarray(a[2][0]), [np.array(y) for y in interpret(*a)]
    have[0][x == (x.min() if wrong == "saturated" else x.max())] ^= True
    return have


@pytest.mark.parametrize(("wrong", "problems"), [("saturated", 0), ("decided", 1)])
def test_a_kernel_is_not_blamed_for_a_sign_that_rounding_decides(
    wrong: str, problems: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 + tanh(2x) is a few units of float32 for x < -4, and may be 0 with another `tanh`."""
    monkeypatch.setattr(differential, "interpret", partial(_planted, wrong))
    monkeypatch.setattr(differential, "_draw", lambda rng, shape, dtype: _saturating(shape))
    candidate = Candidate(parse(SIGN_BY_KERNEL), Schedule((KernelSchedule((("i", 16), ("j", 16))),)), 1.0, "kernels")
    found = differential.check_candidate(parse(SIGN_BY_XLA), candidate, Setting(interpret=True), Counter[str]())
    assert len(list(found)) == problems


def _saturating(shape: tuple[int, ...]) -> np.ndarray:
    return np.linspace(-4.4, 2.0, shape[0] * shape[1], dtype="float32").reshape(shape)


LARGE_LOGITS = """mugraph {
  extents a=16 i=16
  input x: f32[i,a]
  library t: f32[i,a] = affine{scale=100000000001} x[i,a]
  library m: f32[i] = shift{axes=(a), scale=3} t[i,a]
  library e: f32[i,a] = exps{scale=3} t[i,a] m[i]
  BODY
  output s
}"""
BY_XLA = "library s: f32[i] = sum{axes=(a)} e[i,a]"
BY_KERNEL = """kernel k0 grid(i) {
    %x = load e[i,a]
    %0[i] = sum{axes=(a)} %x
    store s: f32[i] = %0
  }"""


def test_between_kernels_xla_computes_in_the_types_of_the_graph() -> None:
    """In float64, 3 t is above its rounded maximum by thousands, and its exponential infinite."""
    program, graph = (parse(LARGE_LOGITS.replace("BODY", body)) for body in (BY_XLA, BY_KERNEL))
    sizes = tuple(KernelSchedule((("i", 16),) if isinstance(k, BlockGraph) else ()) for k in graph)
    counts = Counter[str]()
    candidate = Candidate(graph, Schedule(sizes), 1.0, "kernels")
    assert not list(differential.check_candidate(program, candidate, Setting(interpret=True), counts))
    assert counts["interpreted"] == 1


LOG_SOFTMAX = """mugraph {
  extents a=17 b=17 i=17
  input x0: f32[i,a]
  library t0: f32[i,b] = dot{axes=(a)} x0[i,a] x0[b,a]
  library t1: f32[i] = max{axes=(b)} t0[i,b]
  library t2: f32[i,b] = add{cb=-1} t0[i,b] t1[i]
  library t3: f32[i,b] = exp{scale=3} t2[i,b]
  library t4: f32[i] = sum{axes=(b)} t3[i,b]
  library t5: f32[i,b] = affine{scale=3} t0[i,b]
  library t6: f32[i,b] = lesslogs{degree=3} t5[i,b] t4[i] t1[i]
  library t7: f32[] = const{value=0}
  library t8: bool[i,b] = le t7[] t6[i,b]
  output t8
}"""
LESS_LOG_SUM = """mugraph {
  extents a=17 b=17 i=17
  input x0: f32[i,a]
  library t0: f32[i,b] = dot{axes=(a)} x0[i,a] x0[b,a]
  library t1: f32[i] = shift{axes=(b), scale=3} t0[i,b]
  library t2: f32[i,b] = exps{scale=3} t0[i,b] t1[i]
  library t3: f32[i] = sum{axes=(b)} t2[i,b]
  library t4: f32[i] = logs t3[i] t1[i]
  library t5: f32[i,b] = add{ca=3, cb=-1} t0[i,b] t4[i]
  library t7: f32[] = const{value=0}
  library t8: bool[i,b] = le t7[] t5[i,b]
  output t8
}"""


@pytest.mark.parametrize("seed", range(8, 12))
def test_a_candidate_is_not_blamed_where_rounding_decides(seed: int) -> None:
    """With seed 10 a logarithm is -3e-15 between logits of 60, and one sample of noise leaves it negative by chance."""
    candidate = Candidate(parse(LESS_LOG_SUM), Schedule(()), 1.0, "algebra")
    counts = Counter[str]()
    assert not list(differential.check_candidate(parse(LOG_SOFTMAX), candidate, Setting(seed=seed), counts))


# Campaigns.


def test_random_programs(tmp_path) -> None:
    """The settings of the command; one program in four has candidates with kernels, one in seven asks the float gate
    at once, one in thirty-two runs its kernels in Triton's interpreter."""
    found = fuzz.campaign(128, 0, tmp_path, workers=1)
    assert not found.failures, found.failures[0]
    assert found.programs == 128
    assert found.hit_rate >= 0.6
    assert found.counts["tiled"] and found.counts["candidates"] > found.accepted


def test_an_interrupt_keeps_what_was_found(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(fuzz, "CHUNK", 2)

    def interrupt(text: str) -> None:
        raise KeyboardInterrupt

    found = fuzz.campaign(200, 4, tmp_path, 1, interrupt)
    assert 2 <= found.programs < 200


def test_no_gpu_is_an_error(capsys) -> None:
    if jax.devices()[0].platform == "gpu":
        pytest.skip("there is one")
    assert cli.main(["fuzz", "--device", "gpu"]) == cli.USAGE
    assert "--device: found gpu; allowed is cpu" in capsys.readouterr().err


def test_command(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(fuzz, "CHUNK", 2)
    file = tmp_path / "r.json"
    argv = ["fuzz", "--programs", "3", "--seed", "4", "--json", str(file), "--out", str(tmp_path / "failures")]
    assert cli.main(argv) == cli.OK
    assert "hit rate" in capsys.readouterr().out
    written = json.loads(file.read_text())
    assert written["programs"] == 3 and written["device"] == "cpu" and not (tmp_path / "failures").exists()
    assert cli.main(["fuzz", "--programs", "0"]) == cli.USAGE


def test_command_reports_failures(tmp_path, capsys, monkeypatch) -> None:
    failure = fuzz.FuzzFailure(7, ("result 0: off",), "fuzz_0_7.py", 1)
    monkeypatch.setattr(fuzz, "campaign", lambda *args: fuzz.Campaign(0, 10, 8, failures=[failure]))
    assert cli.main(["fuzz"]) == cli.PROBLEM
    assert "program 7: result 0: off" in capsys.readouterr().err

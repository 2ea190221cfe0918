"""Where programs are cut, and why equations are left out."""

import logging
import random as random_numbers
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from graphlib import TopologicalSorter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxpr_frontend.replacing import Evaluated, Replacing, analysis, assert_close, optimized, random

from mirage_jax.bench import different
from mirage_jax.errors import UsageError
from mirage_jax.jaxpr_frontend.capture.lowering import First
from mirage_jax.jaxpr_frontend.jax_compat import LoweringTarget
from mirage_jax.jaxpr_frontend.partition import regions
from mirage_jax.jaxpr_frontend.partition.clusters import Dependencies, convex_clusters, divide
from mirage_jax.jaxpr_frontend.partition.program import FlatProgram, flatten
from mirage_jax.jaxpr_frontend.partition.reasons import Code
from mirage_jax.jaxpr_frontend.partition.regions import analyse, partition
from mirage_jax.jaxpr_frontend.translate.translate import Region

X, W = random(8, 16), random(16, 16, seed=1)

LEFT_OUT = {
    "sort": (lambda x: jnp.sort(x) @ W, Code.UNSUPPORTED_PRIMITIVE),
    "reduce_sum": (lambda x: x.sum() * x @ W, Code.RANK0),
    "dot_general": (lambda x: jnp.dot(x, W, precision=jax.lax.DotAlgorithmPreset.F64_F64_F64), Code.PRECISION),
    "convert_element_type": (lambda x: x.astype("int16").sum(0).astype("float32") @ W, Code.DTYPE),
    "exp": (lambda x: jnp.exp(x), Code.NO_HEAVY_OP),
    "rev": (lambda x: x[::-1] @ W, Code.UNSUPPORTED_PRIMITIVE),
    "div": (lambda x: (x / 0.0) @ W, Code.NON_FINITE),
    "pow": (lambda x: (x ** (x + 1)) @ W, Code.NON_FINITE),
    "debug_print": (lambda x: (jax.debug.print("{}", x[0, 0]), x @ W)[1], Code.EFFECT),
    "scan": (lambda x: jax.lax.scan(lambda c, _: (c @ W, None), x, length=3)[0], Code.CONTROL_FLOW),
    "broadcast_in_dim": (lambda x: x[:0] @ W, Code.ZERO_SIZE),
}


@pytest.mark.parametrize("primitive", [p for p in LEFT_OUT if p != "broadcast_in_dim"])
def test_reasons(primitive: str) -> None:
    fn, code = LEFT_OUT[primitive]
    found = {x.primitive: x for x in analysis(fn, X).left_out}
    assert found[primitive].code == code
    assert "test_regions.py" in found[primitive].where
    have, want = optimized(fn)(X), fn(X)
    assert_close(jnp.nan_to_num(have), jnp.nan_to_num(want))


def test_empty_arrays_run() -> None:
    assert optimized(lambda x: x[:0] @ W)(X).shape == (0, 16)
    assert {x.code for x in analysis(lambda x: x[:0] @ W, X).left_out} >= {Code.ZERO_SIZE}


def test_an_unrelated_equation_parts_nothing() -> None:
    def fn(x, w):
        y = x @ w
        order = jnp.argsort(w[0])  # between the products in the text, on no path between them
        return jax.nn.softmax(y) @ w, order

    assert len(analysis(fn, X, W).regions) == 1
    have, want = optimized(fn)(X, W), fn(X, W)
    assert_close(have, want)


def test_an_equation_on_a_path_parts() -> None:
    """What needs the sorted values comes after, what does not stays together."""

    def fn(x, w):
        y = x @ w
        z = jnp.sort(y) @ w
        return y * z

    compiler = Replacing()
    assert_close(optimized(fn, compiler)(X, W), fn(X, W))
    assert len(compiler.regions) == 2


def test_clusters_do_not_depend_on_each_other_in_a_circle() -> None:
    """a -> b and c -> d: {a, d} and {b, c} are convex each, but not one after the other."""
    before = (frozenset(), frozenset(), frozenset({0}), frozenset({1}), frozenset({0, 3}), frozenset({1, 2}))
    clusters = convex_clusters(Dependencies(before), range(6))
    owner = {n: c for c in clusters for n in c}
    edges = {(owner[m], owner[n]) for n in range(6) for m in before[n]}
    assert not any(a != b and (b, a) in edges for a, b in edges)


@given(st.integers(0, 2**32))
def test_clusters_of_random_programs_are_steps(seed: int) -> None:
    """Each taken as one, with what is in none, they are still in an order."""
    rng = random_numbers.Random(seed)
    size = rng.randrange(2, 24)
    before = tuple(frozenset(rng.sample(range(n), min(n, rng.randrange(3)))) for n in range(size))
    members = {n for n in range(size) if rng.random() < 0.7}
    clusters = convex_clusters(Dependencies(before), members)
    assert sorted(n for c in clusters for n in c) == sorted(members)

    owner = {n: n for n in range(size)} | {n: c for c in clusters for n in c}
    steps = {s: {owner[m] for n in range(size) if owner[n] == s for m in before[n]} - {s} for s in owner.values()}
    TopologicalSorter(steps).prepare()  # raises if they depend on each other in a circle


def test_division_cuts_where_the_fewest_bytes_cross() -> None:
    crossing = [0, 9 << 20, 1 << 20, 9 << 20, 9 << 20]
    assert divide([[0], [1], [2], [3]], [1] * 4, crossing, 3) == [(0, 1), (2, 3)]
    assert divide([[0], [1]], [9, 9], crossing, 3) == [(0,), (1,)]


def cast_first(x, w, g):
    late = g.astype(jnp.float32)
    return (jnp.tanh(x @ w) * late).sum(-1)


def part_first(x, w, g):
    y = x @ w
    return y[:, :8], y @ w * g


WAITING = {"a cast": (cast_first, "convert_element_type", "tanh", 2), "a part": (part_first, "slice", "mul", 9)}


@pytest.mark.parametrize("name", WAITING)
def test_what_is_waited_for_comes_first(name: str) -> None:
    """Though nothing that waits for it reads it."""
    fn, early, late, max_ops = WAITING[name]
    program = flatten(jax.make_jaxpr(fn)(X, W, X.astype(jnp.bfloat16)))
    position = {eqn.primitive: n for n, eqn in enumerate(program.eqns)}
    eqns = list(program.eqns)
    for n in range(position[early] + 1, position[late] + 1):
        eqns[n] = replace(eqns[n], after=eqns[position[early]].outputs)
    assert_runs(replace(program, eqns=tuple(eqns)), max_ops)


def assert_runs(program: FlatProgram, max_ops: int) -> None:
    """Every step reads, and waits for, what steps before it made. Nobody waits for what no step makes."""
    eqns = program.eqns
    there = {*program.inputs, *program.constants}
    steps = partition(program, max_ops).steps
    parts = [step.equations if isinstance(step, Region) else (eqns[step],) for step in steps]
    never = {v for eqn in eqns for v in eqn.outputs} - {v for part in parts for eqn in part for v in eqn.outputs}
    for part in parts:
        made = {v for eqn in part for v in eqn.outputs}
        assert {v for eqn in part for v in eqn.reads} <= there | made
        assert {v for eqn in part for v in eqn.after} - never <= there | made
        there |= made
    assert there >= {v for v in program.outputs if isinstance(v, int)}


OPERATORS: list[Callable[..., jax.Array]] = [
    lambda x, y: x @ y,
    lambda x, y: jnp.tanh(x) + y,
    lambda x, y: x * jnp.exp(y).sum(-1, keepdims=True),
    lambda x, y: jnp.concatenate([x[:, 4:], y[:, :4]], -1),
    lambda x, y: x.astype(jnp.bfloat16).T.astype(jnp.float32),
]


@given(st.integers(0, 2**32))
@settings(deadline=None)
def test_random_programs_with_waits_are_steps(seed: int) -> None:
    rng = random_numbers.Random(seed)

    def fn(x):
        values = [x]
        for _ in range(rng.randrange(2, 16)):
            values.append(rng.choice(OPERATORS)(*rng.choices(values[-3:], k=2)))
        return values[1:]

    program = flatten(jax.make_jaxpr(fn)(jnp.ones((8, 8))))
    made = [v for eqn in program.eqns for v in eqn.outputs]
    eqns = [
        replace(
            eqn,
            after=tuple(rng.sample(made[:n], min(n, rng.choice((0, 0, 1, 2))))),
            scope=rng.choice((0, 0, 1)),
        )
        for n, eqn in enumerate(program.eqns)
    ]
    assert_runs(replace(program, eqns=tuple(eqns)), rng.randrange(1, 12))


def test_masks_are_repeated_and_not_passed() -> None:
    """Every layer gets its own causal mask, made of indices."""

    def model(x):
        mask = jnp.tril(jnp.ones((32, 32), bool))
        for _ in range(3):
            x = jax.nn.softmax(jnp.where(mask, x @ x.T, -jnp.inf)) @ x
        return x

    x = random(32, 8)
    found = analysis(model, x, max_ops=9)
    assert [len(r.inputs) for r in found.regions] == [1, 1, 1]
    assert len({str(r.graph) for r in found.regions}) == 1
    assert_close(optimized(model, Replacing(max_ops=9))(x), model(x))


@pytest.mark.parametrize("kind", ["lengths", "segments"])
def test_masks_of_integers_are_repeated_and_not_passed(kind: str) -> None:
    """Every layer makes its own mask of what is smaller, and so all layers are alike."""

    def model(x, of):
        keys = jnp.arange(32) < of[:, None] if kind == "lengths" else of[:, :, None] == of[:, None]
        mask = (keys[:, None] if kind == "lengths" else keys) & jnp.tril(jnp.ones((32, 32), bool))
        bias = jnp.where(mask, 0.0, -1e9)
        for _ in range(3):
            x = jax.nn.softmax(jnp.where(mask, x @ x.mT + bias, -1e9)) @ x
        return x

    x = random(2, 32, 8)
    of = jnp.array([20, 32]) if kind == "lengths" else jnp.arange(64).reshape(2, 32) // 10
    found = analysis(model, x, of, max_ops=9)
    assert [sorted(t.dtype for t in r.graph.inputs) for r in found.regions] == [["f32", "i32"]] * 3
    assert len({str(r.graph) for r in found.regions}) == 1
    assert_close(optimized(model, Replacing(max_ops=9))(x, of), model(x, of))


def test_weights_of_integers_are_no_masks() -> None:
    """They are as large as what is made of them, and belong to the product that reads them."""

    def fn(x, w, scale):
        return x @ ((w.astype(jnp.float32) - 8.0) * scale)

    w = jax.random.randint(jax.random.key(0), (16, 16), 0, 16, jnp.uint8)
    (region,) = analysis(fn, X, w, random(16)).regions
    assert sorted(t.dtype for t in region.graph.inputs) == ["f32", "f32", "u8"]


def test_casts_are_repeated_and_not_passed() -> None:
    def fn(x, w):
        wide = x.astype(jnp.float32)
        y = jnp.sort(wide @ w)
        return y @ w.T + wide

    found = analysis(fn, X.astype(jnp.bfloat16), W)
    assert len(found.regions) == 2
    assert all("bf16" in str(r.graph) for r in found.regions)


def test_bodies_are_analysed() -> None:
    def fn(x):
        x = jax.lax.scan(lambda c, _: (jax.nn.softmax(c @ W), None), x, length=3)[0]
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ W, lambda x: x @ W.T, x)

    assert len(analysis(fn, X).regions) == 3


@dataclass(frozen=True, eq=False)
class Failing:
    """A compiler that fails in one of several ways."""

    how: str
    strict: bool = False
    max_ops: int = 16
    platform: str = "cpu"
    exports_kernels: bool = False
    checkpoints: bool = False
    asked: list[Any] = field(default_factory=list)

    def recomputes(self, target: LoweringTarget) -> bool:
        return self.checkpoints

    def prepare(self, regions: Any, target: LoweringTarget, again: bool = False) -> None:
        pass

    def choose(self, whole: Any) -> First:
        return First()

    def names_line_of(self, region: Region) -> tuple[str, ...]:
        return ()

    def compile_region(self, region: Region, platforms: tuple[str, ...] = ()) -> Any:
        self.asked.append(region)
        match self.how:
            case "raises":
                raise RuntimeError("no luck")
            case "declines":
                return None
            case "misuse":
                raise UsageError("nonsense")
        return Wrong(region.graph)


class Wrong(Evaluated):
    def portable(self, *tensors: Any) -> list[Any]:
        return [x[:1] for x in super().portable(*tensors)]


@pytest.mark.parametrize("how", ["raises", "declines", "wrong shapes"])
def test_failures_run_the_original(how: str, caplog: pytest.LogCaptureFixture) -> None:
    compiler = Failing(how)
    with caplog.at_level(logging.WARNING, "mirage_jax"):
        assert_close(optimized(lambda x: x @ W, compiler)(X), X @ W)  # type: ignore[arg-type]
    assert compiler.asked
    assert len(caplog.records) <= 1


def test_strict_raises() -> None:
    with pytest.raises(RuntimeError, match="no luck"):
        optimized(lambda x: x @ W, Failing("raises", strict=True))(X)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected"):
        optimized(lambda x: x @ W, Failing("wrong shapes", strict=True))(X)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="nonsense"):
        optimized(lambda x: x @ W, Failing("misuse"))(X)  # type: ignore[arg-type]


# What cutting takes where nothing repeats.


def work_of(kind: str, count: int, monkeypatch) -> tuple[int, int, int]:
    """How often a program of so many different equations is cut, how many equations are translated, and left out."""
    cuts, translated = [], []
    cut, translate = regions.pieces, regions.translate

    def counted(program, eqns, *more):
        translated.append(len(eqns))
        return translate(program, eqns, *more)

    with monkeypatch.context() as patch:
        patch.setattr(regions, "pieces", lambda c: cuts.append(1) or cut(c))
        patch.setattr(regions, "translate", counted)
        args = jax.eval_shape(partial(different.draw, kind, count), jax.random.key(0))
        found = analyse(jax.make_jaxpr(partial(different.KINDS[kind], count))(*args))
    late = [x for x in found.left_out if x.code in (Code.PARAMETERS, Code.LAYOUT, Code.NON_FINITE)]
    return len(cuts), sum(translated), len(late)


@pytest.mark.parametrize("kind", different.KINDS)
def test_work_grows_like_a_program_of_which_much_is_refused_late(kind: str, monkeypatch) -> None:
    """Hundreds of different equations that only their translation refuses: as many cuts as for a few of them."""
    few, many = work_of(kind, 60, monkeypatch), work_of(kind, 240, monkeypatch)
    assert few[2] == 60 and many[2] == 240
    assert many[0] <= min(few[0] + 2, regions.MAX_CUTS + 4)
    assert many[1] <= 4.5 * few[1]


def test_a_constant_beyond_its_type_is_infinite() -> None:
    """Folding it warns nobody: JAX does not."""

    def masked(x):
        logits = jnp.where(jnp.arange(1) >= 2, x @ x.T, jnp.finfo("float16").min)
        return jnp.sum(jnp.square(logits.astype("float32")))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        analyse(jax.make_jaxpr(jax.grad(masked))(jnp.ones((1, 1), "float16")).jaxpr)

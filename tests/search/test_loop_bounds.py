"""Masked programs end their loops early: found from the function, certified, and right tile by tile and in Triton."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mugraph.graphs import schedule
from search.references import H200, captured, found, kernels_of, worst_error

from mirage_jax.cost.formula import formula
from mirage_jax.cost.outline import outline
from mirage_jax.cost.tilings import tilings
from mirage_jax.mugraph.evaluate import run
from mirage_jax.mugraph.graph import BlockGraph, KernelGraph, KernelSchedule, LoopBounds, Schedule
from mirage_jax.search.loop_bounds import with_loop_bounds
from mirage_jax.verify.equivalence.certificate import certify, fingerprint
from mirage_jax.verify.exact.interpreters.triton import interpret

QKV = ((2, 1024, 64),) * 3


def attention(mask):
    """`mask` is a function of the indices of rows i and columns n."""

    def fn(q, k, v):
        i, n = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])[None, :]
        s = jnp.where(mask(i, n), q @ k.swapaxes(-1, -2) / 8, -jnp.inf)
        return jax.nn.softmax(s) @ v

    return fn


def linear(q, k, v):
    """No softmax: what is masked is zero at once."""
    return jnp.tril(q @ k.swapaxes(-1, -2)) @ v


PROGRAMS = {
    "causal": (attention(lambda i, n: n <= i), (None, 0)),
    "window": (attention(lambda i, n: (n <= i) & (n > i - 128)), (-127, 0)),
    "window of distances": (attention(lambda i, n: (i - n >= 0) & (i - n < 128)), (-127, 0)),
    "both sides": (attention(lambda i, n: (n - i <= 5) & (i - n <= 5)), (-5, 5)),
    "ahead": (attention(lambda i, n: i <= n), (0, None)),
    "linear": (linear, (None, 0)),
    "prefix": (attention(lambda i, n: (n <= i) | (n < 64)), None),
    "tokens": (attention(lambda i, n: n < 500), None),
}


def loop_bounds_in(graph: KernelGraph) -> tuple[int | None, int | None] | None:
    """Of the kernel that computes the logits."""
    (loop_bounds, *_) = [
        k.loop_bounds for k in graph.kernels if isinstance(k, BlockGraph) and any(o.op == "iota" for o in k.ops)
    ]
    return (loop_bounds.low, loop_bounds.high) if loop_bounds else None


@pytest.mark.parametrize("window,loop_bounds", [(None, (None, 0)), ((127, 0), (-127, 0)), ((15, 3), (-15, 0))])
def test_attention_of_jax(window: tuple[int, int] | None, loop_bounds: tuple[int | None, int]) -> None:
    """It masks with a huge negative number, and makes windows of constant arrays."""

    def fn(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=window)

    graph = captured(fn, *((2, 1024, 4, 64),) * 3, dtype="float16")
    best = next(kernels_of(found(graph)[0], 1))
    assert loop_bounds_in(best) == loop_bounds
    assert certify(graph, best).bound <= 1e-12


@pytest.mark.parametrize("name", PROGRAMS)
def test_loops_end_early(name: str) -> None:
    fn, loop_bounds = PROGRAMS[name]
    graph = captured(fn, *QKV)
    candidates, _ = found(graph)
    best = next(kernels_of(candidates, 1))
    assert loop_bounds_in(best) == loop_bounds
    assert certify(graph, best).bound <= 1e-12
    (axis,) = best.kernels[0].loop or ""
    split = list(kernels_of(candidates, 2, split=axis))
    assert split and all(loop_bounds_in(g) == loop_bounds for g in split if g.kernels[0].loop == axis)
    size = {a: 9 if n == 1024 else 16 if n == 64 else n for a, n in graph.extents}
    for g in (best, *split[:3]):
        assert fingerprint(graph, g)
        if name not in ("tokens", "prefix"):
            small, original = g.with_extents(size), graph.with_extents(size)
            for tile in (1, 2, 4):
                assert worst_error(small, schedule(small, tile), original) < 1e-12


@pytest.mark.parametrize("window,low", [(None, None), (128, 385), (600, -87)])
def test_queries_behind_a_cache(window: int | None, low: int | None) -> None:
    """512 queries after 512 keys: the diagonal is not in the band."""
    fn = attention(lambda i, n: (n <= i + 512) & (True if window is None else n > i + 512 - window))
    graph = captured(fn, (2, 512, 64), (2, 1024, 64), (2, 1024, 64))
    best = next(kernels_of(found(graph)[0], 1))
    assert loop_bounds_in(best) == (low, 512)
    assert certify(graph, best).bound <= 1e-12
    (kernel,) = best.kernels
    assert isinstance(kernel, BlockGraph) and kernel.loop_bounds
    for tight in ((low, 511), *([(low + 1, 512)] if low is not None else [])):
        wrong = replace(kernel, loop_bounds=replace(kernel.loop_bounds, low=tight[0], high=tight[1]))
        assert not fingerprint(graph, replace(best, kernels=(wrong,)))
    sizes = {a: 8 if n == 64 else n for a, n in graph.extents}
    tiles = dict.fromkeys((*kernel.grid, kernel.loop or ""), 64) | {kernel.grid[0]: 1}
    schedule = Schedule((KernelSchedule(tuple(tiles.items())),))
    assert worst_error(best.with_extents(sizes), schedule, graph.with_extents(sizes)) < 1e-12


@pytest.mark.parametrize("name", ["causal", "both sides", "linear"])
@pytest.mark.parametrize("n", [64, 50])
def test_in_triton(name: str, n: int) -> None:
    graph = captured(PROGRAMS[name][0], *QKV)
    best = next(kernels_of(found(graph)[0], 1))
    sizes = {a: n if extent == 1024 else 16 if extent == 64 else extent for a, extent in graph.extents}
    small = best.with_extents(sizes)
    (kernel,) = small.kernels
    assert isinstance(kernel, BlockGraph) and kernel.loop and kernel.loop_bounds
    tiles = dict.fromkeys((*kernel.grid, kernel.loop), 16) | {kernel.grid[0]: 1}
    schedule = Schedule((KernelSchedule(tuple(tiles.items())),))
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal([small.extent(a) for a in t.axes]).astype(np.float32) for t in small.inputs]
    (want,) = run(graph.with_extents(sizes), arrays)
    np.testing.assert_allclose(interpret(small, schedule, arrays)[0], want, atol=1e-5 * np.abs(want).max())


def test_the_model_counts_the_steps_that_run() -> None:
    """At length 4096: half of them for a causal mask, few for a window; whether the kernel is written yet or not."""
    big = ((16, 4096, 64),) * 3
    seconds: dict[str, float] = {}
    for name in ("tokens", "causal", "window"):
        graph = captured(PROGRAMS[name][0], *big)
        best = next(c for c in found(graph)[0] if len(c.graph.kernels) == 1)
        (kernel,) = best.graph.kernels
        assert isinstance(kernel, BlockGraph)
        written = outline(kernel, graph)
        costs = tilings(written, graph.extent, frozenset({kernel.grid[0]}), H200)
        assert np.isclose(costs[0].seconds, best.seconds, rtol=0.1)  # a written kernel has more scalars
        seconds[name] = best.seconds
    assert 0.4 < seconds["causal"] / seconds["tokens"] < 0.6
    assert seconds["window"] / seconds["tokens"] < 0.1
    assert "Min" in str(formula(kernel, graph, H200))


def test_only_what_adds_nothing_is_left_out() -> None:
    """A kernel that also sums something unmasked runs all of its loop; so does one that stores in each step."""

    def also_all(q, k, v):
        s = jnp.where(jnp.tril(jnp.ones((q.shape[1],) * 2, bool)), q @ k.swapaxes(-1, -2) / 8, -jnp.inf)
        return jax.nn.softmax(s) @ v + v.sum(1, keepdims=True)

    graph = captured(also_all, *QKV)
    all_bounds = [
        (k.loop_bounds, {o.op for o in k.ops})
        for c in found(graph)[0]
        for k in c.graph.kernels
        if isinstance(k, BlockGraph)
    ]
    assert all("acc" not in ops or not ("accs" in ops and loop_bounds) for loop_bounds, ops in all_bounds)
    plain = next(kernels_of(found(captured(PROGRAMS["causal"][0], *QKV))[0], 1)).kernels[0]
    assert isinstance(plain, BlockGraph) and plain.loop_bounds == LoopBounds(plain.loop_bounds.axis, None, 0)  # type: ignore[union-attr]
    assert with_loop_bounds(plain) == plain

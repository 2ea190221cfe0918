"""Wide regions are divided into windows; the program stays the same, whatever is put in the place of its windows."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mugraph.graphs import schedule
from search.references import H200, TWO_KERNELS, captured, found, reference, ticking, worst_error

from mirage_jax.bench.programs import rms
from mirage_jax.hardware.device_model import DEVICES
from mirage_jax.mugraph.check import check_graph, check_schedule
from mirage_jax.mugraph.evaluate import run
from mirage_jax.mugraph.graph import KernelGraph, Library, Load, Op, Tensor
from mirage_jax.search import driver
from mirage_jax.search.decompose.windows import (
    KernelWindow,
    after_quotients,
    before_reductions,
    before_tail,
    divide,
    elements,
    replace_windows,
    with_copies,
)
from mirage_jax.search.driver import search
from mirage_jax.search.enumerate.window_search import Search
from mirage_jax.verify.equivalence.certificate import fingerprint


def linear_attention(x: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    """Twelve factors in one product."""
    q, k, v = rms(x @ a), rms(x @ b), x @ c
    return (q @ k.T) @ v


def shared(x: jax.Array, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two outputs with a value in common."""
    y = x @ a
    return jax.nn.silu(y) @ b, (y * y) @ b


def chain(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.exp(jnp.tanh(x @ a) @ b) @ a


def towers(x: jax.Array, *w: jax.Array) -> jax.Array:
    """Gated layers on top of each other: as one polynomial, more terms than memory has room for."""
    y = (jnp.tanh(x @ w[0]) * (x @ w[1])) @ w[2]
    y = (jax.nn.gelu(y @ w[3], approximate=False) * (y @ w[4])) @ w[5]
    return jax.nn.gelu(y @ w[6]) * (y @ w[7])


CPU = DEVICES["CPU"]
PROGRAMS = {
    "linear attention": captured(linear_attention, (64, 32), (32, 16), (32, 16), (32, 16)),
    "shared": captured(shared, (16, 32), (32, 24), (24, 8)),
    "chain": captured(chain, (64, 32), (32, 16), (16, 32)),
}


@pytest.fixture(params=PROGRAMS)
def graph(request: pytest.FixtureRequest) -> KernelGraph:
    return PROGRAMS[request.param]


def inputs(graph: KernelGraph) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [0.3 * rng.standard_normal([graph.extent(a) for a in t.axes]) for t in graph.inputs]


def divisions(graph: KernelGraph) -> list[list[KernelWindow]]:
    """Divisions into windows of ever fewer operators."""
    return [divide(graph, lambda g, most=most: len(g.kernels) <= most) for most in (99, 6, 3, 1)]


def test_divisions_are_ever_finer(graph: KernelGraph) -> None:
    """The whole first; every kernel in exactly one window; no window reads what a later one makes."""
    all_of_them = list(divisions(graph))
    assert all_of_them[0] == [KernelWindow(tuple(range(len(graph.kernels))), graph)] and len(all_of_them) > 1
    assert [len(parts) for parts in all_of_them] == sorted(len(parts) for parts in all_of_them)
    for parts in all_of_them:
        assert sorted(i for w in parts for i in w.positions) == list(range(len(graph.kernels)))
        known = {t.name for t in graph.inputs}
        for w in parts:
            check_graph(w.graph)
            assert {t.name for t in w.graph.inputs} <= known
            known |= set(w.graph.outputs)
        assert set(graph.outputs) <= known


def test_windows_together_are_the_program(graph: KernelGraph) -> None:
    arrays = inputs(graph)
    want = run(graph, arrays)
    for parts in divisions(graph):
        tensors = dict(zip((t.name for t in graph.inputs), arrays, strict=True))
        for w in parts:
            made = run(w.graph, [tensors[t.name] for t in w.graph.inputs])
            tensors |= zip(w.graph.outputs, made, strict=True)
        again, places = replace_windows(graph, {}, parts)
        check_graph(again)
        assert set(again.kernels) == set(graph.kernels) and {i for _, i in places} == {-1}
        for have in ([tensors[name] for name in graph.outputs], run(again, arrays)):
            for x, y in zip(have, want, strict=True):
                np.testing.assert_allclose(x, y, rtol=1e-12)


def test_replaced_windows_give_an_equal_program(graph: KernelGraph) -> None:
    """Each window by what the search finds for it, alone and all together."""
    *_, parts = divisions(graph)
    best = {}
    for n, w in enumerate(parts):
        candidates, _ = found(w.graph)
        best[n] = next(c.graph for c in candidates if c.family == "kernels")
    for chosen in [best, *({n: g} for n, g in best.items())]:
        whole, places = replace_windows(graph, chosen, parts)
        check_graph(whole)
        assert len(places) == len(whole.kernels)
        assert all((i < 0) == isinstance(k, Library) for k, (_, i) in zip(whole.kernels, places, strict=True))
        assert all((n in chosen) == (i >= 0) for n, i in places)
        assert worst_error(whole, schedule(whole, tile=5), graph) < 1e-11
        assert fingerprint(graph, whole)


def test_a_wide_region_is_searched_window_by_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit on values decides; what comes out is candidates for the whole region, all of them right."""
    graph = PROGRAMS["linear attention"]
    monkeypatch.setattr(driver, "MAX_WINDOW_CLASSES", 30)
    candidates, report = search(graph, H200, TWO_KERNELS, 60.0)
    assert report.windows > 1 and f"in each of {report.windows} windows" in str(report)
    assert {c.family for c in candidates} == {"kernels", "algebra"}
    for c in candidates:
        check_graph(c.graph)
        check_schedule(c.graph, c.schedule)
        assert (c.graph.inputs, c.graph.outputs) == (graph.inputs, graph.outputs)
        assert fingerprint(graph, c.graph), c.graph
        assert worst_error(c.graph, None, graph) < 1e-11


def test_windows_that_are_best_split_into_different_numbers_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """An axis is split into one number of parts: that is chosen for all windows together."""

    def two(x: jax.Array, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = jnp.tanh(x)
        return y @ a, y @ b

    graph = captured(two, (8192,), (8192, 2048), (8192, 128), dtype="bfloat16")
    monkeypatch.setattr(driver, "MAX_WINDOW_CLASSES", 3)
    candidates, report = search(graph, H200, TWO_KERNELS, 60.0)
    assert report.windows == 3
    alone = [c.schedule.parts for c in candidates if any(isinstance(k, Library) for k in c.graph.kernels)]
    assert len({parts for parts in alone if parts}) > 1
    split = [sum("i.g" in k.grid for k in c.graph.kernels if not isinstance(k, Library)) for c in candidates]
    whole = next(c for c, n in zip(candidates, split, strict=True) if n == 2 and len(c.graph.kernels) == 5)
    assert len(whole.schedule.parts) == 1 and fingerprint(graph, whole.graph)
    check_schedule(whole.graph, whole.schedule)
    inside = next(c for c, n in zip(candidates, split, strict=True) if n == 2 and len(c.graph.kernels) == 4)
    assert inside.seconds < whole.seconds and fingerprint(graph, inside.graph), "tanh is where it is read"
    check_schedule(inside.graph, inside.schedule)


def test_a_narrow_region_is_one_window() -> None:
    _, report = found(captured(lambda x, a, b: (x @ a) @ b, (16, 32), (32, 16), (16, 8)))
    assert report.windows == 1 and "windows" not in str(report)


def test_a_sum_may_count_an_axis_that_no_value_of_a_window_has() -> None:
    """The gradient of what vmap does not map: t[i] summed over n, which only the sum names."""
    i, n = ("i", 8), ("n", 3)
    x = Tensor("x", ("i",), "f32")
    kernels = (
        Library((Load("a", "x", ("i",)),), Op("t", "exp", ("a",), ("i",)), Tensor("t", ("i",), "f32")),
        Library(
            (Load("a", "t", ("i",)),), Op("y", "sum", ("a",), ("i",), (("axes", ("n",)),)), Tensor("y", ("i",), "f32")
        ),
    )
    graph = KernelGraph((x,), kernels, ("t", "y"), (i, n))
    for parts in divisions(graph):
        for w in parts:
            check_graph(w.graph)
    assert dict(divide(graph, lambda g: len(g.kernels) < 2)[-1].graph.extents) == {"i": 8, "n": 3}


def test_a_window_may_read_an_input_under_other_axes() -> None:
    """What one kernel makes over j is read over i only."""
    kernels = (
        Library((Load("a", "x", ("j",)),), Op("t", "exp", ("a",), ("j",)), Tensor("t", ("j",), "f32")),
        Library((Load("a", "t", ("i",)),), Op("y", "tanh", ("a",), ("i",)), Tensor("y", ("i",), "f32")),
    )
    graph = KernelGraph((Tensor("x", ("j",), "f32"),), kernels, ("t", "y"), (("i", 8), ("j", 8)))
    parts = divide(graph, lambda g: len(g.kernels) < 2)
    assert len(parts) == 2
    for w in parts:
        check_graph(w.graph)


def test_a_window_without_inputs() -> None:
    """A mask that two operators read is a window of its own, made of indices alone."""

    def loss(x: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        mask = jnp.tril(jnp.ones((32, 32), bool))
        return jnp.sum(jnp.square(jnp.where(mask, x @ k.T, -100) @ v))

    graph = captured(jax.grad(loss, (0, 1, 2)), (32, 32), (32, 32), (32, 17))
    (mask,) = [w.graph for w in divide(graph, lambda g: len(g.kernels) <= 3) if not w.graph.inputs]
    for device in (CPU, H200):
        for candidate in search(mask, device, TWO_KERNELS, seconds=20.0)[0]:
            assert fingerprint(mask, candidate.graph)


def test_the_look_at_a_region_ends() -> None:
    graph = captured(towers, *[(8, 8)] * 9)
    assert not driver.is_narrow(graph, CPU, TWO_KERNELS)  # ends at all


def test_what_fits_is_the_same_on_a_slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = reference("qknorm_gqa_b1")
    ticking(monkeypatch, 60.0)
    assert driver.is_narrow(graph, CPU, TWO_KERNELS)


@pytest.mark.parametrize("name", ["shared", "chain"])
def test_what_fits_has_few_values(name: str) -> None:
    graph = PROGRAMS[name]
    whole = Search(graph, CPU, TWO_KERNELS)
    whole.start()
    values = math.ceil(whole.report.classes * math.sqrt(len(whole.targets)))
    assert driver.is_narrow(graph, CPU, TWO_KERNELS, values)
    assert not driver.is_narrow(graph, CPU, TWO_KERNELS, values - 1)


def potential(f: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """A step of Sinkhorn's algorithm with guards, as ott-jax writes them: f[N], x[N, D], y[M, D]."""
    new = f - 0.1 * jax.nn.logsumexp((x @ y.T + f[:, None]) / 0.1, axis=1)
    return jnp.where(jnp.isfinite(new), new, 0.0) * 0.5 + jnp.where(jnp.isfinite(f), f, 0.0) * 0.5


def test_a_pointwise_end_may_be_left_out() -> None:
    """Of what a row sum becomes, and not of the softmax that is as large as its logits."""
    graph = captured(potential, (4096,), (4096, 64), (4096, 64))
    *_, body, end = before_tail(graph)  # a constant that both read may be a window, too
    assert {k.op.op for k in end.graph.kernels if isinstance(k, Library)}.isdisjoint({"dot", "sum", "max", "logs"})
    assert "dot" in str(body.graph) and set(end.graph.outputs) == set(graph.outputs)
    assert not before_tail(captured(lambda x: jax.nn.softmax(x) * 2, (256, 512)))


def pooled(x: jax.Array, w: jax.Array) -> jax.Array:
    """A 1 x 1 convolution of x[N, H, W, C], and the maxima of its results over 2 x 2 places."""
    y = jax.nn.relu(x @ w)
    return jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def test_pooling_of_a_product_is_left_out() -> None:
    """A tile of the product would have more axes than tiles have; its other operators stay with it."""
    graph = captured(pooled, (8, 16, 16, 64), (64, 64))
    assert all(c.family == "algebra" for c in Search(graph, H200, TWO_KERNELS).run())
    body, end = before_reductions(graph)
    assert {"dot", "maximum"} <= {k.op.op for k in body.graph.kernels if isinstance(k, Library)}
    assert [k.op.op for k in end.graph.kernels if isinstance(k, Library)] == ["max"]
    found, _ = search(graph, H200, TWO_KERNELS, 20.0)
    assert any(k.name == "w0k0" for c in found for k in c.graph.kernels)
    assert not before_reductions(captured(lambda x, w: jax.nn.softmax(x) @ w, (64, 512), (512, 64)))


def test_where_patience_ends_without_a_kernel_the_end_is_left_out(monkeypatch) -> None:
    graph = captured(potential, (4096,), (4096, 64), (4096, 64))
    assert Search(graph, H200, TWO_KERNELS, patience=0.0).run() == []
    monkeypatch.setattr(driver, "MAX_PATIENCE_SHARE", 0.0)
    found, _ = search(graph, H200, TWO_KERNELS, 20.0)
    kernels = [c for c in found if c.family == "kernels"]
    assert kernels and fingerprint(graph, kernels[0].graph)


def gaussians(x: jax.Array, y: jax.Array, s: jax.Array) -> jax.Array:
    """All pairs of points, at a length of each coordinate, as GPJax writes them: x[N, D], y[M, D], s[D]."""
    return jnp.exp(-0.5 * jnp.sum(jnp.square(x[:, None] / s - y[None] / s), -1))


def distances(far: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    return lambda x, y, s: jnp.sum(jnp.square(far(x[:, None], y[None], s)), -1)


@pytest.mark.parametrize(
    ("far", "stored"),
    [
        (lambda x, y, s: x / s - y / s, ["div", "div"]),
        (lambda x, y, s: x * (1 / s) - y * (1 / s), ["mul", "mul"]),
        (lambda x, y, s: x * jax.lax.rsqrt(s) + y * jax.lax.rsqrt(s), ["mul", "mul"]),
        (lambda x, y, s: (x - y) / s, []),
        (lambda x, y, s: x / s - y / (s + 1), []),
        (lambda x, y, s: x * s - y * s, []),
        (lambda x, y, s: x / s - jnp.max(y, -1, keepdims=True) / s, []),
    ],
    ids=["quotients", "products with a reciprocal", "with a root", "later", "two divisors", "products", "of a maximum"],
)
def test_quotients_come_before_what_they_are_subtracted_in(far, stored: list[str]) -> None:
    graph = captured(distances(far), (40, 8), (24, 8), (8,))
    windows = after_quotients(graph)
    assert [k.op.op for w in windows[:1] for k in w.graph.kernels if k.name in w.graph.outputs] == stored
    assert sorted(n for w in windows for n in w.positions) == list(range(len(graph.kernels) if stored else 0))


def test_a_divisor_of_zero_gives_no_number_in_all_candidates() -> None:
    """As in the program: 1/0 - 2/0 is none, and (1 - 2)/0 would be infinite."""
    graph = captured(gaussians, (40, 8), (24, 8), (8,))
    given = inputs(graph)
    (divisor,) = [n for n, t in enumerate(graph.inputs) if len(t.axes) == 1]
    given[divisor][3] = 0
    candidates, _ = found(graph)
    best = next(c for c in candidates if c.family == "kernels")
    assert len(best.graph.kernels) == 1 and str(best.graph).count("pow{") == 1, "both quotients share the reciprocal"
    with np.errstate(all="ignore"):
        (want,) = run(graph, given)
        assert 0 < np.isnan(want).sum() < want.size
        for c in candidates:
            (have,) = run(c.graph, given, c.schedule)
            np.testing.assert_array_equal(np.isnan(have), np.isnan(want))


def kernel_gradients(x: jax.Array, y: jax.Array, s: jax.Array) -> list[jax.Array]:
    """Of a sum of Gaussian kernels over all pairs of points, by both sets of points."""

    def total(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.sum(jnp.exp(-0.5 * jnp.sum(jnp.square(s * x[:, None] - s * y[None]), -1)) ** 2)

    return list(jax.grad(total, (0, 1))(x, y))


def test_what_is_cheap_is_made_again_by_each_reader() -> None:
    """Differences of all pairs, their kernels and their slopes; not a product, whose numbers cost more than a read."""
    graph = captured(kernel_gradients, (256, 4), (128, 4), (4,))
    copied = with_copies(graph)
    check_graph(copied)
    assert len(copied.kernels) > len(graph.kernels) and copied.outputs == graph.outputs
    for want, have in zip(run(graph, inputs(graph)), run(copied, inputs(graph)), strict=True):
        np.testing.assert_array_equal(want, have)
    large = {name for name in copied.tensors if elements(copied, name) >= 256 * 128}
    ends: dict[str, set[str]] = {}  # what is small, and made of a large value through others
    for k in reversed(copied.kernels):
        for name in {x.tensor for x in k.loads} & large:
            ends.setdefault(name, set()).update(ends[k.name] if k.name in large else {k.name})
    assert large == set(ends) and all(len(names) == 1 for names in ends.values())
    for name in ("shared", "chain", "linear attention"):
        assert with_copies(PROGRAMS[name]) is PROGRAMS[name]


def test_windows_of_copies_store_nothing_large() -> None:
    """Unless one of them is too wide for a search, where none was without copies."""
    graph = captured(kernel_gradients, (256, 4), (128, 4), (4,))
    most = len(graph.kernels) - 1
    reference, parts = driver._divided(graph, lambda g: len(g.kernels) <= most)
    stored = {t.name for w in parts for t in w.graph.inputs} - {t.name for t in graph.inputs}
    assert len(parts) > 1 and reference is not graph
    assert max(elements(reference, name) for name in stored) * 8 <= 256 * 128
    few, parts = driver._divided(graph, lambda g: len(g.kernels) <= 3)
    assert few is graph and parts == divide(graph, lambda g: len(g.kernels) <= 3)

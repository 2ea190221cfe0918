"""Wide regions with several outputs: each output on its own, and what was found for all of them as one program."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from mugraph.programs import schedule
from search.programs import H200, TWO_KERNELS, captured, found, worst_error

from mirage_jax.jaxpr_frontend.regions import analyse
from mirage_jax.mugraph.check import check_graph, check_schedule
from mirage_jax.mugraph.graph import BlockGraph, KernelGraph
from mirage_jax.mugraph.merge import simplify_axes
from mirage_jax.search.cones import cone, joined
from mirage_jax.search.frontier import Space
from mirage_jax.search.window_search import Search
from mirage_jax.verify.certificate import certify, fingerprint

QKV = ((2, 512, 64), (2, 64, 512), (2, 512, 64), (2, 512, 64))


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.softmax(q @ k) @ v


def backward(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
    """dQ, dK and dV from the inputs alone: nothing of the forward pass is kept."""
    return jax.vjp(attention, q, k, v)[1](g)


@pytest.fixture(scope="module")
def gradient() -> KernelGraph:
    specs = [jax.ShapeDtypeStruct(s, np.dtype("float16")) for s in QKV]
    (region,) = analyse(jax.make_jaxpr(backward)(*specs).jaxpr).regions
    return simplify_axes(region.graph)


def shapes(graph: KernelGraph, name: str) -> set[str]:
    return set(graph.tensors[name].axes)


def test_cones_are_programs_of_their_own(gradient: KernelGraph) -> None:
    assert len(gradient.outputs) == 3
    for name in gradient.outputs:
        one = cone(gradient, name)
        check_graph(one)
        assert one.outputs == (name,) and len(one.kernels) < len(gradient.kernels)


def test_gradient_of_the_keys_makes_the_weights_anew(gradient: KernelGraph) -> None:
    """As FlashAttention's backward pass: row sums, and those of the weights' gradients, in one kernel; then a kernel
    over the keys that recomputes the weights from them. No tensor has both queries and keys as axes.
    """
    name = next(n for n in gradient.outputs if shapes(gradient, n) == {"i", "k", "l"})
    one = cone(gradient, name)
    candidates = Search(one, H200, Space(max_ops=14, max_kernels=2), 120.0, 20_000_000, ("kernels",)).run()
    whole = [c for c in candidates if not c.graph.split_axes]
    best = next(c for c in whole if not any({"j", "l"} <= {*t.axes} for t in c.graph.tensors.values()))
    first, second = best.graph.kernels
    assert isinstance(first, BlockGraph) and isinstance(second, BlockGraph)
    assert "j" in first.grid and "l" in second.grid and second.loop == "j"
    for kernel, shifts in ((first, 1), (second, 0)):
        ops = [o.op for o in kernel.ops]
        assert ops.count("exps") == 1 and ops.count("shift") == shifts
    check_schedule(best.graph, best.schedule)
    assert certify(one, best.graph).bound <= 1e-12
    sizes = {a: 7 if n == 512 else 4 if n == 64 else n for a, n in one.sizes.items()}
    small, tiled = one.with_extents(sizes), best.graph.with_extents(sizes)
    assert worst_error(tiled, schedule(tiled, tile=3), small) < 1e-12


def test_gradient_of_the_queries_in_one_kernel(gradient: KernelGraph) -> None:
    """One pass over the keys: both sums of which the gradient is a difference, and the row sums that scale them."""
    name = next(n for n in gradient.outputs if shapes(gradient, n) == {"i", "j", "k"})
    one = cone(gradient, name)
    one = one.with_extents({a: 4096 if n == 512 else n for a, n in one.sizes.items()})
    (best, *_) = Search(one, H200, Space(max_ops=14, max_kernels=1), 120.0, 20_000_000, ("kernels",)).run()
    (kernel,) = best.graph.kernels
    assert isinstance(kernel, BlockGraph) and kernel.loop == "l" and "j" in kernel.grid
    assert certify(one, best.graph).bound <= 1e-12
    sizes = {a: 7 if n == 4096 else 4 if n == 64 else n for a, n in one.sizes.items()}
    small, tiled = one.with_extents(sizes), best.graph.with_extents(sizes)
    assert worst_error(tiled, schedule(tiled, tile=3), small) < 1e-12


def test_equal_kernels_run_once() -> None:
    """Two outputs that need the same sums: what both cones begin with is one kernel of the whole."""

    def both(x: jax.Array, w: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        p = jax.nn.softmax(x)
        return p @ w, p @ v

    graph = captured(both, (64, 4096), (4096, 512), (4096, 512))
    cones = [found(cone(graph, n), replace(TWO_KERNELS, max_kernels=2))[0] for n in graph.outputs]
    pairs = [[c for c in cs if len(c.graph.kernels) == 2 and not c.graph.split_axes][:1] for cs in cones]
    whole = joined(graph, pairs)
    assert whole is not None
    check_graph(whole.graph)
    check_schedule(whole.graph, whole.schedule)
    assert fingerprint(graph, whole.graph)
    assert len(whole.graph.kernels) == 3 and len(whole.alternatives) == 3


def test_nothing_to_join() -> None:
    graph = captured(lambda a, b, v: (a @ b) @ v, (64, 64), (64, 64), (64,))
    algebra = [c for c in found(graph)[0] if c.family == "algebra"]
    assert joined(graph, [algebra]) is None and joined(graph, [[]]) is None

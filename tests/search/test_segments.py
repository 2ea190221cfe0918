"""What the search makes of slices and concatenations, from captured functions; what is looked at is certified."""

from collections import Counter
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from search.references import H200, Shape, found, kernels_of, region
from search.test_beyond import check_right, is_online_softmax

from mirage_jax.mugraph.graph import BlockGraph, KernelGraph
from mirage_jax.mugraph.passes.merge_axes import simplify_axes
from mirage_jax.search.candidates import Candidate
from mirage_jax.search.enumerate.kernels import Space

X, Y, WEIGHTS = (4096, 3072), (4096, 1024), (4096, 1024)


def captured(fn: Callable[..., jax.Array], *shapes: Shape) -> KernelGraph:
    return simplify_axes(region(fn, *shapes, dtype="bfloat16").graph)


def swiglu(x: jax.Array, w: jax.Array) -> jax.Array:
    gate, up = jnp.split(x @ w, 2, -1)
    return jax.nn.silu(gate) * up


def rotated(x: jax.Array, c: jax.Array, s: jax.Array) -> jax.Array:
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * c - b * s, b * c + a * s], -1)


def rope_attention(q: jax.Array, k: jax.Array, v: jax.Array, c: jax.Array, s: jax.Array) -> jax.Array:
    return jax.nn.softmax(rotated(q, c, s) @ rotated(k, c, s).mT / 8) @ v


ONE_KERNEL = {
    "concatenate, then product": (lambda x, y, w: jnp.concatenate([x, y], -1) @ w, (X, Y, WEIGHTS), {"dot": 2}),
    "padding": (lambda x, w: jnp.pad(x, ((0, 0), (0, 1024))) @ w, (X, WEIGHTS), {"dot": 1}),
    "swiglu": (swiglu, ((16, 4096), (4096, 8192)), {"dot": 2, "logistic": 1}),
    "last rows": (lambda x, w: (x @ w)[-16:], (X, (3072, 1024)), {"dot": 1}),
}


@pytest.mark.parametrize("name", ONE_KERNEL)
def test_one_kernel(name: str) -> None:
    fn, shapes, expected = ONE_KERNEL[name]
    graph = captured(fn, *shapes)
    best = next(kernels_of(found(graph)[0], 1))
    assert isinstance(best.kernels[0], BlockGraph)
    ops = Counter(o.op for o in best.kernels[0].ops)
    assert {op: ops[op] for op in expected} == expected
    check_right(graph, best)


def test_rows_of_heads_are_tiles() -> None:
    """``x w`` of one x, in halves of heads that are rotated: of the weights' two axes only one is taken one by one."""

    def project(x: jax.Array, w: jax.Array, c: jax.Array, s: jax.Array) -> jax.Array:
        a, b = jnp.split((x @ w).reshape(16, 128), 2, -1)
        return a * c - b * s

    graph = captured(project, (4096,), (4096, 2048), (64,), (64,))
    best = next(c for c in found(graph, Space(max_ops=28, max_kernels=1))[0] if c.family == "kernels")
    check_right(graph, best.graph)
    (kernel,) = best.graph.kernels
    assert isinstance(kernel, BlockGraph) and kernel.loop is not None and len(best.single) == 1
    (halves,) = {graph.tensors[x.tensor].axes for x in kernel.loads if len(x.axes) == 3}
    assert best.schedule.kernels[0].tile(halves[-1]) >= 16


def test_nothing_is_copied_before_a_product() -> None:
    """The model's time for ``[x, y] @ w`` is less than that of writing [x, y] and reading it again."""
    fused = cheapest(captured(lambda x, y, w: jnp.concatenate([x, y], -1) @ w, X, Y, WEIGHTS))
    whole = cheapest(captured(jnp.matmul, (4096, 4096), WEIGHTS))
    copied = 2 * 2 * 4096 * 4096 / H200.bandwidth
    assert fused.seconds < whole.seconds + copied


def cheapest(graph: KernelGraph) -> Candidate:
    return found(graph)[0][0]


@pytest.mark.parametrize("number", [1, 2])
def test_rope_before_attention(number: int) -> None:
    """Scores are the sum of two products of halves; the last kernel is an online softmax, whatever precedes it."""
    graph = captured(rope_attention, *[(8, 1024, 128)] * 3, (1024, 64), (1024, 64))
    assert len(graph.inputs) == 7
    candidates, _ = found(graph, Space(max_ops=24, max_kernels=number))
    kernels = next(kernels_of(candidates, number))
    last = kernels.kernels[-1]
    assert isinstance(last, BlockGraph)
    assert is_online_softmax(last, Counter(o.op for o in last.ops))
    assert sum(o.op == "dot" for k in kernels.kernels if isinstance(k, BlockGraph) for o in k.ops) == 3
    check_right(graph, kernels)

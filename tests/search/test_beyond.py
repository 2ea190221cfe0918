"""What the search finds beyond the paper's programs, from captured functions: told by structure, each certified.

Every function is searched exhaustively for single kernels.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from mugraph.graphs import schedule
from search.references import H200, TWO_KERNELS, blocks, captured, found, kernels_of, region, worst_error

from mirage_jax.bench.field_programs import contrastive, kernel_sums, mixture
from mirage_jax.compiler.specialization import specialized
from mirage_jax.compiler.tuning_session import SPACE
from mirage_jax.cost.roofline import estimate, fused_estimate
from mirage_jax.jaxpr_frontend.partition.regions import analyse
from mirage_jax.mugraph.check import check_graph
from mirage_jax.mugraph.graph import BlockGraph, KernelGraph
from mirage_jax.mugraph.passes.merge_axes import simplify_axes
from mirage_jax.search.candidates import Candidate, as_launched
from mirage_jax.search.driver import search
from mirage_jax.search.report import StopReason
from mirage_jax.verify.equivalence.certificate import certify

HEADS = ((2, 256, 64), (2, 64, 4096), (2, 4096, 64))


def rms(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def layer_norm(x: jax.Array, gain: jax.Array, bias: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-6) * gain + bias


def padded(q: jax.Array, k: jax.Array, v: jax.Array, keep: jax.Array) -> jax.Array:
    return jax.nn.softmax(jnp.where(keep[:, None, :] > 0, q @ k, -jnp.inf)) @ v


def causal(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.softmax(jnp.where(jnp.tri(q.shape[1], dtype=bool), q @ k, -jnp.inf)) @ v


def grouped(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    weights = jax.nn.softmax(jnp.einsum("tkgd,skd->kgts", q, k))
    return jnp.einsum("kgts,skd->tkgd", weights, v)


def lora(x: jax.Array, w: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    return x @ w + (x @ a) @ b


def is_online_softmax(kernel: BlockGraph, ops: Counter[str]) -> bool:
    """Two sums, both relative to one maximum that moves through the loop."""
    shifts = [o for o in kernel.ops if o.op == "shift" and kernel.loop in o.attributes["axes"]]
    return len(shifts) == 1 and ops["exps"] == 1 and ops["accs"] == 2


def attends_with(op: str, number: int = 1) -> Callable[[BlockGraph, Counter[str]], bool]:
    return lambda kernel, ops: is_online_softmax(kernel, ops) and ops[op] == number


CASES: dict[str, tuple[Callable[..., jax.Array], tuple[tuple[int, ...], ...], Callable[..., bool]]] = {
    "additive bias": (
        lambda q, k, v, bias: jax.nn.softmax(q @ k + bias) @ v, (*HEADS, (2, 256, 4096)), attends_with("add"),
    ),
    "padding mask": (padded, (*HEADS, (2, 4096)), attends_with("mask")),
    "causal mask": (
        causal, ((2, 1024, 64), (2, 64, 1024), (2, 1024, 64)),
        lambda kernel, ops: (
            is_online_softmax(kernel, ops) and kernel.loop_bounds is not None and kernel.loop_bounds.high == 0
        ),
    ),
    "grouped queries": (
        grouped, ((256, 2, 4, 64), (4096, 2, 64), (4096, 2, 64)),
        lambda kernel, ops: is_online_softmax(kernel, ops) and sorted(len(x.axes) for x in kernel.loads) == [3, 3, 4],
    ),
    "rms norm with gain": (
        lambda x, g, w: (rms(x) * g) @ w, ((16, 4096), (4096,), (4096, 6144)),
        lambda kernel, ops: kernel.loop is not None and ops["acc"] == 2 and ops["pow"] == 1,
    ),
    "lora on rms norm": (
        lambda x, w, a, b: lora(rms(x), w, a, b), ((16, 4096), (4096, 4096), (4096, 16), (16, 4096)),
        lambda kernel, ops: kernel.loop is not None and ops["acc"] == 3 and ops["dot"] == 4,
    ),
    "layer norm, long rows": (
        lambda x, w: layer_norm(x, jnp.ones(()), jnp.zeros(())) @ w, ((16, 65536), (65536, 64)),
        lambda kernel, ops: kernel.loop is not None and ops["pow"] == 1,
    ),
    "log-sum-exp of a product, in one pass": (
        lambda h, w: jax.nn.logsumexp(h @ w, axis=-1), ((256, 512), (512, 50000)),
        lambda kernel, ops: ops["accs"] == ops["logs"] == ops["dot"] == 1 and max_depth(kernel) == 1,
    ),
    "cross-entropy of a product, in one pass": (
        lambda h, w, y: jnp.sum(y * jax.nn.log_softmax(h @ w), -1), ((256, 512), (512, 50000), (256, 50000)),
        lambda kernel, ops: ops["accs"] == ops["logs"] == 1 and ops["acc"] == 2 and max_depth(kernel) == 1,
    ),
    "row maximum of a product": (
        lambda q, k: jnp.max(q @ k, -1), ((256, 64), (64, 50000)),
        lambda kernel, ops: kernel.loop is not None and ops["max"] == ops["last"] == 1,
    ),
}  # fmt: skip


def max_depth(kernel: BlockGraph) -> int:
    """Number of loops."""
    return max(stage.depth for stage in kernel.stages.values())


@pytest.mark.parametrize("name", CASES)
def test_found_as_one_kernel(name: str) -> None:
    fn, shapes, expected = CASES[name]
    graph = captured(fn, *shapes)
    candidates, report = found(graph, replace(TWO_KERNELS, max_kernels=1))
    assert report.stop is StopReason.EXHAUSTED
    kernels = list(kernels_of(candidates, 1))
    chosen = next((g for g in kernels if expected(g.kernels[0], Counter(o.op for o in g.kernels[0].ops))), None)
    assert chosen is not None, "\n".join(map(str, kernels))
    check_right(graph, chosen)


def check_right(graph: KernelGraph, chosen: KernelGraph) -> None:
    check_graph(chosen)
    certify(graph, chosen)
    sizes = {a: 7 if n > 16 else 3 for a, n in graph.sizes.items()}
    small, tiled = graph.with_extents(sizes), chosen.with_extents(sizes)
    assert worst_error(tiled, schedule(tiled, tile=2), small) < 1e-12


def decayed(q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array) -> jax.Array:
    return ((q @ k.swapaxes(-1, -2)) * decay) @ v


def narrow(x: jax.Array, wq: jax.Array, wk: jax.Array, wv: jax.Array) -> jax.Array:
    q, k, v = (jnp.einsum("bnd,dhe->bhne", x, w) for w in (wq, wk, wv))
    return jax.nn.softmax(q @ k.swapaxes(-1, -2), -1) @ v


def triangle(z: jax.Array, wq: jax.Array, wk: jax.Array, wb: jax.Array, wg: jax.Array, v: jax.Array) -> jax.Array:
    """AlphaFold's attention along the rows of a table of pairs (Jumper et al., 2021, supplement, algorithm 13)."""
    q, k, g = (jnp.einsum("ijc,chd->ihjd", z, w) for w in (wq, wk, wg))
    weights = jax.nn.softmax(q @ k.swapaxes(-1, -2) + jnp.einsum("jkc,ch->hjk", z, wb), -1)
    return jax.nn.sigmoid(g) * (weights @ v)


def from_statistics(x: jax.Array, y: jax.Array, row: jax.Array, column: jax.Array) -> jax.Array:
    """What a contrastive loss has for its gradient, with the logarithms of both sums known."""
    logits = (x @ y.T).astype("float32")
    weights = jnp.exp(logits - row[:, None]) + jnp.exp(logits - column)
    return weights.astype(x.dtype) @ y


PAIRS = ((256, 256, 128), *[(128, 4, 32)] * 2, (128, 4), (128, 4, 32), (256, 4, 256, 32))
# The last number: how many times as fast as XLA's code, by the model.
FAST: dict[str, tuple[Callable[..., jax.Array], tuple[tuple[int, ...], ...], float]] = {
    "a decay that has heads only": (decayed, (*[(4, 16, 2048, 64)] * 3, (16, 2048, 2048)), 1.5),
    "narrow projections": (narrow, ((64, 512, 256), *[(256, 8, 32)] * 3), 2.0),
    "attention over pairs": (triangle, PAIRS, 1.8),
    "distances": (kernel_sums, ((8192, 3), (8192, 3), (8192,)), 3.0),
    "distances under a log-sum-exp": (mixture, ((65536, 16), (64, 16), (64, 16), (64,)), 2.0),
    "two exponentials of one product": (from_statistics, ((8192, 64), (8192, 64), (8192,), (8192,)), 1.3),
    "rows and columns of one product": (contrastive, ((8192, 256), (8192, 256)), 1.15),
}


def test_logarithms_are_relative_to_shifts_of_their_own_rows() -> None:
    """On a diagonal rows and columns have one name, and may not be taken for one another."""

    def kept(x: jax.Array, y: jax.Array) -> jax.Array:
        s = 3 * (x @ y.T)
        s = 2 * s - jax.nn.logsumexp(2 * s, -1, keepdims=True)
        diagonal = jnp.where(jnp.eye(2, dtype=bool), s, 0).sum(-2)
        return jnp.sum(jnp.square(diagonal.astype("float32")))

    jaxpr = jax.make_jaxpr(jax.grad(kept, (0, 1)))(*[jax.ShapeDtypeStruct((2, 1), "float16")] * 2)
    graph = simplify_axes(analyse(jaxpr).regions[0].graph)
    candidates, _ = search(graph, H200, SPACE, seconds=20.0)
    assert candidates
    for c in candidates:
        check_graph(c.graph)


@pytest.mark.parametrize("name", FAST)
def test_faster_than_xla_by_the_model(name: str) -> None:
    fn, shapes, times = FAST[name]
    graph = simplify_axes(region(fn, *shapes, dtype="float32" if fn in (kernel_sums, mixture) else "bfloat16").graph)
    candidates, _ = search(graph, H200, SPACE, seconds=40.0)
    kernels = (as_launched(c, H200) for c in candidates if c.family == "kernels")
    best = min(kernels, key=lambda c: c.seconds)
    assert times * best.seconds < fused_estimate(graph, H200), best.graph
    check_graph(best.graph)
    certify(graph, best.graph)


def test_attention_that_keeps_its_row_statistics() -> None:
    """Maxima and sums relative to them are results too, as a backward pass wants them: still one kernel, one pass."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        scores = (q @ k.T).astype("float32")
        top = scores.max(-1)
        weights = jnp.exp(scores - top[:, None])
        total = weights.sum(-1)
        return top, total, (weights.astype(v.dtype) @ v) / total[:, None].astype(v.dtype)

    graph = simplify_axes(region(attend, *[(4096, 64)] * 3, dtype="bfloat16").graph)  # type: ignore[arg-type]
    candidates, _ = search(graph, H200, SPACE, seconds=40.0)
    one = next(kernels_of(candidates, 1))
    ops = Counter(op.op for op in blocks(one)[0].ops)
    assert ops["exps"] == 2 and ops["accs"] == 2 and not ops["exp"], one
    certify(graph, one)


def test_split_log_sum_exp() -> None:
    """Few rows: the axis that is summed is divided over the grid, and a second kernel combines the parts."""
    graph = captured(lambda h, w: jax.nn.logsumexp(h @ w, axis=-1), (16, 512), (512, 50000))
    candidates, _ = found(graph)
    splits = [c.graph for c in candidates if c.graph.split_axes and len(c.graph.kernels) == 2]
    ops = {split: [Counter(o.op for o in k.ops) for k in split.kernels] for split in splits}
    one_pass = next(g for g, (first, _) in ops.items() if first["exps"] == 1 and first["logs"] == 0)
    assert ops[one_pass][1]["rescale"] == ops[one_pass][1]["logs"] == 1
    certify(graph, one_pass)


def test_a_product_is_reduced_tile_by_tile_over_a_large_vocabulary() -> None:
    """The loss of a language model: no kernel stores the logits, and none loops over them."""

    def loss(h: jax.Array, w: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = h @ w
        shift = jnp.max(logits, -1)
        chosen = jnp.where(jnp.arange(16384) == labels[:, None], logits, 0.0)
        return shift + jnp.log(jnp.sum(jnp.exp(logits - shift[:, None]), -1)), chosen.sum(-1)

    specs = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1024, 2048), (2048, 16384))]
    (only,) = analyse(jax.make_jaxpr(loss)(*specs, jax.ShapeDtypeStruct((1024,), jnp.int32)).jaxpr).regions
    graph = simplify_axes(only.graph)
    candidates, _ = found(graph)
    tiles = [c for c in candidates if c.schedule.part_counts and max(c.schedule.part_counts.values()) in (64, 128)]

    def in_specialized_warps(c: Candidate) -> float:
        return min(estimate(c.graph, s, H200) for s in specialized(c.graph, c.schedule, H200, most=2))

    best = min(tiles, key=in_specialized_warps)
    first, *_ = blocks(best.graph)
    assert first.loop is not None and all(first.loop in x.axes for x in first.loads if len(x.axes) == 2)
    assert all(len(s.tensor.axes) == 2 and any(a.endswith(".g") for a in s.tensor.axes) for s in first.stores)
    certify(graph, best.graph)
    assert in_specialized_warps(best) < 0.75 * fused_estimate(graph, H200)

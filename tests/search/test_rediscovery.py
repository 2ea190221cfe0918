"""What the search must find by itself, from captured programs, told by structure; and that what it finds is right."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from mugraph.graphs import schedule
from search.references import H200, NAMES, TWO_KERNELS, captured, found, kernels_of, reference, worst_error

from mirage_jax.mugraph.check import check_graph, check_schedule
from mirage_jax.mugraph.graph import BlockGraph, KernelGraph, Library, Op
from mirage_jax.search.driver import search
from mirage_jax.search.enumerate.kernels import Space
from mirage_jax.search.enumerate.window_search import Search
from mirage_jax.search.report import StopReason
from mirage_jax.verify.equivalence.certificate import fingerprint

ONE_KERNEL = replace(TWO_KERNELS, max_kernels=1)  # there are four hundred ways to make nTrans of two
HEADS = ((2, 256, 64), (2, 64, 4096), (2, 4096, 64))


def ops(kernel: BlockGraph, *, body: bool, depth: int = 0) -> Counter[str]:
    """Operators by name: inside of a loop, or before (depth 0) and after it (depth 1)."""
    return Counter(
        o.op for o in kernel.ops if (kernel.stages[o.name].body, kernel.stages[o.name].depth) == (body, depth)
    )


def one(graphs: Iterable[KernelGraph]) -> BlockGraph:
    """The kernel of the best of graphs that have one."""
    (kernel,) = next(iter(graphs)).kernels
    assert isinstance(kernel, BlockGraph)
    return kernel


def size(reference: KernelGraph, kernel: BlockGraph) -> int:
    """Extent of the loop axis."""
    assert kernel.loop is not None
    return reference.extent(kernel.loop)


def test_normalization_and_product_in_one_kernel() -> None:
    """rms(x) W: squares and products are summed in one loop; the scale comes after it."""
    graph = reference("rmsnorm_b1")
    kernel = one(kernels_of(found(graph)[0], 1))
    assert size(graph, kernel) == 4096
    assert ops(kernel, body=True) == Counter(dot=2)
    assert ops(kernel, body=False, depth=1) == Counter(acc=2, pow=1, mul=1)
    assert len(kernel.loads) == 2 and len(kernel.grid) == 2


def test_a_normalized_gated_layer_in_one_kernel() -> None:
    """silu(rms(x) W1) * (rms(x) W2), too wide for plans of two kernels: as a whole it is searched for one. What is not
    split over the grid is tried beside what is.
    """

    def layer(x: jax.Array, gain: jax.Array, w1: jax.Array, w2: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        y = (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)).astype(x.dtype) * gain
        return jax.nn.silu(y @ w1) * (y @ w2)

    graph = captured(layer, (1, 4096), (4096,), (4096, 14336), (4096, 14336), dtype="bfloat16")
    candidates, report = search(graph, H200, Space(max_ops=14), 120.0, families=("kernels",))
    assert report.windows > 1 and report.output_slices == 1
    kernel = one(g for g in (c.graph for c in candidates) if len(g.kernels) == 1)
    assert size(graph, kernel) == 4096 and ops(kernel, body=True)["dot"] == 3  # both products, and the mean square
    assert fingerprint(graph, next(c.graph for c in candidates if len(c.graph.kernels) == 1))
    splits = {bool(c.graph.split_axes) for c in candidates if not any(isinstance(k, Library) for k in c.graph.kernels)}
    assert splits == {True, False}


def test_low_rank_update_in_one_kernel() -> None:
    """x W + (x A) B: one load of x for both products, in one loop, also at full width."""
    graph = reference("lora_b1")
    kernel = one(kernels_of(found(graph)[0], 1))
    assert Counter(o.op for o in kernel.ops) == Counter(dot=3, add=1, acc=2)
    long = captured(lambda x, w, a, b: x @ w + (x @ a) @ b, (16, 4096), (4096, 4096), (4096, 16), (16, 4096))
    kernel = one(kernels_of(found(long)[0], 1))
    assert size(long, kernel) == 4096
    assert ops(kernel, body=True) == Counter(dot=2)
    assert ops(kernel, body=False, depth=1) == Counter(acc=2, dot=1, add=1)


def test_gated_mlp_in_one_kernel() -> None:
    """silu(x W1) (x W2): two accumulators in one loop, the activation after it."""
    graph = reference("gated_mlp_b1")
    kernel = one(kernels_of(found(graph)[0], 1))
    assert size(graph, kernel) == 4096
    assert ops(kernel, body=True) == Counter(dot=2)
    assert ops(kernel, body=False, depth=1) == Counter(acc=2, logistic=1, mul=2)
    assert len(kernel.loads) == 3


def is_online_softmax(kernel: BlockGraph) -> bool:
    """One shift carried over the loop; the weighted sum and the row sum are relative to it."""
    shifts = [o for o in kernel.ops if o.op == "shift" and kernel.loop in o.attributes["axes"]]
    relative = [o for o in kernel.ops if o.op in ("exps", "accs")]
    return len(shifts) == 1 and len(relative) == 3 and all(o.args[1] == shifts[0].name for o in relative)


@pytest.mark.parametrize("safe", [True, False])
def test_attention_in_one_kernel(safe: bool) -> None:
    """softmax(Q K) V: online where the program subtracts the maximum, and as it is where it does not."""

    def unsafe(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        e = jnp.exp(q @ k)
        return e @ v / e.sum(-1, keepdims=True)

    graph = reference("gqa_b1") if safe else captured(unsafe, *HEADS, dtype="float16")
    kernel = one(kernels_of(found(graph)[0], 1))
    assert is_online_softmax(kernel) == safe and size(graph, kernel) == 4096
    assert ops(kernel, body=True) == Counter(dot=2, sum=1) + (Counter(shift=1, exps=1) if safe else Counter(exp=1))
    after = ops(kernel, body=False, depth=1)
    assert after.pop("accs" if safe else "acc") == 2 and after in (Counter(div=1), Counter(pow=1, mul=1))


def check_split(graph: KernelGraph, candidate: KernelGraph) -> BlockGraph:
    """Keys are divided over the grid: partial sums with their shift, and a kernel that combines them."""
    first, second = candidate.kernels
    assert isinstance(first, BlockGraph) and isinstance(second, BlockGraph)
    assert graph.extent(first.grid[1].removesuffix(".g")) == 4096
    parts = first.grid[1]
    assert all(parts in s.tensor.axes and s.tensor.dtype == "f32" for s in first.stores) and len(first.stores) == 3
    (shift,) = (o for o in second.ops if o.op == "shift")
    moved = [o for o in second.ops if o.op == "rescale"]
    sums = [o for o in second.ops if o.op == "sum"]
    assert shift.attributes["axes"] == (parts,) and len(moved) == len(sums) == 2
    assert all(o.args[2] == shift.name for o in moved) and all(o.attributes["axes"] == (parts,) for o in sums)
    return first


def test_attention_split_over_keys() -> None:
    """It is also the best candidate for few rows."""
    graph = reference("gqa_b1")
    candidates, _ = found(graph)
    check_split(graph, candidates[0].graph)
    looped = next(g for g in kernels_of(candidates, 2, "l") if g.kernels[0].loop == "l")
    first = check_split(graph, looped)
    assert is_online_softmax(first) and any(o.op == "last" for o in first.ops)


def test_attention_of_normalized_queries_and_values() -> None:
    """softmax(rms(Q) K) rms(V) in one kernel: Q's scale before the loop, V's in it."""
    graph = reference("qknorm_gqa_b1")
    candidates, _ = found(graph)
    kernel = one(kernels_of(candidates, 1))
    assert is_online_softmax(kernel) and size(graph, kernel) == 4096
    inside, before = ops(kernel, body=True), ops(kernel, body=False)
    assert inside["exps"] == inside["shift"] == 1 and inside["dot"] >= 2
    assert before["pow"] == inside["pow"] == 1
    check_split(graph, next(kernels_of(candidates, 2, "l")))


def test_ntrans_in_one_kernel() -> None:
    """rms(x + a (rms(h) - x)), rows over the grid."""
    kernel = one(kernels_of(found(reference("ntrans_b1"), ONE_KERNEL)[0], 1))
    counts = Counter(o.op for o in kernel.ops)
    assert kernel.loop is None and len(kernel.grid) == 1
    assert counts["pow"] == 2 and counts["dot"] == 2 and not set(counts) - {"pow", "dot", "mul", "add", "affine"}


def dots(graph: KernelGraph) -> list[Op]:
    assert all(isinstance(k, Library) for k in graph.kernels)
    return [o for k in graph.kernels for o in k.ops if o.op == "dot"]


def test_products_beside_kernels_may_be_left_to_the_library() -> None:
    """A plan whose kernel is one product also comes with XLA's product in its place, right after the plan itself."""
    graph = captured(lambda x, w, v: (jax.nn.silu(x @ w) * x) @ v, (256, 512), (512, 512), (512, 384))
    candidates = Search(graph, H200, TWO_KERNELS, 120.0).run()
    mixed = [c for c in candidates if len({type(k) for k in c.graph.kernels}) == 2]
    assert mixed
    for c in mixed:
        check_graph(c.graph)
        check_schedule(c.graph, c.schedule)
        assert fingerprint(graph, c.graph)
        assert all(op.op == "dot" for k in c.graph.kernels if isinstance(k, Library) for op in k.ops)
        assert any(d.seconds < c.seconds and len(d.graph.kernels) == len(c.graph.kernels) for d in candidates)


def test_products_are_reassociated() -> None:
    """(A B) v -> A (B v); (Q K^T) V -> Q (K^T V): no product is as large as the one that the program makes first."""
    for name in ("abv", "linear_attention"):
        graph = reference(name)
        candidates, _ = found(graph)
        algebra = next(c.graph for c in candidates if c.family == "algebra")
        made = [{graph.extent(a) for a in o.axes} for o in dots(algebra)]
        written = [{graph.extent(a) for a in o.axes} for o in dots(graph)]
        assert len(made) == len(written) == 2
        if name == "abv":
            assert [len(o.axes) for o in dots(graph)] == [2, 1] and [len(o.axes) for o in dots(algebra)] == [1, 1]
        else:
            assert written == [{8, 2048}, {8, 2048, 64}] and made == [{8, 64}, {8, 2048, 64}]
    kernel = one(kernels_of(candidates, 1))  # Q (K^T V) also in one kernel, the loop over keys
    assert size(graph, kernel) == 2048 and ops(kernel, body=True) == Counter(dot=1)
    assert ops(kernel, body=False, depth=1) == Counter(acc=1, dot=1)


@pytest.mark.parametrize("name", NAMES)
def test_every_candidate_is_right(name: str) -> None:
    """Well formed, equal to the program over finite fields, and the best also in float64, tile by tile and ragged."""
    graph = reference(name)
    candidates, report = found(graph, ONE_KERNEL if name.startswith("ntrans") else TWO_KERNELS)
    assert report.stop is StopReason.EXHAUSTED
    assert {c.family for c in candidates} == {"kernels", "algebra"}
    assert candidates == sorted(candidates, key=lambda c: c.seconds)
    for c in candidates:
        check_graph(c.graph)
        check_schedule(c.graph, c.schedule)
        assert fingerprint(graph, c.graph), c.graph
    sizes = {a: 7 if n > 16 else 3 for a, n in graph.sizes.items()}
    small = graph.with_extents(sizes)
    for n, c in enumerate(candidates[:8]):
        tiled = c.graph.with_extents(sizes)
        assert worst_error(tiled, schedule(tiled, tile=2 + n % 3), small) < 1e-12


@pytest.mark.parametrize("name", ["rmsnorm_b1", "lora_b1", "gated_mlp_b1", "gqa_b1", "ntrans_b1"])
def test_winners(name: str, golden) -> None:
    """The best single kernels."""
    golden(str(next(kernels_of(found(reference(name), ONE_KERNEL)[0], 1))))

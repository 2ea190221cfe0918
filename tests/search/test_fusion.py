"""Two kernels over the same grid and loop as one: what both compute is computed once, and all of it is the same."""

from dataclasses import replace
from functools import reduce

import jax
from mugraph.graphs import schedule
from search.references import H200, TWO_KERNELS, captured, worst_error

from mirage_jax.mugraph.builder import KernelBuilder, library, tensor
from mirage_jax.mugraph.check import check_graph, check_schedule
from mirage_jax.mugraph.graph import BlockGraph, KernelGraph, LoopBounds, Tensor
from mirage_jax.search.candidates import Candidate, tiled
from mirage_jax.search.decompose.fusion import combined, fuse, fused, inline, inlined
from mirage_jax.search.decompose.output_slices import joined, output_slice
from mirage_jax.search.enumerate.window_search import Search
from mirage_jax.verify.equivalence.certificate import certify

X, W, V = tensor("x0", "i,k"), tensor("x1", "j,k"), tensor("x2", "l,k")


def kernel(name: str, weight: str, axis: str, grid: str, out: str) -> BlockGraph:
    """out[i,axis] = sum over k of exp(x) weight, written with its operands in another order for each axis."""
    k = KernelBuilder(name, grid, "k")
    x, w = k.load(X), k.load(tensor(weight, (axis, "k")))
    e = k.op("exp", x)
    k.store(tensor(out, ("i", axis)), k.op("acc", k.op("dot", *((e, w) if axis == "j" else (w, e)), axes="k")))
    return k.build()


def pair(grid: str = "i", other: str = "i") -> KernelGraph:
    kernels = kernel("k0", "x1", "j", grid, "t0"), kernel("k1", "x2", "l", other, "t1")
    return KernelGraph((X, W, V), kernels, ("t0", "t1"), (("i", 64), ("j", 16), ("k", 256), ("l", 16)))


def test_what_both_compute_is_computed_once() -> None:
    graph = pair("i", "i,l")
    whole = fuse(graph, 0, 1)
    assert whole is not None
    (one,) = whole.kernels
    check_graph(whole)
    assert one.grid == ("i",) and sum(op.op == "exp" for op in one.ops) == 1 and len(one.loads) == 3
    assert worst_error(whole, schedule(whole, tile=5), graph) < 1e-12


def test_what_cannot_be_one_kernel() -> None:
    graph = pair()
    first, second = graph.kernels
    assert isinstance(first, BlockGraph) and isinstance(second, BlockGraph)

    assert fuse(pair("i", "l"), 0, 1) is None, "no axis in both grids"
    assert fuse(pair("i", "i,k.g"), 0, 1) is None, "a part of an axis is always on the grid"
    bounded = replace(second, loop_bounds=LoopBounds("i", None, 0))
    assert fuse(replace(graph, kernels=(first, bounded)), 0, 1) is None, "other steps of the loop"
    after = kernel("k1", "t0", "l", "i", "t1")
    assert fuse(replace(graph, kernels=(first, after)), 0, 1) is None, "one reads what the other makes"


def test_row_statistics_of_two_outputs() -> None:
    """Two sums of a softmax: the maxima and sums of rows that each begins with are one kernel and one tensor."""

    def both(x: jax.Array, w: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        p = jax.nn.softmax(x)
        return p @ w, p @ v

    graph = captured(both, (4096, 4096), (4096, 64), (4096, 64))
    found = [Search(output_slice(graph, n), H200, TWO_KERNELS, families=("kernels",)).run() for n in graph.outputs]
    apart, (together, *_) = joined(graph, found), combined(graph, found, H200)
    assert apart is not None
    assert len(together.graph.kernels) < len(apart.graph.kernels) and together.seconds < apart.seconds
    late = combined(graph, found, H200, until=0.0)
    assert 1 <= len(late) <= 2, "the best of each slice, as they are and fused"
    check_graph(together.graph)
    check_schedule(together.graph, together.schedule)
    assert certify(graph, together.graph).bound <= 1e-12
    assert fused(together, H200, {}) is together


def test_what_suits_the_first_output_is_shared_too() -> None:
    """Each output likes row sums of its own best. To share those of the second is better than not to share; those of
    the first are better still, which is seen if the second one chooses first.
    """
    x, u, v, p, w, q, r = inputs = [tensor(name, f"i,{axis}") for name, axis in zip("xuvpwqr", "kkkhhmm", strict=True)]
    extents = (("h", 1024), ("i", 4096), ("k", 4096), ("m", 4608))

    def product(k: KernelBuilder, *factors: Tensor) -> str:
        return reduce(lambda a, b: k.op("mul", a, b), map(k.load, factors))

    def candidate(out: str, summed: list[Tensor], *factors: Tensor) -> Candidate:
        rows, axes = KernelBuilder("rows", "i", "k"), ",".join(factors[0].axes)
        rows.store(tensor("s", "i"), rows.op("acc", rows.op("sum", product(rows, *summed), axes="k")))
        scaled = KernelBuilder("scaled", axes)
        scaled.store(tensor(out, axes), product(scaled, tensor("s", "i"), *factors))
        kernels = rows.build(), scaled.build()
        found = tiled(KernelGraph(tuple(inputs), kernels, (out,), extents), "kernels", (), H200)
        assert found is not None
        return found

    first = [candidate("y", [x], p), candidate("y", [u, v], p, w)]
    second = [candidate("z", [u, v], q), candidate("z", [x], q, r)]
    assert first[0].seconds < first[1].seconds and second[0].seconds < second[1].seconds
    best = combined(KernelGraph(tuple(inputs), (), ("y", "z"), extents), [first, second], H200)[0]
    assert sum(isinstance(k, BlockGraph) and k.loop == "k" for k in best.graph.kernels) == 1
    assert not any(load.tensor in ("u", "v") for k in best.graph.kernels for load in k.loads)


def small_and_two_readers() -> KernelGraph:
    """t = exp(x) x, read as t[i,k] in a loop over k beside x, and as t[k,i] (x is square) in a kernel without one."""
    x = tensor("x0", "i,k")
    k = KernelBuilder("small", "i,k")
    e = k.load(x)
    k.store(tensor("t", "i,k", "f16"), k.op("mul", k.op("exp", e), e))
    k.store(tensor("u", "i,k"), k.op("affine", e, scale=2))
    one = KernelBuilder("one", "i", "k")
    again, t, w = one.load(x), one.load(tensor("t", "i,k")), one.load(tensor("x1", "j,k"))
    one.store(tensor("y", "i,j"), one.op("acc", one.op("dot", one.op("add", t, again), w, axes="k")))
    two = KernelBuilder("two", "i")
    two.store(tensor("z", "i"), two.op("sum", two.load("t", "k,i"), axes="k"))
    extents = (("i", 24), ("j", 16), ("k", 24))
    return KernelGraph((x, tensor("x1", "j,k")), (k.build(), one.build(), two.build()), ("y", "z"), extents)


def test_what_is_pointwise_is_computed_where_it_is_read() -> None:
    graph = small_and_two_readers()
    without = inline(graph, 0)
    assert without is not None and [k.name for k in without.kernels if isinstance(k, BlockGraph)] == ["one", "two"]
    check_graph(without)
    one, two = without.kernels
    assert [(x.tensor, x.axes) for x in one.loads] == [("x0", ("i", "k")), ("x1", ("j", "k"))]  # x is read once
    assert [(x.tensor, x.axes) for x in two.loads] == [("x0", ("k", "i"))] and "affine" not in str(without)
    assert worst_error(without, schedule(without, tile=5), graph) < 1e-12
    apart = tiled(graph, "kernels", (), H200)
    assert apart is not None and inlined(apart, H200, {}).graph == without


def test_what_has_to_stay() -> None:
    graph = small_and_two_readers()
    small, one, _ = graph.kernels
    assert inline(graph, 1) is None and inline(graph, 2) is None, "not pointwise"
    assert inline(replace(graph, outputs=("y", "z", "t")), 0) is None, "a result"
    assert inline(replace(graph, outputs=("u",), kernels=(small,)), 0) is None, "nobody reads it"
    total = library("sum", [("t", "i,k")], tensor("z", "i"), axes="k")
    assert inline(replace(graph, kernels=(small, one, total)), 0) is None, "XLA reads it"


def test_no_output_slice_without_candidates() -> None:
    assert combined(pair(), [[]], H200) == []

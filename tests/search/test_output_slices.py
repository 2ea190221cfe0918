"""Wide regions with several outputs: each output on its own, and what was found for all of them as one program."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mugraph.graphs import schedule
from search.references import H200, TWO_KERNELS, captured, found, region, worst_error

from mirage_jax.jaxpr_frontend.partition.regions import analyse
from mirage_jax.jaxpr_frontend.translate.translate import Region
from mirage_jax.mugraph.check import check_graph, check_schedule
from mirage_jax.mugraph.evaluate import run
from mirage_jax.mugraph.graph import BlockGraph, KernelGraph, Library
from mirage_jax.mugraph.passes.merge_axes import simplify_axes
from mirage_jax.search.candidates import Candidate
from mirage_jax.search.decompose.fusion import combined
from mirage_jax.search.decompose.output_slices import SUMS, followed, joined, output_slice, shared_operands, waists
from mirage_jax.search.decompose.subprocesses import SubSearch, search_part
from mirage_jax.search.driver import _output_slices, search
from mirage_jax.search.enumerate.kernels import Space
from mirage_jax.search.enumerate.window_search import FAMILIES, Search
from mirage_jax.verify.equivalence.certificate import certify, fingerprint

QKV = ((2, 4096, 64), (2, 64, 4096), (2, 4096, 64), (2, 4096, 64))


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


def test_sums_over_rows_and_over_columns_of_one_product_have_kernels() -> None:
    """A contrastive loss needs both. Two kernels make them, relative to maxima of rows and of columns, in one plan."""

    def both(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = x @ y.T
        return jax.nn.logsumexp(logits, axis=0), jax.nn.logsumexp(logits, axis=1)

    specs = [jax.ShapeDtypeStruct((8192, 256), np.dtype("bfloat16"))] * 2
    (region,) = analyse(jax.make_jaxpr(both)(*specs)).regions
    candidates, report = search(region.graph, H200, Space(max_ops=14), seconds=20.0)
    assert report.windows == 1 and not report.output_slices
    best = next(c for c in candidates if c.family == "kernels")
    certify(region.graph, best.graph)


def masked_square(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> tuple[jax.Array, ...]:
    """Gradients of a loss that reads the result of an attention again."""

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.sum((jax.nn.softmax(jnp.where(mask, q @ k.swapaxes(-1, -2), -1e30)) @ v) ** 2)

    return jax.grad(loss, (0, 1, 2))(q, k, v)


def test_waists() -> None:
    """The attention's result is small and read by products; its weights are too large, and gradients are outputs."""
    specs = [jax.ShapeDtypeStruct((8, 256, 32), np.dtype("float32"))] * 3 + [
        jax.ShapeDtypeStruct((256,), np.dtype(bool))
    ]
    (region,) = analyse(jax.make_jaxpr(masked_square)(*specs).jaxpr).regions
    graph = simplify_axes(region.graph)
    (stored,) = waists(graph)
    assert sorted(map(graph.extent, graph.tensors[stored].axes)) == [8, 32, 256]
    slices = {name: output_slice(graph, name, (stored,)) for name in (stored, *graph.outputs)}
    rng = np.random.default_rng(0)
    known = {t.name: rng.standard_normal([graph.extent(a) for a in t.axes]) for t in graph.inputs}
    known = {t.name: known[t.name] > 0 if t.dtype == "bool" else known[t.name] for t in graph.inputs}
    wanted = run(graph, [known[t.name] for t in graph.inputs])
    for name, one in slices.items():
        check_graph(one)
        (known[name],) = run(one, [known[t.name] for t in one.inputs])
    assert all(stored in {t.name for t in slices[name].inputs} for name in graph.outputs)
    for name, y in zip(graph.outputs, wanted, strict=True):
        np.testing.assert_allclose(known[name], y, rtol=1e-9, atol=1e-9)


def test_a_gradient_of_a_bias_follows_from_one_that_is_stored() -> None:
    """It sums the gradient of the keys, of which an output is a multiple: no product is made for it."""

    def attend(q: jax.Array, k: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.sum(jax.nn.softmax(q @ ((k + b) / 8).swapaxes(-1, -2)) ** 2)

    specs = [jax.ShapeDtypeStruct(s, np.dtype("float32")) for s in ((4, 256, 32), (4, 256, 32), (32,))]
    (region,) = analyse(jax.make_jaxpr(jax.grad(attend, (1, 2)))(*specs).jaxpr).regions
    graph = simplify_axes(region.graph)
    follow = followed(graph)
    ((stored,),) = set(follow.values())
    assert set(follow) == set(graph.outputs)
    assert sorted(map(graph.extent, graph.tensors[stored].axes)) == [4, 32, 256]
    keys, bias = (output_slice(graph, name, (stored,)) for name in graph.outputs)
    for one in (keys, bias):
        check_graph(one)
        assert [t.name for t in one.inputs] == [stored] or one.outputs == (stored,)
        assert one.outputs == (stored,) or not any(op.op == "dot" for k in one.kernels for op in k.ops)


def test_what_reads_a_product_follows_from_nothing_that_is_stored() -> None:
    """The sum of a softmax follows from weights that are stored; its logarithm reads the maximum of the logits, too."""

    def kept(q: jax.Array, k: jax.Array) -> tuple[jax.Array, ...]:
        logits = q @ k.T
        top = jnp.max(logits, -1, keepdims=True)
        weights = jnp.exp(logits - top)
        total = jnp.sum(weights, -1)
        return weights, total, jnp.log(total) + top[:, 0]

    specs = [jax.ShapeDtypeStruct((256, 64), np.dtype("float32"))] * 2
    (region,) = analyse(jax.make_jaxpr(kept)(*specs).jaxpr).regions
    graph = simplify_axes(region.graph)
    made = {k.name: k.op.op for k in graph.kernels}
    assert {made[name]: [made[x] for x in of] for name, of in followed(graph).items()} == {"sum": ["exp"]}
    slices = _output_slices(graph, H200, Space(max_ops=14))
    for one, its in slices:
        search_part(SubSearch(one, H200, its, 20_000, FAMILIES, 20.0, whole=graph))


def test_gradient_of_a_cross_entropy_stores_that_of_its_logits() -> None:
    """Two products read it, and it is no larger than the logits: one kernel per row, then the library's products."""

    def loss(h: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
        logits = (h @ w).astype(jnp.float32)
        of_label = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
        return (jax.nn.logsumexp(logits, axis=-1) - of_label).mean()

    specs = [jax.ShapeDtypeStruct(s, t) for s, t in (((8192, 768), "bfloat16"), ((768, 32768), "bfloat16"))]
    specs.append(jax.ShapeDtypeStruct((8192,), np.dtype("int32")))
    (region,) = analyse(jax.make_jaxpr(jax.grad(loss, (0, 1)))(*specs)).regions
    graph = simplify_axes(region.graph)
    (stored,) = shared_operands(graph)
    assert sorted(map(graph.extent, graph.tensors[stored].axes)) == [8192, 32768]
    candidates, report = search(graph, H200, Space(max_ops=14), seconds=60.0)
    assert report.output_slices == 3
    best = next(c for c in candidates if c.family == "kernels")
    first, *products = best.graph.kernels
    assert isinstance(first, BlockGraph) and "shift" in {op.op for op in first.ops}
    assert [k.op.op for k in products if isinstance(k, Library)] == ["dot", "dot"]
    certify(graph, best.graph)


def test_weights_of_an_attention_are_no_shared_operand(gradient: KernelGraph) -> None:
    """Their gradients are read by two products, but are larger than queries, keys and values."""
    assert not shared_operands(gradient)


def test_sums_are_waists_where_products_alone_leave_slices_too_wide() -> None:
    """The gradient of forces between particles: it reads all forces again, and no matrix of pairs is stored."""

    def energy(x: jax.Array, mass: jax.Array) -> jax.Array:
        gap = x[None] - x[:, None]
        weight = mass * (jnp.sum(gap * gap, -1) + 1e-2) ** -1.5
        return jnp.sum(jnp.square(jnp.sum(weight[..., None] * gap, 1)))

    specs = [jax.ShapeDtypeStruct(s, np.dtype("float32")) for s in ((4096, 3), (4096,))]
    largest = max(analyse(jax.make_jaxpr(jax.grad(energy, (0, 1)))(*specs).jaxpr, remat=True).regions, key=size)
    graph = simplify_axes(largest.graph)
    (force,) = set(waists(graph, SUMS)) - set(waists(graph))
    assert sorted(map(graph.extent, graph.tensors[force].axes)) == [3, 4096]
    space = Space(max_ops=14)
    assert not _output_slices(graph, H200, space) and not _output_slices(graph, H200, space, waists(graph))
    slices = _output_slices(graph, H200, space, waists(graph, SUMS))
    assert {one.outputs[0] for one, _ in slices} == {force, *graph.outputs}
    for one, _ in slices:
        check_graph(one)
        assert force in {t.name for t in one.inputs} or one.outputs == (force,)


def size(region: Region) -> int:
    return len(region.graph.kernels)


def shapes(graph: KernelGraph, name: str) -> set[str]:
    return set(graph.tensors[name].axes)


def test_slices_are_programs_of_their_own(gradient: KernelGraph) -> None:
    assert len(gradient.outputs) == 3
    for name in gradient.outputs:
        one = output_slice(gradient, name)
        check_graph(one)
        assert one.outputs == (name,) and len(one.kernels) < len(gradient.kernels)


@pytest.fixture(scope="module")
def by_output(gradient: KernelGraph) -> dict[str, list[Candidate]]:
    """Kernels for the gradient of each operand alone, by its axes."""
    space = Space(max_ops=14, max_kernels=2, splits=False)
    return {
        "".join(sorted(shapes(gradient, name))): Search(
            output_slice(gradient, name), H200, space, 120.0, 20_000_000, ("kernels",)
        ).run()
        for name in gradient.outputs
    }


def test_gradient_of_the_keys_makes_the_weights_anew(
    gradient: KernelGraph, by_output: dict[str, list[Candidate]]
) -> None:
    """As FlashAttention's backward pass: row sums, and those of the weights' gradients, in one kernel; then a kernel
    over the keys that recomputes the weights from them. No tensor has both queries and keys as axes.
    """
    best = next(c for c in by_output["ikl"] if not any({"j", "l"} <= {*t.axes} for t in c.graph.tensors.values()))
    first, second = best.graph.kernels
    assert isinstance(first, BlockGraph) and isinstance(second, BlockGraph)
    assert "j" in first.grid and "l" in second.grid and second.loop == "j"
    for kernel, shifts in ((first, 1), (second, 0)):
        ops = [o.op for o in kernel.ops]
        assert ops.count("exps") == 1 and ops.count("shift") == shifts
    assert_same(gradient, best)


def test_gradient_of_the_keys_rounds_nothing_that_cancels(by_output: dict[str, list[Candidate]]) -> None:
    """Row sums of the weights' gradients are made of products of inputs, whose operands need no rounding: as products
    of weights and values, which cost a little less, they would be rounded before they are subtracted.
    """
    best = by_output["ikl"][0]
    for kernel in best.graph.kernels:
        assert isinstance(kernel, BlockGraph)
        loads = {x.name for x in kernel.loads}
        for op in (o for o in kernel.ops if o.op == "dot"):
            x, y = (set(kernel.axes_of[a]) for a in op.args)
            assert loads.issuperset(op.args) or kernel.only_scaled(op.name) or not (x - y and y - x)


def test_gradient_of_the_queries(gradient: KernelGraph, by_output: dict[str, list[Candidate]]) -> None:
    """Row sums first. In one pass over the keys it would be a difference of two rounded sums."""
    best, *others = by_output["ijk"]
    sums, kernel = best.graph.kernels
    assert isinstance(sums, BlockGraph) and isinstance(kernel, BlockGraph)
    assert sums.loop == kernel.loop == "l" and "j" in kernel.grid and not best.loses_digits
    assert_same(gradient, best)
    assert any(len(c.graph.kernels) == 1 and c.loses_digits and c.seconds < best.seconds for c in others)


def test_all_gradients_in_three_kernels(gradient: KernelGraph, by_output: dict[str, list[Candidate]]) -> None:
    """Row sums, then a pass over the keys for the queries, and one over the queries for the rest (FlashAttention-2)."""
    names = {"".join(sorted(shapes(gradient, name))): name for name in gradient.outputs}
    best, *others = combined(gradient, [by_output[axes] for axes in names], H200)
    assert {len(c.graph.kernels) for c in others} > {3, 4}, "less of it in one kernel, for devices that disagree"
    passes = {k.loop: k for k in best.graph.kernels if isinstance(k, BlockGraph) and outputs_of(k) & {*names.values()}}
    assert len(best.graph.kernels) == 3 and outputs_of(passes["l"]) == {names["ijk"]}
    assert outputs_of(passes["j"]) == {*gradient.outputs} - {names["ijk"]}
    for kernel in best.graph.kernels:
        assert sum(op.op == "exps" for op in kernel.ops) == 1
    assert not any({"j", "l"} <= {*t.axes} for t in best.graph.tensors.values())
    assert_same(gradient, best)


def outputs_of(kernel: BlockGraph) -> set[str]:
    return {s.tensor.name for s in kernel.stores}


def test_heads_that_share_keys() -> None:
    """The gradient of their values is a sum over queries and over heads: these one by one, and no scores in memory."""

    def gradient(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array) -> jax.Array:
        def attend(v: jax.Array) -> jax.Array:
            return jnp.einsum("hgqk,khd->qhgd", jax.nn.softmax(jnp.einsum("qhgd,khd->hgqk", q, k)), v)

        return jax.vjp(attend, v)[1](g)[0]

    queries, keys = (4096, 8, 4, 64), (4096, 8, 64)
    graph = captured(gradient, queries, keys, keys, queries, dtype="bfloat16")
    best = next(c for c in found(graph, replace(TWO_KERNELS, max_kernels=3))[0] if c.family == "kernels")
    kernels = [k for k in best.graph.kernels if isinstance(k, BlockGraph)]
    assert len(kernels) == len(best.graph.kernels)
    (head,) = (a for a, n in graph.extents if n == 4)
    summing = [k for k in kernels if k.loop == head]
    assert summing and all(head in k.grid for k in kernels if k not in summing)
    scores = graph.extent(head) * 8 * 4096**2
    assert all(np.prod([graph.extent(a) for a in t.axes]) < scores for t in best.graph.tensors.values())
    assert certify(graph, best.graph).bound <= 1e-12
    sizes = {a: 7 if n == 4096 else 4 if n == 64 else 2 if n == 8 else n for a, n in graph.sizes.items()}
    small, tiled = graph.with_extents(sizes), best.graph.with_extents(sizes)
    plan = schedule(tiled, tile=3)
    one = dict.fromkeys(best.single, 1)
    single = tuple(replace(k, tiles=tuple((a, one.get(a, n)) for a, n in k.tiles)) for k in plan.kernels)
    assert worst_error(tiled, replace(plan, kernels=single), small) < 1e-12


def assert_same(gradient: KernelGraph, found: Candidate) -> None:
    """What was found is well formed, proven, and right tile by tile."""
    program = gradient if len(found.graph.outputs) > 1 else output_slice(gradient, *found.graph.outputs)
    check_schedule(found.graph, found.schedule)
    assert certify(program, found.graph).bound <= 1e-12
    sizes = {a: 7 if n == 4096 else 4 if n == 64 else n for a, n in program.sizes.items()}
    small, tiled = program.with_extents(sizes), found.graph.with_extents(sizes)
    assert worst_error(tiled, schedule(tiled, tile=3), small) < 1e-12


def test_equal_kernels_run_once() -> None:
    """Two outputs that need the same sums: what both output slices begin with is one kernel of the whole."""

    def both(x: jax.Array, w: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        p = jax.nn.softmax(x)
        return p @ w, p @ v

    graph = captured(both, (64, 4096), (4096, 512), (4096, 512))
    output_slices = [found(output_slice(graph, n), replace(TWO_KERNELS, max_kernels=2))[0] for n in graph.outputs]
    pairs = [[c for c in cs if len(c.graph.kernels) == 2 and not c.graph.split_axes][:1] for cs in output_slices]
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


def test_the_gradient_of_a_bias_sums_the_batch_step_by_step() -> None:
    """All large tensors have the batch, which this gradient sums: blocks of rows and columns, and a loop over texts."""

    def gradient(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array, g: jax.Array) -> jax.Array:
        def attend(bias: jax.Array) -> jax.Array:
            return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias), v)

        return jax.vjp(attend, bias)[1](g)[0]

    shape = (4, 1024, 8, 64)
    graph = simplify_axes(region(gradient, shape, shape, shape, (8, 1024, 1024), shape, dtype="bfloat16").graph)
    space = replace(TWO_KERNELS, splits=False)
    best = next(c for c in Search(graph, H200, space, 30.0).run() if c.family == "kernels")
    loops = {k.loop for k in best.graph.kernels if isinstance(k, BlockGraph)}
    (batch,) = {a for a, n in graph.extents if n == 4}
    assert batch in loops
    stored = [s.tensor.axes for k in best.graph.kernels for s in k.stores if s.tensor.name not in graph.outputs]
    assert not any({a for a, n in graph.extents if n == 1024} <= {*axes} for axes in stored), "no scores in memory"

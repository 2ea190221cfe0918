"""Structures serve every shape; formulas say in symbols what the cost model computes in numbers."""

from dataclasses import replace
from itertools import islice

import jax
import pytest
from search.references import H200, captured, found, reference

from mirage_jax.bench.programs import attention, gated_mlp, lora, rmsnorm
from mirage_jax.compiler.tuning_session import MAX_STORED_STRUCTURES
from mirage_jax.cost.formula import formula
from mirage_jax.cost.roofline import estimate
from mirage_jax.errors import GraphError, ParseError
from mirage_jax.limits import MAX_PARTS
from mirage_jax.mugraph.check import check_graph, check_schedule
from mirage_jax.mugraph.graph import BlockGraph, KernelSchedule, Library, Schedule, is_part
from mirage_jax.mugraph.parser import parse
from mirage_jax.search.candidates import (
    as_launched,
    diverse,
    in_one_launch,
    parts_of,
    restore,
    structure,
    tiled,
    to_json,
    together,
    with_sizes,
)
from mirage_jax.search.enumerate.extract import negated_after_sums
from mirage_jax.verify.equivalence.certificate import certify, fingerprint

SHAPES = {
    "rmsnorm": (rmsnorm, [(16, 512), (512, 384)], [(4, 1024), (1024, 768)]),
    "lora": (lora, [(16, 256), (256, 512), (256, 16), (16, 512)], [(48, 128), (128, 768), (128, 8), (8, 768)]),
    "gated_mlp": (gated_mlp, [(8, 512), (512, 512), (512, 512)], [(32, 256), (256, 1024), (256, 1024)]),
    "attention": (attention, [(2, 64, 64), (2, 64, 512), (2, 512, 64)], [(6, 32, 32), (6, 32, 2048), (6, 2048, 32)]),
}


@pytest.fixture(params=SHAPES)
def pair(request: pytest.FixtureRequest):
    fn, here, there = SHAPES[request.param]
    return captured(fn, *here, dtype="float16"), captured(fn, *there, dtype="float16")


def test_found_once_for_every_shape(pair) -> None:
    """What a search finds at one shape is, at another, well formed, tiled for it and equal to the program there."""
    here, there = pair
    assert structure(here) == structure(there), "the mean's 1/4096 is the extent of an axis"
    candidates, _ = found(here)
    kernels = [c for c in candidates if c.family == "kernels"]
    restored = restore(to_json(kernels), there, H200)
    assert restored and [c.seconds for c in restored] == sorted(c.seconds for c in restored)
    assert {structure(c.graph) for c in restored} <= {structure(c.graph) for c in kernels}
    for c in restored:
        check_graph(c.graph)
        check_schedule(c.graph, c.schedule)
        assert c.graph.sizes == there.sizes and fingerprint(there, c.graph)


def test_same_shape_gives_the_same_graphs(pair) -> None:
    here, _ = pair
    candidates, _ = found(here)
    kernels = {str(c.graph) for c in candidates if c.family == "kernels"}
    assert {str(c.graph) for c in restore(to_json(candidates), here, H200) if c.family == "kernels"} == kernels


BEST_ELSEWHERE = [("gqa_b8", "prefill_attn"), ("gqa_b1", "mha_b8"), ("gated_mlp_b1", "gated_mlp_b8")]


@pytest.mark.parametrize("here,there", BEST_ELSEWHERE)
def test_what_is_stored_is_good_elsewhere(here: str, there: str) -> None:
    """For few rows the best plans split the keys, for many they do not: of each kind of plan some are kept."""
    kernels = [c for c in found(reference(here))[0] if c.family == "kernels"]
    best = next(c for c in found(reference(there))[0] if c.family == "kernels")
    restored = restore(to_json(list(islice(diverse(kernels), MAX_STORED_STRUCTURES))), reference(there), H200)
    assert best.seconds / 1.1 < restored[0].seconds < 1.1 * best.seconds


def test_library_operators_cost_what_they_cost_in_a_search() -> None:
    graph = reference("rmsnorm_b1")
    for c in found(graph)[0]:
        if c.family == "kernels" and any(isinstance(k, Library) for k in c.graph):
            (same,) = restore(to_json([c]), graph, H200)
            assert same.seconds == pytest.approx(estimate(same.graph, same.schedule, H200))
            return
    raise AssertionError("no candidate has both kernels and library operators")


def test_what_is_no_structure() -> None:
    graph = captured(lora, *SHAPES["lora"][1])
    text = structure(graph)
    with pytest.raises(ParseError, match="not a structure over the axes"):
        with_sizes(text, {"i": 3})
    with pytest.raises(GraphError, match=r"\|zz\|"):
        with_sizes(text.replace("add ", "add{ca=|zz|} "), graph.sizes)
    for nonsense in (None, {}, [1], [{}], [{"structure": "x", "family": "kernels", "single": []}]):
        assert restore(nonsense, graph, H200) == []


def test_formula_is_the_model_in_symbols() -> None:
    graph = captured(lambda x, w: jax.nn.silu(x @ w), (64, 512), (512, 256), dtype="float16")
    best = next(c for c in found(graph)[0] if c.family == "kernels" and not c.graph.split_axes)
    total = 0.0
    for kernel, sizes in zip(best.graph.kernels, best.schedule.kernels, strict=True):
        assert isinstance(kernel, BlockGraph)
        values = {f"T_{a}": n for a, n in sizes.tiles if not is_part(a)} | dict(best.graph.sizes)
        expression = formula(kernel, best.graph, H200, sizes.num_warps, sizes.num_stages)
        total += float(expression.subs({s: values[s.name] for s in expression.free_symbols}))
    assert total == pytest.approx(best.seconds, rel=1e-6)


def test_estimate_of_a_written_graph_is_the_model_of_the_search() -> None:
    """What is compared with measured times is what candidates were ordered by."""
    graph = reference("gqa_b1")
    candidates = [c for c in found(graph)[0] if c.family == "kernels"]
    assert any(c.graph.split_axes for c in candidates)
    for c in candidates:
        if all(isinstance(k, BlockGraph) for k in c.graph):
            assert estimate(c.graph, c.schedule, H200) == pytest.approx(c.seconds, rel=0.1), c.graph  # shifts come last


@pytest.mark.parametrize(("columns", "least", "most"), [(1024, 0.4, 0.7), (65536, 0.9, 1.05)])
def test_kernels_of_one_launch_fill_the_device_together(columns: int, least: float, most: float) -> None:
    """Products with a vector: of few columns each leaves most of the device idle, of many it waits for memory."""
    text = f"""mugraph {{
  extents i=4096 j={columns} k={columns}
  input x: bf16[i]
  input y: bf16[i,j]
  input z: bf16[i,k]
"""
    for n, (axis, tensor) in enumerate((("j", "y"), ("k", "z"))):
        text += f"""  kernel k{n} grid({axis}) loop(i) {{
    %0 = load x[i]
    %1 = load {tensor}[i,{axis}]
    %2[{axis}] = dot{{axes=(i)}} %0 %1
    %3[{axis}] = acc %2
    store t{n}: bf16[{axis}] = %3
  }}
"""
    graph = parse(text + "  output t0 t1\n}")
    sizes = tuple(KernelSchedule((("i", 256), (axis, 32)), num_warps=4, num_stages=4) for axis in "jk")
    apart = estimate(graph, Schedule(sizes), H200)
    assert least * apart < estimate(graph, Schedule(sizes, joint=True), H200) < most * apart
    candidate = tiled(graph, "kernels", (), H200)
    assert candidate is not None
    launches = together(candidate, H200)
    assert launches is not None and launches.joint
    first, *_ = in_one_launch(graph, candidate.schedule)
    seconds = estimate(graph, launches, H200)
    assert seconds <= estimate(graph, first, H200)
    assert as_launched(candidate, H200).seconds == min(seconds, candidate.seconds)
    if columns == 1024:  # alone, blocks of few columns are better: there are more of them
        assert seconds < 0.9 * estimate(graph, first, H200)


def test_sums_are_negated_after_the_loop() -> None:
    """Then a loop may carry the tiles that it sums."""
    text = """
mugraph {
  extents a=64 i=64
  input x: f32[a,i]
  input y: f32[i]
  kernel k grid(a) loop(i) {
    %0 = load x[a,i]
    %1 = load y[i]
    %2[a] = dot{axes=(i)} %0 %1
    %3[a] = affine{scale=-1} %2
    %4[a] = acc %3
    %5[a] = affine{scale=2} %4
    store o: f32[a] = %5
  }
  output o
}"""
    graph = parse(text)
    (kernel,) = graph.kernels
    assert isinstance(kernel, BlockGraph)
    changed = negated_after_sums(kernel)
    assert [op.op for op in changed.ops] == ["dot", "acc", "affine", "affine"]
    assert certify(graph, replace(graph, kernels=(changed,))).bound < 1e-12
    assert negated_after_sums(changed) == changed


def test_a_long_axis_is_split_into_tiles_too() -> None:
    assert parts_of(4096) == [2, 4, 8, 16, 32]
    assert parts_of(32768) == [2, 4, 8, 16, 32, 128, 256]
    assert parts_of(50257)[-2:] == [197, 393], "the last part is shorter"
    assert parts_of(24) == [] and max(parts_of(10**6)) <= MAX_PARTS


SUM_OF_ALL_PAIRS = """mugraph {
  extents i=128 j=2048 k=128
  input x: f32[j,i]
  input y: f32[j,k]
  kernel k0 grid(k,j) {
    %0 = load x[j,i]
    %1 = load y[j,k]
    %2[j,k,i] = add %1 %0
    %3[j,k] = sum{axes=(i)} %2
    store o: f32[j,k] = %3
  }
  output o
}"""
PRODUCTS = """mugraph {
  extents i=128 j=128 k=128
  input x: f32[k,j,i]
  input y: f32[k,i]
  kernel k0 grid(k,j) {
    %0 = load x[k,j,i]
    %1 = load y[k,i]
    %2[k,j] = dot{axes=(i)} %0 %1
    store o: f32[k,j] = %2
  }
  output o
}"""


@pytest.mark.parametrize(("text", "single"), [(SUM_OF_ALL_PAIRS, "j"), (PRODUCTS, "k")])
def test_batch_axes_are_chosen_anew_where_kernels_were_fused(text: str, single: str) -> None:
    """Each of two windows may have had another batch axis. Those of a product stay."""
    best = tiled(parse(text), "kernels", ("k",), H200)
    assert best is not None
    sizes = dict(best.schedule.kernels[0].tiles)
    assert sizes[single] == 1 and all(n > 1 for a, n in sizes.items() if a != single)

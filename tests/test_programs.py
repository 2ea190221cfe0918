"""From the user's function to numbers, for every program structure of the benchmark.

Capture, search, Triton source, and then the interpreter against float64 (three dtypes, divisible and ragged shapes),
and the compilers of three GPU generations. Nothing here is hand-written but the shapes: every kernel is what the search
found, first of its kind in its own ranking.
"""

from dataclasses import dataclass, replace
from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxpr_frontend.frontend_programs import PROGRAMS
from search.references import TWO_KERNELS, captured, found, reference, region

from mirage_jax.bench.programs import BenchProgram, program
from mirage_jax.compiler.tuning import tile_variants
from mirage_jax.jaxpr_frontend.partition.regions import analyse
from mirage_jax.mugraph.check import check_schedule
from mirage_jax.mugraph.dtypes import numpy_dtype
from mirage_jax.mugraph.evaluate import run
from mirage_jax.mugraph.graph import Kernel, KernelGraph, KernelSchedule, Schedule, is_part
from mirage_jax.mugraph.passes.merge_axes import simplify_axes
from mirage_jax.search.candidates import diverse
from mirage_jax.search.enumerate.kernels import Space

triton = pytest.importorskip("triton")

from mirage_jax.lower.backends import compile_for  # noqa: E402
from mirage_jax.lower.runtime.launch import sources  # noqa: E402
from mirage_jax.verify.exact.interpreters.triton import interpret  # noqa: E402

type Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Case:
    """A structure of the benchmark: sizes to run it at, and the axis to split, if any, with its number of parts."""

    name: str
    divisible: Shapes
    ragged: Shapes
    split: str | None = None
    parts: int = 0

    kernels: int = 2  # at most; one where there are too many ways to make two, and one is best

    @property
    def space(self) -> Space:
        return replace(TWO_KERNELS, max_kernels=self.kernels)


def attention(h: int, q: int, d: int, n: int) -> Shapes:
    return (h, q, d), (h, d, n), (h, n, d)


CASES = {
    "rmsnorm": Case("rmsnorm_b1", ((16, 64), (64, 32)), ((17, 100), (100, 33))),
    "rmsnorm of two rows": Case("rmsnorm_b1", ((2, 64), (64, 32)), ((3, 100), (100, 33))),
    "gated mlp": Case("gated_mlp_b1", ((16, 64), (64, 32), (64, 32)), ((17, 100), (100, 33), (100, 33))),
    "ntrans": Case("ntrans_b1", ((4, 64),) * 3, ((3, 100),) * 3, kernels=1),
    "lora": Case("lora_b1", ((16, 64), (64, 32), (64, 16), (16, 32)), ((17, 100), (100, 33), (100, 5), (5, 33))),
    "attention": Case("gqa_b1", attention(2, 32, 16, 64), attention(1, 33, 24, 100)),
    "split attention": Case("gqa_b1", attention(2, 16, 16, 64), attention(2, 17, 24, 100), "l", 3),
    "decoding": Case("gqa_decode_b1", attention(2, 8, 16, 64), attention(3, 5, 17, 100), "l", 2),
    "qk norm": Case("qknorm_gqa_b1", attention(2, 32, 16, 64), attention(2, 33, 24, 100), kernels=1),
    "split qk norm": Case("qknorm_gqa_b1", attention(2, 16, 16, 64), attention(2, 17, 24, 100), "l", 3),
    "exp mlp": Case("mlp", ((16, 64), (64, 8), (8, 32)), ((17, 100), (100, 5), (5, 33))),
    "experts": Case("moe", ((2, 8, 64), (2, 64, 32), (2, 32, 64)), ((2, 5, 33), (2, 33, 17), (2, 17, 33))),
    "(AB)v": Case("abv", ((32, 64), (64, 32), (32,)), ((33, 100), (100, 17), (17,))),
    "linear attention": Case("linear_attention", ((2, 64, 16),) * 3, ((2, 100, 17),) * 3),
}

DTYPES = ("float16", "bfloat16", "float32")

# Of the largest output. Sums are kept in f32. What remains in 16-bit types is to round an output once, and the operands
# of matrix products that are made in the kernel (probabilities, normalized rows) or between kernels, which average out:
# four units of 2^-11 or 2^-8. In f32: sums of 100 terms in another order, and exp of logits up to about 20.
TOLERANCE = {"float16": 4 * 2.0**-11, "bfloat16": 4 * 2.0**-8, "float32": 4e-6}


def resized(case: Case, shapes: Shapes, dtype: str) -> BenchProgram:
    p = program(case.name)
    # weights are scaled by the root of their fan-in, as in the benchmark
    scales = tuple(1.0 if s == 1 else shape[-2] ** -0.5 for s, shape in zip(p.scales, shapes, strict=True))
    named = tuple((n, s) for (n, _), s in zip(p.shapes, shapes, strict=True))
    return replace(p, shapes=named, scales=scales, dtype=dtype)


def best(p: BenchProgram, case: Case) -> KernelGraph:
    """The search's first candidate made of kernels, with the case's axis split or none, for a program at its own sizes.

    Nobody would split 100 keys over the grid: that is searched with many more keys. The structure serves all sizes.
    """
    long = 64 if case.split else 1
    keys = p.shapes[-1][1][1] if case.split else 0
    shapes = [tuple(n * long if n == keys else n for n in shape) for _, shape in p.shapes]
    wanted = (case.split,) if case.split else ()
    candidates, _ = found(captured(p.fn, *shapes, dtype=p.dtype), case.space)
    graph = next(c.graph for c in candidates if c.family == "kernels" and c.graph.split_axes == wanted)
    return graph.with_extents({a: n // long if a in wanted else n for a, n in graph.extents})


def schedule(graph: KernelGraph, case: Case) -> Schedule:
    """Tiles so small that there are several blocks and, in kernels with a loop, several steps: 16, of short axes 1."""

    def one(kernel: Kernel) -> KernelSchedule:
        divided = [a for a in kernel.divided if not is_part(a)]
        tiles = KernelSchedule(tuple((a, 1 if graph.extent(a) < 16 else 16) for a in divided))
        assert any(graph.extent(a) > tiles.tile(a) for a in kernel.grid if not is_part(a))
        assert kernel.loop is None or graph.extent(kernel.loop) > tiles.tile(kernel.loop)
        return tiles

    out = Schedule(tuple(map(one, graph)), ((case.split, case.parts),) if case.split else ())
    check_schedule(graph, out)
    return out


RUNS = [(name, sizes) for name in CASES for sizes in ("divisible", "ragged")]
RUNS.remove(("split qk norm", "divisible"))  # its search takes seconds


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name,sizes", RUNS)
def test_numbers(name: str, sizes: str, dtype: str) -> None:
    case = CASES[name]
    p = resized(case, getattr(case, sizes), dtype)
    graph, whole = best(p, case), region(p.fn, *(shape for _, shape in p.shapes), dtype=dtype)
    args = p.draw()
    tensors = zip(whole.prepare([args[b.value] for b in whole.inputs]), graph.inputs, strict=True)
    arrays = [np.asarray(x).reshape([graph.extent(a) for a in t.axes]) for x, t in tensors]
    results = interpret(graph, schedule(graph, case), arrays)
    shapes = [[whole.graph.extent(a) for a in whole.graph.tensors[n].axes] for n in whole.graph.outputs]
    (have,) = whole.finish([jnp.asarray(y).reshape(s) for y, s in zip(results, shapes, strict=True)])
    want = p.in_float64(args)
    assert have.shape == want.shape and have.dtype == dtype
    error = np.abs(np.asarray(have, np.float64) - want).max() / np.abs(want).max()
    assert error < TOLERANCE[dtype]


OTHERS = ("causal", "padding mask", "grouped query attention", "layer norm", "geglu", "soft cap", "log softmax", "rope")


@pytest.mark.parametrize("name", OTHERS)
def test_other_functions(name: str) -> None:
    """Masks, heads that share keys, rotations: the same chain, against the reference graph in float64."""
    p = PROGRAMS[name]
    (region,) = analyse(jax.make_jaxpr(p.fn)(*p.args).jaxpr).regions
    graph = simplify_axes(region.graph)
    space = replace(TWO_KERNELS, max_ops=28, max_kernels=1)  # both halves of what is rotated
    c = next(c for c in found(graph, space)[0] if c.family == "kernels")
    sizes = [KernelSchedule(tuple((a, 1 if a in c.single else 16) for a in k.divided)) for k in c.graph]
    inputs = sample(graph)
    (have,) = interpret(c.graph, Schedule(tuple(sizes)), inputs)
    (want,) = run(graph, inputs)
    error = np.abs(have.astype(np.float64) - want).max() / np.abs(want).max()
    assert error < TOLERANCE[have.dtype.name]


def sample(graph: KernelGraph) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    arrays = [(rng.standard_normal([graph.extent(a) for a in t.axes]), t.dtype) for t in graph.inputs]
    return [x > -1 if dtype == "bool" else x.astype(numpy_dtype(dtype)) for x, dtype in arrays]


@pytest.mark.parametrize("name", dict.fromkeys(c.name for c in CASES.values()))
def test_compiles(name: str) -> None:
    """The best kernels at the benchmark's own sizes, with the model's own tiles, for each generation of GPUs."""
    space = next(c.space for c in CASES.values() if c.name == name)
    candidates, _ = found(reference(name), space)
    c = next(c for c in candidates if c.family == "kernels")
    check_schedule(c.graph, c.schedule)
    for arch in (80, 90, 100):
        own = [source for source in sources(c.graph, c.schedule) if source is not None]  # others are a library's
        assert own
        for source in own:
            resources = compile_for(source, arch)
            assert resources.registers and ".target sm_" in resources.ptx


@pytest.mark.parametrize("name", ["gated_mlp_b8", "qknorm_gqa_b8"])
def test_large_tiles_fit(name: str) -> None:
    """Tiles are large at a batch of eight; the pipeline gets no more stages than the shared memory has buffers for."""
    candidates, _ = found(reference(name))
    texts: set[str] = set()
    for c in islice((c for c in diverse(candidates) if c.family == "kernels"), 4):
        for schedule in islice(tile_variants(c, 2), 3):
            for source in sources(c.graph, schedule):
                if source is not None and source.text not in texts:
                    texts.add(source.text)
                    assert compile_for(source, 90).fits, schedule
    assert len(texts) > 4

"""Loops with loop bounds in Triton: fewer steps, the same numbers."""

import numpy as np
import pytest
from lower.kernels import NUMPY
from mugraph.graphs import CAUSAL_BOUNDS, WINDOW, Program

from mirage_jax.lower.backends import compile_for
from mirage_jax.lower.runtime.launch import sources
from mirage_jax.lower.triton.emitter import emit
from mirage_jax.mugraph.graph import BlockGraph, KernelGraph, KernelSchedule, Schedule
from mirage_jax.mugraph.parser import parse
from mirage_jax.verify.exact.exact_check import exact_check
from mirage_jax.verify.exact.interpreters.triton import interpret
from mirage_jax.verify.exact.small_sizes import small_sizes


def sized(program: Program, name: str, n: int, dtype: str = "f32") -> KernelGraph:
    text = str(program.graph(program.candidates[name]))
    for tensor in "QKV":
        text = text.replace(f"input {tensor}: f32", f"input {tensor}: {dtype}")
    return parse(text).with_extents({"n": n, "d": 16, "e": 16})


def tiles(graph: KernelGraph, rows: int, columns: int, parts: int = 1) -> Schedule:
    sizes = KernelSchedule((("n'", rows), ("n", columns)))
    return Schedule((sizes,) * len(graph.kernels), (("n", parts),) if graph.split_axes else ())


def error(program: Program, graph: KernelGraph, schedule: Schedule) -> float:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal([graph.extent(a) for a in t.axes]).astype(NUMPY[t.dtype]) for t in graph.inputs]
    want = program.value(*(x.astype(np.float64) for x in arrays))
    return float(np.abs(interpret(graph, schedule, arrays)[0] - want).max())


@pytest.mark.parametrize("dtype,tolerance", [("f32", 1e-5), ("f16", 5e-3)])
@pytest.mark.parametrize("n,rows,columns", [(64, 16, 16), (50, 16, 16), (70, 32, 16), (70, 16, 32), (16, 16, 16)])
@pytest.mark.parametrize("name,parts", [("online", 1), ("split keys", 2), ("split keys", 3)])
@pytest.mark.parametrize("program", [CAUSAL_BOUNDS, WINDOW], ids=lambda p: p.name)
def test_values(
    program: Program, name: str, parts: int, n: int, rows: int, columns: int, dtype: str, tolerance: float
) -> None:
    graph = sized(program, name, n, dtype)
    assert error(program, graph, tiles(graph, rows, columns, parts)) < tolerance


@pytest.mark.parametrize("program", [CAUSAL_BOUNDS, WINDOW], ids=lambda p: p.name)
@pytest.mark.parametrize("name", ["online", "split keys"])
def test_compiles(program: Program, name: str) -> None:
    graph = sized(program, name, 100, "f16")
    for source in sources(graph, tiles(graph, 32, 16, 2)):
        assert source is not None and compile_for(source, 90).fits


GOLDEN = [(WINDOW, "online"), (WINDOW, "split keys"), (CAUSAL_BOUNDS, "online")]


@pytest.mark.parametrize("program,name", GOLDEN, ids=lambda x: getattr(x, "name", x))
def test_golden(program: Program, name: str, golden) -> None:
    graph = sized(program, name, 100)
    (source, *_) = sources(graph, tiles(graph, 16, 32, 2))
    assert source is not None
    golden(source.text)


def test_one_block_knows_its_bounds() -> None:
    """No more rows than a tile has: the last of 7 tiles of columns is beyond all of them."""
    graph = sized(CAUSAL_BOUNDS, "online", 100)
    text = str(graph).replace("n'", "i").replace("d=16", "d=16 i=20")
    (source,) = sources(parse(text), Schedule((KernelSchedule((("i", 32), ("n", 16))),)))
    assert source is not None and "range(0, 20, 16)" in source.text


@pytest.mark.parametrize("condition", ["and %c %w", "and %w %c"])
def test_masks_that_are_data_stay(condition: str) -> None:
    """In the middle of a window nothing is masked for its place, but padding is wherever it is."""
    text = str(sized(WINDOW, "online", 128)).replace("offset=3", "offset=60").replace("n'-2..", "n'-59..")
    text = text.replace("  input V: f32[n,e]\n", "  input V: f32[n,e]\n  input P: bool[n]\n")
    text = text.replace("%v = load V[n,e]\n", "%v = load V[n,e]\n    %w = load P[n]\n")
    text = text.replace("    %x[n,n'] = mask %c", f"    %z[n,n'] = {condition}\n    %x[n,n'] = mask %z")
    graph = parse(text)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((128, 16)).astype(np.float32) for _ in range(3))
    p = np.arange(128) % 3 != 1
    (row, column) = np.indices((128, 128))
    seen = (column <= row) & (row - column < 60) & p
    seen[0, 0] = p[0] = True
    weights = np.exp(np.where(seen, q @ k.T, -np.inf))
    want = weights @ v / weights.sum(-1, keepdims=True)
    assert exact_check(graph, tiles(graph, 16, 16)) == ""
    assert np.abs(interpret(graph, tiles(graph, 16, 16), [q, k, v, p])[0] - want).max() < 1e-5


@pytest.mark.parametrize("program", [CAUSAL_BOUNDS, WINDOW], ids=lambda p: p.name)
def test_the_exact_check_sees_all_parts_of_a_loop(program: Program) -> None:
    """At its small sizes the text has the loops that it has at large ones."""
    graph, schedule = sized(program, "online", 1024), tiles(sized(program, "online", 1024), 16, 16)
    (kernel,), (sizes,) = graph.kernels, schedule.kernels
    assert isinstance(kernel, BlockGraph)
    small, parts = small_sizes(kernel, graph, sizes, {}, ragged=False)
    texts = [emit(kernel, g, sizes, parts).text.partition("_complete")[0] for g in (graph, small)]
    loops = [text.count("for n_start") for text in texts]
    assert loops[0] == loops[1] == (2 if program is CAUSAL_BOUNDS else 3)

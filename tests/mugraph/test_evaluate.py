"""Tile by tile is the same as whole, and both are what numpy says."""

import jax.numpy as jnp
import numpy as np
import pytest
from mugraph.graphs import ATTENTION, CANDIDATES, GRAM, MATRIX_VECTOR, PROGRAMS, RMSNORM, Program, schedule

from mirage_jax.errors import GraphError
from mirage_jax.mugraph.check import check_graph, check_schedule
from mirage_jax.mugraph.evaluate import run
from mirage_jax.mugraph.graph import KernelSchedule, Schedule


def close(have: list[np.ndarray], want: np.ndarray | tuple[np.ndarray, ...], tolerance: float = 1e-11) -> None:
    want = want if isinstance(want, tuple) else (want,)
    assert len(have) == len(want)
    for x, y in zip(have, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_reference(program: Program) -> None:
    graph = program.graph(program.reference)
    check_graph(graph)
    xs = program.inputs()
    close(run(graph, xs), program.value(*xs))


@pytest.mark.parametrize("tile", [1, 2, 3, 100])
@pytest.mark.parametrize("program,name", CANDIDATES, ids=lambda x: getattr(x, "name", x))
def test_tiled(program: Program, name: str, tile: int) -> None:
    graph = program.graph(program.candidates[name])
    check_graph(graph)
    xs = program.inputs(tile)
    want = program.value(*xs)
    close(run(graph, xs), want)
    for parts in (1, 2, 3) if graph.split_axes else (1,):
        sizes = schedule(graph, tile, parts)
        check_schedule(graph, sizes)
        close(run(graph, xs, sizes), want)


@pytest.mark.parametrize("program,name", CANDIDATES, ids=lambda x: getattr(x, "name", x))
def test_jax(program: Program, name: str) -> None:
    graph = program.graph(program.candidates[name])
    xs = [x.astype(np.float32) for x in program.inputs()]
    close([np.asarray(x, np.float64) for x in run(graph, xs, xp=jnp, dtype=None)], program.value(*xs), 1e-2)


def test_large_logits() -> None:
    """Rows of logits near +-2000 with ordinary spread: plain exp overflows, and errors of l and of rescaling show."""
    rng = np.random.default_rng(0)
    q, k, v = ATTENTION.inputs()
    far = np.concatenate([q, 2000 * rng.choice([-1.0, 1.0], (*q.shape[:2], 1))], -1)
    k = np.concatenate([k, np.ones((k.shape[0], 1, k.shape[2]))], 1)
    for name in ("online", "split keys", "whole rows"):
        graph = ATTENTION.graph(ATTENTION.candidates[name])
        graph = graph.with_extents({**graph.sizes, "d": 4})
        close(run(graph, [far, k, v], schedule(graph)), ATTENTION.value(far, k, v))


def test_fully_masked_tile() -> None:
    """-inf in a whole tile is no NaN, unless the whole row is masked."""
    program, text = ATTENTION, ATTENTION.candidates["online"]
    q, k, v = program.inputs()
    q[..., 0], k[:, 0, :4] = 1, -np.inf
    graph = program.graph(text)
    close(run(graph, [q, k, v], schedule(graph)), program.value(q, k, v))


def test_precisions() -> None:
    """Without a dtype, 16-bit operands accumulate in float32 and only the store rounds."""
    graph = MATRIX_VECTOR.graph(MATRIX_VECTOR.reference)
    graph = type(graph)(
        tuple(type(t)(t.name, t.axes, "bf16") for t in graph.inputs), graph.kernels, graph.outputs, graph.extents
    )
    xs = [jnp.asarray(x, jnp.bfloat16) for x in MATRIX_VECTOR.inputs()]
    (out,) = run(graph, xs, xp=jnp, dtype=None)
    assert out.dtype == jnp.float32
    close([np.asarray(out)], MATRIX_VECTOR.value(*(np.asarray(x, np.float64) for x in xs)), 1e-5)


def test_empty_part_is_refused() -> None:
    graph = RMSNORM.graph(RMSNORM.candidates["split k"])
    with pytest.raises(GraphError, match="empty"):
        check_schedule(graph, schedule(graph, 2, 5))
    with pytest.raises(GraphError, match="empty"):
        run(graph, RMSNORM.inputs(), schedule(graph, 2, 5))


def test_every_element_is_written_once() -> None:
    graph = GRAM.graph(GRAM.candidates["loop"].replace("grid(i,k)", "grid(i,k,i')"))
    with pytest.raises(GraphError, match="written 3 times"):
        run(graph, GRAM.inputs(), schedule(graph))


def test_schedule_must_fit() -> None:
    graph, xs = RMSNORM.graph(RMSNORM.candidates["two loops"]), RMSNORM.inputs()
    with pytest.raises(GraphError, match="no tile for axis"):
        run(graph, xs, Schedule((KernelSchedule(),)))
    with pytest.raises(GraphError, match="1 kernels, the schedule 0"):
        run(graph, xs, Schedule(()))
    with pytest.raises(GraphError, match="has shape"):
        run(graph, [xs[1], xs[0]])

"""The search on functions that people write, and on gradients of some: whatever it finds is well formed and right."""

import jax
import pytest
from jaxpr_frontend.programs import PROGRAMS
from search.programs import H200, TWO_KERNELS, small_schedule, worst_error

from mirage_jax.jaxpr_frontend.regions import analyse
from mirage_jax.mugraph.check import check_graph, check_schedule
from mirage_jax.mugraph.merge import merge_axes
from mirage_jax.search.driver import search
from mirage_jax.verify.certificate import fingerprint

GRADIENTS = ("softmax", "linear attention", "lora", "matrix chain", "squared error", "gram matrix", "padding mask")
CASES = [(name, False) for name in PROGRAMS if name != "ntrans"] + [(name, True) for name in GRADIENTS]
SECONDS = 2.0  # a search that is cut short keeps right candidates too


@pytest.mark.parametrize("name,gradient", CASES, ids=[f"{n}{' gradient' * g}" for n, g in CASES])
def test_candidates_are_right(name: str, gradient: bool) -> None:
    program = PROGRAMS[name]

    def backward(args: tuple[jax.Array, ...], cotangent: object) -> object:
        return jax.vjp(program.fn, *args)[1](cotangent)

    made = jax.eval_shape(program.fn, *program.args)
    jaxpr = jax.make_jaxpr(backward)(program.args, made) if gradient else jax.make_jaxpr(program.fn)(*program.args)
    regions = analyse(jaxpr.jaxpr).regions
    assert regions
    for region in regions:
        graph = merge_axes(region.graph)
        candidates, _ = search(graph, H200, TWO_KERNELS, SECONDS)
        assert candidates
        for c in candidates[:20]:
            check_graph(c.graph)
            check_schedule(c.graph, c.schedule)
            assert fingerprint(graph, c.graph), c.graph
        for c in candidates[:2]:
            assert worst_error(c.graph, small_schedule(c.graph, tile=5), graph) < 1e-10

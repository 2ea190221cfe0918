"""The search on functions that people write, and on gradients of some: whatever it finds is well formed and right."""

import jax
import jax.numpy as jnp
import pytest
from jaxpr_frontend.frontend_programs import PROGRAMS
from mugraph.graphs import schedule
from search.references import H200, TWO_KERNELS, region, worst_error

from mirage_jax.errors import UnsupportedError
from mirage_jax.jaxpr_frontend.partition.regions import analyse
from mirage_jax.mugraph.check import check_graph, check_schedule
from mirage_jax.mugraph.graph import KernelGraph
from mirage_jax.mugraph.passes.merge_axes import simplify_axes
from mirage_jax.search.decompose.windows import divide
from mirage_jax.search.driver import search
from mirage_jax.search.enumerate.kernels import KernelTables, Space
from mirage_jax.search.enumerate.shift_degrees import ShiftDegrees
from mirage_jax.search.enumerate.window_search import Search
from mirage_jax.verify.equivalence.certificate import Fingerprint

GRADIENTS = (
    *("softmax", "log softmax", "linear attention", "lora", "matrix chain", "squared error", "gram matrix"),
    "padding mask",
)
CASES = [(name, False) for name in PROGRAMS if name != "ntrans"] + [(name, True) for name in GRADIENTS]
SECONDS = 2.0  # a search that is cut short keeps right candidates too


@pytest.mark.parametrize("name,gradient", CASES, ids=[f"{n}{' gradient' * g}" for n, g in CASES])
def test_candidates_are_right(name: str, gradient: bool) -> None:
    for graph in graphs(name, gradient):
        candidates, _ = search(graph, H200, TWO_KERNELS, SECONDS)
        assert candidates
        same = Fingerprint(graph)
        for c in candidates:
            check_graph(c.graph)
            check_schedule(c.graph, c.schedule)
            assert same(c.graph), c.graph
        for c in candidates[:2]:
            assert worst_error(c.graph, schedule(c.graph, tile=5), graph) < 1e-10


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_value_can_be_made(name: str) -> None:
    """No value below an output is a dead end, in a function or its gradient: a region would have no candidates."""
    for gradient in (False, True):
        for graph in graphs(name, gradient):
            for window in divide(graph, lambda g: len(g.kernels) <= 8):
                one = Search(window.graph, H200, seconds=5.0)
                try:
                    one.start()
                except UnsupportedError:
                    continue
                table = KernelTables(
                    one.axioms, ShiftDegrees(one.e, tuple(x.value for x in one.targets)), Space(), frozenset()
                )
                for target in one.targets:
                    for p in table.reach(target.value):
                        assert one.axioms.is_input(p) or one.axioms.steps(p), one.e.text(p)


def graphs(name: str, gradient: bool) -> list[KernelGraph]:
    """The regions of a program, or of its backward pass, as they are searched."""
    program = PROGRAMS[name]

    def backward(args: tuple[jax.Array, ...], cotangent: object) -> object:
        return jax.vjp(program.fn, *args)[1](cotangent)

    made = jax.eval_shape(program.fn, *program.args)
    jaxpr = jax.make_jaxpr(backward)(program.args, made) if gradient else jax.make_jaxpr(program.fn)(*program.args)
    regions = analyse(jaxpr.jaxpr).regions
    assert regions
    return [simplify_axes(region.graph) for region in regions]


def test_maxima_are_taken_of_what_the_program_takes_them_of() -> None:
    """Squared distances as |x|^2 - 2 x y + |y|^2, and the nearest: nobody proves max(2 x) = 2 max(x)."""

    def nearest(x: jax.Array, codes: jax.Array) -> tuple[jax.Array, jax.Array]:
        far = jnp.sum(x * x, 1)[:, None] - 2 * x @ codes.T + jnp.sum(codes * codes, 1)
        return far, jnp.min(far, 1)

    def softest(x: jax.Array, codes: jax.Array) -> jax.Array:
        return jnp.max(3 * (x @ codes.T) + 1, 1)

    for fn in (nearest, softest):
        graph = simplify_axes(region(fn, (4096, 64), (1024, 64)).graph)
        found = search(graph, H200, TWO_KERNELS, seconds=10.0)[0]
        assert any(c.family == "kernels" for c in found)
        same = Fingerprint(graph)
        assert all(same(c.graph) for c in found)


def test_the_exponential_of_a_maximum_has_the_axes_of_its_rows() -> None:
    """Relative to a shift for each element it would have more, as in the gradient of a log-softmax and its diagonal."""

    def loss(x: jax.Array, y: jax.Array) -> jax.Array:
        logs = jax.nn.log_softmax(3 * (x @ y.T), -2)
        both = (logs, jnp.diagonal(logs, axis1=-2, axis2=-1))
        return sum(jnp.sum(jnp.square(z.astype(jnp.float32))) for z in both)

    shape = jax.ShapeDtypeStruct((7, 7), jnp.float16)
    for one in analyse(jax.make_jaxpr(jax.grad(loss, (0, 1)))(shape, shape)).regions:
        graph = simplify_axes(one.graph)
        found = search(graph, H200, TWO_KERNELS, seconds=5.0, states=1000)[0]
        for c in found:
            check_graph(c.graph)

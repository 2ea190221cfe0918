"""Random programs through the whole search: every candidate is well formed and computes the program."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from mugraph.graphs import schedule
from search.expressions import ATOMS, SIZES, Tree, is_positive, nodes, trees
from search.references import H200, TWO_KERNELS, worst_error

from mirage_jax.errors import UnsupportedError
from mirage_jax.mugraph.check import check_graph, check_schedule
from mirage_jax.mugraph.graph import KernelGraph, Library, Load, Op, Tensor, origin
from mirage_jax.mugraph.operators import operator
from mirage_jax.search.driver import search
from mirage_jax.verify.equivalence.certificate import fingerprint

EXTENTS = tuple((a, 16 * n) for a, n in SIZES.items() if a == origin(a))


def program(tree: Tree) -> KernelGraph:
    """A tree as a graph of library operators, equal subtrees once."""
    tensors: dict[Tree, Tensor] = {("atom", n): Tensor(origin(n), axes, "f32") for n, axes in ATOMS.items() if axes}
    inputs = tuple(t for (_, n), t in tensors.items() if n == t.name)
    kernels: list[Library] = []

    def emit(tree: Tree, op: str, *args: Tree, **attrs: object) -> None:
        loads = tuple(Load(str(n), made(a).name, made(a).axes) for n, a in enumerate(args))
        axes = operator(op).infer(tuple(x.axes for x in loads), attrs)  # type: ignore[arg-type]
        assume(axes)  # scalars stay with XLA
        name = f"t{len(kernels)}"
        tensors[tree] = Tensor(name, axes, "f32")
        made_by = Op(name, op, tuple(x.name for x in loads), axes, tuple(sorted(attrs.items())))  # type: ignore[arg-type]
        kernels.append(Library(loads, made_by, tensors[tree]))

    def made(tree: Tree) -> Tensor:
        if tree not in tensors:
            match tree:
                case ("atom", _):
                    assume(False)
                case (("sum" | "max") as op, t, axis):
                    assume(axis in made(t).axes)
                    emit(tree, op, t, axes=(axis,))
                case ("pow", t, exponent):
                    emit(tree, "pow", t, exponent=exponent)
                case ("scale", t, c):
                    emit(tree, "affine", t, scale=c)
                case ("offset", t, c):
                    emit(tree, "affine", t, offset=c)
                case ("exp", t, c):
                    emit(tree, "exp", t, scale=c)
                case (op, *args):
                    emit(tree, op, *args)
        return tensors[tree]

    output = made(tree).name
    used = {x.tensor for k in kernels for x in k.loads}
    return KernelGraph(tuple(t for t in inputs if t.name in used), tuple(kernels), (output,), EXTENTS)


def beyond_fields(tree: Tree, exponent: bool = False) -> bool:
    """sqrt(x) sqrt(x) = x, max(2 x) = 2 max(x), exp(exp x)^2 = exp(2 exp x): no fingerprint knows, floats tell."""
    nested = exponent and tree[0] == "exp"
    if nested or tree[0] == "max" or getattr(tree[-1], "denominator", 1) == 2:
        return True
    return any(beyond_fields(t, exponent or tree[0] == "exp") for t in tree if isinstance(t, tuple))


@settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck), derandomize=True)
@given(trees(steps=7, largest=24))
def test_candidates_are_right(tree: Tree) -> None:
    assume(nodes(tree) > 5)
    graph = program(tree)
    check_graph(graph)
    try:
        candidates, _ = search(graph, H200, TWO_KERNELS, 1.0)
    except UnsupportedError:
        assume(False)
        raise
    for c in candidates[:12]:
        check_graph(c.graph)
        check_schedule(c.graph, c.schedule)
        assert fingerprint(graph, c.graph) or beyond_fields(tree), c.graph
        if is_positive(tree):
            with np.errstate(all="ignore"):
                error = worst_error(c.graph, schedule(c.graph, tile=24), graph, positive=True)
            assert not error > 1e-9, c.graph  # not a number: too large for floats


def test_an_output_that_loses_an_axis_is_left_alone() -> None:
    """(a v v)^-1 (a v) = v^-1 for a[i], v[k]: the output repeats a value along i, which no candidate can say."""
    av: Tree = ("mul", ("atom", "a"), ("atom", "v"))
    graph = program(("mul", ("pow", ("mul", av, ("atom", "v")), Fraction(-1)), av))
    with pytest.raises(UnsupportedError, match="the same all along i"):
        search(graph, H200, TWO_KERNELS, 1.0)

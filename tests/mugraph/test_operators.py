"""Adding a pointwise function takes one record: every stage reads it, here from outside the package."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from lower.kernels import Block, graph, schedule, tensor

from mirage_jax.errors import GraphError, VerificationError
from mirage_jax.lower.runtime.launch import sources
from mirage_jax.mugraph.builder import library
from mirage_jax.mugraph.check import check_graph
from mirage_jax.mugraph.domains import exact
from mirage_jax.mugraph.evaluate import run
from mirage_jax.mugraph.graph import KernelGraph
from mirage_jax.mugraph.operators import FUNCTIONS, OPERATORS, SIGNED, Function, register, unregister
from mirage_jax.mugraph.parser import parse
from mirage_jax.mugraph.passes.float16_range import program
from mirage_jax.verify.equivalence.certificate import certify
from mirage_jax.verify.exact.exact_check import exact_check
from mirage_jax.verify.exact.interpreters.triton import interpret

SOFTSIGN = Function(
    "softsign",
    lambda xp, x: x / (1 + xp.abs(x)),
    lambda x: exact.divide(x, exact.add(exact.ONE, exact.absolute(x))),
    "({0} / (1.0 + tl.abs({0})))",
    range=SIGNED,
)
X, S, Y = tensor("X", "i j", "f32"), tensor("S", "i j", "f16"), tensor("Y", "i", "f32")
SCHEDULE = schedule({"i": 4, "j": 8})


@pytest.fixture(autouse=True)
def _softsign() -> Iterator[None]:
    register(SOFTSIGN)
    yield
    unregister("softsign")
    assert "softsign" not in OPERATORS and "softsign" not in FUNCTIONS


def reference() -> KernelGraph:
    """Sum softsign(2 x) over rows, as a program that stores it in float16 would."""
    ops = (library("softsign", [(X, "i,j")], S, scale=2), library("sum", [(S, "i,j")], Y, axes="j"))
    return KernelGraph((X,), ops, ("Y",), (("i", 10), ("j", 20)))


def fused(**attributes: int) -> KernelGraph:
    b = Block("fused", "i", "j")
    b.store(Y, b.acc(b.sum(b.op("softsign", b.load("X", "i j"), **attributes), axes="j")))
    return graph([X], [b], "Y", dict(reference().extents))


def test_it_is_checked_written_and_evaluated() -> None:
    check_graph(fused(scale=2))
    assert parse(str(fused(scale=2))) == fused(scale=2)
    x = np.random.default_rng(0).standard_normal((10, 20)).astype(np.float32)
    want = (2 * x / (1 + np.abs(2 * x))).sum(1)
    np.testing.assert_allclose(run(fused(scale=2), [x], SCHEDULE)[0], want, rtol=1e-6)
    with pytest.raises(GraphError, match="softsign is registered twice"):
        register(SOFTSIGN)


def test_it_is_certified() -> None:
    assert certify(reference(), fused(scale=2)).bound < 1e-9
    with pytest.raises(VerificationError):
        certify(reference(), fused(scale=3))


def test_its_range_is_known() -> None:
    values = program(reference())
    (kernel, _) = reference().kernels
    assert values.values(reference(), kernel, values.inputs)[S.name].within == SIGNED


def test_its_text_runs_and_is_checked_on_exact_numbers() -> None:
    pytest.importorskip("triton")
    x = np.random.default_rng(0).standard_normal((10, 20)).astype(np.float32)
    (source,) = sources(fused(scale=2), SCHEDULE)
    assert source is not None and "tl.abs" in source.text
    (found,) = interpret(fused(scale=2), SCHEDULE, [x])
    np.testing.assert_allclose(found, (2 * x / (1 + np.abs(2 * x))).sum(1), rtol=1e-5)
    assert exact_check(fused(scale=2), SCHEDULE) == ""


def test_a_wrong_text_is_found_on_exact_numbers() -> None:
    pytest.importorskip("triton")
    unregister("softsign")
    register(replace(SOFTSIGN, triton="({0} / (2.0 + tl.abs({0})))"))
    assert exact_check(fused(), SCHEDULE)


EDGES = np.array(
    [
        0.0,
        -0.0,
        1e-40,
        1e-8,
        -1e-8,
        0.3,
        0.5,
        -0.5,
        1.0,
        -1.0,
        1.5,
        -2.5,
        8388609.0,
        90.0,
        -90.0,
        3e38,
        -3e38,
        np.inf,
        -np.inf,
        np.nan,
    ],
    np.float32,
)


@pytest.mark.parametrize("name", [n for n, f in FUNCTIONS.items() if n != "softsign"])
def test_texts_of_functions_at_the_edges_of_floats(name: str) -> None:
    pytest.importorskip("triton")
    function, n = FUNCTIONS[name], len(EDGES)
    arguments = [tensor(x, axis, "f32") for x, axis in zip("ABC"[: function.arity], "ijk", strict=False)]
    out = tensor("R", " ".join("ijk"[: function.arity]), "f32")
    b = Block("edges", " ".join(out.axes))
    b.store(out, b.op(name, *(b.load(x.name, " ".join(x.axes)) for x in arguments)))
    g = graph(arguments, [b], "R", dict.fromkeys(out.axes, n))
    (found,) = interpret(g, schedule(dict.fromkeys(out.axes, 16)), [EDGES] * function.arity)
    with np.errstate(all="ignore"):
        want = function.value(np, *np.meshgrid(*[EDGES] * function.arity, indexing="ij")).astype(np.float32)
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-7)
    assert exact_check(g, schedule(dict.fromkeys(out.axes, 16))) == ""

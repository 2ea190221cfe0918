"""Diagonals: which sums are read where they lie, with the same numbers, and which stay sums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mirage_jax.jaxpr_frontend.partition.regions import analyse
from mirage_jax.mugraph.check import check_graph
from mirage_jax.mugraph.evaluate import run
from mirage_jax.mugraph.passes.diagonals import with_diagonals_read
from mirage_jax.verify.equivalence.certificate import Fingerprint


def contrastive(x, y):
    logits = 3.0 * x @ y.T
    one, other = jax.nn.log_softmax(logits, 0), jax.nn.log_softmax(logits, 1)
    return -(jnp.diagonal(one) + jnp.diagonal(other)) / 2


def picked(x, y):
    i = jnp.arange(len(x))
    return jnp.exp(x @ y.T)[i, i]


def batched(x, y):
    return jax.vmap(lambda x, y: jnp.diagonal(jnp.tanh(x @ y.T)))(jnp.stack([x, 2 * x]), jnp.stack([y, y]))


def rows(x, y):
    """Of a value that has one of both axes."""
    i = jnp.arange(len(x))
    s = x @ y.T
    return jnp.where(i[:, None] == i, jnp.max(s, -1, keepdims=True), 0.0).sum(0) + s.sum(0)


READ = [contrastive, picked, batched, rows]


def other_elements(x, y):
    """Not zero, so the sum has more terms."""
    i = jnp.arange(len(x))
    return jnp.where(i[:, None] == i, x @ y.T, 1.0).sum(0)


def beside(x, y):
    i = jnp.arange(len(x))
    return jnp.where(i[:, None] == i + 1, x @ y.T, 0.0).sum(0)


def rectangular(x, y):
    return jnp.diagonal(x @ y[:5].T)


LEFT = [other_elements, beside, rectangular]


def sums(graph) -> int:
    return sum(k.op.op == "sum" for k in graph.kernels)


def region(fn):
    args = [jax.ShapeDtypeStruct((8, 8), "float32")] * 2
    found = analyse(jax.make_jaxpr(fn)(*args)).regions
    return max(found, key=lambda r: len(r.translated.kernels))


@pytest.mark.parametrize("fn", READ)
def test_what_is_read(fn) -> None:
    r = region(fn)
    graph = with_diagonals_read(r.translated)
    check_graph(graph)
    assert sums(graph) < sums(r.translated) and not any(k.op.op in ("eq", "where") for k in graph.kernels)
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal(tuple(map(graph.extent, t.axes))) for t in graph.inputs]
    for have, want in zip(run(graph, inputs), run(r.translated, inputs), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-12, atol=1e-12)
    assert Fingerprint(graph)(graph)


@pytest.mark.parametrize("fn", LEFT)
def test_what_stays_a_sum(fn) -> None:
    r = region(fn)
    assert with_diagonals_read(r.translated) == r.translated


def test_the_diagonal_of_an_input_is_not_read() -> None:
    r = region(lambda x, y: jnp.sum(jnp.where(jnp.eye(8, dtype=bool), x, 0), 1) * (x @ y).sum(1))
    assert sums(with_diagonals_read(r.translated)) == sums(r.translated)


def test_two_softmaxes_of_one_product_need_two_products() -> None:
    """With their diagonals read, and shifts that cancel, no statistic has to be known before another."""
    graph = region(contrastive).graph
    assert [k.op.op for k in graph.kernels].count("lesslogs") == 2

"""Added masks: which sums become choices, with the same floats whatever the logits are, and which stay sums."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mirage_jax.jaxpr_frontend.partition.regions import analyse
from mirage_jax.mugraph.check import check_graph
from mirage_jax.mugraph.evaluate import run
from mirage_jax.mugraph.passes.additive_masks import with_masks_chosen

LOWEST = float(jnp.finfo(jnp.bfloat16).min)
N = 24


def causal(s):
    i = jnp.arange(N)
    return s + jnp.where(i[:, None] >= i, 0.0, LOWEST).astype(s.dtype)


def masked_first(s):
    i = jnp.arange(N)
    return jnp.where(i[:, None] < i, -1e9, 1.0).astype(s.dtype) + s


def scaled(s):
    i = jnp.arange(N)
    return s / 4 - jnp.where(i[:, None] >= i, 0.0, 1e9).astype(s.dtype)


ADDED = [causal, masked_first, scaled]


def small(s):
    """No number that masks: a bias of positions."""
    i = jnp.arange(N)
    return s + jnp.where(i[:, None] >= i, 0.0, -2.0)


def read_mask(s):
    i = jnp.arange(N)
    return s + jnp.where(i[:, None] >= i, jnp.max(s, -1, keepdims=True), LOWEST)


def region(f, dtype="float32"):
    """A product whose results are masked so."""
    s = jax.ShapeDtypeStruct((N, 8), dtype), jax.ShapeDtypeStruct((8, N), dtype)
    (found,) = analyse(jax.make_jaxpr(lambda q, k: f(q @ k))(*s)).regions
    return found


def operators(graph, name):
    return [k for k in graph.kernels if k.op.op == name]


@pytest.mark.parametrize("f", ADDED)
def test_added_masks_are_choices(f) -> None:
    r = region(f)
    check_graph(r.graph)
    assert operators(r.translated, "add") and not operators(r.graph, "add") and not operators(r.graph, "const")
    assert len(operators(r.graph, "where")) == 1


@pytest.mark.parametrize("dtype", ["float32", ml_dtypes.bfloat16])
@pytest.mark.parametrize("f", ADDED)
def test_floats_are_the_same_whatever_the_logits_are(f, dtype) -> None:
    """Also of logits beside which the mask is small, and where sums overflow."""
    rng, r = np.random.default_rng(0), region(f, dtype)
    for size in (1.0, 1e4, 1e14, 1e19):
        q, k = (size * rng.standard_normal(shape).astype("float32") for shape in ((N, 8), (8, N)))
        with np.errstate(all="ignore"):
            results = [run(g, [q, k], dtype="float32") for g in (r.translated, r.graph)]
        np.testing.assert_array_equal(*(own[0] for own in results))


@pytest.mark.parametrize("f", [small, read_mask])
def test_other_sums_stay(f) -> None:
    r = region(f)
    assert with_masks_chosen(r.translated) is r.translated

"""Added masks: which sums become choices, with the same floats whatever the logits are, and which stay sums."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mirage_jax.jaxpr_frontend.partition.regions import analyse
from mirage_jax.mugraph.check import check_graph
from mirage_jax.mugraph.evaluate import run

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


def multiplied(s):
    i = jnp.arange(N)
    return s + (1 - (i[:, None] >= i).astype(s.dtype)) * -1e9


ADDED = [causal, masked_first, scaled, multiplied]


def small(s):
    """No number that masks: a bias of positions."""
    i = jnp.arange(N)
    return s + jnp.where(i[:, None] >= i, 0.0, -2.0)


def read_mask(s):
    i = jnp.arange(N)
    return s + jnp.where(i[:, None] >= i, jnp.max(s, -1, keepdims=True), LOWEST)


def infinite(s):
    """A sentinel that is infinite in the type of the sum."""
    i = jnp.arange(N)
    return s.astype("float16") + jnp.where(i[:, None] >= i, 0.0, LOWEST).astype("float16")


def whole_numbers(s):
    i = jnp.arange(N)
    return s + (jnp.where(i[:, None] >= i, 0, -20_000) + i).astype(s.dtype)


def region(f, dtype="float32"):
    """A product whose results are masked so."""
    s = jax.ShapeDtypeStruct((N, 8), dtype), jax.ShapeDtypeStruct((8, N), dtype)
    (found,) = analyse(jax.make_jaxpr(lambda q, k: f(q @ k))(*s)).regions
    return found


def operators(graph, name):
    return [k for k in graph.kernels if k.op.op == name]


@pytest.mark.parametrize("dtype", ["float32", ml_dtypes.bfloat16])
@pytest.mark.parametrize("f", ADDED)
def test_added_masks_are_choices(f, dtype) -> None:
    r = region(f, dtype)
    check_graph(r.graph)
    assert not operators(r.translated, "add") and not operators(r.translated, "const")
    assert len(operators(r.translated, "where")) == 1


@pytest.mark.parametrize("f", ADDED)
def test_floats_are_the_same_whatever_the_logits_are(f) -> None:
    """Also of logits beside which the mask is small, and where sums overflow. Products of these numbers are exact."""
    rng, r = np.random.default_rng(0), region(f)
    for exponent in (0, 7, 23, 48, 61):
        q, k = (rng.integers(-4, 5, shape).astype("float32") * np.float32(2**exponent) for shape in ((N, 8), (8, N)))
        with np.errstate(all="ignore"):
            (ours,) = run(r.translated, [q, k], dtype="float32")
        np.testing.assert_array_equal(ours, jax.jit(lambda q, k: f(q @ k))(q, k))


@pytest.mark.parametrize(("f", "sums"), [(small, 1), (read_mask, 1), (infinite, 1), (whole_numbers, 2)])
def test_other_sums_stay(f, sums: int) -> None:
    assert len(operators(region(f).translated, "add")) == sums

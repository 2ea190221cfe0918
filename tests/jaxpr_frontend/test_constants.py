"""Constant arrays that count are indices; all others are inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxpr_frontend.replacing import Replacing, assert_close, optimized

from mirage_jax.jaxpr_frontend.jax_compat import as_range

X = jnp.asarray(np.random.default_rng(0).standard_normal((6, 6)), jnp.float32)


def product_at(positions):
    def fn(x):
        p = jnp.asarray(positions)
        return jnp.where(p[:, None] >= p[None, :], x @ x, 0.0)

    return fn


@pytest.mark.parametrize("start", [0, 3, -2])
@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
def test_positions(start: int, array) -> None:
    compiler, fn = Replacing(), product_at(array(range(start, start + 6), dtype="int32"))
    assert_close(optimized(fn, compiler)(X), jax.jit(fn)(X), 1e-6)
    assert len(compiler.regions[0].graph.inputs) == 1
    assert "iota" in str(compiler.regions[0].graph)
    assert all("mirage_jax" not in line for line in compiler.regions[0].where)


@pytest.mark.parametrize("positions", [[0, 1, 2, 3, 5, 4], [0, 0, 0, 0, 0, 0], [5, 4, 3, 2, 1, 0]])
def test_others_are_inputs(positions: list[int]) -> None:
    compiler, fn = Replacing(), product_at(jnp.asarray(positions, "int32"))
    assert_close(optimized(fn, compiler)(X), jax.jit(fn)(X), 1e-6)
    assert len(compiler.regions[0].graph.inputs) == 2


def test_what_counts() -> None:
    assert as_range(np.arange(2, dtype="int32")) is not None
    others = [1.0, np.int32(1), np.arange(1, dtype="int32"), np.arange(4.0), np.arange(4), np.zeros((2, 2), "int32")]
    assert all(as_range(x) is None for x in others)
    jax.jit(lambda x: x if as_range(x) is None else None)(jnp.arange(4))

"""Quotients and remainders of indices, in masks above all: whole numbers that float32 holds exactly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jaxpr_frontend.replacing import Replacing, analysis, assert_close, optimized, random

from mirage_jax.hardware.device_model import DEVICES
from mirage_jax.jaxpr_frontend.partition.reasons import Code
from mirage_jax.jaxpr_frontend.translate.integers import MAX_DIVIDEND
from mirage_jax.mugraph.evaluate import run
from mirage_jax.mugraph.passes.merge_axes import simplify_axes
from mirage_jax.search.driver import search
from mirage_jax.search.enumerate.kernels import Space

N, D = 40, 16
ARGS = tuple(random(N, D, seed=n) for n in range(3))
CONDITIONS = {
    "dilated": lambda i, j: (i >= j) & ((i - j) % 4 == 0),
    "one in three": lambda i, j: i % 3 == j % 3,
    "blocks": lambda i, j: i // 8 == j // 8,
    "strided": lambda i, j: (j % 5 == 4) | (i == j),
    "with the sign of the dividend": lambda i, j: lax.rem(i - j, 3) <= 0,
    "towards zero": lambda i, j: lax.div(i - j, 5) == 0,
    "weighted": lambda i, j: 3 * i + 5 >= 2 * j,
    "of a remainder": lambda i, j: (i % 12) // 4 == j % 3,
}


def attention(condition):
    def attend(q, k, v):
        i, j = jnp.arange(N)[:, None], jnp.arange(N)[None]
        return jax.nn.softmax(jnp.where(condition(i, j), q @ k.T, -1e9), -1) @ v

    return attend


@pytest.mark.parametrize("name", CONDITIONS)
def test_masks(name: str) -> None:
    f, compiler = attention(CONDITIONS[name]), Replacing()
    assert_close(optimized(f, compiler)(*ARGS), f(*ARGS), 1e-4)
    assert len(compiler.regions) == 1
    assert not {e.primitive for e in analysis(f, *ARGS).left_out} & {"rem", "div"}


@pytest.mark.parametrize("name", ["one in three", "weighted"])
def test_candidates_compute_indices_exactly(name: str) -> None:
    """A sum of whole numbers that is scaled to have a coefficient of one would be rounded, and masks would be wrong."""
    (region,) = analysis(attention(CONDITIONS[name]), *ARGS).regions
    program = simplify_axes(region.graph)
    found, _ = search(program, DEVICES["H200"], Space(max_ops=14), 5.0, 200_000)
    rng = np.random.default_rng(0)
    xs = [rng.standard_normal(tuple(map(program.extent, t.axes))).astype("f4") for t in program.inputs]
    (want,) = run(program, [x.astype("f8") for x in xs])
    kernels = [c for c in found if c.family == "kernels"][:8]
    assert kernels
    for c in kernels:
        (have,) = run(c.graph, xs, dtype=np.float32)
        np.testing.assert_allclose(have, want, atol=1e-3, err_msg=str(c.graph))


@given(st.integers(1, MAX_DIVIDEND), st.integers(0, 2**32))
def test_half_an_element_more_makes_up_for_rounding(n: int, seed: int) -> None:
    x = np.random.default_rng(seed).integers(0, MAX_DIVIDEND, 1000, endpoint=True)
    x = np.concatenate([x, x // n * n, np.maximum(x // n * n - 1, 0), [MAX_DIVIDEND]])
    one, half = np.float32(1 / n), np.float32(1 / (2 * n))
    assert (np.floor(x.astype("f4") * one + half) == x // n).all()


@pytest.mark.parametrize(
    ("f", "code"),
    [
        (lambda x, n: x @ x.T + (jnp.arange(N) % n), Code.PARAMETERS),
        (lambda x, n: x @ x.T + (jnp.arange(N) * 10**6 % 7), Code.DTYPE),
        (lambda x, n: (x @ x.T) % 3.0, Code.UNSUPPORTED_PRIMITIVE),
    ],
    ids=["by data", "too large", "of floats"],
)
def test_what_stays(f, code: Code) -> None:
    args = (ARGS[0], jnp.int32(7))
    assert_close(optimized(f)(*args), f(*args), 1e-4)
    assert code in {e.code for e in analysis(f, *args).left_out if e.primitive in ("rem", "mul")}

"""Functions that programs of other fields have, beside those of neural networks, and their gradients."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from mirage_jax.jaxpr_frontend.partition.reasons import Code
from tests.jaxpr_frontend.replacing import Replacing, analysis, assert_close, optimized, random

A, V = random(8, 16), random(16, 12, seed=1)

FUNCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "sinh": jnp.sinh,
    "cosh": jnp.cosh,
    "asinh": jnp.arcsinh,
    "acosh": lambda v: jnp.arccosh(1.1 + v * v),
    "atanh": lambda v: jnp.arctanh(v / (1 + jnp.abs(v))),
    "atan": jnp.arctan,
    "asin": lambda v: jnp.arcsin(v / (1 + jnp.abs(v))),
    "acos": lambda v: jnp.arccos(v / (1 + jnp.abs(v))),
    "atan2": lambda v: jnp.arctan2(v, 1 - v),
    "pow": lambda v: jnp.abs(v) ** (1 + jnp.exp(-v)),
    "pow of a number": lambda v: 1.5**v,
    "pow to a fraction": lambda v: (1 + v * v) ** 0.3,
    "exact gelu": lambda v: jax.nn.gelu(v, approximate=False),
    "xor": lambda v: jnp.where((v > 0) ^ (v > 0.5), v, -v),
    "reduce_or": lambda v: jnp.where((v > 0.9).any(-1, keepdims=True), v, -v),
    "reduce_and": lambda v: jnp.where((v > -0.9).all(-1, keepdims=True), v, -v),
    "erfc": lax.erfc,
}
if hasattr(lax, "polynomial"):  # since JAX 0.12
    FUNCTIONS["polynomial"] = lambda v: lax.polynomial(v, (0.5, 2.0, -1.0))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_and_gradients_are_in_one_region(name: str) -> None:
    """With the products around them, and both passes of a gradient."""

    def program(a: jax.Array, v: jax.Array) -> jax.Array:
        return FUNCTIONS[name](a @ v) @ v.T

    def gradient(a: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        return jax.grad(lambda *args: jnp.square(program(*args)).sum(), (0, 1))(a, v)

    for fn in (program, gradient):
        found = analysis(fn, A, V, max_ops=200)
        assert len(found.regions) == 1
        assert {x.code for x in found.left_out} <= {Code.NO_HEAVY_OP, Code.RANK0}
        assert_close(optimized(fn, Replacing(max_ops=200))(A, V), fn(A, V), 2e-5)


def test_bits_of_integers_are_no_truths() -> None:
    """The bitwise or of several integers is not the largest."""

    def program(a: jax.Array, v: jax.Array, n: jax.Array) -> jax.Array:
        bits = lax.reduce(n, 0, lax.bitwise_or, (1,)) + lax.reduce(n + 4, -1, lax.bitwise_and, (1,))
        return (a @ v) * bits[:, None]

    n = jnp.arange(8 * 3, dtype="int32").reshape(8, 3)
    assert_close(optimized(program)(A, V, n), program(A, V, n), 2e-5)


@pytest.mark.parametrize("n", [3, 200])
def test_the_gradient_of_gelu_runs_where_xla_keeps_it(n: int) -> None:
    """JAX's own function, in an equation that no region takes."""

    def gradient(v: jax.Array) -> jax.Array:
        return jax.grad(lambda x: jax.nn.gelu(x, approximate=False).sum())(v)

    v = jnp.linspace(-12, 12, n)
    assert_close(optimized(gradient)(v), gradient(v), 2e-6)
    assert_close(optimized(jax.vmap(jax.grad(gradient_of_one)))(v), jax.vmap(jax.grad(gradient_of_one))(v), 2e-6)


def gradient_of_one(x: jax.Array) -> jax.Array:
    return jax.grad(lambda x: jax.nn.gelu(x, approximate=False))(x)


def test_an_exponent_that_is_data() -> None:
    """Of a negative number only a whole exponent gives a power: the caller's own is as it is, one made here is not."""

    def norm(a: jax.Array, v: jax.Array, p: jax.Array) -> jax.Array:
        return (jnp.abs(a @ v) ** p).sum(-1) ** (1 / p)

    def power(a: jax.Array, v: jax.Array, p: jax.Array) -> jax.Array:
        return (a @ v) ** p

    for fn, p in ((norm, 2.5), (power, 3.0)):
        assert len(analysis(fn, A, V, jnp.float32(p)).regions) == 1
        assert_close(optimized(fn)(A, V, jnp.float32(p)), fn(A, V, jnp.float32(p)), 2e-5)
    left = analysis(lambda a, v, p: (a @ v) ** (p[:, None] * 2), A, V, jnp.ones(8)).left_out
    assert [x.code for x in left if x.primitive == "pow"] == [Code.NON_FINITE]


def test_a_power_of_constants_stays_with_xla() -> None:
    """Rotary embeddings have 10,000 ** (i / n): XLA computes it once, and more precisely."""
    found = analysis(lambda a, v: (a @ v) * 10000.0 ** (jnp.arange(12) / 8), A, V)
    assert [x.code for x in found.left_out if x.primitive == "pow"] == [Code.PARAMETERS]

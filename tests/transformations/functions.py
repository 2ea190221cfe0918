"""Small functions to transform, and what several cases make of them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

N = 64


def normal(*shape: int, dtype: Any = "float32", seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).normal(size=shape).astype(dtype)


def sums(a: Any, b: Any, v: Any) -> Any:
    """Sums over the rows of a product of matrices: nobody needs the product, neither forwards nor backwards."""
    return jnp.tanh(((a * v) @ b).sum(0) / N)


def linear_attention(q: Any, k: Any, v: Any) -> Any:
    """The scores need not be formed: q (k' v)."""
    return jnp.einsum("hqk,hkd->hqd", jnp.einsum("hqd,hkd->hqk", q, k), v) / N


def attention(q: Any, k: Any, v: Any) -> Any:
    """On a GPU one kernel; on a CPU XLA's own code is as good as any order of these operations."""
    return jax.nn.softmax(q @ k.T / 4) @ v


MATRICES = normal(N, N), normal(N, N, seed=1), normal(N)
HEADS = normal(2, N, 4), normal(2, N, 4, seed=1), normal(2, N, 4, seed=2)
ROWS = normal(N, 16), normal(N, 16, seed=1), normal(N, 16, seed=2)


def squares(f: Any) -> Any:
    """A scalar, to be differentiated."""
    return lambda *args, **kwargs: jnp.sum(f(*args, **kwargs) ** 2)


def twice(x: Any) -> Any:
    return jnp.stack([x, 2 * x])


def repeated(f: Any) -> Any:
    """As the body of a scan, over a carried vector."""
    return lambda a, b, v: jax.lax.scan(lambda c, _: (f(a, b, c), c), v, length=3)


def layers(f: Any, **options: Any) -> Any:
    """A scan over stacked matrices."""

    def over(a: Any, b: Any, v: Any) -> Any:
        return jax.lax.scan(lambda c, ab: (c + f(*ab, c), None), v, (twice(a), twice(b)), **options)[0]

    return over


# Their derivatives are wrong on purpose: it shows who was asked.


@jax.custom_vjp
def wave(x: Any) -> Any:
    return jnp.sin(x)


wave.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * 2 * jnp.cos(x),))


@jax.custom_jvp
def bent(x: Any) -> Any:
    return jnp.sin(x)


bent.defjvp(lambda primals, tangents: (jnp.sin(*primals), 3 * tangents[0]))

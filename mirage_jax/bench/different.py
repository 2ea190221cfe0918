"""Programs of many equations that all differ, and that are refused only while their region is translated.

Equal layers are translated once, and refused together. Here nothing repeats, and the time to lower still has to grow
like the program. Suite "different" lowers these, and the tests count the work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

COUNTS, SMALL_COUNTS = (100, 1000, 5000), (10, 30)  # equations that are refused
ROWS, WIDTH = 8, 16

type Body = Callable[[int, jax.Array, jax.Array], jax.Array]  # number of equations, rows, weights


def powers(count: int, x: jax.Array, w: jax.Array) -> jax.Array:
    """Take roots of numbers that may be below zero: each is refused whatever is around it."""
    for n in range(count):
        x = (4 + x @ w * (1 / (n + 2))) ** 0.5
    return x


def zeros(count: int, x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiply every layer by zero: one equation, refused because of its neighbours, with another scale each time."""
    for n in range(count):
        x = jnp.tanh(x @ w * (1 / (n + 2))) * 0.0 + x
    return x


def slices(count: int, x: jax.Array, w: jax.Array) -> jax.Array:
    """Cut one product into slices, none a divisor: each could be in the region of the product."""
    y = (x.reshape(ROWS // 4, 4, WIDTH) @ w).reshape(ROWS // 4, -1)
    parts = [jnp.tanh(y[:, n + 1 : n + 1 + count]) for n in range(count)]
    return functools.reduce(jnp.add, (jnp.sum(part, -1) for part in parts))


KINDS: dict[str, Body] = {"powers": powers, "zeros": zeros, "slices": slices}


def draw(kind: str, count: int, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Draw the arguments of a program."""
    k1, k2 = jax.random.split(key)
    width = count if kind == "slices" else WIDTH
    return jax.random.normal(k1, (ROWS, WIDTH)), jax.random.normal(k2, (WIDTH, width))

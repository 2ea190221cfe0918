"""Random inputs to time programs on, made where they are needed: a set of weights is large."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from mirage_jax.jaxpr_frontend import jax_compat

type Types = tuple[jax.ShapeDtypeStruct, ...]

PERIOD = (1 << 20) - 3  # numbers that are drawn; a prime, so that rows of an array begin at other places among them
STRIDE = 104_729  # between the places where the arrays of a set begin, and MOST_ARRAYS times that between sets
MOST_ARRAYS = 64
MASKED_BELOW = -1.2816  # of normal numbers: a tenth


def one_set(types: Types, number: int) -> tuple[jax.Array, ...]:
    """Normal numbers, masks that are mostly true, integers that are 0, and keys, on the default device.

    The numbers repeat after `PERIOD`: a generator takes a compiler for GPUs longer than many a program that is timed.

    number: which set; others have other numbers.
    """
    first = MOST_ARRAYS * number
    return tuple(_array(t, np.uint32((first + n) * STRIDE % PERIOD), _normal()) for n, t in enumerate(types))


@functools.cache
def _normal() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(PERIOD, np.float32)


@functools.partial(jax.jit, static_argnums=0)
def _array(t: jax.ShapeDtypeStruct, first: jax.Array, numbers: jax.Array) -> jax.Array:
    """One array. Regions of a program share many types: each is compiled once."""
    if jax_compat.is_key(t):
        return jax.random.split(jax.random.key(first, impl=jax_compat.key_implementation(t)), t.shape)
    if t.dtype != bool and not jnp.issubdtype(t.dtype, jnp.inexact):
        return jnp.zeros(t.shape, t.dtype)
    places = (jnp.arange(math.prod(t.shape), dtype=np.uint32) + first) % np.uint32(PERIOD)
    x = numbers[places].reshape(t.shape)
    return x > MASKED_BELOW if t.dtype == bool else x.astype(t.dtype)

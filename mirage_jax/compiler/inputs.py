"""Random inputs to time programs on, made where they are needed: a set of weights is large."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from mirage_jax.jaxpr_frontend import jax_compat

type Types = tuple[jax.ShapeDtypeStruct, ...]


def one_set(types: Types, key: jax.Array) -> tuple[jax.Array, ...]:
    """Normal numbers, masks that are mostly true, integers that are 0, and keys, on the default device."""
    return tuple(_random(t, k) for k, t in zip(jax.random.split(key, len(types)), types, strict=True))


@functools.partial(jax.jit, static_argnums=0)
def _random(t: jax.ShapeDtypeStruct, key: jax.Array) -> jax.Array:
    """One array. Regions of a program share many types: each is compiled once."""
    if t.dtype == bool:
        return jax.random.bernoulli(key, 0.9, t.shape)
    if jax_compat.is_key(t):
        return jax.random.split(jax.random.key(0, impl=jax_compat.key_implementation(t)), t.shape)
    if jnp.issubdtype(t.dtype, jnp.floating):
        return jax.random.normal(key, t.shape, jnp.float32).astype(t.dtype)
    return jnp.zeros(t.shape, t.dtype)

"""Training steps of one layer, as people write them, in which large values are cheap to compute again.

Each is plain JAX that differentiates itself, ``step(state, batch) -> (state, (loss, gradients))``, without a state. A
backward pass from stored scores is hard to beat here, so the steps show whether a function gets slower as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

type Draw = Callable[[jax.Array], tuple[Any, Any]]
type Fn = Callable[[Any, Any], tuple[Any, Any]]


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of attention-like programs: query heads, heads of keys and values, positions, numbers of a head, window."""

    heads: int = 16
    groups: int = 4
    length: int = 4096
    width: int = 128
    window: int = 1024


SMALL = LayerSizes(heads=4, groups=2, length=64, width=16, window=24)
CAP = 50.0  # of logits


def softcap_attention(q: jax.Array, k: jax.Array, v: jax.Array, window: int) -> jax.Array:
    """Attend in a sliding causal window, logits capped, with heads that share keys: q[H, T, D]; k, v[G, T, D]."""
    grouped = q.reshape(k.shape[0], -1, *q.shape[1:])
    logits = jnp.einsum("ghtd,gsd->ghts", grouped, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    logits = CAP * jnp.tanh(logits / CAP)
    t = jnp.arange(q.shape[1])
    seen = (t[:, None] >= t) & (t[:, None] - t < window)
    weights = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), axis=-1).astype(v.dtype)
    return jnp.einsum("ghts,gsd->ghtd", weights, v).reshape(q.shape)


def retention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Weigh values by scores that decay with distance, each head at another rate (retention: Sun et al., 2023)."""
    heads, length, width = q.shape
    rates = 1 - 2.0 ** (-5 - jnp.arange(heads, dtype=jnp.float32))
    t = jnp.arange(length)
    distance = (t[:, None] - t).astype(jnp.float32)
    decay = jnp.where(distance >= 0, rates[:, None, None] ** jnp.maximum(distance, 0), 0.0)
    scores = jnp.einsum("htd,hsd->hts", q, k, preferred_element_type=jnp.float32) * width**-0.5 * decay
    return jnp.einsum("hts,hsd->htd", scores.astype(v.dtype), v)


def kernel_regression(x: jax.Array, points: jax.Array, values: jax.Array, scale: jax.Array) -> jax.Array:
    """Average all values at each x, weighed by a Gaussian of the distance (Nadaraya and Watson, 1964)."""
    x, points = x / scale, points / scale
    squares = jnp.sum(x * x, -1)[:, None] + jnp.sum(points * points, -1) - 2 * x @ points.T
    weights = jnp.exp(-0.5 * squares)
    return weights @ values / (jnp.sum(weights, -1, keepdims=True) + 1e-6)


def _step(loss: Callable[..., jax.Array]) -> Fn:
    def step(state: tuple[()], batch: tuple[Any, ...]) -> tuple[tuple[()], Any]:
        parameters, *rest = batch
        return state, jax.value_and_grad(loss)(parameters, *rest)

    return step


def _squared(y: jax.Array, target: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(y.astype(jnp.float32) - target.astype(jnp.float32)))


def attention_step(s: LayerSizes) -> tuple[Fn, Draw]:
    """Make a step with gradients of queries, keys and values."""

    def draw(key: jax.Array) -> tuple[Any, Any]:
        shapes = [(n, s.length, s.width) for n in (s.heads, s.groups, s.groups, s.heads)]
        keys = jax.random.split(key, 4)
        q, k, v, target = (jax.random.normal(k, n, jnp.bfloat16) for k, n in zip(keys, shapes, strict=True))
        return (), ((q, k, v), target)

    def loss(qkv: tuple[jax.Array, jax.Array, jax.Array], target: jax.Array) -> jax.Array:
        """Compare attention with a target."""
        q, k, v = qkv
        return _squared(softcap_attention(q, k, v, s.window), target)

    return _step(loss), draw


def retention_step(s: LayerSizes) -> tuple[Fn, Draw]:
    """Make the same step of retention."""

    def draw(key: jax.Array) -> tuple[Any, Any]:
        shape = s.heads, s.length, s.width
        q, k, v, target = (jax.random.normal(one, shape, jnp.bfloat16) for one in jax.random.split(key, 4))
        return (), ((q, k, v), target)

    return _step(lambda qkv, target: _squared(retention(*qkv), target)), draw


def kernel_regression_step(queries: int, points: int, width: int = 16, outputs: int = 8) -> tuple[Fn, Draw]:
    """Make a step with gradients of points, values and scales."""

    def draw(key: jax.Array) -> tuple[Any, Any]:
        shapes = [(points, width), (points, outputs), (queries, width), (queries, outputs)]
        z, y, x, target = (jax.random.normal(k, n) for k, n in zip(jax.random.split(key, 4), shapes, strict=True))
        return (), ((z, y, jnp.full(width, 2.0)), x, target)

    return _step(lambda p, x, target: _squared(kernel_regression(x, *p), target)), draw

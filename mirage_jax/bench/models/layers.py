"""Common parts of models: sizes, random weights, norms, rotary embedding, attention, MLPs, stacks of layers, losses.

Activations are [batch, position, width], or [batch, position, head, head size] inside of attention. Norms, softmax and
losses are computed in float32 at least, products in the dtype of their operands. Weights are dicts of arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

type Weights = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a transformer and of its data. `hidden` is the width inside of an MLP."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    batch: int
    length: int
    dtype: str = "bfloat16"

    @property
    def head(self) -> int:
        """Numbers in a head."""
        return self.width // self.heads


class WeightDraw:
    """Random weights from one key: `draw(m, n)` for a matrix that is applied as ``x @ w``."""

    def __init__(self, key: jax.Array, dtype: str) -> None:
        self.key, self.dtype = key, dtype

    def __call__(self, *shape: int, scale: float | None = None) -> jax.Array:
        """Normal numbers, scaled by the root of the fan-in unless `scale` says otherwise."""
        self.key, key = jax.random.split(self.key)
        spread = shape[-2] ** -0.5 if scale is None else scale
        return (jax.random.normal(key, shape, jnp.float32) * spread).astype(self.dtype)

    def gain(self, n: int) -> jax.Array:
        """Near one: with all ones an error in a gain would not show."""
        return 1 + self(n, scale=0.1)

    def bias(self, n: int) -> jax.Array:
        """Draw a bias."""
        return self(n, scale=0.02)

    def norm(self, n: int) -> Weights:
        """Of a layer normalization."""
        return {"gain": self.gain(n), "bias": self.bias(n)}

    def dense(self, m: int, n: int, scale: float | None = None) -> Weights:
        """Draw weights, scaled by the root of their fan-in unless `scale` says otherwise, and a bias."""
        return {"w": self(m, n, scale=scale), "b": self.bias(n)}


@partial(jax.jit, static_argnums=(1, 2))
def init_language_model(key: jax.Array, s: Any, init_layer: Callable[[WeightDraw, Any], Weights]) -> Weights:
    """Layers between an embedding and a head of its own, with a norm before the head."""
    draw = WeightDraw(key, s.dtype)
    return {
        "tokens": draw(s.vocab, s.width, scale=1.0),
        "layers": [init_layer(draw, s) for _ in range(s.layers)],
        "norm": draw.gain(s.width),
        "head": draw(s.width, s.vocab),
    }


def widen(x: jax.Array) -> jax.Array:
    """Half precision as float32."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def rms_norm(x: jax.Array, gain: jax.Array, eps: float = 1e-5) -> jax.Array:
    """Normalize by the root mean square in float32 (Zhang and Sennrich, 2019)."""
    wide = widen(x)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale * gain).astype(x.dtype)


def layer_norm(x: jax.Array, weights: Weights, eps: float = 1e-5) -> jax.Array:
    """Normalize to mean 0 and variance 1 in float32 (Ba et al., 2016)."""
    wide = widen(x)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    return (centred * scale * weights["gain"] + weights["bias"]).astype(x.dtype)


def unit(x: jax.Array) -> jax.Array:
    """Vectors of length one."""
    wide = widen(x)
    return (wide * jax.lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True))).astype(x.dtype)


def dense(x: jax.Array, weights: Weights) -> jax.Array:
    """Multiply by weights and add a bias."""
    return x @ weights["w"] + weights["b"]


def rotary(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotate halves of [batch, position, head, size] by angles that grow with the position [position]."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = (positions[:, None] * frequencies)[:, None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    left, right = jnp.split(widen(x), 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x.dtype)


def split_heads(x: jax.Array, heads: int) -> jax.Array:
    """Reshape [B, T, H D] to [B, T, H, D]."""
    return x.reshape(*x.shape[:-1], heads, -1)


def join_heads(x: jax.Array) -> jax.Array:
    """Reshape [B, T, H, D] to [B, T, H D]."""
    return x.reshape(*x.shape[:-2], -1)


def swiglu(x: jax.Array, weights: Weights) -> jax.Array:
    """Run a gated MLP (Shazeer, 2020)."""
    return (jax.nn.silu(x @ weights["gate"]) * (x @ weights["up"])) @ weights["down"]


def apply_layers(layer: Callable[[jax.Array, Weights], jax.Array], x: jax.Array, layers: Any) -> jax.Array:
    """`layer` with each weights of a list, one after the other; of one stacked tree by `scan`."""
    if isinstance(layers, list):
        for weights in layers:
            x = layer(x, weights)
        return x
    return jax.lax.scan(lambda x, weights: (layer(x, weights), None), x, layers)[0]


def stacked(layers: list[Weights]) -> Weights:
    """Layers of equal shapes as one tree, for `apply_layers` by `scan`."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean over all positions; `targets` are classes."""
    log_p = jax.nn.log_softmax(widen(logits))
    return -jnp.take_along_axis(log_p, targets[..., None], axis=-1).mean()


def squared_error(found: jax.Array, wanted: jax.Array) -> jax.Array:
    """Average squared differences in float32."""
    return jnp.mean((widen(found) - wanted) ** 2)

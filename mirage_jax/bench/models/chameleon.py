"""Chameleon's layers (arXiv 2405.09818): Llama's, with queries and keys normalized in each head (QK-norm)."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from mirage_jax.bench.models import llama
from mirage_jax.bench.models.layers import (
    Sizes,
    WeightDraw,
    Weights,
    apply_layers,
    join_heads,
    layer_norm,
    rms_norm,
    rotary,
    split_heads,
    swiglu,
)

CHAMELEON_7B = Sizes(layers=32, width=4096, heads=32, kv_heads=32, hidden=11008, vocab=0, batch=1, length=4096)
SMALL = Sizes(layers=2, width=64, heads=4, kv_heads=4, hidden=192, vocab=0, batch=2, length=64)
THETA = 10000.0


@partial(jax.jit, static_argnums=1)
def init(key: jax.Array, s: Sizes) -> list[Weights]:
    """Draw all weights."""
    draw = WeightDraw(key, s.dtype)
    norms = lambda: {"norm_q": draw.norm(s.head), "norm_k": draw.norm(s.head)}  # noqa: E731
    return [llama.init_layer(draw, s) | norms() for _ in range(s.layers)]


def layer(s: Sizes, x: jax.Array, w: Weights) -> jax.Array:
    """Run a layer."""
    h, positions = rms_norm(x, w["norm1"]), jnp.arange(x.shape[1])
    q = rotary(layer_norm(split_heads(h @ w["query"], s.heads), w["norm_q"]), positions, THETA)
    k = rotary(layer_norm(split_heads(h @ w["key"], s.kv_heads), w["norm_k"]), positions, THETA)
    v = split_heads(h @ w["value"], s.kv_heads)
    x = x + join_heads(jax.nn.dot_product_attention(q, k, v, is_causal=True)) @ w["out"]
    return x + swiglu(rms_norm(x, w["norm2"]), w)


def run(s: Sizes, layers: list[Weights], x: jax.Array) -> jax.Array:
    """The layers on [batch, length, width]."""
    return apply_layers(partial(layer, s), x, layers)

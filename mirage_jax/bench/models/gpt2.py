"""GPT-2 (Radford et al., 2019): pre-norm, learned positions, GELU by tanh, the head tied to the embedding."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from mirage_jax.bench.models.layers import (
    Sizes,
    WeightDraw,
    Weights,
    apply_layers,
    cross_entropy,
    dense,
    join_heads,
    layer_norm,
    split_heads,
)

MEDIUM = Sizes(layers=24, width=1024, heads=16, kv_heads=16, hidden=4096, vocab=50257, batch=2, length=1024)
SMALL = Sizes(layers=2, width=64, heads=4, kv_heads=4, hidden=256, vocab=128, batch=2, length=64)


def init_layer(draw: WeightDraw, s: Sizes) -> Weights:
    """Draw the weights of a layer."""
    return {
        "norm1": draw.norm(s.width),
        "qkv": draw.dense(s.width, 3 * s.width),
        "out": draw.dense(s.width, s.width),
        "norm2": draw.norm(s.width),
        "up": draw.dense(s.width, s.hidden),
        "down": draw.dense(s.hidden, s.width),
    }


@partial(jax.jit, static_argnums=1)
def init(key: jax.Array, s: Sizes) -> Weights:
    """Draw all weights."""
    draw = WeightDraw(key, s.dtype)
    return {
        "tokens": draw(s.vocab, s.width, scale=0.02),
        "positions": draw(s.length, s.width, scale=0.01),
        "layers": [init_layer(draw, s) for _ in range(s.layers)],
        "norm": draw.norm(s.width),
    }


def layer(s: Sizes, x: jax.Array, w: Weights) -> jax.Array:
    """Run a layer: attention and MLP, each normalized first."""
    qkv = jnp.split(dense(layer_norm(x, w["norm1"]), w["qkv"]), 3, axis=-1)
    q, k, v = (split_heads(y, s.heads) for y in qkv)
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + dense(join_heads(mixed), w["out"])
    return x + dense(jax.nn.gelu(dense(layer_norm(x, w["norm2"]), w["up"])), w["down"])


def run(s: Sizes, layers: list[Weights], x: jax.Array) -> jax.Array:
    """The layers on [batch, length, width]."""
    return apply_layers(partial(layer, s), x, layers)


def logits(s: Sizes, w: Weights, tokens: jax.Array) -> jax.Array:
    """Run the model on tokens."""
    x = w["tokens"][tokens] + w["positions"][: tokens.shape[1]]
    return layer_norm(run(s, w["layers"], x), w["norm"]) @ w["tokens"].T


def loss(s: Sizes, w: Weights, text: jax.Array) -> jax.Array:
    """Of predicting each token of `text`, [batch, length + 1], from those before it."""
    return cross_entropy(logits(s, w, text[:, :-1]), text[:, 1:])

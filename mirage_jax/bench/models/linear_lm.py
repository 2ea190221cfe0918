"""A language model with causal linear attention (Katharopoulos et al., arXiv 2006.16236; norms as in arXiv 2307.08621).

Scores are products of queries and keys, masked and never normalized; results are normalized in each head. Written
as one thinks of it: all scores of a text at once.
"""

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
    init_language_model,
    join_heads,
    rms_norm,
    split_heads,
    swiglu,
)

M340 = Sizes(layers=24, width=1024, heads=4, kv_heads=4, hidden=2816, vocab=32000, batch=4, length=2048)
SMALL = Sizes(layers=2, width=64, heads=2, kv_heads=2, hidden=192, vocab=128, batch=2, length=64)


def init_layer(draw: WeightDraw, s: Sizes) -> Weights:
    """Draw the weights of a layer."""
    square = lambda: draw(s.width, s.width)  # noqa: E731
    return {
        "norm1": draw.gain(s.width),
        "query": square(),
        "key": square(),
        "value": square(),
        "norm_head": draw.gain(s.head),
        "out": square(),
        "norm2": draw.gain(s.width),
        "gate": draw(s.width, s.hidden),
        "up": draw(s.width, s.hidden),
        "down": draw(s.hidden, s.width),
    }


def init(key: jax.Array, s: Sizes) -> Weights:
    """Draw all weights."""
    return init_language_model(key, s, init_layer)


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Of [batch, position, head, size]."""
    length = q.shape[1]
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, 0)
    return jnp.einsum("bhqk,bkhd->bqhd", scores, v)


def layer(s: Sizes, x: jax.Array, w: Weights) -> jax.Array:
    """Run a layer."""
    h = rms_norm(x, w["norm1"])
    q, k, v = (split_heads(h @ w[n], s.heads) for n in ("query", "key", "value"))
    x = x + join_heads(rms_norm(attention(q, k, v), w["norm_head"])) @ w["out"]
    return x + swiglu(rms_norm(x, w["norm2"]), w)


def run(s: Sizes, layers: list[Weights], x: jax.Array) -> jax.Array:
    """Run all layers."""
    return apply_layers(partial(layer, s), x, layers)


def loss(s: Sizes, w: Weights, text: jax.Array) -> jax.Array:
    """Of predicting each token of `text`, [batch, length + 1], from those before it."""
    x = run(s, w["layers"], w["tokens"][text[:, :-1]])
    return cross_entropy(rms_norm(x, w["norm"]) @ w["head"], text[:, 1:])

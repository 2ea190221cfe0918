"""Llama 3 (Grattafiori et al., arXiv 2407.21783): RMSNorm, rotary positions, grouped queries, SwiGLU.

`prefill` reads a prompt and fills the cache of keys and values, `decode` adds one token to each text. A cache is one
pair [batch, capacity, kv head, head size] per layer; a step that is given it by donation updates it in place.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mirage_jax.bench.models.layers import (
    Sizes,
    WeightDraw,
    Weights,
    init_language_model,
    join_heads,
    rms_norm,
    rotary,
    split_heads,
    swiglu,
)

LLAMA3_8B = Sizes(layers=32, width=4096, heads=32, kv_heads=8, hidden=14336, vocab=128256, batch=1, length=4096)
SMALL = Sizes(layers=2, width=64, heads=4, kv_heads=2, hidden=256, vocab=128, batch=2, length=64)
THETA = 500000.0

type Cache = list[tuple[jax.Array, jax.Array]]


def init_layer(draw: WeightDraw, s: Sizes) -> Weights:
    """Draw the weights of a layer."""
    kv = s.kv_heads * s.head
    return {
        "norm1": draw.gain(s.width),
        "query": draw(s.width, s.width),
        "key": draw(s.width, kv),
        "value": draw(s.width, kv),
        "out": draw(s.width, s.width),
        "norm2": draw.gain(s.width),
        "gate": draw(s.width, s.hidden),
        "up": draw(s.width, s.hidden),
        "down": draw(s.hidden, s.width),
    }


def init(key: jax.Array, s: Sizes) -> Weights:
    """Draw all weights."""
    return init_language_model(key, s, init_layer)


def empty_cache(s: Sizes) -> Cache:
    """Make a cache of keys and values for every layer, all zero."""
    shape = (s.batch, s.length, s.kv_heads, s.head)
    return [(jnp.zeros(shape, s.dtype), jnp.zeros(shape, s.dtype)) for _ in range(s.layers)]


def project(s: Sizes, x: jax.Array, w: Weights, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries and keys, rotated, and values."""
    q = split_heads(x @ w["query"], s.heads)
    k = split_heads(x @ w["key"], s.kv_heads)
    v = split_heads(x @ w["value"], s.kv_heads)
    return rotary(q, positions, THETA), rotary(k, positions, THETA), v


def layer(s: Sizes, x: jax.Array, w: Weights) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """All positions of a text at once; the keys and values go with the result."""
    q, k, v = project(s, rms_norm(x, w["norm1"]), w, jnp.arange(x.shape[1]))
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + join_heads(mixed) @ w["out"]
    return x + swiglu(rms_norm(x, w["norm2"]), w), (k, v)


def layer_with_cache(
    s: Sizes, x: jax.Array, w: Weights, cache: tuple[jax.Array, jax.Array], position: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """One position more, whose keys and values go into the cache."""
    q, k, v = project(s, rms_norm(x, w["norm1"]), w, position[None])
    keys, values = (
        jax.lax.dynamic_update_slice_in_dim(old, new, position, axis=1) for old, new in zip(cache, (k, v), strict=True)
    )
    known = jnp.full(len(x), position + 1)
    mixed = jax.nn.dot_product_attention(q, keys, values, key_value_seq_lengths=known)
    x = x + join_heads(mixed) @ w["out"]
    return x + swiglu(rms_norm(x, w["norm2"]), w), (keys, values)


def read(s: Sizes, layers: list[Weights], x: jax.Array) -> tuple[jax.Array, Cache]:
    """The layers over whole texts, and their cache."""
    cache: Cache = []
    for w in layers:
        x, new = layer(s, x, w)
        cache.append(new)
    return x, cache


def extend(s: Sizes, layers: list[Weights], x: jax.Array, cache: Cache, position: jax.Array) -> tuple[jax.Array, Cache]:
    """The layers over one more position, and the cache with it."""
    new: Cache = []
    for w, old in zip(layers, cache, strict=True):
        x, updated = layer_with_cache(s, x, w, old, position)
        new.append(updated)
    return x, new


def logits(w: Weights, x: jax.Array) -> jax.Array:
    """Of the token after the last position, [batch, vocab]."""
    return rms_norm(x[:, -1], w["norm"]) @ w["head"]


def prefill(s: Sizes, w: Weights, prompt: jax.Array) -> tuple[jax.Array, Cache]:
    """Predict the next tokens after a prompt, [batch, positions]; also returns a full-size cache with the prompt."""
    x, made = read(s, w["layers"], w["tokens"][prompt])
    fill = lambda new, empty: jax.lax.dynamic_update_slice_in_dim(empty, new, 0, axis=1)  # noqa: E731
    return logits(w, x), jax.tree.map(fill, made, empty_cache(s))


def decode(s: Sizes, w: Weights, token: jax.Array, cache: Cache, position: jax.Array) -> tuple[jax.Array, Cache]:
    """Predict the token after `token`, [batch], which stands at `position`."""
    x, cache = extend(s, w["layers"], w["tokens"][token[:, None]], cache, position)
    return logits(w, x), cache

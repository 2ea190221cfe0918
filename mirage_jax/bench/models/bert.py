"""The encoder layers of BERT (Devlin et al., arXiv 1810.04805): post-norm, exact GELU, padding is masked."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from mirage_jax.bench.models.layers import (
    Sizes,
    WeightDraw,
    Weights,
    apply_layers,
    dense,
    join_heads,
    layer_norm,
    split_heads,
    squared_error,
)

LARGE = Sizes(layers=24, width=1024, heads=16, kv_heads=16, hidden=4096, vocab=0, batch=16, length=512)
SMALL = Sizes(layers=2, width=64, heads=4, kv_heads=4, hidden=256, vocab=0, batch=4, length=32)
EPSILON = 1e-12

type Batch = tuple[jax.Array, jax.Array, jax.Array]


def init_layer(draw: WeightDraw, s: Sizes) -> Weights:
    """Draw the weights of a layer."""
    square = lambda: draw.dense(s.width, s.width)  # noqa: E731
    return {
        "query": square(),
        "key": square(),
        "value": square(),
        "out": square(),
        "norm1": draw.norm(s.width),
        "up": draw.dense(s.width, s.hidden),
        "down": draw.dense(s.hidden, s.width),
        "norm2": draw.norm(s.width),
    }


@partial(jax.jit, static_argnums=1)
def init(key: jax.Array, s: Sizes) -> list[Weights]:
    """Draw all weights."""
    draw = WeightDraw(key, s.dtype)
    return [init_layer(draw, s) for _ in range(s.layers)]


def layer(s: Sizes, x: jax.Array, w: Weights, is_token: jax.Array) -> jax.Array:
    """Run a layer: attention and MLP, each normalized after its residual."""
    q, k, v = (split_heads(dense(x, w[n]), s.heads) for n in ("query", "key", "value"))
    mixed = jax.nn.dot_product_attention(q, k, v, mask=is_token[:, None, None, :])
    x = layer_norm(x + dense(join_heads(mixed), w["out"]), w["norm1"], EPSILON)
    inner = jax.nn.gelu(dense(x, w["up"]), approximate=False)
    return layer_norm(x + dense(inner, w["down"]), w["norm2"], EPSILON)


def encode(s: Sizes, layers: list[Weights], x: jax.Array, lengths: jax.Array) -> jax.Array:
    """[batch, length, width] to the same; of each text the first `lengths` positions are tokens."""
    is_token = jnp.arange(x.shape[1]) < lengths[:, None]
    return apply_layers(lambda x, w: layer(s, x, w, is_token), x, layers)


def batch(key: jax.Array, s: Sizes) -> Batch:
    """Embeddings, lengths of the texts, and targets of the encoder."""
    k1, k2, k3 = jax.random.split(key, 3)
    shape = (s.batch, s.length, s.width)
    lengths = jax.random.randint(k3, (s.batch,), s.length // 2, s.length + 1, jnp.int32)
    return jax.random.normal(k1, shape, s.dtype), lengths, jax.random.normal(k2, shape, s.dtype)


def loss(s: Sizes, layers: list[Weights], batch: Batch) -> jax.Array:
    """Compute the loss of masked tokens."""
    x, lengths, wanted = batch
    return squared_error(encode(s, layers, x, lengths), wanted)

"""The vision transformer (Dosovitskiy et al., arXiv 2010.11929): patches of an image and a class token, pre-norm."""

from __future__ import annotations

from dataclasses import dataclass
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
)

EPSILON = 1e-6


@dataclass(frozen=True)
class VitSizes(Sizes):
    """`vocab` counts the classes; `length` counts the patches and the class token."""

    patch: int = 16

    @property
    def image(self) -> int:
        """Pixels of a side."""
        return round((self.length - 1) ** 0.5) * self.patch


LARGE = VitSizes(layers=24, width=1024, heads=16, kv_heads=16, hidden=4096, vocab=1000, batch=32, length=197)
SMALL = VitSizes(layers=2, width=64, heads=4, kv_heads=4, hidden=256, vocab=10, batch=2, length=17, patch=4)


def init_layer(draw: WeightDraw, s: Sizes) -> Weights:
    """Draw the weights of a layer."""
    square = lambda: draw.dense(s.width, s.width)  # noqa: E731
    return {
        "norm1": draw.norm(s.width),
        "query": square(),
        "key": square(),
        "value": square(),
        "out": square(),
        "norm2": draw.norm(s.width),
        "up": draw.dense(s.width, s.hidden),
        "down": draw.dense(s.hidden, s.width),
    }


@partial(jax.jit, static_argnums=1)
def init(key: jax.Array, s: VitSizes) -> Weights:
    """Draw all weights."""
    draw = WeightDraw(key, s.dtype)
    return {
        "patches": draw.dense(3 * s.patch**2, s.width),
        "class": draw(1, 1, s.width, scale=0.02),
        "positions": draw(s.length, s.width, scale=0.02),
        "layers": [init_layer(draw, s) for _ in range(s.layers)],
        "norm": draw.norm(s.width),
        "head": draw.dense(s.width, s.vocab),
    }


def patches(s: VitSizes, images: jax.Array) -> jax.Array:
    """[batch, side, side, colour] as [batch, patch, pixels of a patch]."""
    n, side, p = len(images), s.image // s.patch, s.patch
    grid = images.reshape(n, side, p, side, p, 3)
    return grid.transpose(0, 1, 3, 2, 4, 5).reshape(n, side * side, p * p * 3)


def layer(s: Sizes, x: jax.Array, w: Weights) -> jax.Array:
    """Run a layer."""
    h = layer_norm(x, w["norm1"], EPSILON)
    q, k, v = (split_heads(dense(h, w[n]), s.heads) for n in ("query", "key", "value"))
    x = x + dense(join_heads(jax.nn.dot_product_attention(q, k, v)), w["out"])
    inner = jax.nn.gelu(dense(layer_norm(x, w["norm2"], EPSILON), w["up"]), approximate=False)
    return x + dense(inner, w["down"])


def run(s: Sizes, layers: list[Weights], x: jax.Array) -> jax.Array:
    """Run all layers."""
    return apply_layers(partial(layer, s), x, layers)


def logits(s: VitSizes, w: Weights, images: jax.Array) -> jax.Array:
    """Of the classes, for images [batch, side, side, colour]."""
    x = dense(patches(s, images), w["patches"])
    first = jnp.broadcast_to(w["class"], (len(x), 1, s.width))
    x = jnp.concatenate([first, x], axis=1) + w["positions"]
    x = run(s, w["layers"], x)
    return dense(layer_norm(x, w["norm"], EPSILON)[:, 0], w["head"])

"""nGPT (Loshchilov et al., arXiv 2410.01131): a transformer on the sphere, without norms that have gains.

Every vector along the width has length one. A block proposes a point, and the state moves towards it by a learned
step per dimension and returns to the sphere. Queries and keys are normalized too, so the softmax is scaled up.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp

from mirage_jax.bench.models.layers import (
    Sizes,
    WeightDraw,
    Weights,
    apply_layers,
    join_heads,
    rotary,
    split_heads,
    unit,
)

HALF_B = Sizes(layers=24, width=1024, heads=16, kv_heads=16, hidden=4096, vocab=0, batch=1, length=4096)
SMALL = Sizes(layers=2, width=64, heads=4, kv_heads=4, hidden=256, vocab=0, batch=2, length=64)
THETA = 10000.0
STEP = 0.05  # the initial step towards the result of a block


def init_layer(draw: WeightDraw, s: Sizes) -> Weights:
    """Draw the weights of a layer."""
    inwards = lambda m, n: unit(draw(n, m)).T  # noqa: E731  (columns of length one)
    return {
        "query": inwards(s.width, s.width),
        "key": inwards(s.width, s.width),
        "value": inwards(s.width, s.width),
        "out": unit(draw(s.width, s.width)),
        "up": inwards(s.width, s.hidden),
        "gate": inwards(s.width, s.hidden),
        "down": unit(draw(s.hidden, s.width)),
        "scale_qk": draw.gain(s.width),
        "scale_up": draw.gain(s.hidden),
        "scale_gate": draw.gain(s.hidden),
        "step_attention": STEP * draw.gain(s.width),
        "step_mlp": STEP * draw.gain(s.width),
    }


@partial(jax.jit, static_argnums=1)
def init(key: jax.Array, s: Sizes) -> list[Weights]:
    """Draw all weights."""
    draw = WeightDraw(key, s.dtype)
    return [init_layer(draw, s) for _ in range(s.layers)]


def attention(s: Sizes, x: jax.Array, w: Weights) -> jax.Array:
    """Attend with normalized queries and keys."""
    positions = jnp.arange(x.shape[1])
    q, k, v = (split_heads(x @ w[n], s.heads) for n in ("query", "key", "value"))
    scale = w["scale_qk"].reshape(s.heads, s.head)
    q = unit(rotary(q, positions, THETA)) * scale
    k = unit(rotary(k, positions, THETA)) * scale
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, scale=math.sqrt(s.head))
    return join_heads(mixed) @ w["out"]


def mlp(s: Sizes, x: jax.Array, w: Weights) -> jax.Array:
    """Run the gated MLP."""
    up = (x @ w["up"]) * w["scale_up"]
    gate = (x @ w["gate"]) * w["scale_gate"] * math.sqrt(s.width)
    return (up * jax.nn.silu(gate)) @ w["down"]


def layer(s: Sizes, x: jax.Array, w: Weights) -> jax.Array:
    """Run a layer: each part moves the hidden state on the sphere."""
    x = unit(x + w["step_attention"] * (unit(attention(s, x, w)) - x))
    return unit(x + w["step_mlp"] * (unit(mlp(s, x, w)) - x))


def run(s: Sizes, layers: list[Weights], x: jax.Array) -> jax.Array:
    """The layers on points of the sphere, [batch, length, width]."""
    return apply_layers(partial(layer, s), x, layers)

"""Fine-tuning Llama's layers by LoRA (Hu et al., arXiv 2106.09685): every projection W gets a trained A B added.

The gradients are of A and B only; W is data of the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from mirage_jax.bench.models import llama
from mirage_jax.bench.models.layers import (
    Sizes,
    WeightDraw,
    Weights,
    join_heads,
    rms_norm,
    rotary,
    split_heads,
    squared_error,
)

PROJECTIONS = ("query", "key", "value", "out", "gate", "up", "down")
ALPHA = 2.0  # the share of A B, times its rank


@dataclass(frozen=True)
class LoraSizes(Sizes):
    rank: int = 16


LLAMA3_8B = LoraSizes(layers=32, width=4096, heads=32, kv_heads=8, hidden=14336, vocab=0, batch=1, length=2048)
SMALL = LoraSizes(layers=2, width=64, heads=4, kv_heads=2, hidden=256, vocab=0, batch=2, length=64, rank=4)

type Batch = tuple[list[Weights], jax.Array, jax.Array]


@partial(jax.jit, static_argnums=1)
def init(key: jax.Array, s: Sizes) -> list[Weights]:
    """The frozen layers."""
    draw = WeightDraw(key, s.dtype)
    return [llama.init_layer(draw, s) for _ in range(s.layers)]


@partial(jax.jit, static_argnums=1)
def init_adapters(key: jax.Array, s: LoraSizes, layers: list[Weights]) -> list[Weights]:
    """A and B of each projection. Training starts with B = 0; that no sum is trivial here, it is not."""
    draw = WeightDraw(key, s.dtype)

    def pair(w: jax.Array) -> Weights:
        return {"a": draw(w.shape[0], s.rank), "b": draw(s.rank, w.shape[1], scale=0.1 * s.rank**-0.5)}

    return [{n: pair(w[n]) for n in PROJECTIONS} for w in layers]


def adapted(x: jax.Array, w: Weights, adapters: Weights, name: str) -> jax.Array:
    """Multiply by weights with their adapter (Hu et al., 2021)."""
    a, b = adapters[name]["a"], adapters[name]["b"]
    return x @ w[name] + ((x @ a) @ b) * (ALPHA / a.shape[1])


def layer(s: Sizes, x: jax.Array, w: Weights, adapters: Weights) -> jax.Array:
    """Run a layer."""
    project = lambda x, name: adapted(x, w, adapters, name)  # noqa: E731
    h, positions = rms_norm(x, w["norm1"]), jnp.arange(x.shape[1])
    q = rotary(split_heads(project(h, "query"), s.heads), positions, llama.THETA)
    k = rotary(split_heads(project(h, "key"), s.kv_heads), positions, llama.THETA)
    v = split_heads(project(h, "value"), s.kv_heads)
    x = x + project(join_heads(jax.nn.dot_product_attention(q, k, v, is_causal=True)), "out")
    h = rms_norm(x, w["norm2"])
    return x + project(jax.nn.silu(project(h, "gate")) * project(h, "up"), "down")


def loss(s: Sizes, adapters: list[Weights], batch: Batch) -> jax.Array:
    """Compare the results of all layers with targets."""
    layers, x, wanted = batch
    for w, own in zip(layers, adapters, strict=True):
        x = layer(s, x, w, own)
    return squared_error(x, wanted)

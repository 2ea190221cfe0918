"""Programs that people write: name -> (function, operands, tolerance). Their regions and gradients are tested."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jaxpr_frontend.replacing import random


@dataclass(frozen=True)
class Program:
    fn: Callable[..., Any]
    args: tuple[Any, ...]

    @property
    def tolerance(self) -> float:
        narrow = any(x.dtype.itemsize == 2 for x in jax.tree.leaves(self.args))
        return 4e-2 if narrow else 2e-4


def rms(x):
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def layer_norm(x, g, b):
    m = x.mean(-1, keepdims=True)
    v = ((x - m) ** 2).mean(-1, keepdims=True)
    return (x - m) / jnp.sqrt(v + 1e-5) * g + b


def attention(q, k, v):
    return jax.nn.softmax(q @ k.mT / jnp.sqrt(q.shape[-1]).astype(q.dtype)) @ v


def linear_attention(q, k, v):
    def heads(x):
        return x.reshape(*x.shape[:2], 4, -1).transpose(0, 2, 1, 3)

    out = (heads(q) @ heads(k).mT) @ heads(v)
    return out.transpose(0, 2, 1, 3).reshape(q.shape)


def causal_attention(q, k, v):
    """bf16 with f32 accumulation, and an infinite mask."""
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32) / np.sqrt(q.shape[-1])
    s = jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(s).astype(q.dtype), v)


def padded_attention(q, k, v, lengths):
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    mask = jnp.arange(k.shape[1])[None, :] < lengths[:, None]
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(mask[:, None, None, :], s, -1e9)), v)


def rope(x):
    steps, width = x.shape[-2:]
    angles = jnp.arange(steps)[:, None] / 10000 ** (jnp.arange(0, width, 2) / width)
    c, s = jnp.cos(angles), jnp.sin(angles)
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * c - b * s, b * c + a * s], -1)


def many_views(x):
    """One product in several layouts, and results that need no kernel."""
    y = x @ x.T
    return y, y[:, None], jnp.broadcast_to(y[None], (3, 8, 8)).reshape(24, 8), x.T, x[None] + 0


def _flax() -> dict[str, Program]:
    x = random(2, 16, 32)
    attend = linen.MultiHeadDotProductAttention(num_heads=4)
    found = {"linen attention": Program(attend.apply, (attend.init(jax.random.key(0), x), x))}
    for name, module in {
        "nnx attention": nnx.MultiHeadAttention(4, 32, decode=False, rngs=nnx.Rngs(0)),
        "nnx rms norm": nnx.RMSNorm(32, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)),
        "nnx layer norm": nnx.LayerNorm(32, rngs=nnx.Rngs(0)),
    }.items():
        definition, state = nnx.split(module)
        operand = x.astype(jnp.bfloat16) if "rms" in name else x
        found[name] = Program(lambda s, x, d=definition: nnx.merge(d, s)(x), (state, operand))
    return found


H, B = "float16", "bfloat16"
QKV = [random(2, 24, 16, seed=n) for n in range(3)]
HALF = [random(2, 24, 16, seed=n, dtype=H) for n in range(3)]
HEADS = [random(2, 16, 4, 8, seed=n, dtype=B) for n in range(3)]
FEWER = [random(2, 16, 2, 8, seed=n, dtype=B) for n in range(2)]
X, W, V = random(8, 32), random(32, 16, seed=1), random(32, 16, seed=2)

PROGRAMS: dict[str, Program] = {
    "softmax": Program(jax.nn.softmax, (X.astype(H),)),
    "attention": Program(attention, tuple(HALF)),
    "qk norm attention": Program(lambda q, k, v: attention(rms(q), k, rms(v)), tuple(HALF)),
    "linear attention": Program(linear_attention, tuple(HALF)),
    "rms norm": Program(lambda x, w: rms(x) @ w, (X.astype(H), W.astype(H))),
    "gated mlp": Program(lambda x, w, v: jax.nn.silu(x @ w) * (x @ v), (X, W, V)),
    "lora": Program(lambda x, w, a, b: x @ w + 2.0 * ((x @ a) @ b), (X, W, random(32, 4), random(4, 16))),
    "ntrans": Program(lambda x, h, a: rms(x + a * (rms(h) - x)), tuple(random(8, 32, seed=n) for n in range(3))),
    "matrix chain": Program(lambda a, b, v: (a @ b) @ v, (X, random(32, 8), random(8, 1))),
    "dot product attention": Program(jax.nn.dot_product_attention, tuple(HEADS)),
    "grouped query attention": Program(jax.nn.dot_product_attention, (HEADS[0], *FEWER)),
    "causal": Program(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True), tuple(HEADS)),
    "local window": Program(
        lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=(5, 0)), tuple(HEADS)
    ),
    "causal by hand": Program(causal_attention, tuple(HEADS)),
    "padding mask": Program(padded_attention, (*(x.astype("float32") for x in HEADS), jnp.array([3, 16]))),
    "layer norm": Program(layer_norm, (X, random(32, seed=3), random(32, seed=4))),
    "geglu": Program(lambda x, w, v: jax.nn.gelu(x @ w) * (x @ v), (X, W, V)),
    "exact geglu": Program(lambda x, w, v: jax.nn.gelu(x @ w, approximate=False) * (x @ v), (X, W, V)),
    "squared relu": Program(lambda x, w: jnp.square(jax.nn.relu(x @ w)), (X, W)),
    "gram matrix": Program(lambda x: (x @ x.T) @ x, (X,)),
    "square chain": Program(lambda a: a @ a.T @ a + a @ a, (random(8, 8),)),
    "soft cap": Program(lambda q, k, v: jax.nn.softmax(30 * jnp.tanh(q @ k.mT / 30)) @ v, tuple(QKV)),
    "log softmax": Program(lambda x, w: jax.nn.log_softmax(x @ w), (X, W)),
    "squared error": Program(lambda x, w, y: jnp.mean((x @ w - y) ** 2, -1), (X, W, random(8, 16))),
    "rope": Program(lambda q, k, v: attention(rope(q), rope(k), v), tuple(QKV)),
    "tiles": Program(lambda x, w: jnp.tile(x, (2, 3)) @ jnp.tile(w, (3, 1)) + jnp.tile(x[0, :8], 2), (X, W)),
    "many views": Program(many_views, (X,)),
    **_flax(),
}

"""Layers as people write them: name -> function, operands, and what stays with XLA of it and of its gradient."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxpr_frontend.replacing import random


@dataclass(frozen=True)
class Layer:
    """`regions` and `gradients`: how many regions it has and how many its gradient has (0: it is not taken).

    `inside`: primitives that must be in them; `outside`: those that stay with XLA for want of a meaning.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    regions: int = 1
    gradients: int = 1
    inside: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()
    outside_gradient: tuple[str, ...] = ()

    @property
    def tolerance(self) -> float:
        return 4e-2 if any(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(self.args)) else 2e-4


B, T, N, K, H = 2, 16, 4, 2, 8  # batch, positions, heads of queries, of keys, width of a head
Q, FEW = random(B, T, N, H), [random(B, T, K, H, seed=n) for n in (1, 2)]
KEY, VALUE = (random(B, T, N, H, seed=n) for n in (1, 2))
HALF = [x.astype("bfloat16") for x in (Q, KEY, VALUE)]
QKV = (Q, KEY, VALUE)
X, W, V = random(B, T, 32), random(32, 48, seed=1), random(32, 48, seed=2)
BACK = random(48, 32, seed=3)
GAIN, BIAS = 1 + random(32, seed=4), random(32, seed=5)
SEGMENTS = jnp.asarray(np.repeat([[0, 1, 2, 2], [0, 0, 0, 1]], T // 4, axis=1), jnp.int32)
LENGTHS = jnp.asarray([5, T], jnp.int32)
attend = jax.nn.dot_product_attention


def scores(q, k):
    return jnp.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(H)


def mix(s, v):
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s, axis=-1), v)


def alibi(q, k, v):
    slopes = 2.0 ** (-8 * jnp.arange(1, N + 1) / N)
    distance = jnp.arange(T)[None, :] - jnp.arange(T)[:, None]
    s = scores(q, k) + slopes[:, None, None] * distance
    return mix(jnp.where(distance <= 0, s, -jnp.inf), v)


def soft_cap(q, k, v, cap=50.0):
    s = cap * jnp.tanh(scores(q, k) / cap)
    mask = jnp.tril(jnp.ones((T, T), bool))
    return mix(jnp.where(mask, s, jnp.finfo(s.dtype).min), v)


def segments(q, k, v, ids):
    return attend(q, k, v, mask=(ids[:, None, :, None] == ids[:, None, None, :]), is_causal=True)


def angles(positions):
    return positions[..., None] / 10000.0 ** (jnp.arange(0, H, 2) / H)


def rotated(x, sin, cos):
    """Halves, as Llama has them."""
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def interleaved(x, sin, cos):
    """Pairs of neighbours, as GPT-J has them."""
    a, b = x[..., ::2], x[..., 1::2]
    return jnp.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(x.shape)


def rope(rotation):
    def fn(q, k, v):
        theta = angles(jnp.arange(T))[None, :, None, :]
        sin, cos = jnp.sin(theta), jnp.cos(theta)
        return attend(rotation(q, sin, cos), rotation(k, sin, cos), v, is_causal=True)

    return fn


def rms_norm(x, gain, eps=1e-6):
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + eps) * gain).astype(x.dtype)


def layer_norm(x, gain, bias, eps=1e-5):
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(var + eps) * gain + bias


def qk_norm(q, k, v, gain_q, gain_k):
    return attend(rms_norm(q, gain_q), rms_norm(k, gain_k), v, is_causal=True)


def gated(activation):
    return lambda x, w, v, back: (activation(x @ w) * (x @ v)) @ back


def cross_entropy(x, w, labels):
    log_p = jax.nn.log_softmax(x @ w)
    return -jnp.take_along_axis(log_p, labels[..., None], axis=-1)[..., 0].mean()


def one_hot_entropy(x, w, labels):
    logits = x @ w
    return -jnp.sum(jax.nn.one_hot(labels, logits.shape[-1]) * jax.nn.log_softmax(logits), -1).mean()


def optax_entropy(x, w, labels):
    return optax.softmax_cross_entropy_with_integer_labels(x @ w, labels).mean()


def residual(x, g1, b1, w1, w2, g2, b2, w, back):
    x = x + layer_norm(x, g1, b1) @ w1 @ w2
    return x + jax.nn.gelu(layer_norm(x, g2, b2) @ w) @ back


def w8a16(x, w, scale):
    return x @ (w.astype(x.dtype) * scale)


def w8a16_late(x, w, scale):
    return (x @ w.astype(x.dtype)) * scale


def w4a16(x, packed, scale):
    """Two weights per byte (low half first), 8 rows share a scale."""
    low, high = (packed & 15).astype(jnp.int8) - 8, (packed >> 4).astype(jnp.int8) - 8
    w = jnp.stack([low, high], 1).reshape(32, -1).astype(x.dtype)
    w = (w.reshape(4, 8, -1) * scale[:, None]).reshape(32, -1)
    return x @ w


def int4(x, w, scale):
    return x @ (w.astype(x.dtype) * scale)


def dropout_attention(q, k, v, keep):
    p = jax.nn.softmax(scores(q, k))
    p = jnp.where(keep, p / 0.9, 0)
    return jnp.einsum("bnts,bsnh->btnh", p, v)


def dropout_mlp(x, w, back, keep):
    return jnp.where(keep, jax.nn.relu(x @ w) / 0.9, 0.0) @ back


ADAMW = optax.adamw(1e-3, weight_decay=0.1)
PARAMETERS = {"w": W, "b": BIAS}


def adamw(gradients, state, parameters):
    updates, state = ADAMW.update(gradients, state, parameters)
    return optax.apply_updates(parameters, updates), state


def train_step(parameters, state, x, y):
    loss, gradients = jax.value_and_grad(lambda p: jnp.mean((x @ p["w"] - y) ** 2))(parameters)
    return loss, *adamw(gradients, state, parameters)


LABELS = jnp.asarray(np.random.default_rng(0).integers(0, 48, (B, T)), jnp.int32)
INT8 = jnp.asarray(np.random.default_rng(0).integers(-127, 128, (32, 48)), jnp.int8)
PACKED = jnp.asarray(np.random.default_rng(0).integers(0, 256, (16, 48)), jnp.uint8)
KEEP = jnp.asarray(np.random.default_rng(1).random((B, N, T, T)) < 0.9)
KEEP_X = jnp.asarray(np.random.default_rng(1).random((B, T, 48)) < 0.9)
HALF_X = X.astype("bfloat16")
INT4 = (INT8 // 16).astype(jnp.int4)
SCALE, SCALES = jnp.full((48,), 0.01, "bfloat16"), jnp.full((4, 48), 0.01, "bfloat16")
STATE = ADAMW.init(PARAMETERS)
CAST = ("convert_element_type",)
NAN = ("squeeze", "ge", "lt", "and", "select_n")  # in place of what is picked out of range: XLA puts it in

LAYERS: dict[str, Layer] = {
    "attention": Layer(attend, tuple(HALF)),
    "grouped queries": Layer(lambda q, k, v: attend(q, k, v, is_causal=True), (Q, *FEW)),
    "bias": Layer(lambda q, k, v, b: attend(q, k, v, b), (*QKV, random(B, N, T, T, seed=6))),
    "bias of grouped queries": Layer(lambda q, k, v, b: attend(q, k, v, b), (Q, *FEW, random(1, N, T, T, seed=6))),
    "mask": Layer(lambda q, k, v, m: attend(q, k, v, mask=m), (*QKV, KEEP)),
    "causal": Layer(lambda q, k, v: attend(q, k, v, is_causal=True), tuple(HALF)),
    "sliding window": Layer(lambda q, k, v: attend(q, k, v, is_causal=True, local_window_size=(3, 0)), QKV),
    "window both ways": Layer(lambda q, k, v: attend(q, k, v, local_window_size=3), QKV),
    "padding": Layer(lambda q, k, v, n: attend(q, k, v, key_value_seq_lengths=n), (*QKV, LENGTHS)),
    "padding of both": Layer(
        lambda q, k, v, n: attend(q, k, v, query_seq_lengths=n, key_value_seq_lengths=n, is_causal=True),
        (*QKV, LENGTHS),
    ),
    "segment ids": Layer(segments, (*QKV, SEGMENTS)),
    "residual of attention": Layer(lambda q, k, v: attend(q, k, v, return_residual=True), QKV),
    "soft cap": Layer(soft_cap, QKV),
    "alibi": Layer(alibi, QKV, outside=("pow",), outside_gradient=("pow",)),
    "rope": Layer(rope(rotated), QKV, gradients=2, outside=("pow",), outside_gradient=("pow",)),
    "interleaved rope": Layer(rope(interleaved), QKV, gradients=2, outside=("pow",), outside_gradient=("pow",)),
    "qk norm": Layer(qk_norm, (*QKV, random(H, seed=3), random(H, seed=4)), gradients=5),
    "attention dropout": Layer(dropout_attention, (*QKV, KEEP)),
    "rms norm": Layer(lambda x, g, w: rms_norm(x, g) @ w, (HALF_X, GAIN, W.astype("bfloat16"))),
    "layer norm": Layer(lambda x, g, b, w: layer_norm(x, g, b) @ w, (X, GAIN, BIAS, W), gradients=2),
    "layer norm alone": Layer(layer_norm, (X, GAIN, BIAS), gradients=4),
    "standardize": Layer(lambda x, w: jax.nn.standardize(x) @ w, (X, W), gradients=2),
    "swiglu": Layer(gated(jax.nn.silu), (X, W, V, BACK)),
    "geglu": Layer(gated(jax.nn.gelu), (X, W, V, BACK)),
    "exact geglu": Layer(gated(lambda x: jax.nn.gelu(x, approximate=False)), (X, W, V, BACK)),
    "relu mlp": Layer(lambda x, w, v: jax.nn.relu(x @ w) @ v, (X, W, BACK)),
    "elu mlp": Layer(lambda x, w, v: jax.nn.elu(x @ w) @ v, (X, W, BACK)),
    "softplus mlp": Layer(lambda x, w, v: jax.nn.softplus(x @ w) @ v, (X, W, BACK)),
    "leaky relu mlp": Layer(lambda x, w, v: jax.nn.leaky_relu(x @ w) @ v, (X, W, BACK)),
    "cross entropy": Layer(cross_entropy, (X, W, LABELS), inside=("gather",), outside=NAN),
    "cross entropy of one-hot": Layer(one_hot_entropy, (X, W, LABELS)),
    "cross entropy of optax": Layer(optax_entropy, (X, W, LABELS), inside=("gather",), outside=NAN),
    "residual chain": Layer(residual, (X, GAIN, BIAS, W, BACK, GAIN, BIAS, W, BACK), regions=2, gradients=4),
    "adamw": Layer(adamw, (PARAMETERS, STATE, PARAMETERS), regions=0, gradients=0),
    "train step": Layer(train_step, (PARAMETERS, STATE, X, random(B, T, 48)), gradients=2, inside=("sqrt",)),
    "int8 weights": Layer(w8a16, (HALF_X, INT8, SCALE), inside=CAST),
    "int8 weights, scaled late": Layer(w8a16_late, (HALF_X, INT8, SCALE), inside=CAST),
    "packed int4 weights": Layer(w4a16, (HALF_X, PACKED, SCALES), inside=("and", "shift_right_logical", "stack")),
    "int4 weights": Layer(int4, (HALF_X, INT4, SCALE), gradients=2, outside=CAST, outside_gradient=CAST),
    "dropout": Layer(dropout_mlp, (X, W, BACK, KEEP_X)),
}

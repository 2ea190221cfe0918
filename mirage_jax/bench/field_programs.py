"""Programs of several fields, forward and as gradients, in the words of these fields; nothing here is tuned for them.

Point clouds and particles, Gaussian processes and mixtures, optimal transport, protein models, graphs and sets: plain
JAX, at sizes of published work. Each is a step without a state, ``step(state, batch) -> (state, result)``; of the
gradient, ``result`` has one array for each argument of floats.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from mirage_jax.bench.whole_programs import Draw, Fn

type Shapes = tuple[tuple[int, ...], ...]

LONGEST_SMALL = 32  # extents beyond are divided for a CPU
SMALLER = 64


@dataclass(frozen=True)
class FieldProgram:
    """A function, and the shapes of its arguments. `positive`: arguments, by position, without negative numbers;
    `masks`: arguments that are booleans.
    """

    fn: Callable[..., jax.Array]
    shapes: Shapes
    dtype: str = "float32"
    positive: tuple[int, ...] = ()
    masks: tuple[int, ...] = ()

    def small(self) -> FieldProgram:
        """The same at sizes that a CPU can afford."""
        shrunk = tuple(tuple(n if n <= LONGEST_SMALL else max(8, n // SMALLER) for n in s) for s in self.shapes)
        return replace(self, shapes=shrunk)

    def draw(self, key: jax.Array) -> tuple[Any, Any]:
        """Make no state and a batch: normal numbers, and masks that are mostly true."""
        batch: list[jax.Array] = []
        for i, (one, shape) in enumerate(zip(jax.random.split(key, len(self.shapes)), self.shapes, strict=True)):
            if i in self.masks:
                batch.append(jax.random.bernoulli(one, 0.9, shape))
                continue
            x = jax.random.normal(one, shape)
            x = x / math.sqrt(shape[0]) if i and shape and self.fn in WITH_WEIGHTS else x
            batch.append((jnp.abs(x) + 0.5 if i in self.positive else x).astype(self.dtype))
        return (), tuple(batch)

    def forward(self, state: tuple[()], batch: tuple[jax.Array, ...]) -> tuple[tuple[()], Any]:
        """Call the function."""
        return state, self.fn(*batch)

    def gradients(self, state: tuple[()], batch: tuple[jax.Array, ...]) -> tuple[tuple[()], Any]:
        """Differentiate the mean square of the results by every argument of floats."""

        def loss(*args: jax.Array) -> jax.Array:
            return jnp.mean(jnp.square(self.fn(*args).astype(jnp.float32)))

        floats = tuple(i for i in range(len(batch)) if i not in self.masks)
        return state, jax.grad(loss, floats)(*batch)


def squared_distances(x: jax.Array, y: jax.Array) -> jax.Array:
    """Of all pairs of rows: |x[i] - y[j]|^2, for x[N, D] and y[M, D]."""
    return jnp.sum(jnp.square(x[:, None] - y), -1)


def kernel_sums(x: jax.Array, y: jax.Array, w: jax.Array) -> jax.Array:
    """Sum a Gaussian kernel over points, as kernel density estimates and Stein gradients do."""
    return jnp.exp(-squared_distances(x, y) / 2) @ w


def nearest(x: jax.Array, y: jax.Array) -> jax.Array:
    """Squared distance to the nearest point, half of a Chamfer distance."""
    return jnp.min(squared_distances(x, y), 1)


def forces(x: jax.Array, mass: jax.Array) -> jax.Array:
    """Softened gravity between all particles x[N, 3]."""
    gap = x[None] - x[:, None]
    return jnp.sum((mass * (jnp.sum(gap * gap, -1) + 1e-2) ** -1.5)[..., None] * gap, 1)


def mixture(x: jax.Array, mean: jax.Array, precision: jax.Array, weight: jax.Array) -> jax.Array:
    """Log-likelihood of each row under a mixture of Gaussians with diagonal precisions."""
    distance = jnp.sum(jnp.square(x[:, None] - mean) * precision, -1)
    return jax.nn.logsumexp(weight + (jnp.sum(jnp.log(precision), -1) - distance) / 2, axis=1)


def covariance(x: jax.Array, y: jax.Array, scale: jax.Array) -> jax.Array:
    """The covariance of a Gaussian process with a length scale for each coordinate."""
    return jnp.exp(-squared_distances(x / scale, y / scale) / 2)


def soft_means(x: jax.Array, centre: jax.Array) -> jax.Array:
    """Replace each row by the mean of its nearest centres (soft k-means)."""
    cost = jnp.sum(x * x, 1)[:, None] - 2 * x @ centre.T + jnp.sum(centre * centre, 1)
    return jax.nn.softmax(-cost, axis=1) @ centre


def sinkhorn(x: jax.Array, y: jax.Array, g: jax.Array) -> jax.Array:
    """One half step of Sinkhorn's algorithm in logarithms (Cuturi, 2013): a potential from the other one."""
    cost = jnp.sum(x * x, 1)[:, None] + jnp.sum(y * y, 1) - 2 * x @ y.T
    return -0.5 * jax.nn.logsumexp((g - cost) / 0.5, axis=1)


def contrastive(x: jax.Array, y: jax.Array) -> jax.Array:
    """Loss of each pair against all others, in both directions (CLIP: Radford et al., 2021)."""
    logits = 10 / x.shape[-1] * (x @ y.T).astype(jnp.float32)
    one, other = jax.nn.log_softmax(logits, 0), jax.nn.log_softmax(logits, 1)
    return -(jnp.diagonal(one) + jnp.diagonal(other)) / 2


def graph_attention(h: jax.Array, score: jax.Array, to: jax.Array, edge: jax.Array) -> jax.Array:
    """Attend along the edges of a graph (Velickovic et al., 2018)."""
    logits = jax.nn.leaky_relu(score[:, None] + to, 0.2)
    return jax.nn.softmax(jnp.where(edge, logits, -1e9), axis=-1) @ h


def decayed_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Retention with a batch (Sun et al., 2023): q, k, v[B, H, T, D], each head decays at another rate."""
    rate = 1 - 2.0 ** (-5 - jnp.arange(q.shape[1], dtype=jnp.float32))
    t = jnp.arange(q.shape[2])
    distance = (t[:, None] - t).astype(jnp.float32)
    decay = jnp.where(distance >= 0, rate[:, None, None] ** jnp.maximum(distance, 0), 0.0)
    return (q @ k.swapaxes(-1, -2) * decay.astype(q.dtype)) @ v


def narrow_attention(x: jax.Array, wq: jax.Array, wk: jax.Array, wv: jax.Array) -> jax.Array:
    """Self-attention of many short texts with narrow heads, projections included."""
    q, k, v = (jnp.einsum("bnd,dhe->bhne", x, w) for w in (wq, wk, wv))
    scores = (q @ k.swapaxes(-1, -2)).astype(jnp.float32) / math.sqrt(wq.shape[-1])
    return jax.nn.softmax(scores, -1).astype(x.dtype) @ v


def pair_attention(
    z: jax.Array, wq: jax.Array, wk: jax.Array, wv: jax.Array, wb: jax.Array, wg: jax.Array
) -> jax.Array:
    """Attention along the rows of a table of pairs (AlphaFold: Jumper et al., 2021, supplement, algorithm 13)."""
    q, k, v, gate = (jnp.einsum("ijc,chd->ihjd", z, w) for w in (wq, wk, wv, wg))
    scores = jnp.einsum("ihjd,ihkd->ihjk", q, k) / math.sqrt(wq.shape[-1]) + jnp.einsum("jkc,ch->hjk", z, wb)
    weights = jax.nn.softmax(scores.astype(jnp.float32), -1).astype(z.dtype)
    return jnp.einsum("ihjk,ihkd->ihjd", weights, v) * jax.nn.sigmoid(gate)


def set_attention(q: jax.Array, k: jax.Array, v: jax.Array, is_element: jax.Array) -> jax.Array:
    """Attention over sets of different sizes: q, k, v[B, N, H, D]."""
    return jax.nn.dot_product_attention(q, k, v, mask=is_element[:, None, None])


def biased_attention(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array) -> jax.Array:
    """Attention with a bias for each pair of positions and each head (T5: Raffel et al., 2020)."""
    return jax.nn.dot_product_attention(q, k, v, bias=bias[None])


def cosine_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention by the angles of queries and keys (Swin v2: Liu et al., 2022)."""
    q, k = (x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6) for x in (q, k))
    return jax.nn.softmax(10 * q @ k.swapaxes(-1, -2), -1) @ v


WITH_WEIGHTS = {narrow_attention, pair_attention}  # their arguments but the first are weights
_CLOUD, _HEADS = ((8192, 3), (8192, 3)), ((8, 1024, 8, 64),) * 3
_PAIRS = ((256, 256, 128), *[(128, 4, 32)] * 3, (128, 4), (128, 4, 32))
PROGRAMS = {
    p.fn.__name__: p
    for p in (
        FieldProgram(kernel_sums, (*_CLOUD, (8192,))),
        FieldProgram(nearest, _CLOUD),
        FieldProgram(forces, ((8192, 3), (8192,)), positive=(1,)),
        FieldProgram(mixture, ((65536, 16), (64, 16), (64, 16), (64,)), positive=(2,)),
        FieldProgram(covariance, ((4096, 8), (4096, 8), (8,)), positive=(2,)),
        FieldProgram(soft_means, ((16384, 64), (512, 64))),
        FieldProgram(sinkhorn, ((8192, 64), (8192, 64), (8192,))),
        FieldProgram(contrastive, ((8192, 256), (8192, 256)), "bfloat16"),
        FieldProgram(graph_attention, ((4096, 128), (4096,), (4096,), (4096, 4096)), masks=(3,)),
        FieldProgram(decayed_attention, ((4, 16, 2048, 64),) * 3, "bfloat16"),
        FieldProgram(narrow_attention, ((64, 512, 256), *[(256, 8, 32)] * 3), "bfloat16"),
        FieldProgram(pair_attention, _PAIRS, "bfloat16"),
        FieldProgram(set_attention, (*[(64, 256, 8, 32)] * 3, (64, 256)), "bfloat16", masks=(3,)),
        FieldProgram(biased_attention, (*_HEADS, (8, 1024, 1024)), "bfloat16"),
        FieldProgram(cosine_attention, ((128, 512, 64),) * 3, "bfloat16"),
    )
}


def steps(small: bool) -> list[tuple[str, Fn, Draw, bool]]:
    """Name, step and draw of every program, then of every gradient; the last is whether it is a gradient."""
    sized = {name: p.small() if small else p for name, p in PROGRAMS.items()}
    forward = [(name, p.forward, p.draw, False) for name, p in sized.items()]
    return forward + [(f"{name}_gradients", p.gradients, p.draw, True) for name, p in sized.items()]

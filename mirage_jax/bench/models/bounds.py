"""Certified training of a small transformer: bounds on all that it may answer to perturbed words.

Intervals go through the transformer's layers (Gowal et al., arXiv 1810.12715; for attention Shi et al., arXiv
2002.06622), and a linear bound through the MLP that classifies (CROWN-IBP; Zhang et al., arXiv 1906.06316). Written as
users of robustness tools write them. An interval is a pair of arrays: the lowest and the highest values.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp

from mirage_jax.bench.models.layers import Sizes, WeightDraw, Weights, cross_entropy, join_heads, split_heads

# Shi et al. verify texts of up to 32 words, and layers of this width. `vocab` counts the classes.
PUBLISHED = Sizes(layers=1, width=256, heads=4, kv_heads=4, hidden=512, vocab=2, batch=256, length=32, dtype="float32")
SMALL = Sizes(layers=1, width=16, heads=2, kv_heads=2, hidden=32, vocab=2, batch=3, length=8, dtype="float32")
MLP_LAYERS = 3
RADIUS = 1e-3
LEAST_SUM = 1e-30  # of exponentials
LEAST_WIDTH = 1e-6  # of the interval that goes into a ReLU

type Interval = tuple[jax.Array, jax.Array]


@partial(jax.jit, static_argnums=1)
def init(key: jax.Array, s: Sizes) -> Weights:
    """Draw all weights so small that no layer widens intervals (Shi et al., arXiv 2103.17268)."""
    draw = WeightDraw(key, s.dtype)
    dense = lambda m, n: draw.dense(m, n, scale=math.sqrt(2 * math.pi) / m)  # noqa: E731
    square, widths = (s.width, s.width), [s.width, *(s.hidden,) * (MLP_LAYERS - 1), s.vocab]
    parts = dict.fromkeys(("query", "key", "value", "out"), square)
    parts |= {"up": (s.width, s.hidden), "down": (s.hidden, s.width)}
    layers = [{name: dense(*shape) for name, shape in parts.items()} for _ in range(s.layers)]
    return {"layers": layers, "mlp": [dense(m, n) for m, n in pairwise(widths)]}


# --- intervals


def halves(x: Interval) -> tuple[jax.Array, jax.Array]:
    """Find the centre and the radius."""
    return (x[0] + x[1]) / 2, (x[1] - x[0]) / 2


def affine(x: Interval, weights: Weights) -> Interval:
    """Multiply by weights and add a bias: a centre by the weights, a radius by their absolute values."""
    centre, radius = halves(x)
    centre, radius = centre @ weights["w"] + weights["b"], radius @ jnp.abs(weights["w"])
    return centre - radius, centre + radius


def products(equation: str, x: Interval, y: Interval) -> Interval:
    """Bound an einsum of two intervals, by centres and radii."""
    (xc, xr), (yc, yr) = halves(x), halves(y)
    multiply = partial(jnp.einsum, equation)
    centre = multiply(xc, yc)
    radius = multiply(jnp.abs(xc), yr) + multiply(xr, jnp.abs(yc)) + multiply(xr, yr)
    return centre - radius, centre + radius


def softmax(x: Interval) -> Interval:
    """A weight is lowest where its own logit is, and all others are highest."""
    shift = jax.lax.stop_gradient(jnp.max(x[1], axis=-1, keepdims=True))
    low, high = jnp.exp(x[0] - shift), jnp.exp(x[1] - shift)
    lows, highs = jnp.sum(low, axis=-1, keepdims=True), jnp.sum(high, axis=-1, keepdims=True)
    most, least = jnp.maximum(highs - high, 0) + low, jnp.maximum(lows - low, 0) + high
    return low / jnp.maximum(most, LEAST_SUM), high / jnp.maximum(least, LEAST_SUM)


def centred(x: Interval) -> Interval:
    """Subtract the mean: Shi et al. train without the division of a layer norm."""
    mean = partial(jnp.mean, axis=-1, keepdims=True)
    return x[0] - mean(x[1]), x[1] - mean(x[0])


def relu(x: Interval) -> Interval:
    """Bound a ReLU, which is monotonic."""
    return jax.nn.relu(x[0]), jax.nn.relu(x[1])


def add(x: Interval, y: Interval) -> Interval:
    """Bound a sum."""
    return x[0] + y[0], x[1] + y[1]


def block(s: Sizes, x: Interval, weights: Weights) -> Interval:
    """Bound a layer of the transformer, of [batch, position, width]."""

    def heads(name: str) -> Interval:
        low, high = affine(x, weights[name])
        return split_heads(low, s.heads), split_heads(high, s.heads)

    scores = products("bqhd,bkhd->bhqk", heads("query"), heads("key"))
    low, high = (end * s.head**-0.5 for end in scores)
    mixed = products("bhqk,bkhd->bqhd", softmax((low, high)), heads("value"))
    attended = affine((join_heads(mixed[0]), join_heads(mixed[1])), weights["out"])
    x = centred(add(x, attended))
    return centred(add(x, affine(relu(affine(x, weights["up"])), weights["down"])))


# --- linear bounds


def lowest_margins(x: Interval, layers: list[Weights], labels: jax.Array) -> jax.Array:
    """Bound from below how far the label's logit is above each other one, for [batch, width]; the label's own is 0."""
    before: list[Interval] = []  # bounds of what goes into each ReLU
    inside = x
    for weights in layers[:-1]:
        before.append(affine(inside, weights))
        inside = relu(before[-1])
    classes = jnp.eye(layers[-1]["b"].shape[0], dtype=x[0].dtype)
    margins = classes[labels][:, None] - classes  # [batch, class, class]
    slopes, constant = margins @ layers[-1]["w"].T, margins @ layers[-1]["b"]
    for (low, high), weights in zip(reversed(before), reversed(layers[:-1]), strict=True):
        slopes, less = _through_relu(slopes, low[:, None], high[:, None])
        constant = constant + less + slopes @ weights["b"]
        slopes = slopes @ weights["w"].T
    centre, radius = halves(x)
    ends = jnp.einsum("bcw,bw->bc", slopes, centre) - jnp.einsum("bcw,bw->bc", jnp.abs(slopes), radius)
    return ends + constant


def _through_relu(slopes: jax.Array, low: jax.Array, high: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Replace ReLUs by lines below them where slopes are positive, and above them where they are negative."""
    low, high = jnp.minimum(low, 0), jnp.maximum(high, 0)
    above = high / jnp.maximum(high - low, LEAST_WIDTH)
    below = (high > -low).astype(low.dtype)
    positive, negative = jnp.maximum(slopes, 0), jnp.minimum(slopes, 0)
    return positive * below + negative * above, jnp.sum(negative * above * -low, axis=-1)


# --- the whole


def draw(key: jax.Array, s: Sizes) -> tuple[Weights, jax.Array, jax.Array, jax.Array]:
    """Draw weights, embeddings of words, how far they may be from that, and labels."""
    k1, k2, k3 = jax.random.split(key, 3)
    words = jax.random.normal(k2, (s.batch, s.length, s.width), s.dtype)
    return init(k1, s), words, jnp.asarray(RADIUS, s.dtype), jax.random.randint(k3, (s.batch,), 0, s.vocab)


def certified(s: Sizes, weights: Weights, words: jax.Array, radius: jax.Array, labels: jax.Array) -> jax.Array:
    """Bound the margins for all words within `radius` of these, of [batch, position, width]."""
    x = words - radius, words + radius
    for layer in weights["layers"]:
        x = block(s, x, layer)
    return lowest_margins((x[0].mean(axis=1), x[1].mean(axis=1)), weights["mlp"], labels)


def loss(s: Sizes, weights: Weights, words: jax.Array, radius: jax.Array, labels: jax.Array) -> jax.Array:
    """The worst cross-entropy within `radius`."""
    return cross_entropy(-certified(s, weights, words, radius, labels), labels)

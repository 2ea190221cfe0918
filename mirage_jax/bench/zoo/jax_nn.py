"""Functions of `jax.nn` and Optax, at sizes of published models."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from mirage_jax.bench.zoo.entries import BF16, LibraryEntries, Made, Shape, normal

JAX_NN, OPTAX = LibraryEntries("jax"), LibraryEntries("optax")


def _attention(queries: Shape, keys: Shape, **options: Any) -> Made:
    """`jax.nn.dot_product_attention` of q[B, T, N, D] and k, v[B, S, K, D]."""
    return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, **options), normal(queries, keys, keys, dtype=BF16)


@JAX_NN.entry("GPT-2 medium: 1,024 tokens, 16 heads of 64")
def _jax_attention_causal(small: bool) -> Made:
    """Causal attention."""
    shape = (1, 32, 2, 16) if small else (8, 1024, 16, 64)
    return _attention(shape, shape, is_causal=True)


@JAX_NN.entry("Llama 3 8B: 32 heads of 128 that share 8 keys, 4,096 tokens")
def _jax_attention_grouped(small: bool) -> Made:
    """Causal attention with grouped heads."""
    q, k = ((1, 32, 4, 16), (1, 32, 2, 16)) if small else ((1, 4096, 32, 128), (1, 4096, 8, 128))
    return _attention(q, k, is_causal=True)


@JAX_NN.entry("Gemma 3 1B's local layers: 4 heads of 256, one key, a window of 512 in 4,096 tokens")
def _jax_attention_window(small: bool) -> Made:
    """Causal attention in a window."""
    q, k = ((1, 32, 2, 16), (1, 32, 1, 16)) if small else ((2, 4096, 4, 256), (2, 4096, 1, 256))
    return _attention(q, k, is_causal=True, local_window_size=(7, 0) if small else (511, 0))


@JAX_NN.entry("BERT base: batches of 32 texts of up to 512 tokens, 12 heads of 64")
def _jax_attention_lengths(small: bool) -> Made:
    """Attention over texts of different lengths."""
    n, t, h, d = (2, 32, 2, 16) if small else (32, 512, 12, 64)

    def _fn(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lengths)

    def draw(key: jax.Array) -> tuple[jax.Array, ...]:
        """Make the arguments."""
        k1, k2 = jax.random.split(key)
        return *normal(*((n, t, h, d),) * 3, dtype=BF16)(k1), jax.random.randint(k2, (n,), t // 4, t + 1, jnp.int32)

    return _fn, draw


@JAX_NN.entry("decoding of Llama 3 8B with a cache of 8,192 tokens, 16 texts")
def _jax_attention_decode(small: bool) -> Made:
    """Attention of one query for each text."""
    q, k = ((2, 1, 4, 16), (2, 64, 2, 16)) if small else ((16, 1, 32, 128), (16, 8192, 8, 128))
    return _attention(q, k)


@OPTAX.entry("GPT-2: 4,096 tokens, width 768, 50,257 words")
def _optax_cross_entropy(small: bool) -> Made:
    """Loss of logits with integer labels, and the product that makes the logits."""
    import optax

    n, d, words = (32, 16, 128) if small else (4096, 768, 50257)

    def _fn(h: jax.Array, table: jax.Array, labels: jax.Array) -> jax.Array:
        logits = (h @ table.T).astype(jnp.float32)
        return optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels)

    def draw(key: jax.Array) -> tuple[jax.Array, ...]:
        """Make the arguments."""
        k1, k2, k3 = jax.random.split(key, 3)
        table = jax.random.normal(k2, (words, d)) * d**-0.5
        return jax.random.normal(k1, (n, d), BF16), table.astype(BF16), jax.random.randint(k3, (n,), 0, words)

    return _fn, draw


@OPTAX.entry("SimCLR (Chen et al., 2020): batch 4,096, two views, width 128")
def _optax_ntxent(small: bool) -> Made:
    """Normalized temperature-scaled cross-entropy of pairs of views."""
    import optax

    n, d = (32, 16) if small else (8192, 128)

    def _fn(x: jax.Array) -> jax.Array:
        return optax.losses.ntxent(x, jnp.tile(jnp.arange(n // 2), 2), temperature=0.1)

    return _fn, normal((n, d))


@OPTAX.entry("RetinaNet (Lin et al., 2017): 100,000 anchors, 80 classes, width 256")
def _optax_focal_loss(small: bool) -> Made:
    """Focal loss of a classifier's logits."""
    import optax

    n, d, classes = (64, 16, 8) if small else (98304, 256, 80)

    def _fn(x: jax.Array, w: jax.Array, y: jax.Array) -> jax.Array:
        return optax.losses.sigmoid_focal_loss(x @ w, y, alpha=0.25, gamma=2.0).sum(-1)

    def draw(key: jax.Array) -> tuple[jax.Array, ...]:
        """Make the arguments."""
        k1, k2 = jax.random.split(key)
        x, w = normal((n, d), (d, classes))(k1)
        return x, w * d**-0.5, jax.random.bernoulli(k2, 0.01, (n, classes)).astype(jnp.float32)

    return _fn, draw


@OPTAX.entry("CLIP with a sigmoid (SigLIP: Zhai et al., 2023): batch 8,192, width 768")
def _optax_sigmoid_pairs(small: bool) -> Made:
    """Sigmoid loss of all pairs of images and texts."""
    import optax

    n, d = (32, 16) if small else (8192, 768)

    def _fn(x: jax.Array, y: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
        logits = (x @ y.T).astype(jnp.float32) * scale + bias
        return optax.losses.sigmoid_binary_cross_entropy(logits, jnp.eye(n)).sum(-1)

    def draw(key: jax.Array) -> tuple[jax.Array, ...]:
        """Make the arguments."""
        x, y = normal((n, d), (n, d), dtype=BF16)(key)
        return x * d**-0.5, y * d**-0.5, jnp.float32(10.0), jnp.float32(-10.0)

    return _fn, draw

"""Modules of Haiku."""

# The libraries need not be here.
# pyright: reportMissingImports=false

from __future__ import annotations

import jax
import jax.numpy as jnp

from mirage_jax.bench.zoo.entries import BF16, LibraryEntries, Made, haiku

HAIKU = LibraryEntries("dm-haiku")


@HAIKU.entry("BERT base: 32 texts of 512 tokens, width 768, 12 heads")
def _haiku_attention(small: bool) -> Made:
    """Self-attention with projections."""
    import haiku as hk

    b, t, d, h = (2, 16, 32, 2) if small else (32, 512, 768, 12)

    def _fn(x: jax.Array) -> jax.Array:
        return hk.MultiHeadAttention(h, d // h, w_init=hk.initializers.VarianceScaling(1.0))(x, x, x)

    return haiku(_fn, (b, t, d), dtype=BF16)


@HAIKU.entry("a block of GPT-2 small, as in Haiku's example: 8 texts of 1,024 tokens, width 768")
def _haiku_transformer_block(small: bool) -> Made:
    """Causal attention and MLP with norms before them."""
    import haiku as hk

    b, t, d, h = (2, 16, 32, 2) if small else (8, 1024, 768, 12)

    def _fn(x: jax.Array) -> jax.Array:
        mask = jnp.tril(jnp.ones((1, 1, t, t)))
        norm = lambda y: hk.LayerNorm(-1, create_scale=True, create_offset=True)(y)  # noqa: E731
        y = norm(x)
        x = x + hk.MultiHeadAttention(h, d // h, w_init=hk.initializers.VarianceScaling(2 / 12))(y, y, y, mask=mask)
        hidden = jax.nn.gelu(hk.Linear(4 * d)(norm(x)))
        return x + hk.Linear(d)(hidden)

    return haiku(_fn, (b, t, d), dtype=BF16)


@HAIKU.entry("Soft Actor-Critic's critic (Haarnoja et al., 2018): two MLPs of 256, batch 4,096, 17 + 6 inputs")
def _haiku_twin_critic(small: bool) -> Made:
    """The lesser of two MLPs' values."""
    import haiku as hk

    n, d = (32, 16) if small else (4096, 256)

    def _fn(state: jax.Array, action: jax.Array) -> jax.Array:
        x = jnp.concatenate([state, action], -1)
        return jnp.minimum(hk.nets.MLP([d, d, 1])(x), hk.nets.MLP([d, d, 1])(x))

    return haiku(_fn, (n, 17), (n, 6))

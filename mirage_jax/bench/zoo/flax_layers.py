"""Layers of Flax, Linen and NNX, at sizes of published models."""

from __future__ import annotations

from typing import Any

import jax

from mirage_jax.bench.zoo.entries import BF16, LibraryEntries, Made, linen, nnx

FLAX = LibraryEntries("flax")


@FLAX.entry("ViT-L/16 (Dosovitskiy et al., 2021): 64 images of 197 patches, width 1,024, 16 heads")
def _linen_attention(small: bool) -> Made:
    """Self-attention with projections."""
    from flax import linen as nn

    b, t, d, h = (2, 17, 32, 2) if small else (64, 197, 1024, 16)
    return linen(nn.MultiHeadDotProductAttention(num_heads=h), (b, t, d), dtype=BF16)


@FLAX.entry("GPT-2 medium: 1,024 tokens, width 1,024, 16 heads")
def _linen_attention_causal(small: bool) -> Made:
    """Causal self-attention with projections and normalized queries and keys."""
    from flax import linen as nn

    b, t, d, h = (2, 16, 32, 2) if small else (8, 1024, 1024, 16)
    module = nn.MultiHeadDotProductAttention(num_heads=h, normalize_qk=True)
    mask = nn.make_causal_mask(jax.numpy.ones((1, t)))
    return linen(module, (b, t, d), dtype=BF16, mask=mask)


@FLAX.entry("an encoder block of BERT base: 32 texts of 512 tokens, width 768")
def _linen_encoder_block(small: bool) -> Made:
    """Attention and MLP with residuals and norms after them, of Linen's layers."""
    from flax import linen as nn

    b, t, d, h = (2, 16, 32, 2) if small else (32, 512, 768, 12)

    class BertBlock(nn.Module):
        """BERT's block."""

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            """Map x[B, T, D] to the same shape."""
            x = nn.LayerNorm()(x + nn.MultiHeadDotProductAttention(num_heads=h)(x))
            return nn.LayerNorm()(x + nn.Dense(d)(nn.gelu(nn.Dense(4 * d)(x))))

    return linen(BertBlock(), (b, t, d), dtype=BF16)


@FLAX.entry("an LSTM of 1,024 units (Zaremba et al., 2014: medium is 650, large 1,500), 128 steps, batch 64")
def _linen_lstm(small: bool) -> Made:
    """A recurrent layer, which is a loop over steps."""
    from flax import linen as nn

    b, t, d = (2, 8, 16) if small else (64, 128, 1024)
    return linen(nn.RNN(nn.LSTMCell(d)), (b, t, d))


@FLAX.entry("ResNet-50's third stage (He et al., 2015): 32 images, 14 x 14, 1,024 channels in 32 groups")
def _linen_group_norm(small: bool) -> Made:
    """Group normalization, an activation and a convolution of one pixel."""
    from flax import linen as nn

    b, n, c, g = (2, 4, 32, 4) if small else (32, 14, 1024, 32)
    return linen(nn.Sequential([nn.GroupNorm(g), nn.silu, nn.Conv(c // 4, (1, 1))]), (b, n, n, c), dtype=BF16)


@FLAX.entry("ViT-B/16: 64 images of 197 patches, width 768, 12 heads")
def _nnx_attention(small: bool) -> Made:
    """Self-attention with projections."""
    from flax import nnx as modules

    b, t, d, h = (2, 17, 32, 2) if small else (64, 197, 768, 12)
    make = lambda rngs: modules.MultiHeadAttention(h, d, rngs=rngs, decode=False)  # noqa: E731
    return nnx(make, (b, t, d), dtype=BF16)


@FLAX.entry("an MLP with a gate as in Llama 3 8B: 2,048 tokens, width 4,096, 14,336 hidden")
def _nnx_gated_mlp(small: bool) -> Made:
    """A normalized, gated MLP with a residual."""
    from flax import nnx as modules

    t, d, hidden = (16, 32, 64) if small else (2048, 4096, 14336)

    class GatedMLP(modules.Module):
        """Llama's MLP."""

        def __init__(self, rngs: Any) -> None:
            self.norm = modules.RMSNorm(d, rngs=rngs)
            self.gate, self.up = (modules.Linear(d, hidden, use_bias=False, rngs=rngs) for _ in range(2))
            self.down = modules.Linear(hidden, d, use_bias=False, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            """Map x[T, D] to the same shape."""
            h = self.norm(x)
            return x + self.down(modules.silu(self.gate(h)) * self.up(h))

    return nnx(GatedMLP, (t, d), dtype=BF16)


@FLAX.entry("adapters of rank 16 (Hu et al., 2021) for Llama 3 8B's projections: 64 tokens, width 4,096")
def _nnx_lora(small: bool) -> Made:
    """A linear layer and its low-rank adapter."""
    from flax import nnx as modules

    t, d, rank = (8, 32, 4) if small else (64, 4096, 16)
    options = {"lora_rank": rank, "b_initializer": jax.nn.initializers.normal(0.02)}  # not zeros, as in training
    return nnx(lambda rngs: modules.LoRALinear(d, d, **options, rngs=rngs), (t, d), dtype=BF16)


@FLAX.entry("a GRU of 512 units, 128 steps, batch 64")
def _nnx_gru(small: bool) -> Made:
    """A recurrent layer, which is a loop over steps."""
    from flax import nnx as modules

    b, t, d = (2, 8, 16) if small else (64, 128, 512)
    return nnx(lambda rngs: modules.RNN(modules.GRUCell(d, d, rngs=rngs), rngs=rngs), (b, t, d))

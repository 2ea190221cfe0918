"""Blocks of language models: Gemma, Griffin, Mamba 2, the Flax models of Transformers, and attention in loops."""

# The libraries need not be here.
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from mirage_jax.bench.zoo.entries import BF16, LibraryEntries, Made, linen, nnx, normal

GEMMA, GRIFFIN, MAMBA = LibraryEntries("gemma"), LibraryEntries("recurrentgemma"), LibraryEntries("mamba2-jax")
TRANSFORMERS, FLASH = LibraryEntries("transformers"), LibraryEntries("flash-attention-jax")


def _gemma_block(b: int, t: int, **options: Any) -> Made:
    """A block on x[B, T, D] with a causal mask."""
    from gemma.gm.nn import _modules

    block = _modules.Block(
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        attn_type=_modules.AttentionType.LOCAL_SLIDING,
        transpose_gating_einsum=True,
        query_pre_attn_scalar=options["head_dim"] ** -0.5,
        **options,
    )

    def call(module: Any, x: jax.Array) -> jax.Array:
        """Use the module."""
        positions = jnp.broadcast_to(jnp.arange(t), (b, t))
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((t, t), bool)), (b, t, t))
        return module(x, positions, None, mask)[1]

    return linen(block, (b, t, options["embed_dim"]), dtype=BF16, call=call)


@GEMMA.entry("Gemma 2 2B: width 2,304, 8 heads of 256 that share 4 keys, softcap 50; 4,096 tokens")
def _gemma2_block(small: bool) -> Made:
    """Attention with capped logits in a window, and a gated MLP."""
    sizes: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 4, "embed_dim": 2304, "head_dim": 256, "hidden_dim": 9216}
    tiny = {"num_heads": 4, "num_kv_heads": 2, "embed_dim": 32, "head_dim": 8, "hidden_dim": 64}
    options = {"attn_logits_soft_cap": 50.0, "sliding_window_size": 8 if small else 4096}
    return _gemma_block(*((2, 16) if small else (1, 4096)), **(tiny if small else sizes), **options)


@GEMMA.entry("Gemma 3 1B: width 1,152, 4 heads of 256 that share a key, a window of 512; 4,096 tokens")
def _gemma3_block(small: bool) -> Made:
    """Attention with normalized queries and keys in a window, and a gated MLP."""
    sizes: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 1, "embed_dim": 1152, "head_dim": 256, "hidden_dim": 6912}
    tiny = {"num_heads": 4, "num_kv_heads": 1, "embed_dim": 32, "head_dim": 8, "hidden_dim": 64}
    options = {"use_qk_norm": True, "sliding_window_size": 8 if small else 512}
    return _gemma_block(*((2, 16) if small else (1, 4096)), **(tiny if small else sizes), **options)


@GRIFFIN.entry("RecurrentGemma 2B: width 2,560, 10 heads, 2,048 tokens")
def _griffin_recurrent_block(small: bool) -> Made:
    """A gated linear recurrence with a short convolution."""
    from recurrentgemma import jax as griffin

    b, t, d, h = (2, 8, 32, 2) if small else (1, 2048, 2560, 10)
    block = griffin.RecurrentBlock(
        width=d, num_heads=h, lru_width=d, conv1d_temporal_width=4, final_w_init_variance_scale=1.0
    )
    return linen(block, (b, t, d), call=lambda m, x: m(x, jnp.broadcast_to(jnp.arange(t), (b, t)))[0])


@MAMBA.entry("Mamba 2 130M (Dao and Gu, 2024): width 768, state 128, chunks of 256; 4,096 tokens")
def _mamba2_block(small: bool) -> Made:
    """A block: projections, a short convolution, and the chunked recurrence."""
    import mamba2_jax

    b, t = (1, 16) if small else (1, 4096)
    tiny = {"hidden_size": 16, "state_size": 8, "head_dim": 8, "chunk_size": 8}
    config = mamba2_jax.Mamba2Config(num_hidden_layers=1, **(tiny if small else {}))
    make = lambda rngs: mamba2_jax.Mamba2Block(config, 0, rngs=rngs)  # noqa: E731
    return nnx(make, (b, t, config.hidden_size), call=lambda m, x: m(x)[0])


@MAMBA.entry("the recurrence of Mamba 2 130M alone: 24 heads of 64, state 128, 4,096 tokens, 4 texts")
def _mamba2_recurrence(small: bool) -> Made:
    """State space duality: products within chunks, a scan over chunks."""
    import mamba2_jax

    b, t, h, p, n, chunk = (1, 16, 2, 8, 8, 8) if small else (4, 4096, 24, 64, 128, 256)

    def _fn(x: jax.Array, dt: jax.Array, a: jax.Array, keys: jax.Array, queries: jax.Array) -> Any:
        wide = lambda y: jnp.broadcast_to(y, (b, t, h, n))  # noqa: E731
        ones = jnp.ones(h)
        args = wide(keys), wide(queries), chunk, ones, ones, 0.0, 1e3
        return mamba2_jax.ssd_forward(x, dt, -jnp.exp(a), *args)[0]

    return _fn, normal((b, t, h, p), (b, t, h), (h,), (b, t, 1, n), (b, t, 1, n))


# ---------------------------------------------------------------------- Transformers


def _layer(module: str, layer: str, config: Any, shape: tuple[int, ...], call: Any, **options: Any) -> Made:
    """A layer of a Flax model of Transformers, in the type of its inputs."""
    import importlib

    make = getattr(importlib.import_module(f"transformers.models.{module}"), layer)
    return linen(lambda dtype: make(config, dtype=dtype, **options), shape, dtype=BF16, call=call)


@TRANSFORMERS.entry("BERT base: 32 texts of 512 tokens, width 768, 12 heads, with padding")
def _transformers_bert(small: bool) -> Made:
    """An encoder layer."""
    from transformers import BertConfig

    b, t = (2, 16) if small else (32, 512)
    config = BertConfig(**({"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64} if small else {}))
    mask = (jnp.arange(t) < t - t // 8)[None].repeat(b, 0)
    call = lambda m, x: m(x, mask, None)[0]  # noqa: E731
    return _layer("bert.modeling_flax_bert", "FlaxBertLayer", config, (b, t, config.hidden_size), call)


@TRANSFORMERS.entry("GPT-2 medium: 4 texts of 1,024 tokens, width 1,024, 16 heads")
def _transformers_gpt2(small: bool) -> Made:
    """A decoder block."""
    from transformers import GPT2Config

    b, t, d, h = (2, 16, 32, 2) if small else (4, 1024, 1024, 16)
    config = GPT2Config(n_embd=d, n_head=h, n_positions=t)
    call = lambda m, x: m(x, jnp.ones((b, t), bool))[0]  # noqa: E731
    return _layer("gpt2.modeling_flax_gpt2", "FlaxGPT2Block", config, (b, t, d), call)


@TRANSFORMERS.entry("T5 v1.1 base (Raffel et al., 2020): 16 texts of 512 tokens, width 768, a gated MLP")
def _transformers_t5(small: bool) -> Made:
    """An encoder block with relative positions."""
    from transformers import T5Config

    b, t = (2, 16) if small else (16, 512)
    tiny = {"d_model": 32, "d_kv": 16, "num_heads": 2, "d_ff": 64}
    base = {"d_model": 768, "d_kv": 64, "num_heads": 12, "d_ff": 2048}
    config = T5Config(feed_forward_proj="gated-gelu", **(tiny if small else base))
    config.causal = False
    call = lambda m, x: m(x)[0]  # noqa: E731
    options = {"has_relative_attention_bias": True}
    return _layer("t5.modeling_flax_t5", "FlaxT5Block", config, (b, t, config.d_model), call, **options)


@TRANSFORMERS.entry("LongT5 base (Guo et al., 2022): 4,096 tokens, blocks of 128, width 768")
def _transformers_long_t5(small: bool) -> Made:
    """An encoder block with attention to three blocks of neighbours."""
    from transformers import LongT5Config

    b, t = (1, 32) if small else (2, 4096)
    tiny = {"d_model": 32, "d_kv": 16, "num_heads": 2, "d_ff": 64, "local_radius": 7}
    base = {"d_model": 768, "d_kv": 64, "num_heads": 12, "d_ff": 2048, "local_radius": 127}
    config = LongT5Config(encoder_attention_type="local", feed_forward_proj="gated-gelu", **(tiny if small else base))
    config.causal = False
    call = lambda m, x: m(x, jnp.ones((b, t), bool))[0]  # noqa: E731
    options = {"has_relative_attention_bias": True}
    return _layer("longt5.modeling_flax_longt5", "FlaxLongT5Block", config, (b, t, config.d_model), call, **options)


def _llama(module: str, layer: str, config: Any, small: bool) -> Made:
    b, t = (2, 16) if small else (1, 2048)

    def call(m: Any, x: jax.Array) -> jax.Array:
        """Use the module."""
        return m(x, jnp.ones((b, t), bool), jnp.broadcast_to(jnp.arange(t), (b, t)))[0]

    return _layer(module, layer, config, (b, t, config.hidden_size), call)


_TINY = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 32}


@TRANSFORMERS.entry("Llama 2 7B: 2,048 tokens, width 4,096, 32 heads")
def _transformers_llama(small: bool) -> Made:
    """A decoder layer."""
    from transformers import LlamaConfig

    config = LlamaConfig(**(_TINY if small else {}))
    return _llama("llama.modeling_flax_llama", "FlaxLlamaDecoderLayer", config, small)


@TRANSFORMERS.entry("Mistral 7B: 2,048 tokens, width 4,096, 32 heads that share 8 keys, a window of 4,096")
def _transformers_mistral(small: bool) -> Made:
    """A decoder layer with grouped heads."""
    from transformers import MistralConfig

    config = MistralConfig(**({**_TINY, "num_key_value_heads": 2, "sliding_window": 8} if small else {}))
    return _llama("mistral.modeling_flax_mistral", "FlaxMistralDecoderLayer", config, small)


@TRANSFORMERS.entry("CLIP ViT-L/14's images: 32 of 257 patches, width 1,024, 16 heads")
def _transformers_clip(small: bool) -> Made:
    """An encoder layer with a quick GELU."""
    from transformers import CLIPVisionConfig

    b, t = (2, 17) if small else (32, 257)
    tiny = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    large = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
    config = CLIPVisionConfig(**(tiny if small else large))
    call = lambda m, x: m(x, None)[0]  # noqa: E731
    return _layer("clip.modeling_flax_clip", "FlaxCLIPEncoderLayer", config, (b, t, config.hidden_size), call)


@TRANSFORMERS.entry("Whisper small: 8 recordings of 1,500 frames, width 768, 12 heads")
def _transformers_whisper(small: bool) -> Made:
    """An encoder layer."""
    from transformers import WhisperConfig

    b, t = (2, 16) if small else (8, 1500)
    tiny = {"d_model": 32, "encoder_attention_heads": 2, "encoder_ffn_dim": 64}
    base = {"d_model": 768, "encoder_attention_heads": 12, "encoder_ffn_dim": 3072}
    config = WhisperConfig(**(tiny if small else base))
    call = lambda m, x: m(x, jnp.ones((b, t), bool))[0]  # noqa: E731
    return _layer("whisper.modeling_flax_whisper", "FlaxWhisperEncoderLayer", config, (b, t, config.d_model), call)


# ---------------------------------------------------------------------- attention


@FLASH.entry("blocked attention in JAX's loops: 16 heads of 64, 4,096 tokens")
def _lucidrains_flash_attention(small: bool) -> Made:
    """Attention as loops over blocks of queries and keys."""
    from flash_attention_jax import flash_attention

    b, h, t, d = (1, 2, 16, 8) if small else (2, 16, 4096, 64)
    return lambda q, k, v: flash_attention(q, k, v, jnp.ones((b, t), bool)), normal(*((b, h, t, d),) * 3)


@FLASH.entry("attention by angles in loops, one head of 64, 8,192 tokens")
def _lucidrains_cosine_attention(small: bool) -> Made:
    """The same of normalized queries and keys, without a maximum."""
    from flash_attention_jax import cosine_sim_flash_attention

    t, d = (16, 8) if small else (8192, 64)
    return lambda q, k, v: cosine_sim_flash_attention(q, k, v, jnp.ones(t, bool)), normal(*((t, d),) * 3)

"""Layers of Equinox, and vision models of Equimo."""

# The libraries need not be here.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from mirage_jax.bench.zoo.entries import BF16, LibraryEntries, Made, equinox

EQUINOX, EQUIMO, DIFFRAX = LibraryEntries("equinox"), LibraryEntries("equimo"), LibraryEntries("diffrax")


@EQUINOX.entry("ViT-B/16: 64 images of 197 patches, width 768, 12 heads")
def _equinox_attention(small: bool) -> Made:
    """Self-attention, mapped over a batch."""
    import equinox as eqx

    b, t, d, h = (2, 17, 32, 2) if small else (64, 197, 768, 12)
    make = lambda key: eqx.nn.MultiheadAttention(h, d, key=key)  # noqa: E731
    return equinox(make, lambda m, x: jax.vmap(lambda one: m(one, one, one))(x), (b, t, d), dtype=BF16)


@EQUINOX.entry("rotated queries and keys of Llama 3 8B: 2,048 tokens, width 4,096, 32 heads")
def _equinox_rotary_attention(small: bool) -> Made:
    """Self-attention with rotary positions."""
    import equinox as eqx

    t, d, h = (16, 32, 2) if small else (2048, 4096, 32)

    def make(key: jax.Array) -> Any:
        return eqx.nn.MultiheadAttention(h, d, key=key), eqx.nn.RotaryPositionalEmbedding(d // h)

    def call(modules: Any, x: jax.Array) -> jax.Array:
        """Use the module."""
        attention, rotary = modules
        rotate = jax.vmap(rotary, in_axes=1, out_axes=1)
        return attention(x, x, x, process_heads=lambda q, k, v: (rotate(q), rotate(k), v))

    return equinox(make, call, (t, d), dtype=BF16)


@EQUINOX.entry("a network of coordinates (Sitzmann et al., 2020): 65,536 points, 3 hidden layers of 256")
def _equinox_mlp(small: bool) -> Made:
    """An MLP, mapped over a batch."""
    import equinox as eqx

    n, d = (64, 16) if small else (65536, 256)
    make = lambda key: eqx.nn.MLP(3, 4, d, 3, activation=jax.numpy.sin, key=key)  # noqa: E731
    return equinox(make, lambda m, x: jax.vmap(m)(x), (n, 3))


@EQUINOX.entry("an LSTM cell of 1,024 units, 128 steps, batch 64")
def _equinox_lstm(small: bool) -> Made:
    """A loop over steps of a cell, mapped over a batch."""
    import equinox as eqx

    b, t, d = (2, 8, 16) if small else (64, 128, 1024)

    def call(cell: Any, x: jax.Array) -> jax.Array:
        """Use the module."""

        def run(one: jax.Array) -> jax.Array:
            zero = jax.numpy.zeros(d, one.dtype)
            return jax.lax.scan(lambda s, i: (cell(i, s), None), (zero, zero), one)[0][0]

        return jax.vmap(run)(x)

    return equinox(lambda key: eqx.nn.LSTMCell(d, d, key=key), call, (b, t, d))


@DIFFRAX.entry("a neural ODE (Chen et al., 2018): 64 coordinates, hidden width 256, 16 steps of Tsit5, 4,096 states")
def _diffrax_neural_ode(small: bool) -> Made:
    """Integrate an MLP by Runge-Kutta steps, mapped over a batch."""
    import diffrax
    import equinox as eqx

    n, d, width, steps = (4, 8, 16, 4) if small else (4096, 64, 256, 16)

    def call(field: Any, x: jax.Array) -> jax.Array:
        """Use the module."""

        def solve(y0: jax.Array) -> jax.Array:
            term = diffrax.ODETerm(lambda t, y, args: field(y))
            options = {"stepsize_controller": diffrax.ConstantStepSize(), "max_steps": steps + 1}
            return diffrax.diffeqsolve(term, diffrax.Tsit5(), 0.0, 1.0, 1.0 / steps, y0, **options).ys[0]

        return jax.vmap(solve)(x)

    return equinox(lambda key: eqx.nn.MLP(d, d, width, 2, activation=jax.nn.softplus, key=key), call, (n, d))


def _image_model(make: Callable[[jax.Array], Any], images: int, pixels: int, channels: int = 3) -> Made:
    """A model of images[N, C, P, P] in inference mode, mapped over a batch."""
    call = lambda m, x: jax.vmap(lambda one: m(one, jax.random.key(0), inference=True))(x)  # noqa: E731
    return equinox(make, call, (images, channels, pixels, pixels), dtype=BF16)


@EQUIMO.entry("ViT-B/16 with 2 of its 12 blocks, 32 images of 224 x 224")
def _equimo_vit(small: bool) -> Made:
    """A vision transformer."""
    from equimo.vision.models import VisionTransformer

    size, d, h, images = (32, 32, 2, 2) if small else (224, 768, 12, 32)
    options = {"img_size": size, "in_channels": 3, "dim": d, "patch_size": 16, "num_heads": h, "depths": [2]}
    return _image_model(lambda key: VisionTransformer(**options, num_classes=10, key=key), images, size)

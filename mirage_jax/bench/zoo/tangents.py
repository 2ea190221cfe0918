"""Infinitely wide networks by Neural Tangents."""

# The libraries need not be here.
# pyright: reportMissingImports=false

from __future__ import annotations

import jax

from mirage_jax.bench.zoo.entries import LibraryEntries, Made, normal

NEURAL_TANGENTS = LibraryEntries("neural-tangents")


@NEURAL_TANGENTS.entry("CIFAR-10 as vectors: 4,096 images of 3,072 numbers, 3 layers")
def _neural_tangent_kernel(small: bool) -> Made:
    """The neural tangent kernel of an MLP."""
    from neural_tangents import stax

    n, d = (16, 8) if small else (4096, 3072)
    layers = [stax.Dense(512), stax.Relu(), stax.Dense(512), stax.Relu(), stax.Dense(1)]
    kernel = stax.serial(*layers)[2]

    def _fn(x: jax.Array, y: jax.Array) -> jax.Array:
        return kernel(x, y, "ntk")

    return _fn, normal((n, d), (n, d))

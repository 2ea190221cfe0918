"""ViT-L/16: classifying random images.

Weights are random, sizes as published; ``--small`` is for a CPU, ``--layers 2`` and the like change one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

import mirage_jax
from mirage_jax.bench.beside import compare, flags
from mirage_jax.bench.models import vit


def main(argv: Sequence[str] | None = None) -> int:
    s, options, steps = flags(argv, __doc__, vit.LARGE, vit.SMALL)
    k1, k2 = jax.random.split(jax.random.key(0))
    images = jax.random.normal(k2, (s.batch, s.image, s.image, 3), s.dtype)

    def forward(weights: Any, images: jax.Array) -> jax.Array:
        return vit.logits(s, weights, images)

    args = vit.init(k1, s), images
    return compare(jax.jit(forward), mirage_jax.optimize(forward, **options), args, s, steps)


if __name__ == "__main__":
    raise SystemExit(main())

"""nGPT: the layers of the normalized transformer, on points of the sphere.

Weights are random, sizes as published; ``--small`` is for a CPU, ``--layers 2`` and the like change one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

import mirage_jax
from mirage_jax.bench.beside import compare, flags
from mirage_jax.bench.models import ngpt
from mirage_jax.bench.models.layers import unit


def main(argv: Sequence[str] | None = None) -> int:
    s, options, steps = flags(argv, __doc__, ngpt.HALF_B, ngpt.SMALL)
    k1, k2 = jax.random.split(jax.random.key(0))
    x = unit(jax.random.normal(k2, (s.batch, s.length, s.width), s.dtype))

    def forward(weights: Any, x: jax.Array) -> jax.Array:
        return ngpt.run(s, weights, x)

    args = ngpt.init(k1, s), x
    return compare(jax.jit(forward), mirage_jax.optimize(forward, **options), args, s, steps)


if __name__ == "__main__":
    raise SystemExit(main())

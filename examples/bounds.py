"""Certified training: a loss of bounds on what a transformer may answer to perturbed words, and its gradients.

Weights are random, sizes as published; ``--small`` is for a CPU, ``--layers 2`` and the like change one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax

import mirage_jax
from mirage_jax.bench.beside import compare, flags
from mirage_jax.bench.models import bounds


def main(argv: Sequence[str] | None = None) -> int:
    s, options, steps = flags(argv, __doc__, bounds.PUBLISHED, bounds.SMALL)
    step = jax.value_and_grad(partial(bounds.loss, s))
    args = bounds.draw(jax.random.key(0), s)
    return compare(jax.jit(step), mirage_jax.optimize(step, **options), args, s, steps)


if __name__ == "__main__":
    raise SystemExit(main())

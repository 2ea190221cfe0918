"""BERT-large: a training step of its encoder layers, with padding.

Weights are random, sizes as published; ``--small`` is for a CPU, ``--layers 2`` and the like change one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax

import mirage_jax
from mirage_jax.bench.beside import compare, flags
from mirage_jax.bench.models import bert, training


def main(argv: Sequence[str] | None = None) -> int:
    s, options, steps = flags(argv, __doc__, bert.LARGE, bert.SMALL)
    k1, k2 = jax.random.split(jax.random.key(0))
    step = training.train_step(partial(bert.loss, s))
    state = training.start(bert.init(k1, s))
    plain = jax.jit(step, donate_argnums=0)
    optimized = mirage_jax.optimize(step, donate_argnums=0, **options)
    return compare(plain, optimized, (state, bert.batch(k2, s)), s, steps, stateful=True)


if __name__ == "__main__":
    raise SystemExit(main())

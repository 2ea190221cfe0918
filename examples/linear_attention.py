"""A language model with causal linear attention: a training step on random text.

Weights are random, sizes as published; ``--small`` is for a CPU, ``--layers 2`` and the like change one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax

import mirage_jax
from mirage_jax.bench.beside import compare, flags
from mirage_jax.bench.models import linear_lm, training


def main(argv: Sequence[str] | None = None) -> int:
    s, options, steps = flags(argv, __doc__, linear_lm.M340, linear_lm.SMALL)
    k1, k2 = jax.random.split(jax.random.key(0))
    text = jax.random.randint(k2, (s.batch, s.length + 1), 0, s.vocab)
    step = training.train_step(partial(linear_lm.loss, s))
    state = training.start(linear_lm.init(k1, s))
    plain = jax.jit(step, donate_argnums=0)
    optimized = mirage_jax.optimize(step, donate_argnums=0, **options)
    return compare(plain, optimized, (state, text), s, steps, stateful=True)


if __name__ == "__main__":
    raise SystemExit(main())

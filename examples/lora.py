"""Fine-tuning layers of Llama 3 by LoRA: a training step of the adapters alone.

Weights are random, sizes as published; ``--small`` is for a CPU, ``--layers 2`` and the like change one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax

import mirage_jax
from mirage_jax.bench.beside import compare, flags
from mirage_jax.bench.models import lora, training


def main(argv: Sequence[str] | None = None) -> int:
    s, options, steps = flags(argv, __doc__, lora.LLAMA3_8B, lora.SMALL)
    k1, k2, k3, k4 = jax.random.split(jax.random.key(0), 4)
    layers = lora.init(k1, s)
    x, wanted = (jax.random.normal(k, (s.batch, s.length, s.width), s.dtype) for k in (k2, k3))
    step = training.train_step(partial(lora.loss, s))
    state = training.start(lora.init_adapters(k4, s, layers))
    plain = jax.jit(step, donate_argnums=0)
    optimized = mirage_jax.optimize(step, donate_argnums=0, **options)
    return compare(plain, optimized, (state, (layers, x, wanted)), s, steps, stateful=True)


if __name__ == "__main__":
    raise SystemExit(main())

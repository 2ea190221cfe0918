"""Llama 3: reading a prompt, and decoding with a cache of keys and values that is donated.

Weights are random, sizes as published; ``--small`` is for a CPU, ``--layers 2`` and the like change one of them.
``--length`` is what the cache can hold; the prompt fills half of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import mirage_jax
from mirage_jax.bench.beside import compare, flags
from mirage_jax.bench.models import llama


def main(argv: Sequence[str] | None = None) -> int:
    s, options, steps = flags(argv, __doc__, llama.LLAMA3_8B, llama.SMALL)
    k1, k2 = jax.random.split(jax.random.key(0))
    weights = llama.init(k1, s)
    prompt = jax.random.randint(k2, (s.batch, s.length // 2), 0, s.vocab)

    def prefill(weights: Any, prompt: jax.Array) -> Any:
        return llama.prefill(s, weights, prompt)

    def decode(cache: Any, weights: Any, token: jax.Array, position: jax.Array) -> Any:
        logits, cache = llama.decode(s, weights, token, cache, position)
        return cache, logits

    read = mirage_jax.optimize(prefill, **options)
    differs = compare(jax.jit(prefill), read, (weights, prompt), s, steps)

    logits, cache = read(weights, prompt)
    extend = mirage_jax.optimize(decode, donate_argnums=0, **options)
    args = cache, weights, jnp.argmax(logits, axis=-1), jnp.asarray(s.length // 2, jnp.int32)
    return differs | compare(jax.jit(decode, donate_argnums=0), extend, args, s, steps, stateful=True)


if __name__ == "__main__":
    raise SystemExit(main())

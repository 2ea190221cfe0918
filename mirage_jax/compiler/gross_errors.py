"""Does a function as a whole differ from plain jit on random numbers, far beyond what rounding can do?

Each region is proven, and compared with XLA's code alone. XLA compiles all of a function together, and that can go
wrong: on a CPU it once gave a result the memory of an array that the same loop still read through reshaped views. So
where a function is compiled and timed as a whole, its results are compared, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from mirage_jax.mugraph.dtypes import is_sixteen_bit_float

MAX_RELATIVE_ERROR = 0.1  # root mean square, over that of plain jit's result; of others the share of elements
MAX_MOVED = 8.0  # times what plain jit's result changes by if inputs are moved
MOVED, MOVED_IN_SIXTEEN_BITS = 2.0**-10, 2.0**-7  # by what share: twice what products round their operands by
LEAST_SIZE = 1e-30  # of a result's largest number, to divide by


@jax.jit
def moved(args: Sequence[jax.Array]) -> list[jax.Array]:
    """Arguments with every float a little larger or smaller."""
    return [_moved(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x for x in args]


def _moved(x: jax.Array) -> jax.Array:
    by = MOVED_IN_SIXTEEN_BITS if is_sixteen_bit_float(x.dtype) else MOVED
    up = jnp.arange(x.size).reshape(x.shape) % 3 > 0  # two of three
    return (x * jnp.where(up, 1 + by, 1 - by)).astype(x.dtype)


def gross_error(ours: Sequence[Any], plain: Sequence[Any], nearby: Sequence[Any]) -> str:
    """Say where our results are grossly wrong, against plain jit's for the same inputs and for `moved` ones.

    Of integers and truth values the share that differs counts. Random bits are never compared. Numbers that are not
    finite under plain jit say nothing. Returns an empty text if nothing is wrong.
    """
    for n, (a, b, c) in enumerate(zip(ours, plain, nearby, strict=True)):
        if jnp.issubdtype(b.dtype, jax.dtypes.prng_key) or not b.size:
            continue
        error, size, change, lost = map(float, _compared(a, b, c))
        if lost:
            return f"output {n} is not finite in {lost:.0f} of {b.size} elements where that of plain jit is"
        if error > MAX_RELATIVE_ERROR * size + MAX_MOVED * change:
            return f"output {n} is off by {error / size if size else math.inf:.2g} of its size"
    return ""


@jax.jit
def _compared(a: jax.Array, b: jax.Array, c: jax.Array) -> tuple[jax.Array, ...]:
    """Root mean squares, relative to the largest number, of a - b, b and c - b; and how many elements of a are lost."""
    if not jnp.issubdtype(b.dtype, jnp.inexact):
        return jnp.mean(a != b), jnp.ones(()), jnp.mean(c != b), jnp.zeros(())
    known = jnp.isfinite(b) & jnp.isfinite(c)
    a, b, c = (jnp.where(known, x, 0).astype(jnp.promote_types(x.dtype, jnp.float32)) for x in (a, b, c))
    here = jnp.isfinite(a)
    largest = jnp.maximum(jnp.abs(b).max(), LEAST_SIZE)
    rms = partial(_rms, largest)
    return rms(jnp.where(here, a - b, 0)), rms(b), rms(c - b), (~here).sum()


def _rms(largest: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(jnp.abs(x / largest))))

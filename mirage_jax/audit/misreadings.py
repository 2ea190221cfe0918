"""Where a translated program differs from the user's by more than rounding: is it wrong, or does XLA round?

At run time the float gate has only XLA to compare a translation with, and refuses candidates where the two differ. Here
there is a third witness: the user's equations in float64, by an evaluation that knows nothing of the translation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from mirage_jax.audit import float64
from mirage_jax.mugraph.domains.floats import is_float

type Array = np.ndarray

EXACT = 1e-6  # relative error of a right translation in float64, whatever cancels in it
MOVED = 1e-13  # relative; results that cancel to nothing move by the error of their terms
SLACK = 1e4  # times that movement, which a right translation may be off by
SAID = "the translated program"  # in what the float gate says where they differ


def wrong(equations: Callable[..., Any], values: Sequence[Array], translated: Sequence[Array]) -> str:
    """What is wrong with a translation's results in float64 for these inputs of the user's equations; "" if nothing is,
    and it is XLA that rounds so much.
    """
    jaxpr, rng = jax.make_jaxpr(equations)(*values), np.random.default_rng(0)
    exact = float64.evaluate(jaxpr, values)
    again = float64.evaluate(jaxpr, [_moved(x, rng) for x in values])
    for n, (r, a, t) in enumerate(zip(exact, again, translated, strict=True)):
        if not is_float(r.dtype):
            continue
        good = np.isfinite(r)
        with np.errstate(all="ignore"):
            off = np.where(good, np.abs(np.asarray(t, np.float64) - r), 0.0)
            movement = np.where(good & np.isfinite(a), np.abs(a - r), 0.0)
        size = float(np.abs(np.where(good, r, 0.0)).max(initial=0.0))
        limit = EXACT * size + SLACK * float(movement.max(initial=0.0))
        if not off.max(initial=0.0) <= limit:  # NaN where the translation gives one
            return f"result {n} is off by {off.max():.3g} in float64, values of size {size:.3g}"
    return ""


def _moved(x: Array, rng: np.random.Generator) -> Array:
    """Floats in float64, each a little larger or smaller."""
    x = np.asarray(x)
    return x.astype(np.float64) * (1 + MOVED * rng.uniform(-1, 1, x.shape)) if is_float(x.dtype) else x

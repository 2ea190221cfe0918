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
SAID = "the translated program"  # in what the float gate says where they differ


def wrong(equations: Callable[..., Any], values: Sequence[Array], translated: Sequence[Array]) -> str:
    """What is wrong with a translation's results in float64 for these inputs of the user's equations; "" if nothing is,
    and it is XLA that rounds so much.
    """
    exact = float64.evaluate(jax.make_jaxpr(equations)(*values), values)
    for n, (r, t) in enumerate(zip(exact, translated, strict=True)):
        if not is_float(r.dtype):
            continue
        good = np.isfinite(r)
        with np.errstate(all="ignore"):
            off = np.where(good, np.abs(np.asarray(t, np.float64) - r), 0.0)
        size = float(np.abs(np.where(good, r, 0.0)).max(initial=0.0))
        if not off.max(initial=0.0) <= EXACT * size:  # NaN where the translation gives one
            return f"result {n} is off by {off.max():.3g} in float64, values of size {size:.3g}"
    return ""

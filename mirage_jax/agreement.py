"""Whether two results of one function agree but for rounding: the default check of `bisect`.

Half of the digits of the type have to agree, relative to the largest element of the array: 3e-4 in float32, 3e-2 in
float16. NaN agrees with NaN only, an infinity with itself, integers and truth values if they are equal.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def difference(ours: Any, plain: Any) -> str:
    """Say where two results differ; an empty text if they agree. Results are arrays, or trees of arrays."""
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True)
    found = ((n, _of_arrays(a, b)) for n, (a, b) in enumerate(pairs))
    return next((f"output {n} {why}" for n, why in found if why), "")


def tolerance(dtype: Any) -> float:
    """Give the difference that is allowed in a type, relative to the largest element: 0 for integers."""
    return math.sqrt(float(jnp.finfo(dtype).eps)) if jnp.issubdtype(dtype, jnp.inexact) else 0.0


def _of_arrays(ours: Any, plain: Any) -> str:
    if hasattr(plain, "dtype") and jnp.issubdtype(plain.dtype, jax.dtypes.prng_key):
        ours, plain = map(jax.random.key_data, (ours, plain))
    if (jnp.shape(ours), jnp.result_type(ours)) != (jnp.shape(plain), jnp.result_type(plain)):
        return f"is {jax.typeof(ours)}, under jit {jax.typeof(plain)}"
    allowed = tolerance(jnp.result_type(plain))
    a, b = _wide(ours), _wide(plain)
    finite = np.isfinite(b)
    if np.any(np.isfinite(a) != finite) or not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return "is not finite where the result under jit is, or the other way round"
    largest = float(np.abs(b[finite]).max(initial=0))
    error = float(np.abs(a[finite] - b[finite]).max(initial=0))
    if error <= allowed * largest:
        return ""
    return (
        f"differs by up to {error:.1e}, where its largest element is {largest:.1e}; {allowed * largest:.1e} is allowed"
    )


def _wide(x: Any) -> Any:
    array = np.asarray(x)
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)

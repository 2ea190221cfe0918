"""What has to be the same: values, trees, types, weak types and shardings; and which error wrong use gets."""

import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

TOLERANCE = {"float64": 1e-11, "float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2}
ON_GPU = {"float32": 5e-3}  # products in TF32


def assert_same(have: Any, want: Any, looser: float = 1.0) -> None:
    """Equal but for rounding, and equal in everything else that can be asked of an array."""
    assert jax.tree.structure(have) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
        assert type(a) is type(b)
        if isinstance(a, jax.Array):
            assert _description(a) == _description(b)
            assert a.sharding.is_equivalent_to(b.sharding, a.ndim), f"{a.sharding} for {b.sharding}"
        if isinstance(a, jax.Array | np.ndarray):
            _assert_close(a, b, looser)
        else:
            assert a == b


def _description(x: jax.Array) -> tuple[Any, ...]:
    return x.shape, x.dtype, x.aval.weak_type, x.committed


def _assert_close(a: Any, b: Any, looser: float) -> None:
    if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    name = str(a.dtype)
    if name not in TOLERANCE:  # integers, bits, float0: exactly
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        return
    on_gpu = jax.default_backend() == "gpu"
    tolerance = looser * (ON_GPU.get(name, 0) if on_gpu else 0) or looser * TOLERANCE[name]
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1.0, float(np.abs(b).max(initial=0))))


def error_of(f: Callable[[], Any]) -> tuple[type, str]:
    """Type and first line of what a call raises."""
    with pytest.raises(Exception) as info:
        f()
    return info.type, re.sub("0x[0-9a-f]+", "0x", str(info.value).partition("\n")[0])

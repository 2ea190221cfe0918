"""For tests of the whole pipeline on CPU: a program that algebra shortens, and timings that are always the same."""

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from mirage_jax import timing

N = 48


def chain(a, b, v):
    """Two products of matrices and vectors are far less work than the product of the matrices."""
    return (a @ b) @ v


def operands(n: int = N, dtype: Any = "float32") -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(n)
    return tuple(jnp.asarray(rng.normal(size=s), dtype) for s in [(n, n), (n, n), (n,)])


def flops(f: Any, *args: Any) -> float:
    """What XLA says that a jitted or optimized function costs."""
    return f.lower(*args).compile().cost_analysis()["flops"]


@contextmanager
def measured(ratio: float) -> Iterator[list[Mapping[str, timing.Call]]]:
    """Every candidate is measured to be `ratio` times faster than XLA; gives the list of all calls that were timed."""
    seen: list[Mapping[str, timing.Call]] = []

    def time_wall(calls: Mapping[str, timing.Call], rounds: int = 10) -> dict[str, timing.Timing]:
        seen.append(calls)
        for call in calls.values():
            call()
        return {k: timing.Timing((ratio if k == "xla" else 1.0,) * max(rounds, 6)) for k in calls}

    with mock.patch.object(timing, "time_wall", time_wall):
        yield seen


@contextmanager
def processor_time() -> Iterator[None]:
    """The clock counts what processors do for this process, so that a busy machine makes nothing slower."""
    with mock.patch.object(timing, "time", SimpleNamespace(perf_counter=time.process_time)):
        yield


def assert_same(have: Any, want: Any, tolerance: float = 1e-4) -> None:
    """Equal but for rounding, and of the same types."""

    def one(a: Any, b: Any) -> None:
        assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1.0, float(np.abs(b).max(initial=0))))

    jax.tree.map(one, have, want)


def instructions(f: Any, *args: Any) -> list[str]:
    """What XLA makes of a jitted or optimized function: its instructions without names, sorted."""
    lines = f.lower(*args).compile().as_text().splitlines()
    found = (re.sub(r", metadata=\{[^}]*\}|%[\w.\-]+", "", line) for line in lines if " = " in line)
    return sorted(found)

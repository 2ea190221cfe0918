"""What people see of a compiled program, and what they said about parts of it, is there when it is optimized."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.xla_metadata import set_xla_metadata
from transformations.functions import (
    MATRICES,
    sums,
)

import mirage_jax
from mirage_jax.compiler.tuning_session import TuningSession

optimize = functools.partial(mirage_jax.optimize, on_miss="heuristic", backend="jax", strict=True)


@pytest.fixture(autouse=True)
def _no_matter_of_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TuningSession, "gate", lambda self, winner, only=(): (True, "not asked"))


def text(f: Any) -> str:
    return f.lower(*MATRICES).as_text(debug_info=True)


def test_scopes_and_lines() -> None:
    @optimize
    def f(a, b, v):
        with jax.named_scope("block"):
            y = jax.jit(lambda: jax.named_scope("inner")(sums)(a, b, v))()
            return jax.named_scope("order")(jnp.sort)(y)

    assert f.explain(*MATRICES).optimized
    for piece in ("block/inner/mirage_functions_", "block/order", "functions.py", "test_compiled_text.py"):
        assert piece in text(f), piece


def test_metadata_stays_where_it_is() -> None:
    def f(a, b, v):
        with set_xla_metadata(who="us"):
            y = sums(a, b, v)
        return sums(a, b, y)

    g = optimize(f)
    report = g.explain(*MATRICES)
    assert len(report.optimized) == 1 and "context (it carries XLA metadata" in str(report)
    assert text(g).count('who = "us"') == text(jax.jit(f)).count('who = "us"') > 0


def test_values_in_the_memory_of_the_host_stay_with_xla() -> None:
    def f(a, b, v):
        there = jax.device_put((a, b, v), jax.memory.Space.Host)
        return jax.device_put(sums(*there), jax.memory.Space.Device)

    report = optimize(f).explain(*MATRICES)
    assert not report.regions and "context (it is in the memory of the host)" in str(report)

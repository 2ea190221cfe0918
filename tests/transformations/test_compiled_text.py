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
from mirage_jax.jaxpr_frontend.capture.lowering import WholeProgram
from mirage_jax.jaxpr_frontend.jax_compat import LoweringTarget
from mirage_jax.jaxpr_frontend.partition.program import flatten

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


@jax.custom_vjp
def _scaled(x):
    return 2 * x


_scaled.defvjp(lambda x: (2 * x, x), lambda x, g: (g * jnp.cos(x),))


def _loops(a, b, v):
    def body(carry, row):
        return jax.jit(sums)(a, b, carry) @ jnp.ones((a.shape[0], v.shape[0])), jnp.cumsum(row)

    return jax.lax.scan(body, v, a)


def _branches(a, b, v):
    return jax.lax.cond(v.sum() > 0, lambda: jax.jit(sums)(a, b, v), lambda: jnp.sort(a, 1)[:, 0])


def _printing(a, b, v):
    y = jax.jit(sums)(a, b, v)
    jax.debug.print("{y}", y=y[0])
    return jax.jit(jnp.sort)(y)


def _with_a_call(a, b, v):
    return jnp.sort(jax.jit(sums)(a, b, v))


def _gradients(a, b, v):
    return jax.grad(lambda *x: jnp.square(_scaled(jax.checkpoint(sums)(*x))).sum(), (0, 1, 2))(a, b, v)


@pytest.mark.parametrize("f", [_loops, _branches, _printing, _with_a_call, _gradients, sums])
def test_what_is_left_to_xla_is_what_jit_would_compile(f: Any) -> None:
    """Not a call of it either: on a GPU, XLA makes other kernels of what it takes out of a call."""
    left = mirage_jax.optimize(f, on_miss="fallback", remat="regions")
    assert left.lower(*MATRICES).as_text() == jax.jit(f).lower(*MATRICES).as_text()


@pytest.mark.parametrize("f", [_loops, _with_a_call, _gradients])
def test_what_is_timed_as_plain_jit_is_what_jit_would_compile(f: Any) -> None:
    jaxpr = jax.make_jaxpr(f)(*MATRICES)
    whole = WholeProgram(jaxpr, flatten(jaxpr), {}, LoweringTarget(("cpu",)))

    def operations(text: str) -> list[str]:
        return [line.split(" = ")[-1].split("(")[0] for line in text.splitlines()[2:] if "func" not in line]

    timed = jax.jit(lambda *args: whole.run(*args)).lower(*MATRICES).as_text()
    assert operations(timed) == operations(jax.jit(f).lower(*MATRICES).as_text())

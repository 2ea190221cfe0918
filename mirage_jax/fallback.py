"""What this package is where JAX lacks a name that the optimizer needs: plain `jax.jit`, with one warning.

A program that runs under a new JAX goes on to run, and loses speed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from mirage_jax.config import JIT_OPTIONS, Options, warn_once
from mirage_jax.errors import in_one_line
from mirage_jax.report import Report

JAX_VERSIONS = ">=0.11.2,<0.13"  # of JAX that are tested; the same as in pyproject.toml

Optimized = type(jax.jit(lambda: 0))


def say_why(error: Exception) -> None:
    """Warn, once in a process, that nothing is optimized."""
    warn_once(
        f"nothing is optimized: mirage_jax works with jax {JAX_VERSIONS}, found {jax.__version__}: {in_one_line(error)}"
    )


def optimize(fn: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """`jax.jit` with its own options; ours are checked and ignored. Raises `UsageError` for a wrong one."""
    jit_options = {k: options.pop(k) for k in JIT_OPTIONS if k in options}
    Options.make(options, also=JIT_OPTIONS)
    if fn is None:
        return lambda f: optimize(f, **jit_options, **options)
    jitted: Any = jax.jit(fn, **jit_options)
    jitted.explain = lambda *args, **kwargs: _report(fn)
    return jitted


def tune(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Report:
    """Nothing is tuned; the report says why."""
    del args, kwargs
    return _report(fn)


def _report(fn: Callable[..., Any]) -> Report:
    name = getattr(fn, "__qualname__", type(fn).__qualname__)
    return Report(name, (), notes=(f"runs as plain jax.jit: jax {jax.__version__} is none of {JAX_VERSIONS}",))

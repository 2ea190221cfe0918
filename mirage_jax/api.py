"""The public surface: `optimize` and `tune`.

``@mirage_jax.optimize`` wraps a function as `jax.jit` does; the captured program travels through every transformation as one call
primitive (`jaxpr_frontend.capture`), and where JAX lowers it, `compiler.Compiler` decides region by region.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any, overload

import jax

from mirage_jax.compiler import Compiler
from mirage_jax.config import Options, is_disabled
from mirage_jax.errors import UsageError
from mirage_jax.jaxpr_frontend.capture import capture
from mirage_jax.jaxpr_frontend.regions import analyse
from mirage_jax.report import RegionReport, Report

JIT_OPTIONS = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames", "in_shardings", "out_shardings", "keep_unused", "device", "inline")


class Optimized:
    """An optimized function: call it like the function; mirrors `jax.jit` and adds `explain`.

    Inside ``with mirage_jax.disabled():`` or under ``MIRAGE_JAX=off`` it is plain `jax.jit` of the function.
    """

    def __init__(self, fn: Callable[..., Any], options: Options, jit_options: dict[str, Any]) -> None:
        self.options = options
        self.compiler = Compiler(options)
        self.__wrapped__ = fn
        self._jit_options = jit_options
        self._plain = jax.jit(fn, **jit_options)
        self._jit = jax.jit(capture(fn, self.compiler), **jit_options)
        functools.update_wrapper(self, fn, updated=())

    @property
    def _active(self) -> Any:
        return self._plain if is_disabled() else self._jit

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._active(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __repr__(self) -> str:
        return f"mirage_jax.optimize({getattr(self.__wrapped__, '__qualname__', self.__wrapped__)!s})"

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """As `jax.jit(f).lower`."""
        return self._active.lower(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """As `jax.jit(f).trace`."""
        return self._active.trace(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit(f).eval_shape`."""
        return self._active.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """Forget compiled programs; the next call compiles with the decisions known then."""
        self._jit.clear_cache()

    def explain(self, *args: Any, **kwargs: Any) -> Report:
        """What happens to this function at these argument shapes: regions, decisions, evidence. Arguments may be `jax.ShapeDtypeStruct`s.

        Makes the same decisions as a call would; nothing of the function is run.
        """
        return self._report(args, kwargs, on_miss=None)

    def _report(self, args: tuple[Any, ...], kwargs: dict[str, Any], on_miss: str | None) -> Report:
        name = getattr(self.__wrapped__, "__qualname__", type(self.__wrapped__).__name__)
        if is_disabled():
            return Report(name, (), notes=("disabled: runs as plain jax.jit",))
        analysis = analyse(self._jit.trace(*args, **kwargs).jaxpr, self.compiler.max_ops)
        reports: dict[str, RegionReport] = {}
        for region in analysis.regions:
            text = str(region.graph)
            if text in reports:
                old = reports[text]
                reports[text] = RegionReport(tuple(dict.fromkeys((*old.where, *region.where))), text, old.decision, old.occurrences + 1)
            else:
                decision = self.compiler.decide(region, jax.default_backend(), on_miss)
                reports[text] = RegionReport(region.where, text, decision)
        return Report(name, tuple(reports.values()), tuple(analysis.left_out))


@overload
def optimize(fn: Callable[..., Any], /, **options: Any) -> Optimized: ...
@overload
def optimize(fn: None = None, /, **options: Any) -> Callable[[Callable[..., Any]], Optimized]: ...


def optimize(fn: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Wrap a function like `jax.jit`, with its regions of the Lax fragment superoptimized.

    Use bare (``@optimize``) or with options (``@optimize(on_miss="fallback")``):

    * on_miss: what to do with a region that was never decided before: "search" (default in a single process), "heuristic" (the cost
      model's choice, verified but not measured), "fallback" (leave to XLA; default in several processes) or "error".
    * budget: of one search: seconds, or a text such as "30s"; see `mirage_jax.Budget`.
    * backend: "auto", "triton" (kernels on GPUs) or "jax" (algebra only).
    * cache_dir: where winners are kept; default: the user's cache directory.
    * strict: raise what would otherwise be logged and left to XLA.
    * static_argnums, static_argnames, donate_argnums, donate_argnames, ...: as for `jax.jit`.

    Raises `UsageError` for anything else. An optimized function is returned as it is if no options are given.
    """
    jit_options = {k: options.pop(k) for k in JIT_OPTIONS if k in options}
    chosen = Options.make(options, also=JIT_OPTIONS)
    if fn is None:
        return lambda f: optimize(f, **jit_options, **options)
    if isinstance(fn, Optimized) and not options and not jit_options:
        return fn
    if not callable(fn):
        raise UsageError(f"optimize: found {fn!r} ({type(fn).__name__}); it takes a function or a callable module")
    return Optimized(fn, chosen, jit_options)


def tune(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Report:
    """Search and measure every region of a function ahead of time, for these argument shapes; returns the report.

    Arguments may be arrays or `jax.ShapeDtypeStruct`s. Winners go to the cache, and later calls of `fn` use them.
    """
    f = fn if isinstance(fn, Optimized) else optimize(fn)
    report = f._report(args, kwargs, on_miss="search")
    f.clear_cache()
    return report

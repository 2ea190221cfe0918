"""Flax's nnx modules as arguments: their state goes in and comes back as `flax.nnx.jit` does it.

Under `jax.jit` a module is a pytree that the function gets a copy of: what it writes (running statistics, keys of
dropout, new variables) is lost. `nnx.jit` splits modules, passes their state through a pure function, and writes back
what changed. The same is done here: the pure function that nnx makes is what is captured.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from mirage_jax.errors import UsageError
from mirage_jax.jaxpr_frontend.capture.call_primitive import capture
from mirage_jax.jaxpr_frontend.capture.lowering import RegionCompiler

log = logging.getLogger("mirage_jax")

SHARDINGS = ("in_shardings", "out_shardings")


@functools.cache
def _is_stateful(kind: type) -> bool | None:
    """Whether nnx keeps the state of such objects: modules, optimizers, metrics, `Rngs`, variables. None: there is
    none in them, as in arrays, and in a `State` that was split off by hand, which is a plain pytree."""
    nnx: Any = sys.modules["flax.nnx"]
    if issubclass(kind, (nnx.Pytree, nnx.Variable)):
        return True
    return None if issubclass(kind, (nnx.State, np.ndarray, np.generic)) or hasattr(kind, "aval") else False


def is_module(x: Any) -> bool:
    """Tell whether an object is an nnx module or other object with state."""
    return "flax.nnx" in sys.modules and bool(_is_stateful(type(x)))


def has_modules(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether some argument is a module, or a container of one."""
    if "flax.nnx" not in sys.modules:  # then there is none
        return False
    return any(map(_has_module, args)) or any(map(_has_module, kwargs.values()))


def _has_module(x: Any) -> bool:
    kind = type(x)
    if kind is dict or kind is list or kind is tuple:  # for most pytrees JAX's own walk takes longer than a call may
        for y in x.values() if kind is dict else x:  # noqa: SIM110 (in a loop, as this is run in every call)
            if _has_module(y):
                return True
        return False
    if (stateful := _is_stateful(kind)) is not False:
        return bool(stateful)
    leaves = jax.tree.leaves(x, is_leaf=lambda y: _is_stateful(type(y)) is not False)
    return any(_is_stateful(type(y)) for y in leaves)


def check_no_linen(args: tuple[Any, ...]) -> None:
    """linen gives the methods of a module their variables from outside: under jit there would be none."""
    linen: Any = sys.modules.get("flax.linen")
    if linen is not None and args and isinstance(args[0], linen.Module):
        found = type(args[0]).__qualname__
        raise UsageError(f"optimize: found a method of the linen module {found}; optimize {found}(..).apply instead")


def owner(fn: Callable[..., Any]) -> Any:
    """Find the module that `fn` is, or is a bound method of; else None."""
    instance = getattr(fn, "__self__", fn)
    return instance if is_module(instance) else None


def unbound(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function that takes the module first."""
    return fn.__func__ if inspect.ismethod(fn) else type(fn).__call__


def behind_module(jit_options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a bound method, for the function that takes the module first."""
    out = dict(jit_options)
    for name in ("static_argnums", "donate_argnums"):
        if out.get(name) is not None:
            numbers = (out[name],) if isinstance(out[name], int) else tuple(out[name])
            out[name] = tuple(n + 1 if n >= 0 else n for n in numbers)
    if isinstance(out.get("in_shardings"), tuple | list):
        out["in_shardings"] = (None, *out["in_shardings"])
    return out


def jit(fn: Callable[..., Any], compiler: RegionCompiler | None, jit_options: Mapping[str, Any]) -> Any:
    """``nnx.jit(fn)``, with its program captured if there is a compiler."""
    nnx: Any = sys.modules["flax.nnx"]

    @functools.wraps(fn, updated=())
    def function(*args: Any, **kwargs: Any) -> Any:  # nnx takes no bound methods, of whatever they are
        return fn(*args, **kwargs)

    wrapped = nnx.jit(function, **jit_options)
    if compiler is None:
        return wrapped
    pure = getattr(getattr(wrapped, "jitted_fn", None), "__wrapped__", None)
    if pure is None or any(jit_options.get(name) is not None for name in SHARDINGS):
        log.warning("a function of nnx modules with shardings (or under an unknown version of Flax) runs as in nnx.jit")
        return wrapped
    wrapped.jitted_fn = jax.jit(capture(pure, compiler), **jit_options)
    return wrapped

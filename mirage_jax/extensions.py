"""Functions by which other packages add operators, translations of JAX primitives, GPUs, back ends."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from mirage_jax import extension_modules
from mirage_jax.errors import GraphError, UsageError
from mirage_jax.hardware import device_model, gpus
from mirage_jax.jaxpr_frontend.translate import rules
from mirage_jax.lower import backends
from mirage_jax.lower.backend import Backend
from mirage_jax.mugraph import operators
from mirage_jax.mugraph.operators import Function, OpDef

_NAME = re.compile(r"[a-z][a-z0-9_]*")


def register_operator(operator: Function | OpDef) -> None:
    """Add an operator to muGraphs.

    A `Function` is pointwise and uninterpreted: proofs know only that equal arguments give equal values. It has a value
    on floats, one on the exact numbers of `mirage_jax.mugraph.domains.exact`, and a text in Triton's language. The
    exact check compares the last two. Call this in a module of its own: processes that search or try kernels load it
    too.

    Raises:
        UsageError: the name is taken or is no lower-case identifier, or a script calls this.
    """
    owner = _owner("register_operator")
    if not _NAME.fullmatch(operator.name):
        raise UsageError(f"register_operator: found the name {operator.name!r}; allowed are lower-case identifiers")
    try:
        operators.register(operator)
    except GraphError as why:
        raise UsageError(f"register_operator: {why}; give the new one a name of its own") from None
    extension_modules.add(*owner)


def register_rule(
    primitive: str,
    rule: rules.Rule,
    *,
    is_light: bool = False,
    fold: Callable[[Mapping[str, Any], Any], Any] | None = None,
) -> None:
    """Translate a JAX primitive into muGraphs, so that regions may contain it.

    Call this in a module of its own: processes that search or try kernels load it too. The translation is trusted:
    test it (docs/extending.md).

    Args:
        primitive: the name of the primitive in jaxprs, such as ``"cosh"``.
        rule: takes a `NodeBuilder`, an `EquationInfo` (parameters, shape and dtype of the result) and the values of the
            operands; returns the value of the result.
        is_light: it costs nothing in a muGraph, as a change of layout.
        fold: the same on constants: takes the parameters and numpy scalars.

    Raises:
        UsageError: the primitive has a rule, or a script calls this.
    """
    owner = _owner("register_rule")
    if primitive in rules.RULES:
        raise UsageError(f"register_rule: {primitive} has a rule; allowed are primitives that stay with XLA so far")
    rules.rule(primitive, light=is_light, fold=fold)(rule)
    extension_modules.add(*owner)


def register_device(
    name: str, *, capability: int, processors: int, clock: float, bandwidth: float, matrix: int | None = None
) -> None:
    """Describe a GPU for the cost model, which ranks candidates and takes the time of none.

    Args:
        name: what its `device_kind` contains, such as ``"H200"``.
        capability: its compute capability, 90 for 9.0.
        processors: how many it has.
        clock: cycles per second under load.
        bandwidth: bytes per second from device memory.
        matrix: FLOP of matrix products per processor and cycle, for 16-bit operands. None: as others of its capability.

    Raises:
        UsageError: a GPU of this name is known, or a number is not positive.
    """
    if name in gpus.GPUS:
        raise UsageError(f"register_device: {name} is known; known are {', '.join(gpus.GPUS)}")
    numbers = {"capability": capability, "processors": processors, "clock": clock, "bandwidth": bandwidth}
    for field, number in (numbers | ({} if matrix is None else {"matrix": matrix})).items():
        if not number > 0:
            raise UsageError(f"register_device: found {field}={number}; allowed are positive numbers")
    described = gpus.by_vendor(capability, processors, clock, bandwidth, matrix)
    device_model.register(name, described)
    extension_modules.note(f"{name}: {described}")


def register_backend(backend: Backend) -> None:
    """Add a back end, which writes, compiles and runs kernels of the sizes that it takes.

    It is asked before those that were there. Call this in a module of its own: processes that try kernels load it too.

    Raises:
        UsageError: its name is taken, or a script calls this.
    """
    owner = _owner("register_backend")
    backends.register(backend)
    extension_modules.add(*owner)


def _owner(function: str) -> tuple[str, str]:
    """The module that calls one of the functions above, and its file."""
    caller = sys._getframe(2).f_globals
    name, file = caller["__name__"], caller.get("__file__")
    if name == "__main__" or file is None:
        raise UsageError(
            f"{function}: called in a script or a notebook, which processes that try kernels cannot import; "
            "move it to a module of its own, and import that"
        )
    return name, file

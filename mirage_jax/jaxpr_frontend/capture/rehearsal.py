"""A program in a form that can be timed on random numbers.

What a program prints is left out, and what code outside of JAX computes is zeros: neither makes the program faster or
slower on the device. A loop whose end depends on data makes a fixed number of steps. Times of this form say which of
two variants of the program is faster, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from jax import lax
from jax import numpy as jnp

from mirage_jax.jaxpr_frontend import jax_compat
from mirage_jax.jaxpr_frontend.jax_compat import Jaxpr, JaxprEqn
from mirage_jax.jaxpr_frontend.partition.program import evaluate, flatten, read

STEPS = 16  # of a loop whose end depends on data


def rehearsed(jaxpr: Jaxpr) -> Jaxpr:
    """The form of a program that can be timed; the program itself where it can be, or where nothing helps."""
    if jax_compat.is_opaque(jaxpr) or not _has_any(jaxpr):
        return jaxpr
    return jax_compat.traced(partial(_run, jaxpr), [v.aval for v in jaxpr.invars])


def _has_any(jaxpr: Jaxpr) -> bool:
    return any(_is_changed(eqn) or any(map(_has_any, jax_compat.inside(eqn))) for eqn in jaxpr.eqns)


def _is_changed(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "while" or jax_compat.calls_outside(eqn)


def _run(jaxpr: Jaxpr, *args: Any) -> list[Any]:
    program = flatten(jaxpr)
    values = {**program.constants, **dict(zip(program.inputs, args, strict=True))}
    given: list[Any] = []
    evaluate(program.eqns, values, partial(_bind, given))
    outputs = [read(values, atom) for atom in program.outputs]
    return jax_compat.held_back(outputs, given) if given else outputs  # which are results that somebody reads


def _bind(given: list[Any], eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """The results of an equation in the other form; what code outside of JAX is `given` is added there."""
    if jax_compat.calls_outside(eqn):
        given += values
        types: list[Any] = [v.aval for v in eqn.outvars]
        zeros = [jnp.zeros(t.shape, t.dtype) for t in types]
        return list(lax.optimization_barrier(zeros)) if zeros else []
    if eqn.primitive.name == "while":
        return _for_some_steps(eqn, values)
    if any(map(_has_any, jax_compat.bodies(eqn))):
        eqn = eqn.replace(params=jax_compat.with_bodies(eqn, rehearsed))
    return jax_compat.bind(eqn, values)


def _for_some_steps(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """A `while` loop without its condition."""
    first, count = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    constants, carried = values[first : first + count], values[first + count :]
    step = lambda _, carry: tuple(_run(eqn.params["body_jaxpr"], *constants, *carry))  # noqa: E731
    return list(lax.fori_loop(0, STEPS, step, tuple(carried)))

"""Everything that depends on the version of JAX, or on names that JAX does not promise to keep.

The rest of the package sees jaxprs through these few functions. Parameters are read by name with a default, and what is
not known here is left to XLA, so that a new JAX version costs speed at worst.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax
from jax.extend import core as jex_core
from jax.extend import source_info_util
from jax.interpreters import mlir

Jaxpr = jex_core.Jaxpr
JaxprEqn = jex_core.JaxprEqn
Literal = jex_core.Literal
Primitive = jex_core.Primitive
Var = jex_core.Var
Tracer = core.Tracer
eval_jaxpr = core.eval_jaxpr

# Parameter that holds the jaxpr of primitives which only call it: their equations are taken over by the caller.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "mirage_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
}
# Parameters that hold the bodies of primitives with a control flow or a scope of their own.
_BODIES = {
    "scan": ("jaxpr",),
    "while": ("body_jaxpr",),
    "cond": ("branches",),
    "shard_map": ("jaxpr",),
    "remat2": ("jaxpr",),
    "checkpoint": ("jaxpr",),
}


# Where an equation comes from is a line of the user, or of a library, not one of the wrapper around them.
source_info_util.register_exclusion(str(Path(__file__).parent) + os.sep)
source_info_util.register_exclusion(str(Path(__file__).parents[1] / "api.py"))


def create_call_primitive(name: str) -> Primitive:
    """A primitive with parameter `call_jaxpr` and every transformation rule of JAX (jax >= 0.11.1)."""
    return jex_core.create_call_primitive(name)


def create_leaf_primitive(name: str) -> Primitive:
    """A primitive with several results whose avals are its parameter `out_avals`."""
    primitive = jex_core.Primitive(name)
    primitive.multiple_results = True

    @primitive.def_abstract_eval
    def _(*_: Any, out_avals: Sequence[Any], **__: Any) -> list[Any]:
        return list(out_avals)

    return primitive


def register_lowering(primitive: Primitive, rule: Callable[..., Any], platform: str | None = None) -> None:
    """`rule(context, *operands, **params)` produces the MLIR of `primitive`."""
    mlir.register_lowering(primitive, rule, platform=platform)


def lower_traced(fn: Callable[..., list[Any]], context: Any, operands: Sequence[Any]) -> Any:
    """Trace `fn`, a function of JAX values, and lower what it does in place."""
    return mlir.lower_fun(fn, multiple_results=True)(context, *operands)


def platforms(context: Any) -> tuple[str, ...]:
    """The platforms that a program is being lowered for: usually one, several under `jax.export`."""
    return tuple(context.platforms or context.module_context.platforms)


def is_partitioned(context: Any) -> bool:
    """Whether the compiler will divide what is lowered here over several devices (it cannot divide a custom call).

    Inside of shard_map every axis is manual and shapes are local: nothing is left to divide.
    """
    axes = context.module_context.axis_context
    manual = getattr(axes, "manual_axes", None)
    if manual is not None:
        return any(size > 1 and name not in manual for name, size in axes.mesh.shape.items())
    return (getattr(axes, "num_devices", None) or 1) > 1


def called_jaxpr(eqn: JaxprEqn) -> Jaxpr | None:
    """The jaxpr of an equation that can be replaced by its content, else None."""
    params, name = eqn.params, eqn.primitive.name
    if name not in _CALLS or _CALLS[name] not in params:
        return None
    if name in ("jit", "pjit") and not all(
        type(s).__name__ == "UnspecifiedValue"
        for s in (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    ):
        return None
    # A differentiated checkpoint recomputes on purpose: without its barrier XLA would merge the copies again.
    if name in ("remat2", "checkpoint") and params.get("differentiated") and params.get("prevent_cse"):
        return None
    return params[_CALLS[name]]


def is_differentiated_as_one(eqn: JaxprEqn) -> bool:
    """Whether a call has a derivative of its own, or says what is kept for it."""
    return eqn.primitive.name.startswith("custom_") or eqn.primitive.name in ("remat2", "checkpoint")


def as_range(value: Any) -> Jaxpr | None:
    """A jaxpr that makes a constant array a, a + 1, a + 2, .. (positions, of which masks are made), else None."""
    known = not isinstance(value, Tracer) and getattr(value, "is_fully_addressable", True)
    if not known or getattr(value, "ndim", 0) != 1 or value.size < 2 or str(value.dtype) != "int32":
        return None
    numbers = np.asarray(value)
    if (np.diff(numbers) != 1).any():
        return None
    return jax.make_jaxpr(lambda: jnp.arange(int(numbers[0]), int(numbers[-1]) + 1, dtype="int32"))()


def as_slices(eqn: JaxprEqn) -> list[list[JaxprEqn]] | None:
    """For each result of a `split` or `unstack` the equations that make it alone; None for another primitive."""
    match eqn.primitive.name:
        case "split":
            sizes = tuple(map(int, eqn.params["sizes"]))
        case "unstack":
            sizes = (1,) * len(eqn.outvars)
        case _:
            return None
    starts = (sum(sizes[:n]) for n in range(len(sizes)))
    return [_slice(eqn, *one) for one in zip(eqn.outvars, starts, sizes, strict=True)]


def _slice(eqn: JaxprEqn, result: Any, start: int, size: int) -> list[JaxprEqn]:
    (operand,), axis = eqn.invars, eqn.params["axis"]
    aval: Any = operand.aval
    starts, limits = [0] * aval.ndim, list(aval.shape)
    starts[axis], limits[axis] = start, start + size
    params = {"start_indices": tuple(starts), "limit_indices": tuple(limits), "strides": None}
    context = eqn.effects, eqn.source_info, eqn.ctx
    if result.aval.ndim == aval.ndim:
        return [jex_core.new_jaxpr_eqn([operand], [result], lax.slice_p, params, *context)]
    whole = Var(aval.update(shape=(*aval.shape[:axis], 1, *aval.shape[axis + 1 :])))
    return [
        jex_core.new_jaxpr_eqn([operand], [whole], lax.slice_p, params, *context),
        jex_core.new_jaxpr_eqn([whole], [result], lax.squeeze_p, {"dimensions": (axis,)}, *context),
    ]


def bodies(eqn: JaxprEqn) -> tuple[Jaxpr, ...]:
    """The jaxprs that an equation runs in a scope of its own."""
    found = (eqn.params.get(name) for name in _BODIES.get(eqn.primitive.name, ()))
    return tuple(j for value in found if value is not None for j in (value if isinstance(value, tuple) else (value,)))


def with_bodies(eqn: JaxprEqn, change: Callable[[Jaxpr], Jaxpr]) -> dict[str, Any]:
    """The parameters of `eqn` with every body changed."""
    params = dict(eqn.params)
    for name in _BODIES.get(eqn.primitive.name, ()):
        value = params[name]
        params[name] = tuple(map(change, value)) if isinstance(value, tuple) else change(value)
    return params


def as_one_call(jaxpr: Jaxpr, primitive: Primitive, **params: Any) -> Jaxpr:
    """A jaxpr of the same type whose only equation is a call of `jaxpr` by `primitive`. Built, never traced."""
    if not jaxpr.eqns:
        return jaxpr
    outvars = [Var(v.aval) for v in jaxpr.outvars]
    first = jaxpr.eqns[0]
    call = jex_core.new_jaxpr_eqn(
        list(jaxpr.invars),
        outvars,
        primitive,
        {"call_jaxpr": jaxpr, **params},
        jaxpr.effects,
        first.source_info,
        first.ctx,
    )
    return jex_core.Jaxpr((), jaxpr.invars, outvars, [call], jaxpr.effects, jaxpr.debug_info, consts=())


def is_opaque(jaxpr: Jaxpr) -> bool:
    """Whether effects of a jaxpr name its variables (references), so that it cannot be built of new ones."""
    return any(hasattr(effect, "input") for effect in jaxpr.effects)


def as_checkpoint(jaxpr: Jaxpr, policy: Callable[..., bool], prevent_cse: bool = True) -> JaxprEqn:
    """The equation that `jax.checkpoint` makes of a function with this jaxpr, which must not close over anything."""
    (template,) = jax.make_jaxpr(jax.checkpoint(lambda x: x + 1, policy=policy, prevent_cse=prevent_cse))(0.0).eqns
    return template.replace(
        invars=list(jaxpr.invars),
        outvars=[Var(v.aval) for v in jaxpr.outvars],
        params={**template.params, "jaxpr": jaxpr},
        effects=jaxpr.effects,
        source_info=jaxpr.eqns[0].source_info,
        ctx=jaxpr.eqns[0].ctx,
    )


def built(
    like: Jaxpr,
    invars: Sequence[Any],
    eqns: Sequence[JaxprEqn],
    outvars: Sequence[Any],
    constvars: Sequence[Any],
    constants: Iterable[Any],
) -> Jaxpr:
    """A jaxpr of these equations, with the effects of another one that has all of them."""
    effects = {effect for eqn in eqns for effect in eqn.effects} & like.effects
    names = like.debug_info if len(invars) == len(like.invars) else like.debug_info.with_unknown_names()
    return jex_core.Jaxpr(
        list(constvars), list(invars), list(outvars), list(eqns), effects, names, consts=tuple(constants)
    )


def held_back(operands: Sequence[Any], waits: Sequence[Any]) -> list[Any]:
    """Operands that the compiler can neither make before `waits` are there nor take for what they are copies of."""
    return list(lax.optimization_barrier((tuple(operands), tuple(waits)))[0])


def bind(eqn: JaxprEqn, values: Sequence[Any], params: dict[str, Any] | None = None) -> list[Any]:
    """Evaluate one equation under the context in which it was traced."""
    with eqn.ctx.manager:
        out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params if params is None else params))
    return list(out) if eqn.primitive.multiple_results else [out]


def bind_alone(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Evaluate one equation outside of the shard_map that it stands in: on one device nothing varies."""
    if eqn.primitive.name in ("pvary", "pcast"):
        return list(values)
    out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


def source_line(eqn: JaxprEqn) -> str:
    """``file.py:12:4 (function)``: where the user wrote it."""
    return source_info_util.summarize(eqn.source_info)

"""The call primitive: captures a function as a jaxpr that every JAX transformation understands.

`capture(fn, compiler)` traces `fn` and binds one `mirage_call`. JAX's own rules for call primitives rewrite that
jaxpr under grad, vmap, remat, scan, shard_map and the rest; whatever finally reaches the lowering rule below is again
a jaxpr, which is planned and run with compiled regions in it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from mirage_jax.jaxpr_frontend import jax_compat
from mirage_jax.jaxpr_frontend.capture.lowering import LoweringPlan, RegionCompiler, with_checkpoints
from mirage_jax.jaxpr_frontend.capture.lowering import plan as plan_of
from mirage_jax.jaxpr_frontend.jax_compat import Jaxpr

mirage_call_p = jax_compat.create_call_primitive("mirage_call")
jax_compat.keep_whole(mirage_call_p, "plan")


def capture[**P, T](fn: Callable[P, T], compiler: RegionCompiler, is_differentiated: bool = True) -> Callable[P, T]:
    """`fn` as one `mirage_call`, to be wrapped in `jax.jit`.

    Arguments that are not arrays (what `static_argnums` leaves behind) are closed over. Where `jax.jit` calls this with
    values, it wants to see each operator run (`jax.disable_jit`, or the search for a NaN): then it is `fn`.

    is_differentiated: False where nobody differentiates the results; then its gradients do not matter.
    """

    @functools.wraps(fn, updated=())
    def captured(*args: P.args, **kwargs: P.kwargs) -> T:
        if jax.config.jax_disable_jit or _are_values(jax.tree.leaves((args, kwargs))):
            return fn(*args, **kwargs)
        jaxpr, operands, out_tree = trace(fn, args, kwargs)
        jaxpr, gradients = with_checkpoints(jaxpr, compiler, mirage_call_p) if is_differentiated else (jaxpr, None)
        results = mirage_call_p.bind(*operands, call_jaxpr=jaxpr, compiler=compiler, gradients=gradients)
        return jax.tree.unflatten(out_tree, results)

    return captured


def trace(fn: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Jaxpr, list[Any], Any]:
    """The jaxpr of ``fn(*args, **kwargs)``, its operands (with tracers that `fn` closes over), and the output tree."""
    traced = list(map(_is_traced, args))
    given = [x for x, yes in zip(args, traced, strict=True) if yes]
    named = {k: x for k, x in kwargs.items() if _is_traced(x)}
    operands = jax.tree.leaves((given, named))
    out_trees: list[Any] = []

    def fresh(*some_args: Any, **some_kwargs: Any) -> Any:  # not `fn` itself: JAX would remember tracers it closes over
        rest = iter(some_args)
        every = [next(rest) if yes else x for x, yes in zip(args, traced, strict=True)]
        result = fn(*every, **{k: some_kwargs.get(k, x) for k, x in kwargs.items()})
        out_trees.append(jax.tree.structure(result))  # JAX would make a tree of shapes, where a class may want arrays
        return result

    jaxpr = jax.make_jaxpr(_named_as(fn, fresh))(*given, **named)
    (out_tree,) = out_trees
    outer = list(jaxpr.consts)
    if any(isinstance(c, jax_compat.Tracer) for c in outer):  # values of an enclosing transformation become operands
        inner, count = jaxpr.jaxpr, len(outer)

        def hoisted(*given: Any) -> list[Any]:
            return jax_compat.eval_jaxpr(inner, given[:count], *given[count:])

        operands = [*outer, *operands]
        jaxpr = jax.make_jaxpr(hoisted)(*operands)
    return jaxpr, operands, out_tree


def gradients_of(jaxpr: Jaxpr) -> Any:
    """What is known of a captured function with its gradients as a whole."""
    found = (eqn.params.get("gradients") for eqn in jaxpr.eqns if eqn.primitive is mirage_call_p)
    return next(filter(None, found), None)


def planned_alone(jaxpr: Jaxpr, compiler: RegionCompiler, target: jax_compat.LoweringTarget) -> LoweringPlan:
    """The plan of a program that is lowered by itself."""
    return plan_of(jaxpr, compiler, mirage_call_p, target)


def _named_as(fn: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(fn, updated=())(wrapper)


def _are_values(leaves: Sequence[Any]) -> bool:
    """Whether nothing is being traced, as far as arguments tell."""
    return any(map(_is_array, leaves)) and not any(isinstance(x, jax_compat.Tracer) for x in leaves)


def _is_traced(argument: Any) -> bool:
    """Whether an argument is traced; what `static_argnums` leaves is passed on as the object that it is."""
    return any(isinstance(x, jax_compat.Tracer | jax.ShapeDtypeStruct) for x in jax.tree.leaves(argument))


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | jax_compat.Tracer | np.ndarray | np.generic | jax.ShapeDtypeStruct)


def _lower_call(
    context: Any,
    *operands: Any,
    call_jaxpr: Jaxpr,
    compiler: RegionCompiler,
    plan: LoweringPlan | None = None,
    is_body: bool = False,
    gradients: Any = None,
) -> Any:
    """`plan`: of a body that is planned already. Only reports read `gradients`."""
    del gradients
    plan = plan or plan_of(call_jaxpr, compiler, mirage_call_p, jax_compat.target(context), is_body)
    if (jaxpr := plan.as_jaxpr(call_jaxpr)) is not None:
        return jax_compat.lower_as_written(jaxpr, context, operands)
    return jax_compat.lower_traced(plan.run, context, operands)


jax_compat.register_lowering(mirage_call_p, _lower_call)

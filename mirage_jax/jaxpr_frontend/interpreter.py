"""Runs a captured jaxpr at lowering time, with compiled regions in the place of their equations.

By then every transformation has been applied: the jaxpr may be a forward or backward pass, batched or not. A region
that the compiler takes becomes one `mirage_region`, a leaf primitive with one lowering per platform; everything else
is bound as it was. Bodies of scan, while, cond, shard_map and checkpoint become calls that arrive here on their own.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax

from mirage_jax.errors import UsageError
from mirage_jax.jaxpr_frontend import jax_compat, rules
from mirage_jax.jaxpr_frontend.flat import FlatEqn, FlatProgram, evaluate, flatten, operands, read
from mirage_jax.jaxpr_frontend.jax_compat import Jaxpr, Primitive
from mirage_jax.jaxpr_frontend.reasons import Code
from mirage_jax.jaxpr_frontend.regions import partition
from mirage_jax.jaxpr_frontend.remat import checkpointed, repeated
from mirage_jax.jaxpr_frontend.translate import Region
from mirage_jax.mugraph.arrays import numpy_dtype

log = logging.getLogger("mirage_jax")


class CompiledRegion(Protocol):
    """A region's replacement: functions from the graph's input tensors to its output tensors.

    Hashable, because identical regions share one lowering if they share one object.
    """

    @property
    def portable(self) -> Callable[..., list[Any]]: ...

    @property
    def cuda(self) -> Callable[..., list[Any]] | None: ...


class Compiler(Protocol):
    """Decides what replaces a region; None leaves it to XLA. Frozen and hashable: it is a parameter of an equation."""

    @property
    def strict(self) -> bool: ...

    @property
    def max_ops(self) -> int: ...

    @property
    def remat(self) -> bool:
        """Whether large values that are cheap to make again are not kept for the backward pass."""
        ...

    def compile_region(self, region: Region, platforms: tuple[str, ...]) -> CompiledRegion | None:
        """`platforms` are those that the program is being lowered for, as JAX names them: "cpu", "cuda", ..."""
        ...


mirage_region_p = jax_compat.create_leaf_primitive("mirage_region")


def interpret(
    jaxpr: Jaxpr,
    args: Sequence[Any],
    compiler: Compiler,
    call: Primitive,
    sharded: bool = False,
    platforms: tuple[str, ...] = (),
) -> list[Any]:
    """Evaluate `jaxpr`. `call` is the primitive that brings a body back here; `sharded` leaves all regions to XLA."""
    program = _opened(jaxpr, compiler)
    values = {**program.constants, **dict(zip(program.inputs, args, strict=True))}
    for step in _steps(program, compiler, sharded):
        if not isinstance(step, Region):
            _run_equation(program.eqns[step], values, compiler, call)
        elif (compiled := _compile(step, compiler, platforms)) is not None:
            _run_region(step, compiled, values)
        else:
            evaluate(step.equations, values)
    return [read(values, atom) for atom in program.outputs]


def with_checkpoints(jaxpr: Jaxpr, compiler: Compiler) -> Jaxpr:
    """A jaxpr that was captured, as it is differentiated: what the compiler wants to be made again is checkpointed."""
    return _unless_it_fails(checkpointed, jaxpr, compiler) if compiler.remat else jaxpr


def _opened(jaxpr: Jaxpr, compiler: Compiler) -> FlatProgram:
    program = flatten(jaxpr)
    return _unless_it_fails(repeated, program, compiler) if compiler.remat else program


def _unless_it_fails[T](change: Callable[[T], T], x: T, compiler: Compiler) -> T:
    try:
        return change(x)
    except Exception as e:
        _failed(e, compiler, "looking for values to make again")
        return x


def _steps(program: FlatProgram, compiler: Compiler, sharded: bool) -> Sequence[Region | int]:
    everything = range(len(program.eqns))
    if sharded:
        if any(eqn.primitive in rules.HEAVY for eqn in program.eqns):
            _warn_once(f"{Code.SHARDED}: XLA divides this program over several devices and cannot divide a kernel")
        return everything
    try:
        return partition(program, compiler.max_ops).steps
    except Exception as e:
        _failed(e, compiler, "dividing a program into regions")
        return everything


def _compile(region: Region, compiler: Compiler, platforms: tuple[str, ...]) -> CompiledRegion | None:
    """The replacement of a region, if there is one and it has the right type."""
    try:
        compiled = compiler.compile_region(region, platforms)
        if compiled is None:
            return None
        graph = region.graph
        want = [(a.shape, a.dtype) for a in region.tensor_avals()]
        sizes = [tuple(map(graph.extent, t.axes)) for t in graph.inputs]
        given = [jax.ShapeDtypeStruct(s, numpy_dtype(t.dtype)) for s, t in zip(sizes, graph.inputs, strict=True)]
        have = [(a.shape, a.dtype) for a in jax.eval_shape(compiled.portable, *given)]
        if want != have:
            raise TypeError(f"the replacement of outputs {graph.outputs} returns {have}, expected {want}")
        return compiled
    except Exception as e:
        _failed(e, compiler, f"compiling the region at {', '.join(region.where[:1])}")
        return None


def _run_region(region: Region, compiled: CompiledRegion, values: dict[int, Any]) -> None:
    tensors = region.prepare([values[b.value] for b in region.inputs])
    made = mirage_region_p.bind(*tensors, out_avals=tuple(region.tensor_avals()), compiled=compiled)
    values.update(zip((b.value for b in region.outputs), region.finish(made), strict=True))
    evaluate(region.aside, values)


def _run_equation(eqn: FlatEqn, values: dict[int, Any], compiler: Compiler, call: Primitive) -> None:
    params = None
    try:
        if any(not body.effects and _has_work(body) for body in jax_compat.bodies(eqn.eqn)):

            def as_call(body: Jaxpr) -> Jaxpr:
                return body if body.effects else jax_compat.as_one_call(body, call, compiler=compiler)

            params = jax_compat.with_bodies(eqn.eqn, as_call)
    except Exception as e:
        _failed(e, compiler, f"opening the body of {eqn.primitive}")
    results = jax_compat.bind(eqn.eqn, operands(eqn, values), params)
    values.update(zip(eqn.outputs, results, strict=True))


def _has_work(jaxpr: Jaxpr) -> bool:
    for eqn in jaxpr.eqns:
        inner = (jax_compat.called_jaxpr(eqn), *jax_compat.bodies(eqn))
        if eqn.primitive.name in rules.HEAVY or any(j is not None and _has_work(j) for j in inner):
            return True
    return False


def _failed(error: Exception, compiler: Compiler, doing: str) -> None:
    if compiler.strict or isinstance(error, UsageError):
        raise error
    _warn_once(f"{Code.INTERNAL} while {doing}, your own code runs: {type(error).__name__}: {error}")


@functools.cache
def _warn_once(message: str) -> None:
    log.warning("%s", message)


def _lower_portable(context: Any, *tensors: Any, out_avals: Any, compiled: CompiledRegion) -> Any:
    return jax_compat.lower_traced(compiled.portable, context, tensors)


def _lower_cuda(context: Any, *tensors: Any, out_avals: Any, compiled: CompiledRegion) -> Any:
    if compiled.cuda is None:
        return _lower_portable(context, *tensors, out_avals=out_avals, compiled=compiled)
    try:
        return jax_compat.lower_traced(compiled.cuda, context, tensors)
    except Exception as e:
        _warn_once(
            f"{Code.INTERNAL} while lowering a kernel, the same program runs as plain JAX: {type(e).__name__}: {e}"
        )
        return _lower_portable(context, *tensors, out_avals=out_avals, compiled=compiled)


jax_compat.register_lowering(mirage_region_p, _lower_portable)
jax_compat.register_lowering(mirage_region_p, _lower_cuda, platform="cuda")

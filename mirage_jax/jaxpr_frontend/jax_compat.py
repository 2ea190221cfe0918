"""Everything that depends on the version of JAX, or on names that JAX does not promise to keep.

The rest of the package sees jaxprs through these few functions. Parameters are read by name with a default. Unknown
primitives are left to XLA, so that a new JAX version costs speed at worst.
"""

from __future__ import annotations

import functools
import math
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
ShapedArray = core.ShapedArray
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
    "custom_vmap_call": "call",
    "mirage_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
}
EXP_OF_NEGATIVE_SQUARE = "exp_neg_sq"
_EXP_OF_NEGATIVE_SQUARE = f"exp_neg_sq at {Path(jax.__file__).parent}{os.sep}"  # how its jaxpr says where it is from
# What may be replaced by equations that it stands for.
OPENED = frozenset({*_CALLS, "cond", "gather", "reduce_sum", "scatter-add", "select_n", "split", "unstack"})
# Parameters that hold the bodies of primitives with a control flow or a scope of their own.
_BODIES = {
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
    "shard_map": ("jaxpr",),
    "remat2": ("jaxpr",),
    "checkpoint": ("jaxpr",),
}


# How the names of primitives by which devices exchange values begin; some have forms for varying types, or two halves.
_COLLECTIVES = (
    *("psum", "pmax", "pmin", "ppermute", "pbroadcast", "psend", "precv"),
    *("all_gather", "all_to_all", "ragged_all_to_all", "reduce_scatter"),
)
COMPILED_FOR = ("cpu", "cuda", "rocm", "tpu")  # platforms of whole programs; Pallas has its own, such as "mosaic"
MAX_PICKED_ELEMENTS = 4  # elements of a row: each is looked for in all of it

# Where an equation comes from is a line of the user, or of a library, not one of the wrapper around them.
source_info_util.register_exclusion(str(Path(__file__).parent) + os.sep)
source_info_util.register_exclusion(str(Path(__file__).parents[1] / "api.py"))


def create_call_primitive(name: str) -> Primitive:
    """A primitive with parameter `call_jaxpr` and every transformation rule of JAX (jax >= 0.11.2)."""
    return jex_core.create_call_primitive(name)


def pruned(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr without what no result needs, in loops too, as `jax.jit` lowers it; the same one if JAX cannot say."""
    try:
        from jax.interpreters import partial_eval

        return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]
    except Exception:  # of a version of JAX that has it elsewhere: a report may then show more than runs
        return jaxpr


def keep_whole(primitive: Primitive, parameter: str) -> None:
    """Let JAX take no dead code from calls by `primitive` that have this parameter: it is about the whole jaxpr."""
    from jax.interpreters import partial_eval

    if (rule := partial_eval.dce_rules.get(primitive)) is None:
        return

    def whole(used_outputs: list[bool], *rest: Any) -> Any:
        eqn = rest[-1]  # since 0.12 JAX says in between which inputs live
        if any(used_outputs) and eqn.params.get(parameter) is not None:
            return [True] * len(eqn.invars), eqn
        return rule(used_outputs, *rest)

    partial_eval.dce_rules[primitive] = whole


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


def lower_as_written(jaxpr: Jaxpr, context: Any, operands: Sequence[Any]) -> Any:
    """Lower a jaxpr in place. Nothing is traced again, and no call is left: of what XLA takes out of a call it may make
    more kernels than of the same operations without one.
    """
    module = context.module_context
    if context.platforms is not None:
        module = module.replace(platforms=context.platforms)
    constant = functools.partial(mlir.ir_constant, const_lowering=context.const_lowering)
    constants = [constant(c, aval=v.aval) for c, v in zip(jaxpr.consts, jaxpr.constvars, strict=True)]
    results, tokens = mlir.jaxpr_subcomp(
        module,
        jaxpr,
        context.name_stack,
        context.tokens_in,
        constants,
        *operands,
        dim_var_values=context.dim_var_values,
        const_lowering=context.const_lowering,
        outer_traceback=None,
    )
    context.set_tokens_out(tokens)
    return results


@dataclass(frozen=True)
class LoweringTarget:
    """What a program is being lowered for."""

    platforms: tuple[str, ...]  # usually one, several under `jax.export`
    is_partitioned: bool = False  # the compiler will divide it over several devices (it cannot divide a custom call)
    is_exported: bool = False  # it will be stored, which `jax.export` allows to few custom calls only
    is_manual: bool = False  # each device computes its part: inside of shard_map
    is_nested: bool = False  # it is part of a larger program
    processes: tuple[int, ...] = ()  # whose devices compute it, where that is known


def target(context: Any) -> LoweringTarget:
    parameters = getattr(context.module_context, "lowering_parameters", None)
    return LoweringTarget(
        tuple(context.platforms or context.module_context.platforms),
        _is_partitioned(context),
        bool(getattr(parameters, "for_export", False)),
        bool(getattr(context.module_context.axis_context, "manual_axes", None)),
        not getattr(context.name_stack, "stack", True),
        _processes(context.module_context.axis_context),
    )


def _processes(axes: Any) -> tuple[int, ...]:
    """The processes whose devices compute a program: its mesh says, or it is for as many devices as all have."""
    devices = getattr(axes, "device_assignment", None)
    if devices is None and isinstance(mesh := getattr(axes, "mesh", None), jax.sharding.Mesh):
        devices = mesh.devices.flat
    if devices is None and getattr(axes, "num_devices", None) == jax.device_count():
        devices = jax.devices()
    return tuple(sorted({d.process_index for d in devices or ()}))


def key_value_store() -> Any:
    """The client of the store that processes of one program share; None where there is none."""
    try:
        from jax._src.distributed import global_state

        return global_state.client
    except Exception:  # of a version of JAX that has it elsewhere
        return None


def _is_partitioned(context: Any) -> bool:
    """Inside of shard_map every axis is manual and shapes are local: nothing is left to divide."""
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


def name_of(eqn: JaxprEqn) -> str:
    """The name of an equation's primitive, or of the function of JAX's own that it calls and kernels write themselves.

    Since 0.12 JAX computes exp(-x * x), a factor in the gradient of exact GELU, by splitting the bits of x.
    """
    name = eqn.primitive.name
    if name != "custom_jvp_call":
        return name
    function = getattr(getattr(eqn.params.get("call_jaxpr"), "debug_info", None), "func_src_info", None) or ""
    return EXP_OF_NEGATIVE_SQUARE if function.startswith(_EXP_OF_NEGATIVE_SQUARE) else name


def meaning(eqn: JaxprEqn) -> tuple[str, Mapping[str, Any]]:
    """What an equation does to its operands: a name, and parameters unless the name says all."""
    name = name_of(eqn)
    return name, {} if name == EXP_OF_NEGATIVE_SQUARE else eqn.params


def default_platform() -> str:
    """Name the platform for programs that name none."""
    chosen = jax.config.jax_default_device
    return getattr(chosen, "platform", chosen) or jax.default_backend()


def differentiates(jaxpr: Jaxpr) -> bool:
    """Whether there is a backward pass in a jaxpr: JAX names the scope of what it transposes."""

    def is_transposed(eqn: JaxprEqn) -> bool:
        return any(getattr(scope, "name", "") == "transpose" for scope in eqn.source_info.name_stack.stack)

    return any(is_transposed(eqn) or any(map(differentiates, inside(eqn))) for eqn in jaxpr.eqns)


def is_in_scope(eqn: JaxprEqn, name: str) -> bool:
    """Whether an equation was written in a name scope; transformations keep scopes."""
    return any(getattr(scope, "name", "") == name for scope in eqn.source_info.name_stack.stack)


def is_key(aval: Any) -> bool:
    """Whether a value is a key of random numbers, and not of numbers."""
    return jnp.issubdtype(aval.dtype, jax.dtypes.extended)


def key_implementation(aval: Any) -> str | None:
    """The name of how a key of random numbers makes them; None if `jax.random.key` knows it by no name."""
    return {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}.get(str(aval.dtype))


def policy_of(eqn: JaxprEqn) -> Any:
    """What says which values a checkpoint keeps; None for another equation."""
    return eqn.params.get("policy") if eqn.primitive.name in ("remat2", "checkpoint") else None


def is_differentiated_as_one(eqn: JaxprEqn) -> bool:
    """Whether a call has a derivative of its own, or a policy for values stored for it."""
    return eqn.primitive.name.startswith("custom_") or eqn.primitive.name in ("remat2", "checkpoint")


def as_range(value: Any) -> Jaxpr | None:
    """A jaxpr that makes a constant array a, a + 1, a + 2, .. (positions in masks), else None."""
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


def as_two_sums(eqn: JaxprEqn, first: int) -> list[JaxprEqn] | None:
    """A sum over all dimensions as one over those from `first` on, and one over the others; None on a mesh."""
    (operand,), (total,), context = eqn.invars, eqn.outvars, (eqn.effects, eqn.source_info, eqn.ctx)
    aval: Any = operand.aval
    if not aval.sharding.mesh.empty:
        return None
    rows = Var(aval.update(shape=aval.shape[:first]))
    inner, outer = tuple(range(first, aval.ndim)), tuple(range(first))
    return [
        jex_core.new_jaxpr_eqn([operand], [rows], eqn.primitive, {**eqn.params, "axes": inner}, *context),
        jex_core.new_jaxpr_eqn([rows], [total], eqn.primitive, {**eqn.params, "axes": outer}, *context),
    ]


def with_avals(eqn: JaxprEqn, given: Sequence[Any], made: Sequence[Any], params: dict[str, Any]) -> JaxprEqn:
    """The equation with these parameters, between variables of these types; literals stay."""
    invars = [v if isinstance(v, Literal) else jex_core.Var(a) for v, a in zip(eqn.invars, given, strict=True)]
    outvars = list(map(jex_core.Var, made))
    return jex_core.new_jaxpr_eqn(invars, outvars, eqn.primitive, params, eqn.effects, eqn.source_info, eqn.ctx)


@dataclass(frozen=True, slots=True)
class Indexed:
    """Dimension numbers of a gather, or of a scatter with the operand that it updates: which dimensions of the result
    are windows of the operand, which dimensions of the operand an index picks (`mapped`) or goes with (`batch`, and
    `index_batch` of the indices), and which are gone in the result (`collapsed`).
    """

    window: tuple[int, ...]
    collapsed: tuple[int, ...]
    mapped: tuple[int, ...]
    batch: tuple[int, ...]
    index_batch: tuple[int, ...]

    def is_few(self, shape: Sequence[int], index_shape: Sequence[int]) -> bool:
        """Whether the indices pick few elements of every row, and not rows or anything else."""
        several = math.prod(n for d, n in enumerate(index_shape[:-1]) if d not in self.index_batch)
        return len(self.mapped) == 1 and self.collapsed == self.mapped and several <= MAX_PICKED_ELEMENTS

    def places(self, rank: int, index_rank: int) -> list[tuple[int | None, int | None]]:
        """Map each dimension of the result (or updates) to dimensions of the operand and of the indices."""
        windows = (d for d in range(rank) if d not in (*self.collapsed, *self.batch))
        indices, of = iter(range(index_rank - 1)), dict(zip(self.index_batch, self.batch, strict=True))
        out: list[tuple[int | None, int | None]] = []
        for d in range(index_rank - 1 + len(self.window)):
            if d in self.window:
                out.append((next(windows), None))
            else:
                n = next(indices)
                out.append((of.get(n), n))
        return out


def indexed(eqn_params: Mapping[str, Any]) -> Indexed:
    """Of the parameters of a gather or scatter."""
    d = eqn_params["dimension_numbers"]
    if isinstance(d, lax.GatherDimensionNumbers):
        parts = d.offset_dims, d.collapsed_slice_dims, d.start_index_map, d.operand_batching_dims
        return Indexed(*parts, d.start_indices_batching_dims)
    parts = d.update_window_dims, d.inserted_window_dims, d.scatter_dims_to_operand_dims, d.operand_batching_dims
    return Indexed(*parts, d.scatter_indices_batching_dims)


def indexed_by_row(eqn: JaxprEqn, index: Any, label: int, rows: Sequence[tuple[int, int]]) -> JaxprEqn:
    """A gather or scatter with indices of type `index` into one dimension of the operand, `label`, in every row.

    rows: dimensions of the operand, ascending, each with the dimension of the indices that goes with it.
    """
    d = eqn.params["dimension_numbers"]
    of_operand, of_indices = (tuple(pair[n] for pair in rows) for n in (0, 1))
    if isinstance(d, lax.GatherDimensionNumbers):
        numbers = d._replace(
            collapsed_slice_dims=(label,), start_index_map=(label,),
            operand_batching_dims=of_operand, start_indices_batching_dims=of_indices,
        )  # fmt: skip
    else:
        numbers = d._replace(
            inserted_window_dims=(label,), scatter_dims_to_operand_dims=(label,),
            operand_batching_dims=of_operand, scatter_indices_batching_dims=of_indices,
        )  # fmt: skip
    invars = [eqn.invars[0], Var(index), *eqn.invars[2:]]
    return eqn.replace(invars=invars, params={**eqn.params, "dimension_numbers": numbers})


def as_fill_apart(eqn: JaxprEqn) -> Jaxpr | None:
    """A gather of few elements of every row, and then what stands where an index is out of range; None for others."""
    if eqn.primitive.name != "gather" or eqn.params["mode"] != lax.GatherScatterMode.FILL_OR_DROP:
        return None
    avals: list[Any] = [v.aval for v in eqn.invars]
    params, fill, dimensions = eqn.params, eqn.params["fill_value"], indexed(eqn.params)
    shape, index_shape = (a.shape for a in avals)
    known = all(isinstance(n, int) for n in (*shape, *index_shape)) and jnp.issubdtype(avals[0].dtype, jnp.floating)
    if not known or any(map(_varies, avals)) or not dimensions.is_few(shape, index_shape):
        return None
    inside = {**params, "mode": lax.GatherScatterMode.PROMISE_IN_BOUNDS, "fill_value": None}

    def apart(x: Any, indices: Any) -> Any:
        in_range = (indices[..., 0] >= 0) & (indices[..., 0] < x.shape[dimensions.mapped[0]])
        picked = lax.gather_p.bind(x, indices, **inside)
        return jnp.where(jnp.expand_dims(in_range, dimensions.window), picked, jnp.nan if fill is None else fill)

    return jax.make_jaxpr(apart)(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals))


def _varies(aval: Any) -> bool:
    """Whether a value differs over the manual axes of a shard_map; a value traced from its shape would not."""
    return bool(getattr(aval, "vma", None) or getattr(getattr(aval, "mat", None), "varying", None))


def bodies(eqn: JaxprEqn) -> tuple[Jaxpr, ...]:
    """The jaxprs that an equation runs in a scope of its own."""
    names = _BODIES.get(eqn.primitive.name)
    if names is None:
        return ()
    found = (eqn.params.get(name) for name in names)
    return tuple(j for value in found if value is not None for j in (value if isinstance(value, tuple) else (value,)))


def known_branch(eqn: JaxprEqn, maker: JaxprEqn | None) -> Jaxpr | None:
    """The branch that a `cond` always takes; None if that depends on data, or on the platform.

    maker: the equation that makes its index, if that is no literal. `jax.lax.platform_dependent` (JAX's `diagonal` is
    written with it) makes one that is the same on all platforms that whole programs are compiled for.
    """
    if eqn.primitive.name != "cond":
        return None
    branches = bodies(eqn)
    index: int | None = None
    if isinstance(eqn.invars[0], Literal):
        index = min(max(np.asarray(eqn.invars[0].val).item(), 0), len(branches) - 1)
    elif maker is not None and maker.primitive.name == "platform_index":
        index = _same_everywhere(maker.params.get("platforms", ()))
    return None if index is None else branches[index]


def _same_everywhere(platforms: Sequence[Sequence[str] | None]) -> int | None:
    """The position of the branch for every platform in `COMPILED_FOR`; None if they differ."""
    found = {branch_for(name, platforms) for name in COMPILED_FOR}
    return found.pop() if len(found) == 1 else None


def branch_for(platform: str, platforms: Sequence[Sequence[str] | None]) -> int | None:
    """The position of a platform's branch, by the names of each; None among these: others. None if it has no branch."""
    named = {name: n for n, names in enumerate(platforms) for name in names or ()}
    return named.get(platform, next((n for n, names in enumerate(platforms) if names is None), None))


def inside(eqn: JaxprEqn) -> tuple[Jaxpr, ...]:
    """All jaxprs that an equation calls or has as bodies."""
    called = eqn.params.get(_CALLS.get(eqn.primitive.name, ""))
    return (*bodies(eqn), *([called] if called is not None and not bodies(eqn) else []))


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


def equation_like(like: JaxprEqn, primitive: Primitive, params: dict[str, Any]) -> JaxprEqn:
    """An equation without effects where another one stands; what it reads and makes is still to be named."""
    return jex_core.new_jaxpr_eqn([], [], primitive, params, set(), like.source_info, like.ctx)


def renamed(eqn: JaxprEqn, invars: list[Any], outvars: list[Any], calls: Sequence[JaxprEqn] = ()) -> JaxprEqn:
    """An equation with other operands and results, in the name scopes of the calls that brought it here."""
    info = eqn.source_info.replace(name_stack=_scopes(eqn, calls)) if calls else eqn.source_info
    return eqn.replace(invars=invars, outvars=outvars, source_info=info)


@contextmanager
def written_at(eqn: JaxprEqn, calls: Sequence[JaxprEqn] = ()) -> Iterator[None]:
    """Trace with the line of the user and the name scopes of `eqn`, which `calls` brought here."""
    scopes = source_info_util.current_name_stack() + _scopes(eqn, calls)
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=scopes):
        yield


def _scopes(eqn: JaxprEqn, calls: Sequence[JaxprEqn]) -> Any:
    return functools.reduce(operator.add, (one.source_info.name_stack for one in (*calls, eqn)))


def calls_outside(eqn: JaxprEqn) -> bool:
    """Whether an equation runs code that is not JAX's own: Python, or a library of the user's."""
    return "callback" in eqn.primitive.name or eqn.primitive.name in ("debug_print", "ffi_call", "custom_call")


def both_passes(jaxpr: Jaxpr) -> Jaxpr | None:
    """The results of `jaxpr` and its gradients, from its arguments and the results' cotangents: all floating numbers
    that go in and out. None where JAX cannot differentiate it.
    """
    given, made = ([_as_struct(v.aval) for v in border] for border in (jaxpr.invars, jaxpr.outvars))
    floats = [n for n, x in enumerate(given) if jnp.issubdtype(x.dtype, jnp.floating)]
    wanted = [n for n, x in enumerate(made) if jnp.issubdtype(x.dtype, jnp.floating)]
    cotangents = [made[n] for n in wanted]

    def run(args: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        def of_floats(*some: Any) -> tuple[list[Any], list[Any]]:
            values = dict(enumerate(args)) | dict(zip(floats, some, strict=True))
            results = eval_jaxpr(jaxpr, jaxpr.consts, *(values[n] for n in range(len(args))))
            return [results[n] for n in wanted], [x for n, x in enumerate(results) if n not in wanted]

        results, pull, others = jax.vjp(of_floats, *(args[n] for n in floats), has_aux=True)
        return results, others, pull(list(cotangents))

    try:
        return jax.make_jaxpr(run)(given, cotangents)
    except (TypeError, ValueError, NotImplementedError):
        return None


def traced(function: Callable[..., Any], avals: Sequence[Any]) -> Jaxpr:
    """The jaxpr of a function of values of these types."""
    return jax.make_jaxpr(function)(*map(_as_struct, avals))


def _as_struct(aval: Any) -> jax.ShapeDtypeStruct:
    """The type of a value, to trace with."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=bool(getattr(aval, "weak_type", False)))


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
    """Build a jaxpr of these equations, with those effects of another jaxpr that they have."""
    effects = {effect for eqn in eqns for effect in eqn.effects} & like.effects
    names = like.debug_info if len(invars) == len(like.invars) else like.debug_info.with_unknown_names()
    return jex_core.Jaxpr(
        list(constvars), list(invars), list(outvars), list(eqns), effects, names, consts=tuple(constants)
    )


def held_back(operands: Sequence[Any], waits: Sequence[Any]) -> list[Any]:
    """Operands that the compiler can neither make before `waits` are there nor take for what they are copies of."""
    return list(lax.optimization_barrier((tuple(operands), tuple(waits)))[0])


def bind(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Evaluate one equation under the context in which it was traced."""
    with eqn.ctx.manager:
        out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


def bind_alone(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Evaluate one equation outside of the shard_map that it stands in: on one device nothing varies."""
    if eqn.primitive.name in ("pvary", "pcast"):
        return list(values)
    out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


def bind_unfused(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """The same, as if the equation ran by itself: XLA fuses its floats with no other, and rounds them to their types.
    Other types lose nothing where they are fused, and some masks are cut out of one that fills a GPU.
    """
    results = bind_alone(eqn, values)
    return [lax.optimization_barrier(y) if jnp.issubdtype(y.dtype, jnp.inexact) else y for y in results]


def has_context(eqn: JaxprEqn) -> bool:
    """Whether an equation carries what a region would lose: XLA metadata, or who is to compute it."""
    return bool(getattr(eqn.ctx, "xla_metadata", None) or getattr(eqn.ctx, "compute_type", None))


def has_effects(eqn: JaxprEqn) -> bool:
    """Whether an equation has effects, as JAX counts them where it drops dead code: naming a mesh axis is none."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def is_collective(eqn: JaxprEqn) -> bool:
    """Whether devices exchange values in an equation, or begin to, or wait for it."""
    return eqn.primitive.name.removeprefix("unreduced_").startswith(_COLLECTIVES)


def is_on_device(aval: Any) -> bool:
    """Whether a value is in the device's own memory, and not offloaded."""
    return getattr(aval, "memory_space", jax.memory.Space.Device) != jax.memory.Space.Host


def source_line(eqn: JaxprEqn) -> str:
    """``file.py:12:4 (function)``: where the user wrote it."""
    return source_info_util.summarize(eqn.source_info)
